"""How long the library waits for what may never come: every such time, and which of them must together keep a promise.

Those that C++ waits for are defined in src/protocol/deadlines.h and read from there. What a user sets (`timeout`) is not here, nor
are the naps of threads that poll. `make docs` writes the table of docs/failure.md from this file.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import pplx_comm._core as _core
from pplx_comm.errors import Error


class Deadline(float):
    """Seconds, and what they are for."""

    what: str

    def __new__(cls, seconds: float, what: str) -> Deadline:
        deadline = super().__new__(cls, seconds)
        deadline.what = what
        return deadline


_CPP = {name: Deadline(seconds, what) for name, seconds, what in _core.deadlines()}

# The promises to users, and the longest time that they may ask for.

CLOSE_SECONDS = Deadline(2.0, "promised: close() returns within this, of an AllToAll and of a Communicator")
DEATH_SECONDS = Deadline(1.0, "promised: the death of a process is noticed within this")
LONGEST_TIMEOUT = Deadline(1e6, "the longest `timeout`, eleven days: the kernel's waits take no more than 24")

# Start.

DEFAULT_TIMEOUT = Deadline(300.0, "for all ranks to come, where `timeout` of the Communicator says nothing else")
HANDSHAKE_SECONDS = Deadline(15.0, "for one handshake: a guest at the door, or a call at all addresses of a rank")
GRACE_SECONDS = Deadline(2.0, "beyond the start's own time: for rank 0 to name the missing ranks")
GONE_SECONDS = Deadline(3.0, "for a rank all of whose addresses refuse: it listens before it says where, so it is gone")
PROBE_SECONDS = Deadline(60.0, "for NVSHMEM to start with one PE, in a process of its own: once for each GPU")
CONSTRUCTOR_SECONDS = Deadline(30.0, "for other ranks' AllToAll() or reset(), at least; else three times `timeout`")

# A peer's end.

KEEPALIVE_SECONDS = Deadline(1.0, "of silence on a control connection, before the peer's kernel is asked, and between questions")
USER_TIMEOUT_SECONDS = Deadline(5.0, "without an answer of the peer's kernel: then its host is lost")
DEATH_GRACE = _CPP["DEATH_GRACE"]
GOODBYE_GRACE = _CPP["GOODBYE_GRACE"]

# A step.

FIRST_STEP_FACTOR: int = _core.FIRST_STEP_FACTOR
"""The first step gets that many times `timeout`."""
AWAY = _CPP["AWAY"]
BUSY = _CPP["BUSY"]
PASSED_ON = _CPP["PASSED_ON"]
ANSWERED = _CPP["ANSWERED"]
PROXY_TURN = Deadline(
    0.1, "without a turn of the proxy's thread, which takes one each ms: a timeout says that it is stuck, stats() does not ask it"
)
ASKED_RANK = Deadline(0.5, "after a timeout: for the rank that is blamed to say what it does")
ASKED_JOB = Deadline(3.0, "for all ranks to say so")

# close() of an AllToAll, in this order.

CLOSE_STEPS = Deadline(1.0, "for running kernels and writes in flight")
CLOSE_FAILED = Deadline(0.1, "instead, after a failure and in reset(): writes to a dead peer never end")
CLOSE_PROXY = Deadline(0.1, "for each proxy thread, at least")
CLOSE_KERNELS = _CPP["CLOSE_KERNELS"]
CLOSE_ABORTED = _CPP["CLOSE_ABORTED"]

# close() of a Communicator, in this order. AllToAlls that are open are closed first.

CLOSE_TIMELINE = Deadline(0.05, "where PPLX_COMM_TRACE asks for a timeline: for rank 0's clock")
TIMELINE_FILE = Deadline(1.0, "then, beyond CLOSE_SECONDS, for its file, which other ranks write as well")
CLOSE_PROXIES = Deadline(0.6, "for its proxy threads to end; one that hangs in its provider is left behind")
FLUSH_SECONDS = Deadline(0.8, "for every peer's socket to take the goodbye")
LINGER_SECONDS = Deadline(0.25, "for peers reached by TCP to close their end, too, so that no reset overtakes the goodbye")
JOIN_SECONDS = Deadline(1.2, "for the control thread, which does both, and for callbacks of on_failure")
EXIT_SECONDS = Deadline(5.0, "for it, or another thread that closes, at the end of the process, which aborts in a return from C++")


def checked_timeout(timeout: Any, name: str = "timeout") -> float:
    """`timeout` as seconds that every wait of the library takes."""
    seconds = float(timeout) if isinstance(timeout, Real) else math.nan
    if not 0 <= seconds <= LONGEST_TIMEOUT:
        raise Error(f"{name}={timeout!r} must be a number of seconds, at most {LONGEST_TIMEOUT:.0f}: no wait is unbounded")
    return seconds


def all_deadlines() -> dict[str, Deadline]:
    return {name: value for name, value in globals().items() if isinstance(value, Deadline)}


def table() -> str:
    """As Markdown."""
    rows = [f"| `{name}` | {value:g} s | {value.what} |" for name, value in all_deadlines().items()]
    return "\n".join(["| name | how long | what for |", "|---|---|---|", *rows])
