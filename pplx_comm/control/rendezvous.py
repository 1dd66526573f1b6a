"""How the ranks of one job first find each other: a star around rank 0 that gathers to all, and is gone once the mesh
stands.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any, Protocol

from pplx_comm.control.connecting import NotReached, connect
from pplx_comm.control.deadlines import GRACE_SECONDS, HANDSHAKE_SECONDS
from pplx_comm.control.door import Door
from pplx_comm.control.frames import FrameError, FrameReader, Kind, decode, decode_object, encode, field, json_frame
from pplx_comm.control.handshake import Identity, WrongKey
from pplx_comm.control.launch import Launch
from pplx_comm.control.secret import user_key
from pplx_comm.control.sockets import Address, describe, is_loopback, listen_tcp, listen_unix, remaining, resolve
from pplx_comm.errors import Error, PeerError, StepTimeout
from pplx_comm.log import log
from pplx_comm.settings import HOW_TO_SET_SECRET, Start, read


class Bootstrap(Protocol):
    """Gathers values before there is a mesh: this file's star, MPI, or a torch process group."""

    rank: int
    world_size: int
    key: bytes
    here: str | None
    """This host's address as rank 0 sees it, if known: the first that others should try."""

    def allgather(self, value: dict[str, Any]) -> list[dict[str, Any]]: ...

    def close(self) -> None: ...


def meet(launch: Launch, timeout: float, environ: Mapping[str, str]) -> Bootstrap:
    """Rank 0 listens, the others knock until it is there. Returns at once; the first allgather waits for all."""
    deadline = time.monotonic() + timeout
    addresses, key = _where(launch, environ)
    me = Identity("rendezvous", key, launch.rank, launch.world_size, launch.job, launch.launcher)
    if launch.rank == 0:
        if not launch.has_id and launch.local_job is None:
            log.warning(
                "rank 0 at %s: only the address and the secret tell this job from another one that starts there at the same "
                "time. Set PPLX_COMM_JOB to one value on all of its ranks",
                " or ".join(describe(address) for address in addresses),
            )
        return _Host(me, addresses, deadline)
    return _Visitor(me, addresses, deadline, timeout, launch)


def _where(launch: Launch, environ: Mapping[str, str]) -> tuple[list[Address], bytes]:
    """The addresses of rank 0 and the key to use there."""
    secret = read(Start, environ).secret
    if launch.local_job is not None and launch.address_source != "PPLX_COMM_ADDR":
        # No port to collide on. The kernel vouches for the user at the other end, so the key need not be secret.
        name = hashlib.sha256(f"{os.geteuid()}\0{launch.local_job}".encode()).hexdigest()[:32]
        return [f"pplx_comm-{name}"], secret or b"one user, one host"
    if launch.address is None:
        raise Error(
            f"{launch.source} say rank {launch.rank} of {launch.world_size}, but not where rank 0 is, nor that all "
            "ranks are on one host. "
            f"On every rank: export PPLX_COMM_ADDR=<host of rank 0>:<port>; {HOW_TO_SET_SECRET} (one value for all)"
        )
    host, port = launch.address
    try:
        hosts = resolve(host)
    except (OSError, UnicodeError) as problem:
        why = getattr(problem, "strerror", "no host can have this name")
        raise Error(
            f"cannot resolve {host!r} ({launch.address_source}): {why}. Set PPLX_COMM_ADDR=<host of rank 0>:<port>"
        ) from None
    if secret is None:
        if not all(is_loopback(found) for found in hosts):
            raise Error(
                f"{launch.address_source} gives {host}:{port}, which other hosts can reach, and PPLX_COMM_SECRET is "
                "not set. "
                f"Make one secret and give the same one to every rank: {HOW_TO_SET_SECRET}"
            )
        secret = user_key(environ)
    return [(found, port) for found in hosts], secret


