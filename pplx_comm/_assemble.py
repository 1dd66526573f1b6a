"""From ranks that can gather once to a mesh that stands: exchange addresses, link every two ranks, prove who shares a
node.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pplx_comm._frames import FrameError, field
from pplx_comm._handshake import HANDSHAKE_SECONDS, Identity, WrongKey, derive_key, greet
from pplx_comm._mesh import Mesh
from pplx_comm._probe import Place, candidates, partition, probe
from pplx_comm._rendezvous import Bootstrap
from pplx_comm._sockets import Address, close_all, connect_any, listen_tcp, listen_unix, local_addresses, remaining
from pplx_comm.errors import Error, PeerError, StepTimeout

GONE_SECONDS = 3.0
"""A rank listens before it says where; if it refuses for this long, it is not there any more."""


@dataclass(frozen=True)
class Peer:
    """What a rank tells the others about itself, first of all."""

    place: Place
    node_size: int | None
    unix: str
    nonce: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Peer:
        try:
            place, node_size = field(value, "place", dict), value.get("node_size")
            here = Place(field(place, "boot_id", str), field(place, "net_namespace", int), field(place, "ipc_namespace", int))
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


def assemble(bootstrap: Bootstrap, node_size: int | None, timeout: float) -> Assembly:
    """Collective. Closes nothing of the bootstrap; closes everything of its own if it fails."""
    deadline = time.monotonic() + timeout
    rank, world_size = bootstrap.rank, bootstrap.world_size
    mesh = Mesh(rank, world_size)
    if world_size == 1:
        _check_node_size([node_size])
        return Assembly(mesh, [0], 0)
    with contextlib.ExitStack() as on_failure:
        me = Peer(Place.here(), node_size, f"pplx_comm-{secrets.token_hex(16)}", secrets.token_hex(16))
        listeners = [listen_unix(me.unix)]
        on_failure.callback(close_all, listeners)
        peers = [Peer.from_json(value) for value in bootstrap.allgather(me.to_json())]
        _check_node_size([peer.node_size for peer in peers])
        places = [peer.place for peer in peers]
        claimed = candidates(places, node_size)
        addresses = _exchange_addresses(bootstrap, peers, claimed, listeners)

        identity = Identity("mesh", derive_key(bootstrap.key, peers[0].nonce), rank, world_size, "")
        mesh.start(listeners, identity)
        try:
            for lower in reversed(range(rank)):
                mesh.adopt(_connect(mesh, identity, lower, addresses[lower], deadline), lower)
            mesh.wait_for_links(deadline)
            on_failure.pop_all()  # the listeners are the control thread's now
            neighbours = [other for other in range(world_size) if other != rank and claimed[other] == claimed[rank]]
            shares = probe(mesh, neighbours, remaining(deadline))
            node_of = partition(claimed, shares, node_size)
        except BaseException as problem:
            mesh.close(f"its start failed: {problem}")
            raise
    host_rank = sum(place.boot_id == me.place.boot_id for place in places[:rank])
    return Assembly(mesh, node_of, host_rank)


def _check_node_size(claims: Sequence[int | None]) -> None:
    """The same on every rank, so all raise together."""
    if len(set(claims)) > 1:
        by_value = {claim: [rank for rank, other in enumerate(claims) if other == claim] for claim in claims}
        said = ", ".join(f"{claim} on ranks {ranks[:8]}" for claim, ranks in by_value.items())
        raise Error(f"node_size differs between ranks: {said}. Give every rank the same")
    claim = claims[0]
    if claim is not None and not 1 <= claim <= len(claims):
        raise Error(f"node_size={claim} is not between 1 and the world size {len(claims)}")


def _exchange_addresses(
    bootstrap: Bootstrap, peers: Sequence[Peer], claimed: Sequence[int], listeners: list[socket.socket]
) -> list[list[Address]]:
    """Where to call each rank from here: AF_UNIX inside a node, TCP between nodes."""
    rank = bootstrap.rank
    tcp = len(set(claimed)) > 1
    one_host = all(peers[0].place.same_sockets(peer.place) for peer in peers)
    mine: dict[str, Any] = {"tcp": []}
    if tcp:
        try:
            # On one host nobody else may even connect. Between hosts every connection must prove the session's key.
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


def _listen_everywhere() -> socket.socket:
    try:
        return listen_tcp("::", 0)
    except OSError:  # a host without IPv6
        return listen_tcp("0.0.0.0", 0)


def _connect(mesh: Mesh, me: Identity, peer: int, addresses: Sequence[Address], deadline: float) -> socket.socket:
    refused_since: float | None = None
    while True:
        mesh.raise_if_failed()
        seconds = max(0.05, min(remaining(deadline), HANDSHAKE_SECONDS))
        try:
            return connect_any(addresses, seconds, functools.partial(greet, me=me, server=peer, seconds=seconds))[0]
        except WrongKey as problem:
            raise PeerError(
                f"start-up: rank {peer} at {addresses} is another job's: {problem}", peer=peer, phase="rendezvous"
            ) from None
        except OSError as problem:
            now = time.monotonic()
            refused_since = (refused_since or now) if problem.errno == errno.ECONNREFUSED else None
            if refused_since is not None and now - refused_since > GONE_SECONDS:
                raise PeerError(
                    f"rank {peer} went away during start-up ({problem.strerror}): see its own error",
                    peer=peer,
                    phase="rendezvous",
                ) from None
            if now >= deadline:
                raise StepTimeout(
                    f"start-up: rank {mesh.rank} cannot connect to rank {peer} ({problem.strerror}). May their hosts "
                    "connect to each other on any TCP port?",
                    peer=peer,
                    phase="rendezvous",
                ) from None
        time.sleep(0.01)  # a full backlog, or a listener that is slow to come: nothing to wait on
