"""From ranks that can gather once to a mesh that stands: exchange addresses, connect every two ranks, prove which ranks share a
node.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pplx_comm.control.connecting import NotReached, connect
from pplx_comm.control.deadlines import GONE_SECONDS, HANDSHAKE_SECONDS
from pplx_comm.control.frames import FrameError, field
from pplx_comm.control.handshake import Identity, WrongKey, derive_key
from pplx_comm.control.mesh import Mesh
from pplx_comm.control.probe import Locality, candidates, partition, probe
from pplx_comm.control.rendezvous import Bootstrap
from pplx_comm.control.sockets import Address, close_all, listen_tcp, listen_unix, local_addresses, remaining
from pplx_comm.errors import Error, PeerError, StepTimeout


@dataclass(frozen=True)
class Introduction:
    """The first thing that a rank tells the others: about itself."""

    locality: Locality
    node_size: int | None
    unix: str
    nonce: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Introduction:
        try:
            locality, node_size = field(value, "locality", dict), value.get("node_size")
            here = Locality(
                field(locality, "boot_id", str), field(locality, "net_namespace", int), field(locality, "ipc_namespace", int)
            )
            if not (node_size is None or isinstance(node_size, int)):
                raise FrameError("field 'node_size' is no number")
            return cls(here, node_size, field(value, "unix", str), field(value, "nonce", str))
        except FrameError as problem:
            raise Error(
                f"start-up: a rank introduced itself wrongly ({problem}): install one version of pplx_comm everywhere"
            ) from None


@dataclass(frozen=True)
class Assembly:
    mesh: Mesh
    node_of: list[int]
    host_rank: int
    one_network: bool
    """True if all ranks have one loopback interface."""


def assemble(bootstrap: Bootstrap, node_size: int | None, timeout: float) -> Assembly:
    """Collective. Closes nothing of the bootstrap; closes everything of its own if it fails."""
    deadline = time.monotonic() + timeout
    rank, world_size = bootstrap.rank, bootstrap.world_size
    mesh = Mesh(rank, world_size)
    if world_size == 1:
        _check_node_size([node_size])
        return Assembly(mesh, [0], 0, True)
    with contextlib.ExitStack() as on_failure:
        me = Introduction(Locality.here(), node_size, f"pplx_comm-{secrets.token_hex(16)}", secrets.token_hex(16))
        listeners = [listen_unix(me.unix)]
        on_failure.callback(close_all, listeners)
        peers = [Introduction.from_json(value) for value in bootstrap.allgather(me.to_json())]
        _check_node_size([peer.node_size for peer in peers])
        localities = [peer.locality for peer in peers]
        claimed = candidates(localities, node_size)
        addresses = _exchange_addresses(bootstrap, peers, claimed, listeners)

        session = peers[0].nonce
        identity = Identity("mesh", derive_key(bootstrap.key, session), rank, world_size, job=session)
        mesh.start(listeners, identity)
        try:
            for lower in reversed(range(rank)):
                mesh.adopt(_connect(mesh, identity, lower, addresses[lower], deadline), lower)
            mesh.wait_for_connections(deadline)
            on_failure.pop_all()  # the listeners are the control thread's now
            neighbours = [other for other in range(world_size) if other != rank and claimed[other] == claimed[rank]]
            shares = probe(mesh, neighbours, remaining(deadline))
            node_of = partition(claimed, shares, node_size)
        except BaseException as problem:
            mesh.close(f"its start failed: {problem}")
            raise
    host_rank = sum(locality.boot_id == me.locality.boot_id for locality in localities[:rank])
    return Assembly(mesh, node_of, host_rank, _one_network(peers))


def _check_node_size(claims: Sequence[int | None]) -> None:
    """All ranks see the same claims, so they raise together."""
    if len(set(claims)) > 1:
        by_value = {claim: [rank for rank, other in enumerate(claims) if other == claim] for claim in claims}
        said = ", ".join(f"{claim} on ranks {ranks[:8]}" for claim, ranks in by_value.items())
        raise Error(f"node_size differs between ranks: {said}. Give every rank the same")
    claim = claims[0]
    if claim is not None and not 1 <= claim <= len(claims):
        raise Error(f"node_size={claim} is not between 1 and the world size {len(claims)}")


def _exchange_addresses(
    bootstrap: Bootstrap, peers: Sequence[Introduction], claimed: Sequence[int], listeners: list[socket.socket]
) -> list[list[Address]]:
    """The addresses of each rank as seen from here: AF_UNIX inside a node, TCP between nodes."""
    rank = bootstrap.rank
    tcp = len(set(claimed)) > 1
    one_host = _one_network(peers)
    mine: dict[str, Any] = {"tcp": []}
    if tcp:
        try:
            # On one host, other hosts cannot even connect. Between hosts every connection must prove the session's key.
            listener = listen_tcp("127.0.0.1", 0) if one_host else _listen_everywhere()
            listeners.append(listener)
            hosts = (
                ["127.0.0.1"]
                if one_host
                else list(dict.fromkeys([*([bootstrap.here] if bootstrap.here else []), *local_addresses()]))
            )
            mine = {"tcp": [[host, listener.getsockname()[1]] for host in hosts]}
        except OSError as problem:
            mine = {"error": f"rank {rank} cannot listen on TCP: {problem.strerror}"}
    everybody = bootstrap.allgather(mine)
    problems = [str(entry["error"]) for entry in everybody if "error" in entry]
    if problems:
        raise Error(f"start-up: {'; '.join(problems)}")
    addresses: list[list[Address]] = []
    for other, entry in enumerate(everybody):
        if claimed[other] == claimed[rank]:
            addresses.append([peers[other].unix])
        else:
            addresses.append([(str(host), int(port)) for host, port in entry["tcp"]])
    return addresses


def _one_network(peers: Sequence[Introduction]) -> bool:
    return all(peers[0].locality.same_sockets(peer.locality) for peer in peers)


def _listen_everywhere() -> socket.socket:
    try:
        return listen_tcp("::", 0)
    except OSError:  # a host without IPv6
        return listen_tcp("0.0.0.0", 0)


def _connect(mesh: Mesh, me: Identity, peer: int, addresses: Sequence[Address], deadline: float) -> socket.socket:
    refused_since: float | None = None
    while True:
        mesh.raise_if_failed()
        try:
            return connect(addresses, me, peer, max(0.05, min(remaining(deadline), HANDSHAKE_SECONDS)))
        except WrongKey as problem:
            raise _not_found(mesh, peer, str(problem)) from None
        except NotReached as problem:
            now = time.monotonic()
            refused_since = (refused_since or now) if problem.errno == errno.ECONNREFUSED else None
            if refused_since is not None and now - refused_since > GONE_SECONDS:
                if problem.strangers:
                    raise _not_found(mesh, peer, problem.answers) from None
                raise PeerError(
                    f"rank {peer} went away during start-up ({problem.answers}): see its own error",
                    peer=peer,
                    phase="rendezvous",
                ) from None
            if now >= deadline:
                raise StepTimeout(
                    f"start-up: rank {mesh.rank} cannot connect to rank {peer} ({problem.answers}). May their hosts "
                    "connect to each other on any TCP port?",
                    peer=peer,
                    phase="rendezvous",
                ) from None
        time.sleep(0.01)  # a full backlog, or a listener that is slow to come: nothing to wait on


def _not_found(mesh: Mesh, peer: int, answers: str) -> PeerError:
    return PeerError(
        f"start-up: rank {mesh.rank} found other processes at the addresses of rank {peer} ({answers}). Do their hosts have "
        "an address that differs, and may they connect to each other on any TCP port?",
        peer=peer,
        phase="rendezvous",
    )