class _Host:
    """Rank 0."""

    def __init__(self, me: Identity, addresses: list[Address], deadline: float) -> None:
        self.rank, self.world_size, self.key = me.rank, me.world_size, me.key
        self.here: str | None = None
        self._me = me
        self._deadline = deadline
        self._visitors: dict[int, tuple[socket.socket, FrameReader]] = {}
        self._values: dict[int, dict[str, Any]] = {}
        self._gone: int | None = None
        self._selector = selectors.DefaultSelector()
        try:
            listeners = _listen(addresses, deadline)
            self._door = Door(self._selector, listeners, me, may_come=self._may_come, came=self._came)
        except BaseException:
            self._selector.close()
            raise

    def allgather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        self._values[0] = value
        while len(self._values) < self.world_size and self._gone is None:
            due = self._door.next_deadline()
            until = min(self._deadline, due) if due is not None else self._deadline
            for key, mask in self._selector.select(remaining(until)):
                key.data(mask)
            self._door.expire()
            if not remaining(self._deadline):
                self._fail_missing()
        if self._gone is not None:
            self._fail(
                PeerError(
                    f"rank {self._gone} went away during start-up: see its own error",
                    peer=self._gone,
                    phase="rendezvous",
                )
            )
        values = [self._values[rank] for rank in range(self.world_size)]
        self._values = {}
        self._tell(json_frame(Kind.GATHERED, values))
        return values

    def close(self) -> None:
        self._door.close()
        for sock, _ in self._visitors.values():
            sock.close()
        self._visitors = {}
        self._selector.close()

    def _may_come(self, rank: int) -> str | None:
        if rank == self.rank:
            return "rank 0 is here already: two processes were started as rank 0"
        if rank in self._visitors:
            return f"rank {rank} is here already: two processes were started as this rank, or two jobs share one address"
        return None

    def _came(self, sock: socket.socket, rank: int) -> None:
        reader = FrameReader(frozenset({Kind.GATHER}))
        self._visitors[rank] = sock, reader
        if self.here is None and sock.family != socket.AF_UNIX:
            self.here = _own_address(sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda _: self._read(rank, sock, reader))

    def _read(self, rank: int, sock: socket.socket, reader: FrameReader) -> None:
        try:
            data = sock.recv(1 << 16)
            if not data:
                raise FrameError("it closed its connection")
            for _, payload in reader.feed(data):
                message = decode_object(payload)
                if rank in self._values:
                    raise FrameError("it sent twice")
                self._values[rank] = field(message, "value", dict)
                left = field(message, "left", float)
                self._deadline = min(self._deadline, time.monotonic() + max(0.0, left))
        except (OSError, FrameError) as problem:
            log.warning("rank %d is lost during start-up: %s", rank, problem)
            self._selector.unregister(sock)
            self._gone = rank

    def _tell(self, message: bytes) -> None:
        for rank, (sock, _) in self._visitors.items():
            try:
                sock.settimeout(GRACE_SECONDS)
                sock.sendall(message)
                sock.setblocking(False)
            except OSError:
                self._gone = rank  # the next allgather fails for all

    def _fail(self, error: Error) -> None:
        self._tell(json_frame(Kind.FAIL, {"message": str(error), "timeout": isinstance(error, TimeoutError)}))
        raise error

    def _fail_missing(self) -> None:
        missing = [rank for rank in range(self.world_size) if rank not in self._values]
        if not missing:
            return
        refused = ", ".join(f"{reason} (x{count})" for reason, count in self._door.refused.items())
        hint = f" Connections were refused: {refused}." if refused else ""
        self._fail(
            StepTimeout(
                f"start-up: {_ranks(missing)} of {self.world_size} never came to rank 0.{hint} "
                "Look at their output; check that they run, reach rank 0's address and have the same PPLX_COMM_SECRET",
                phase="rendezvous",
                expected=list(range(self.world_size)),
                seen=sorted(self._values),
            )
        )


