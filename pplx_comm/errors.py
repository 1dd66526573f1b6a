"""The library's exceptions. Every message says what was wrong and what to do about it."""

from __future__ import annotations

from typing import Any


class Error(Exception):
    """Base of everything that pplx_comm raises on purpose."""


class PeerError(Error):
    """Another rank died, left, aborted or sent something wrong.

    peer: the rank at fault.
    phase, step: the place where it showed.
    expected, seen: the value that was waited for, and the value that came.
    """

    def __init__(
        self,
        message: str,
        *,
        peer: int | None = None,
        phase: str | None = None,
        step: int | None = None,
        expected: Any = None,
        seen: Any = None,
    ) -> None:
        super().__init__(message)
        self.peer = peer
        self.phase = phase
        self.step = step
        self.expected = expected
        self.seen = seen


class StepTimeout(PeerError, TimeoutError):
    """A peer did not come in time, and is not known to be dead."""
