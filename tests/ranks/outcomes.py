"""Outcomes of calls, as ranks tell them to the test, and how a check fails."""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Any

import pplx_comm as pc


class Failed(AssertionError):
    pass


def must(condition: bool, what: str, *details: Any) -> None:
    if not condition:
        raise Failed(" ".join([what, *map(str, details)]))


class Starved:
    """How long this process was ready to run and had no core, by its hungriest thread: on a busy machine that is no fault of the library."""

    def __init__(self) -> None:
        self.again()

    def again(self) -> None:
        self.begin, self._since = self._waited(), time.monotonic()

    def seconds(self) -> float:
        return max(waited - self.begin.get(thread, 0) for thread, waited in self._waited().items()) * 1e-9

    def seconds_with_a_core(self) -> float:
        """The others since then."""
        return max(0.0, time.monotonic() - self._since - self.seconds())

    @staticmethod
    def _waited() -> dict[str, int]:
        waited = {}
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, IndexError):  # it ended just now; or a kernel that does not count
                waited[thread] = int(open(f"/proc/self/task/{thread}/schedstat").read().split()[1])
        return waited or {"": 0}


def raised(call: Any, starved: Starved | None = None) -> dict[str, Any]:
    """Describes what the call raises, or that it returned."""
    starved = starved or Starved()
    begin = time.monotonic()
    try:
        value = call()
    except BaseException as error:
        return {
            "type": type(error).__name__,
            "is_error": isinstance(error, pc.Error),
            "is_peer": isinstance(error, pc.PeerError),
            "is_timeout": isinstance(error, TimeoutError),
            "message": str(error),
            "peer": getattr(error, "peer", None),
            "phase": getattr(error, "phase", None),
            "step": getattr(error, "step", None),
            "expected": getattr(error, "expected", None),
            "seen": getattr(error, "seen", None),
            "seconds": time.monotonic() - begin,
            "at": time.monotonic(),
            "starved": starved.seconds(),
        }
    return {
        "type": "", "message": f"returned {value!r}", "at": time.monotonic(), "seconds": time.monotonic() - begin, "starved": starved.seconds(),
    }  # fmt: skip


def mistake(call: Any, pattern: str) -> None:
    """The call is refused: the caller's own mistake, with a message that says which."""
    r = raised(call)
    must(bool(r.get("is_error")) and not r.get("is_peer"), f"for {pattern!r}:", r["type"], r["message"])
    must(re.search(pattern, r["message"]) is not None, f"the message must have {pattern!r}:", r["message"])
