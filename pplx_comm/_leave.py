"""The ways out: a goodbye to every peer, the end of the process, and fork."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import sys
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pplx_comm._link import Link
from pplx_comm._sockets import remaining

if TYPE_CHECKING:
    from pplx_comm._mesh import Mesh

# Together less than the 2 s that close() may take.
FLUSH_SECONDS = 1.0
LINGER_SECONDS = 0.25

open_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()
"""What the end of the process closes, and what a forked child gives up."""


def take_leave(links: Sequence[Link], goodbye: bytes) -> None:
    for link in links:
        link.send(goodbye)
    deadline = time.monotonic() + FLUSH_SECONDS
    unsent = [link for link in links if link.flush()]
    while unsent and remaining(deadline):
        _wait_until_ready(unsent, select.POLLOUT, deadline)
        unsent = [link for link in unsent if link.flush()]
    # Over TCP a close with unread data resets the connection, and the reset can overtake the goodbye:
    # read until the peer, which hears the goodbye, closes too.
    deadline = time.monotonic() + LINGER_SECONDS
    lingering = [link for link in links if link.is_tcp]
    for link in lingering:
        link.finish_sending()
    while lingering and remaining(deadline):
        _wait_until_ready(lingering, select.POLLIN, deadline)
        lingering = [link for link in lingering if link.receive()[1] is None]


def _wait_until_ready(links: Sequence[Link], event: int, deadline: float) -> None:
    poll = select.poll()
    for link in links:
        if link.sock.fileno() >= 0:
            poll.register(link.sock, event)
    poll.poll(remaining(deadline) * 1000)


def _close_all_at_exit() -> None:
    problem = getattr(sys, "last_value", None)
    reason = f"its process ends with {type(problem).__name__}: {problem}" if problem is not None else "its process ends"
    for mesh in list(open_meshes):
        mesh.close(reason)


def _close_all_in_child() -> None:
    for mesh in list(open_meshes):
        with contextlib.suppress(OSError):
            mesh.close_in_child()


atexit.register(_close_all_at_exit)
os.register_at_fork(after_in_child=_close_all_in_child)
