"""The callbacks that are told of failures and of busy ranks, outside of the mesh's lock."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pplx_comm.control.failure import Failure
from pplx_comm.log import log

Callback = Callable[[Failure], None]

Event = TypeVar("Event")


@dataclass(frozen=True)
class Busy:
    """A rank's report on itself: busy or not, and the activity."""

    rank: int
    busy: bool
    what: str = ""


class Callbacks(Generic[Event]):
    """Call everything under the lock but `tell` and what `add` returns.

    apart: they run in a thread of their own, one after the other, so that they may wait for other ranks.
    """

    def __init__(self, lock: threading.Condition, rank: int, apart: bool = False) -> None:
        self.thread: threading.Thread | None = None
        """Runs those that are apart, while there is something to tell."""
        self._apart = apart
        self._lock = lock
        self._rank = rank
        self._callbacks: dict[int, Callable[[], Callable[[Event], None] | None]] = {}
        self._handles = 0
        self._untold: list[tuple[int, Event]] = []

    def add(self, callback: Callable[[Event], None], known: Iterable[Event]) -> Callable[[], None]:
        """A bound method is held weakly. Returns a function that removes the callback.

        known: events that it is told at once.
        """
        bound = hasattr(callback, "__self__") and hasattr(callback, "__func__")
        self._handles += 1
        handle = self._handles
        self._callbacks[handle] = weakref.WeakMethod(callback) if bound else lambda: callback
        self._untold += [(handle, event) for event in known]
        self._begin()

        def remove() -> None:
            with self._lock:
                self._callbacks.pop(handle, None)

        return remove

    def announce(self, event: Event) -> None:
        self._untold += [(handle, event) for handle in self._callbacks]
        self._begin()

    def _begin(self) -> None:
        if self._apart and self._untold and self.thread is None:
            self.thread = threading.Thread(target=self.tell, name="pplx_comm callbacks", daemon=True)
            self.thread.start()

    def clear(self) -> None:
        self._callbacks.clear()

    def tell(self) -> None:
        """Runs those that are due, in this thread."""
        while True:
            with self._lock:
                if not self._untold:
                    self.thread = None
                    return
                handle, event = self._untold.pop(0)
                keep = self._callbacks.get(handle)
                callback = keep() if keep is not None else None
                if callback is None:  # removed, or its object is gone
                    self._callbacks.pop(handle, None)
            if callback is not None:
                try:
                    callback(event)
                except Exception:
                    log.exception("a failure callback failed on rank %d", self._rank)
