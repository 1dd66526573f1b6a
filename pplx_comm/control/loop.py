"""The control thread's loop over sockets, and over work that other threads hand it.

Only the control thread touches the selector. The lock is the mesh's: work that is handed over under it keeps its order.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable

from pplx_comm.control.sockets import remaining

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Loop:
    def __init__(self, lock: threading.Condition) -> None:
        self.selector = selectors.DefaultSelector()
        self._lock = lock
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._work: list[Callable[[], None]] = []
        self.selector.register(self._wake_fd, READ, self._woken)

    def do(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._work.append(work)
            self.wake()

    def wake(self) -> None:
        """Under the lock: the descriptor must not be closed, and its number reused, in between."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def turn(self, due: float | None) -> None:
        """Wait until something happens or it is `due`, and handle it."""
        for key, mask in self.selector.select(None if due is None else remaining(due)):
            key.data(mask)

    def watch(self, sock: socket.socket, events: int, ready: Callable[[int], None]) -> None:
        if sock.fileno() < 0:
            return
        if sock.fileno() in self.selector.get_map():
            self.selector.modify(sock, events, ready)
        else:
            self.selector.register(sock, events, ready)

    def forget(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            self.selector.unregister(sock)

    def close(self) -> None:
        """Under the lock, or in the child of a fork."""
        if self._wake_fd < 0:
            return
        self.selector.close()
        os.close(self._wake_fd)
        self._wake_fd = -1

    @property
    def closed(self) -> bool:
        return self._wake_fd < 0

    def _woken(self, _: int) -> None:
        os.eventfd_read(self._wake_fd)
        with self._lock:
            work, self._work = self._work, []
        for item in work:
            item()
