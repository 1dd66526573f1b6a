"""Mutual HMAC-SHA256 challenge-response between two ranks, and the door through which connections come in.

    client -> HELLO      its rank, the job, a nonce
    server -> CHALLENGE  a nonce, and the server's proof over both nonces, both ranks, purpose and job
    client -> PROOF      the client's proof over the same, under another label
    server -> WELCOME

The key never travels; a proof is of no use in another conversation, in the other direction, or for another rank.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pplx_comm._frames import FrameError, FrameReader, Kind, decode_object, field, json_frame, rank_field
from pplx_comm._sockets import close_all, remaining, watch_for_loss, wrong_user
from pplx_comm.errors import Error

log = logging.getLogger("pplx_comm")

HANDSHAKE_SECONDS = 15.0
GUESTS = 256
FROM_CLIENT = frozenset({Kind.HELLO, Kind.PROOF, Kind.REJECT})
FROM_SERVER = frozenset({Kind.CHALLENGE, Kind.WELCOME, Kind.REJECT})


class WrongKey(Error):
    """The other end does not hold our key, or says that it belongs to a job of another shape: no use to try again."""


class Refused(OSError):
    """Nobody to talk to here now; another try may find the right one."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.ECONNREFUSED, reason)


@dataclass(frozen=True)
class Identity:
    """Who this rank claims to be, and the key that proves it."""

    purpose: str
    key: bytes
    rank: int
    world_size: int
    job: str

    @property
    def job_digest(self) -> str:
        return hashlib.sha256(self.job.encode()).hexdigest()

    def proof(self, role: str, client: int, server: int, nonces: tuple[str, str]) -> str:
        parts = (
            "pplx_comm",
            self.purpose,
            role,
            self.job_digest,
            str(self.world_size),
            str(client),
            str(server),
            *nonces,
        )
        return hmac.new(self.key, "\0".join(parts).encode(), "sha256").hexdigest()


def derive_key(key: bytes, nonce: str) -> bytes:
    """The session's key. Over TCP the nonce is public and the key secret; over AF_UNIX and MPI it is the other way
    round.
    """
    return hmac.digest(key, b"pplx_comm session " + nonce.encode(), "sha256")


def greet(sock: socket.socket, me: Identity, server: int, seconds: float) -> None:
    """The client's side, blocking for at most `seconds`. Leaves `sock` blocking with no timeout."""
    deadline = time.monotonic() + seconds
    watch_for_loss(sock)
    problem = wrong_user(sock)
    if problem:
        raise Refused(problem)
    reader = FrameReader(FROM_SERVER)
    try:
        nonce = secrets.token_hex(16)
        hello = {"rank": me.rank, "world": me.world_size, "job": me.job_digest, "nonce": nonce}
        _send(sock, json_frame(Kind.HELLO, hello), deadline)
        answer = _expect(sock, reader, Kind.CHALLENGE, deadline)
        nonces = (nonce, _nonce(answer))
        proof = field(answer, "proof", str)
        if not hmac.compare_digest(proof.encode(), me.proof("server", me.rank, server, nonces).encode()):
            _send(sock, json_frame(Kind.REJECT, {"reason": "wrong secret"}), deadline)
            raise WrongKey("it does not know this job's secret")
        _send(sock, json_frame(Kind.PROOF, {"proof": me.proof("client", me.rank, server, nonces)}), deadline)
        _expect(sock, reader, Kind.WELCOME, deadline)
    except FrameError as problem:
        raise Refused(f"it does not answer like a rank of this job ({problem})") from None
    sock.settimeout(None)


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(remaining(deadline) or 1e-3)
    sock.sendall(data)


def _expect(sock: socket.socket, reader: FrameReader, wanted: Kind, deadline: float) -> dict[str, object]:
    while True:
        sock.settimeout(remaining(deadline) or 1e-3)
        # Not a byte more: right behind the welcome may come the mesh's first frame, with file descriptors.
        data = sock.recv(reader.missing)
        if not data:
            raise Refused("it closed the connection during the handshake")
        for kind, payload in reader.feed(data):
            value = decode_object(payload)
            if kind == Kind.REJECT:
                reason = field(value, "reason", str)[:500]
                raise WrongKey(reason) if value.get("final") is True else Refused(reason)
            if kind != wanted:
                raise FrameError(f"{kind.name} instead of {wanted.name}")
            return value


