"""The callbacks that are told of failures, outside of the mesh's lock, so that a callback may call anything."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable

from pplx_comm.control.failure import Failure

log = logging.getLogger("pplx_comm")

Callback = Callable[[Failure], None]


class Callbacks:
    """Call everything under the lock but `tell` and what `add` returns."""

    def __init__(self, lock: threading.Condition, rank: int) -> None:
        self._lock = lock
        self._rank = rank
        self._callbacks: dict[int, Callable[[], Callback | None]] = {}
        self._handles = 0
        self._untold: list[tuple[int, Failure]] = []

    def add(self, callback: Callback, known: Iterable[Failure]) -> Callable[[], None]:
        """A bound method is held weakly. Returns a function that removes the callback.

        known: failures that it is told at once.
        """
        bound = hasattr(callback, "__self__") and hasattr(callback, "__func__")
        self._handles += 1
        handle = self._handles
        self._callbacks[handle] = weakref.WeakMethod(callback) if bound else lambda: callback
        self._untold += [(handle, failure) for failure in known]

        def remove() -> None:
            with self._lock:
                self._callbacks.pop(handle, None)

        return remove

    def announce(self, failure: Failure) -> None:
        self._untold += [(handle, failure) for handle in self._callbacks]

    def clear(self) -> None:
        self._callbacks.clear()

    def tell(self) -> None:
        while True:
            with self._lock:
                if not self._untold:
                    return
                handle, failure = self._untold.pop(0)
                keep = self._callbacks.get(handle)
                callback = keep() if keep is not None else None
                if callback is None:  # removed, or its object is gone
                    self._callbacks.pop(handle, None)
            if callback is not None:
                try:
                    callback(failure)
                except Exception:
                    log.exception("a failure callback failed on rank %d", self._rank)
