"""Connects to a rank that may be reached at several addresses, some of which may lead to a stranger."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from pplx_comm.control.frames import FrameError
from pplx_comm.control.handshake import ClientSide, Identity, Refused, WrongKey
from pplx_comm.control.sockets import Address, close_all, describe, remaining, start_connect, watch_for_loss, wrong_user


class NotReached(OSError):
    """No address led to the rank.

    errno: ECONNREFUSED if each of them refused, or was answered by a stranger; EHOSTUNREACH otherwise.
    answers: what each address answered.
    strangers: how many were answered by a process that does not hold our key.
    spoken: whether any of them sent a byte.
    """

    def __init__(self, code: int, answers: str, *, strangers: int, spoken: bool) -> None:
        super().__init__(code, answers)
        self.answers = answers
        self.strangers = strangers
        self.spoken = spoken


def connect(addresses: Sequence[Address], me: Identity, server: int, seconds: float) -> socket.socket:
    """A socket to rank `server` after a handshake, blocking and without a timeout. WrongKey if a stranger answers at every
    address, else NotReached.

    All addresses are tried at once. A host advertises interfaces that only some peers can reach, and those that drop
    packets would cost a full timeout each. Other addresses, such as a container bridge's, are the same on every host:
    there the caller meets itself, or a stranger that may never send a byte. So each answer ends the attempt at its own
    address only.
    """
    deadline = time.monotonic() + seconds
    with _Attempts(me, server) as attempts:
        for address in addresses:
            attempts.start(address)
        while attempts.under_way and remaining(deadline):
            connection = attempts.turn(remaining(deadline))
            if connection is not None:
                return connection
        raise attempts.outcome(len(addresses))


@dataclass
class _Attempt:
    address: Address
    talk: ClientSide
    connected: bool = False


class _Attempts:
    def __init__(self, me: Identity, server: int) -> None:
        self._me = me
        self._server = server
        self._selector = selectors.DefaultSelector()
        self.under_way: dict[socket.socket, _Attempt] = {}
        self._proving: socket.socket | None = None
        self._answers: list[str] = []
        self._refused = 0
        self._strangers = 0
        self._spoken = False

    def __enter__(self) -> _Attempts:
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._selector.close()
        close_all(self.under_way)

    def start(self, address: Address) -> None:
        try:
            sock = start_connect(address)
        except OSError as problem:
            self._note(address, problem)
            return
        self.under_way[sock] = _Attempt(address, ClientSide(self._me, self._server))
        self._selector.register(sock, selectors.EVENT_WRITE)

    def turn(self, seconds: float) -> socket.socket | None:
        """Wait for something to happen, and handle it. Returns the connection that was welcomed, if one was."""
        for key, _ in self._selector.select(seconds):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            attempt = self.under_way.get(sock)
            if attempt is None:  # given up while an earlier event of the same select() was handled
                continue
            try:
                self._advance(sock, attempt)
            except (OSError, FrameError, WrongKey) as problem:
                self._give_up(sock, problem)
                continue
            if attempt.talk.welcome:
                del self.under_way[sock]
                self._selector.unregister(sock)
                sock.settimeout(None)
                return sock
        return None

    def outcome(self, called: int) -> Exception:
        """Returns why no address led to the rank."""
        text = "; ".join([*self._answers, *(f"{describe(attempt.address)}: no answer" for attempt in self.under_way.values())])
        if self._strangers == called > 0:
            return WrongKey(text)
        code = errno.ECONNREFUSED if self._refused + self._strangers == called else errno.EHOSTUNREACH
        return NotReached(code, text or "no address to connect to", strangers=self._strangers, spoken=self._spoken)

    def _advance(self, sock: socket.socket, attempt: _Attempt) -> None:
        if not attempt.connected:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            attempt.connected = True
            watch_for_loss(sock)
            wrong = wrong_user(sock)
            if wrong:
                raise Refused(wrong)
            _send(sock, attempt.talk.hello())
            self._selector.modify(sock, selectors.EVENT_READ)
            return
        data = sock.recv(attempt.talk.missing)
        if not data:
            raise Refused("it closed the connection during the handshake")
        attempt.talk.receive(data)
        self._prove_to_one()

    def _prove_to_one(self) -> None:
        """One proof at a time: two addresses that lead to one rank would have it refuse the second connection."""
        if self._proving is not None:
            return
        for sock, attempt in list(self.under_way.items()):
            if attempt.talk.proof is not None:
                self._proving = sock
                try:
                    _send(sock, attempt.talk.proof)
                    return
                except OSError as problem:
                    self._give_up(sock, problem)
                    return

    def _give_up(self, sock: socket.socket, problem: Exception) -> None:
        attempt = self.under_way.pop(sock)
        self._selector.unregister(sock)
        sock.close()
        self._note(attempt.address, problem)
        if self._proving is sock:
            self._proving = None
            self._prove_to_one()

    def _note(self, address: Address, problem: Exception) -> None:
        self._spoken |= isinstance(problem, Refused | WrongKey | FrameError)
        if isinstance(problem, WrongKey):
            self._strangers += 1
            text = str(problem)
        elif isinstance(problem, OSError):
            self._refused += problem.errno == errno.ECONNREFUSED
            text = problem.strerror or str(problem)
        else:
            self._refused += 1
            text = f"it does not answer like a rank of this job ({problem})"
        self._answers.append(f"{describe(address)}: {text}")


def _send(sock: socket.socket, message: bytes) -> None:
    if sock.send(message) != len(message):
        raise Refused("it does not read")
