"""The times that the library waits, and what they add up to."""

from __future__ import annotations

import re
from pathlib import Path

from pplx_comm.control import deadlines

ROOT = Path(__file__).resolve().parent.parent.parent
PROXY_THREADS = 2
"""The most that proxy_threads= allows."""


def test_close_of_an_all_to_all() -> None:
    """Everything that can take its full time, in the order in which it does. Each proxy thread gets a least time of its own."""
    kernels = deadlines.CLOSE_KERNELS + deadlines.CLOSE_ABORTED
    for first in (deadlines.CLOSE_STEPS, deadlines.CLOSE_FAILED):
        assert first + PROXY_THREADS * deadlines.CLOSE_PROXY + kernels <= deadlines.CLOSE_SECONDS


def test_close_of_a_communicator() -> None:
    assert deadlines.FLUSH_SECONDS + deadlines.LINGER_SECONDS < deadlines.JOIN_SECONDS
    proxies = deadlines.CLOSE_PROXIES + (PROXY_THREADS - 1) * deadlines.CLOSE_PROXY
    assert deadlines.CLOSE_TIMELINE + proxies + deadlines.JOIN_SECONDS <= deadlines.CLOSE_SECONDS


def test_a_death_is_noticed_in_time() -> None:
    """A failed write waits for the control connection to name the dead, and then says itself what it knows."""
    assert deadlines.DEATH_GRACE < deadlines.DEATH_SECONDS


def test_the_order_of_giving_up() -> None:
    """The warp or relay that passes on before those that wait for it, and rank 0 before those that wait for its verdict."""
    assert 0 < deadlines.PASSED_ON < deadlines.ANSWERED
    assert deadlines.GRACE_SECONDS > 0
    assert deadlines.FIRST_STEP_FACTOR > 1
    # A proxy that stands still is found to do so well within a death's time.
    assert PROXY_THREADS * deadlines.PROXY_TURN < deadlines.DEATH_SECONDS - deadlines.DEATH_GRACE + 0.1


def test_one_place() -> None:
    """Every deadline of the table is used, and no file of the library defines one of its own."""
    named = set(deadlines.all_deadlines())
    python = {path: path.read_text() for path in (ROOT / "pplx_comm").rglob("*.py") if path.name != "deadlines.py"}
    used = {name for text in python.values() for name in re.findall(r"\b[A-Z]+_[A-Z_]+\b", text)}
    cpp = (ROOT / "src/protocol/deadlines.h").read_text()
    assert named - used - set(re.findall(r'"([A-Z_]+)"', cpp)) == {"CLOSE_SECONDS", "DEATH_SECONDS"}
    own = re.compile(r"^_?[A-Z_]*(?:SECONDS|TIMEOUT|GRACE|DRAIN)[A-Z_]*\b[^\n]*= *[0-9]", re.MULTILINE)
    # A launcher of processes waits for their ends, which has no part in what ranks wait for.
    library = {path: text for path, text in python.items() if path != ROOT / "pplx_comm/efasoft/launch.py"}
    assert [str(path) for path, text in library.items() if own.search(text)] == []
    assert {name for name, _, _ in deadlines._core.deadlines()} <= named
