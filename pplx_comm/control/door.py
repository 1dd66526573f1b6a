"""Admits only connections whose callers have proved their rank."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pplx_comm.control.deadlines import HANDSHAKE_SECONDS
from pplx_comm.control.frames import FrameError, Kind, json_frame
from pplx_comm.control.handshake import Identity, Rejected, ServerSide
from pplx_comm.control.sockets import close_all, watch_for_loss, wrong_user
from pplx_comm.log import log

MOST_GUESTS = 256


@dataclass
class _Guest:
    """A connection that has not proved anything yet."""

    talk: ServerSide
    deadline: float


class Door:
    """Accepts connections on a selector, and hands over those that have proved which rank they are.

    Nothing that a stranger sends or fails to send disturbs another guest: each guest has its own small reader and its
    own deadline. When too many wait, or there is no file descriptor for the next, the one that waited longest is dropped.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listeners: Iterable[socket.socket],
        me: Identity,
        *,
        may_come: Callable[[int], str | None],
        came: Callable[[socket.socket, int], None],
        patience: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._selector = selector
        self._listeners = list(listeners)
        self._me = me
        self._may_come = may_come
        self._came = came
        self._patience = patience
        self._guests: dict[socket.socket, _Guest] = {}
        # Guests may take a quarter of the descriptors: the start itself needs some.
        self._most_guests = max(4, min(MOST_GUESTS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self.refused: dict[str, int] = {}
        for listener in self._listeners:
            selector.register(listener, selectors.EVENT_READ, self._accept(listener))

    def next_deadline(self) -> float | None:
        """Monotonic time at which `expire` has something to do."""
        return next(iter(self._guests.values())).deadline if self._guests else None

    def expire(self) -> None:
        now = time.monotonic()
        while self._guests:
            sock, guest = next(iter(self._guests.items()))
            if guest.deadline > now:
                return
            self._drop(sock, "too slow", None)

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(listener)
        for sock in list(self._guests):
            self._forget(sock)
            sock.close()
        close_all(self._listeners)
        self._listeners = []

    def close_in_child(self) -> None:
        """After fork: the descriptors only; the selector is shared with the parent and must not be told."""
        close_all([*self._listeners, *self._guests])

    def _accept(self, listener: socket.socket) -> Callable[[int], None]:
        def ready(_: int) -> None:
            try:
                sock, _ = listener.accept()
            except OSError as problem:
                if problem.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_room(problem.errno)
                return
            sock.setblocking(False)
            self._guests[sock] = _Guest(ServerSide(self._me, self._may_come), time.monotonic() + self._patience)
            self._selector.register(sock, selectors.EVENT_READ, lambda _, sock=sock: self._read(sock))
            problem_user = wrong_user(sock)
            if problem_user:
                self._drop(sock, problem_user, None)
            elif len(self._guests) > self._most_guests:
                self._drop(next(iter(self._guests)), "too many connections", None)

        return ready

    def _make_room(self, code: int) -> None:
        """There is no descriptor for the next connection; the listener stays readable and calls again."""
        if self._guests:
            self._drop(next(iter(self._guests)), "too many connections", None)
            return
        log.warning("cannot accept a control connection: %s (raise `ulimit -n`)", os.strerror(code))
        time.sleep(0.05)  # without this the loop would spin

    def _read(self, sock: socket.socket) -> None:
        guest = self._guests.get(sock)
        if guest is None:  # shown out by an earlier event of the same select()
            return
        try:
            data = sock.recv(4096)
            if not data:
                raise Rejected("it went away during the handshake", final=False)
            reply = guest.talk.receive(data)
            if reply and sock.send(reply) != len(reply):
                raise Rejected("it does not read", final=False)
        except Rejected as no:
            self._drop(sock, str(no), no)
            return
        except (OSError, FrameError) as problem:
            self._drop(sock, str(problem), Rejected(str(problem), final=False))
            return
        if guest.talk.proved is not None:
            self._forget(sock)
            watch_for_loss(sock)
            self._came(sock, guest.talk.proved)

    def _drop(self, sock: socket.socket, reason: str, answer: Rejected | None) -> None:
        if reason in self.refused or len(self.refused) < 16:
            self.refused[reason] = self.refused.get(reason, 0) + 1
        log.debug("control connection refused: %s", reason)
        if answer is not None:
            with contextlib.suppress(OSError):
                sock.send(json_frame(Kind.REJECT, {"reason": reason[:500], "final": answer.final}))
        self._forget(sock)
        sock.close()

    def _forget(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._guests[sock]