class _Visitor:
    """Every other rank."""

    def __init__(self, me: Identity, addresses: list[Address], deadline: float, timeout: float, launch: Launch) -> None:
        self.rank, self.world_size, self.key = me.rank, me.world_size, me.key
        self._deadline = deadline
        self._where = " or ".join(describe(address) for address in addresses)
        self._sock = self._knock(me, addresses, timeout, launch)
        self._reader = FrameReader(frozenset({Kind.GATHERED, Kind.FAIL}))
        self.here = None if self._sock.family == socket.AF_UNIX else _own_address(self._sock)

    def _knock(self, me: Identity, addresses: list[Address], timeout: float, launch: Launch) -> socket.socket:
        pause = 0.005
        told: NotReached | None = None
        while True:
            try:
                return connect(addresses, me, 0, max(0.05, min(remaining(self._deadline), HANDSHAKE_SECONDS)))
            except WrongKey as problem:
                raise Error(f"rank {self.rank} and rank 0 at {self._where} are not of one job: {problem}. {_SAME_SECRET}") from None
            except NotReached as problem:
                if problem.strangers and not (told and told.strangers):  # rank 0 may come to an address that is still free
                    log.warning("rank %d still looks for rank 0: %s. %s", self.rank, problem.answers, _SAME_SECRET)
                if problem.spoken or told is None or not told.spoken:
                    told = problem
                if not remaining(self._deadline):
                    raise StepTimeout(
                        f"start-up: rank {self.rank} could not reach rank 0 within {timeout:g} s "
                        f"({told.answers}). {_hint(launch, told)}",
                        peer=0,
                        phase="rendezvous",
                    ) from None
            time.sleep(pause)  # rank 0 may not have started: nothing announces that it listens
            pause = min(0.25, pause * 1.5)

    def allgather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            self._sock.settimeout(remaining(self._deadline) + GRACE_SECONDS)
            message = json_frame(Kind.GATHER, {"left": float(remaining(self._deadline)), "value": value})
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # why it left may have come before that
                self._sock.sendall(message)
            kind, payload = self._hear()
            answer = decode_object(payload) if kind == Kind.FAIL else decode(payload)
        except TimeoutError:
            raise StepTimeout(
                f"start-up: rank 0 at {self._where} has not answered in time: is it stopped?",
                peer=0,
                phase="rendezvous",
            ) from None
        except FrameError as problem:
            raise PeerError(f"rank 0 sent an invalid message during start-up: {problem}", peer=0, phase="rendezvous") from None
        except OSError:
            raise PeerError("rank 0 went away during start-up: see its own error", peer=0, phase="rendezvous") from None
        if kind == Kind.FAIL:
            kind_of_error = StepTimeout if answer.get("timeout") is True else PeerError
            raise kind_of_error(str(answer.get("message")), phase="rendezvous")
        if not isinstance(answer, list) or [type(entry) for entry in answer] != [dict] * self.world_size:
            raise PeerError(
                "rank 0 sent a list of the wrong length during start-up: install one version of pplx_comm everywhere",
                peer=0,
                phase="rendezvous",
            )
        return answer

    def _hear(self) -> tuple[Kind, bytes]:
        while True:
            self._sock.settimeout(remaining(self._deadline) + GRACE_SECONDS)
            data = self._sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            for message in self._reader.feed(data):
                return message

    def close(self) -> None:
        self._sock.close()


_SAME_SECRET = f"Give every rank the same secret, and every job its own address: {HOW_TO_SET_SECRET}"


def _hint(launch: Launch, problem: NotReached) -> str:
    if problem.strangers:
        return _SAME_SECRET
    if launch.local_job is not None:
        return (
            "Is rank 0 running, in this network namespace, under this user, started by the same launcher? "
            "If not: export PPLX_COMM_ADDR=<host>:<port> on every rank"
        )
    return f"Is rank 0 running there? The address comes from {launch.address_source}; PPLX_COMM_ADDR overrides it"


class Gathered:
    """MPI and torch bring their own allgather, of text; they are trusted as far as the job itself is."""

    key = b"carried by the job's own process group"
    here: str | None = None

    def __init__(self, rank: int, world_size: int, gather_text: Any) -> None:
        self.rank, self.world_size = rank, world_size
        self._gather_text = gather_text

    def allgather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        return [decode_object(str(text).encode()) for text in self._gather_text(encode(value).decode())]

    def close(self) -> None:
        return None


class Alone:
    """A world of one."""

    rank, world_size, key = 0, 1, b"alone"
    here: str | None = None

    def allgather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        return [value]

    def close(self) -> None:
        return None


def _listen(addresses: list[Address], deadline: float) -> list[socket.socket]:
    """Bind rank 0's address. Another job may hold it for the moment that its own start-up takes."""
    while True:
        problems = []
        for address in addresses:
            try:
                return [listen_unix(address) if isinstance(address, str) else _listen_host(*address)]
            except OSError as problem:
                problems.append(f"{describe(address)}: {problem.strerror}")
                if problem.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise Error(
                        f"rank 0 cannot listen at {describe(address)}: {problem.strerror}. Set PPLX_COMM_ADDR to another host:port"
                    ) from None
        if not remaining(deadline):
            raise Error(
                f"rank 0 cannot listen ({'; '.join(problems)}): another process holds the address. Set PPLX_COMM_ADDR to a free one"
            )
        time.sleep(0.05)  # until the process that holds the address has closed it: nothing announces that


def _listen_host(host: str, port: int) -> socket.socket:
    try:
        return listen_tcp(host, port)
    except OSError as problem:
        # A service or NAT address that leads here without being ours. Never for loopback, which must not widen.
        if problem.errno != errno.EADDRNOTAVAIL or is_loopback(host):
            raise
        return listen_tcp("::" if ":" in host else "0.0.0.0", port)


def _own_address(sock: socket.socket) -> str | None:
    with contextlib.suppress(OSError):
        return str(sock.getsockname()[0])
    return None


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:32]) + (", ..." if len(ranks) > 32 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
