"""The mutual HMAC-SHA256 handshake of two ranks. Both sides are pure: bytes in, bytes out, no sockets.

    client -> HELLO      its rank, the rank it wants, the job, a nonce
    server -> CHALLENGE  a nonce
    client -> PROOF      the client's proof over both nonces, both ranks, purpose and job
    server -> WELCOME    the server's proof over the same, under another label

The key never travels; a proof is useless in another conversation, in the other direction, or for another rank. The
client proves first: a stranger that connects learns nothing to test guesses of a weak secret against.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from pplx_comm.control.frames import FrameError, FrameReader, Kind, decode_object, field, json_frame, rank_field
from pplx_comm.errors import Error

FROM_CLIENT = frozenset({Kind.HELLO, Kind.PROOF})
FROM_SERVER = frozenset({Kind.CHALLENGE, Kind.WELCOME, Kind.REJECT})


class WrongKey(Error):
    """Raised if the other end does not hold our key, or belongs to a job of another shape: calling it again is useless."""


class Refused(OSError):
    """The rank that we want is not at the other end now; another try may find it."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.ECONNREFUSED, reason)


@dataclass(frozen=True)
class Identity:
    """The rank and job that this end claims, and the key that proves it."""

    purpose: str
    key: bytes
    rank: int
    world_size: int
    job: str
    launcher: tuple[str, str] | None = None
    """(scope, process): tells jobs apart that have no id, where both ends are in the same scope (see launch.py)."""

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
    """The session's key. Over TCP the nonce is public and the key is secret; over AF_UNIX and MPI it is the reverse."""
    return hmac.digest(key, b"pplx_comm session " + nonce.encode(), "sha256")


class ClientSide:
    """One call to rank `server`. Refused, WrongKey and FrameError end it."""

    def __init__(self, me: Identity, server: int) -> None:
        self._me = me
        self._server = server
        self._nonce = secrets.token_hex(16)
        self._nonces: tuple[str, str] | None = None
        self._reader = FrameReader(FROM_SERVER)
        self.proof: bytes | None = None
        """The client's next message, once the server has asked for it."""
        self.welcome = False

    @property
    def missing(self) -> int:
        """How many bytes to read, and not one more: right behind the welcome may come the mesh's first frame, with file
        descriptors.
        """
        return self._reader.missing

    def hello(self) -> bytes:
        me = self._me
        scope, launcher = me.launcher or ("", "")
        return json_frame(
            Kind.HELLO,
            {
                "rank": me.rank,
                "wants": self._server,
                "world": me.world_size,
                "job": me.job_digest,
                "scope": scope,
                "launcher": launcher,
                "nonce": self._nonce,
            },
        )

    def receive(self, data: bytes) -> None:
        for kind, payload in self._reader.feed(data):
            value = decode_object(payload)
            if kind == Kind.REJECT:
                reason = field(value, "reason", str)[:500]
                raise WrongKey(reason) if value.get("final") is True else Refused(reason)
            if kind == Kind.CHALLENGE and self._nonces is None:
                self._nonces = self._nonce, _nonce(value)
                self.proof = json_frame(Kind.PROOF, {"proof": self._proof("client", self._nonces)})
            elif kind == Kind.WELCOME and self._nonces is not None:
                theirs = field(value, "proof", str)
                if not hmac.compare_digest(theirs.encode(), self._proof("server", self._nonces).encode()):
                    raise WrongKey("it does not know this job's secret")
                self.welcome = True
            else:
                raise FrameError(f"{kind.name} out of turn")

    def _proof(self, role: str, nonces: tuple[str, str]) -> str:
        return self._me.proof(role, self._me.rank, self._server, nonces)


class Rejected(Exception):
    """The reason why a caller is turned away. `final` tells an honest client not to try again."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


class ServerSide:
    """A caller that has not proved anything yet. Rejected and FrameError end it."""

    def __init__(self, me: Identity, may_come: Callable[[int], str | None]) -> None:
        self._me = me
        self._may_come = may_come
        self._reader = FrameReader(FROM_CLIENT)
        self._hello: tuple[int, tuple[str, str]] | None = None
        self.proved: int | None = None
        """The caller's rank, once it has proved it."""

    def receive(self, data: bytes) -> bytes:
        """The answer to send."""
        return b"".join(self._answer(kind, decode_object(payload)) for kind, payload in self._reader.feed(data))

    def _answer(self, kind: Kind, value: dict[str, object]) -> bytes:
        if kind == Kind.HELLO and self._hello is None:
            self._hello = self._check_hello(value), (_nonce(value), secrets.token_hex(16))
            return json_frame(Kind.CHALLENGE, {"nonce": self._hello[1][1]})
        if kind == Kind.PROOF and self._hello is not None and self.proved is None:
            me, (rank, nonces) = self._me, self._hello
            proof = field(value, "proof", str)
            if not hmac.compare_digest(proof.encode(), me.proof("client", rank, me.rank, nonces).encode()):
                raise Rejected("it does not know this job's secret", final=True)
            problem = self._may_come(rank)
            if problem:
                raise Rejected(problem, final=False)
            self.proved = rank
            return json_frame(Kind.WELCOME, {"proof": me.proof("server", rank, me.rank, nonces)})
        raise FrameError(f"{kind.name} out of turn")

    def _check_hello(self, value: dict[str, object]) -> int:
        """The caller's rank. Rejected if it wants another job or another rank."""
        me = self._me
        if field(value, "job", str) != me.job_digest:
            raise Rejected("another job listens here", final=False)
        scope, launcher = me.launcher or ("", "")
        if scope and field(value, "scope", str) == scope and field(value, "launcher", str) != launcher:
            raise Rejected(
                "a job that another launcher process started listens here; if it is this one, set PPLX_COMM_JOB to one "
                "value on all of its ranks",
                final=False,
            )
        world_size = field(value, "world", int)
        if world_size != me.world_size:
            raise Rejected(
                f"rank {me.rank} was started with world size {me.world_size}, this rank with {world_size}",
                final=True,
            )
        wanted = rank_field(value, "wants", me.world_size)
        if wanted != me.rank:
            raise Rejected(f"rank {me.rank} of this job listens here, not rank {wanted}", final=False)
        return rank_field(value, "rank", me.world_size)


def _nonce(value: dict[str, object]) -> str:
    nonce: str = field(value, "nonce", str)
    if len(nonce) != 32 or not set(nonce) <= set("0123456789abcdef"):
        raise FrameError("a nonce that is not 32 hex digits")
    return nonce