class Rejected(Exception):
    """Why the door stays shut. `final` tells an honest client not to try again."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


class Door:
    """Accepts connections on a selector, and hands over those that have proved which rank they are.

    Nothing that a stranger sends or fails to send disturbs anybody else: each guest has its own small reader and its
    own deadline, and when too many wait, the one that waited longest is dropped.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listeners: Iterable[socket.socket],
        me: Identity,
        *,
        may_come: Callable[[int], str | None],
        came: Callable[[socket.socket, int], None],
    ) -> None:
        self._selector = selector
        self._listeners = list(listeners)
        self._me = me
        self._may_come = may_come
        self._came = came
        self._guests: dict[socket.socket, _Guest] = {}
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
                    log.warning("cannot accept a control connection: %s (raise `ulimit -n`)", os.strerror(problem.errno))
                    time.sleep(0.05)  # the listener stays readable: without this the loop would spin
                return
            sock.setblocking(False)
            guest = _Guest(self._me, self._may_come)
            self._guests[sock] = guest
            self._selector.register(sock, selectors.EVENT_READ, lambda _, sock=sock: self._read(sock))
            problem_user = wrong_user(sock)
            if problem_user:
                self._drop(sock, problem_user, None)
            elif len(self._guests) > GUESTS:
                self._drop(next(iter(self._guests)), "too many connections", None)

        return ready

    def _read(self, sock: socket.socket) -> None:
        guest = self._guests.get(sock)
        if guest is None:  # shown out by an earlier event of the same select()
            return
        try:
            data = sock.recv(4096)
            if not data:
                raise Rejected("it went away during the handshake", final=False)
            for kind, payload in guest.reader.feed(data):
                reply = guest.receive(kind, payload)
                if sock.send(reply) != len(reply):
                    raise Rejected("it does not read", final=False)
        except Rejected as no:
            self._drop(sock, str(no), no)
            return
        except (OSError, FrameError) as problem:
            self._drop(sock, str(problem), Rejected(str(problem), final=False))
            return
        if guest.proved is not None:
            self._forget(sock)
            watch_for_loss(sock)
            self._came(sock, guest.proved)

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


class _Guest:
    """A connection that has not proved anything yet."""

    def __init__(self, me: Identity, may_come: Callable[[int], str | None]) -> None:
        self.reader = FrameReader(FROM_CLIENT)
        self.deadline = time.monotonic() + HANDSHAKE_SECONDS
        self.proved: int | None = None
        self._me = me
        self._may_come = may_come
        self._hello: tuple[int, tuple[str, str]] | None = None

    def receive(self, kind: Kind, payload: bytes) -> bytes:
        value = decode_object(payload)
        me = self._me
        if kind == Kind.HELLO and self._hello is None:
            if field(value, "job", str) != me.job_digest:
                raise Rejected("another job listens here", final=False)
            world_size = field(value, "world", int)
            if world_size != me.world_size:
                raise Rejected(
                    f"rank {me.rank} was started with world size {me.world_size}, this rank with {world_size}",
                    final=True,
                )
            rank = rank_field(value, "rank", me.world_size)
            nonces = (_nonce(value), secrets.token_hex(16))
            self._hello = rank, nonces
            return json_frame(Kind.CHALLENGE, {"nonce": nonces[1], "proof": me.proof("server", rank, me.rank, nonces)})
        if kind == Kind.PROOF and self._hello is not None and self.proved is None:
            rank, nonces = self._hello
            proof = field(value, "proof", str)
            if not hmac.compare_digest(proof.encode(), me.proof("client", rank, me.rank, nonces).encode()):
                raise Rejected("wrong secret", final=True)
            problem = self._may_come(rank)
            if problem:
                raise Rejected(problem, final=False)
            self.proved = rank
            return json_frame(Kind.WELCOME, {})
        if kind == Kind.REJECT and self._hello is not None:
            raise Rejected("wrong secret", final=True)
        raise FrameError(f"{kind.name} out of turn")


def _nonce(value: dict[str, object]) -> str:
    nonce: str = field(value, "nonce", str)
    if len(nonce) != 32 or not set(nonce) <= set("0123456789abcdef"):
        raise FrameError("a nonce that is not 32 hex digits")
    return nonce
