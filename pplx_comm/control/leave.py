"""How a rank leaves: a goodbye to every peer, the end of its process, or fork."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

from pplx_comm.control.connection import Connection
from pplx_comm.control.deadlines import EXIT_SECONDS, FLUSH_SECONDS, LINGER_SECONDS
from pplx_comm.control.sockets import remaining


class Open(Protocol):
    """Something to close when the process ends, and to give up in a forked child."""

    def close(self, reason: str, patience: float) -> None: ...

    def close_in_child(self) -> None: ...


open_meshes: weakref.WeakSet[Open] = weakref.WeakSet()
"""Closed when the process ends; given up in a forked child."""


def take_leave(connections: Sequence[Connection], goodbye: bytes) -> None:
    for connection in connections:
        connection.send(goodbye)
    deadline = time.monotonic() + FLUSH_SECONDS
    unsent = [connection for connection in connections if connection.flush()]
    while unsent and remaining(deadline):
        _wait_until_ready(unsent, select.POLLOUT, deadline)
        unsent = [connection for connection in unsent if connection.flush()]
    # Over TCP a close with unread data resets the connection, and the reset can overtake the goodbye:
    # read until the peer, which hears the goodbye, closes too.
    deadline = time.monotonic() + LINGER_SECONDS
    lingering = [connection for connection in connections if connection.is_tcp]
    for connection in lingering:
        connection.finish_sending()
    while lingering and remaining(deadline):
        _wait_until_ready(lingering, select.POLLIN, deadline)
        lingering = [connection for connection in lingering if connection.receive()[1] is None]


def _wait_until_ready(connections: Sequence[Connection], event: int, deadline: float) -> None:
    poll = select.poll()
    for connection in connections:
        if connection.sock.fileno() >= 0:
            poll.register(connection.sock, event)
    poll.poll(remaining(deadline) * 1000)


def _close_all_at_exit() -> None:
    problem = getattr(sys, "last_value", None)
    reason = f"its process ends with {type(problem).__name__}: {problem}" if problem is not None else "its process ends"
    for mesh in list(open_meshes):
        mesh.close(reason, EXIT_SECONDS)


def _close_all_in_child() -> None:
    for mesh in list(open_meshes):
        with contextlib.suppress(OSError):
            mesh.close_in_child()


atexit.register(_close_all_at_exit)
os.register_at_fork(after_in_child=_close_all_in_child)
