"""The collective part of an AllToAll's construction: every rank agrees on everything, or every rank raises."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from . import _core, _gpu, _memory
from ._carriers import Carriers, ProxyCarrier, host_key, positive_setting
from ._libfabric import Place, refuses_device_memory, this_place
from ._placement import placement
from ._version import __version__
from .errors import Error, PeerError

if TYPE_CHECKING:
    from .communicator import Communicator

T = TypeVar("T")

log = logging.getLogger("pplx_comm")


@dataclass
class Wiring:
    """What carries to whom, once it stands."""

    exchange: Any  # _core.Exchange or _cuda.Exchange
    mapped: list[int]
    remote: list[int]
    hosts: dict[int, str]  # by rank, see host_key
    places: dict[int, Place]  # of the ranks of this host
    blocks_on_gpu: bool  # those that the proxy moves
    carrier: ProxyCarrier | None = None
    regions: list[_core.LocalRegion] = field(default_factory=list)  # by proxy

    @property
    def carried(self) -> _core.Carried:
        """What the proxy sees of it."""
        return self.exchange if isinstance(self.exchange, _core.Exchange) else self.exchange.host

    def detach(self, timeout: float) -> None:
        """Takes the AllToAll off its proxy, waiting that long for kernels and writes under way."""
        if self.carrier is None:
            return
        end = time.monotonic() + timeout
        if not isinstance(self.exchange, _core.Exchange):
            self.exchange.ended(timeout)
        self.carrier.detach(self.carried, self.regions, max(0.0, end - time.monotonic()))
        self.carrier = None


@dataclass(frozen=True)
class Request:
    """What the constructor asked for."""

    config: _core.Config  # rank, world and object are filled in here
    compared: dict[str, Any]  # must be equal on all ranks
    transport: str
    provider: str | None
    node_size: int | None
    timeout: float  # of a step
    error: str | None = None  # what this rank found wrong with its arguments
    nics: tuple[str, ...] = ()  # of this rank, by name
    proxies: int = 1  # threads, of each rank
    gpu: int | None = None  # None: the CPU device
    num_sms: int = 0  # 0: all
    placement: str = "auto"  # of remote peers' blocks: see _placement

    @property
    def patience(self) -> float:
        """Seconds to wait for other ranks' constructors: they may come as late as a first step."""
        return max(3 * self.timeout, 30.0)


def _name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _agree(comm: Communicator, tag: str, payload: dict[str, Any], timeout: float) -> list[dict[str, Any] | None]:
    """Exchanges payloads; if any rank reports an error, all raise it."""
    answers = comm._exchange(payload, tag, timeout)
    for rank, answer in enumerate(answers):
        if answer is not None and answer.get("error"):
            text = answer["error"]
            if rank == comm.rank:
                raise Error(text)
            raise PeerError(f"rank {rank} could not make its AllToAll: {text}", peer=rank, phase="AllToAll()")
    return answers


def _attempt(error_of: list[str], what: Callable[[], T]) -> T | None:
    """Runs what may fail on one rank only; the error is told to all at the next agreement."""
    try:
        return what()
    except Exception as error:  # whatever it is, the other ranks must hear of it rather than wait
        error_of.append(f"{error}" if isinstance(error, Error) else f"{type(error).__name__}: {error}")
        return None


def _compare(answers: list[dict[str, Any] | None]) -> None:
    alive = [(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
    fields = dict.fromkeys(key for _, answer in alive for key in answer["compared"])
    differing = []
    for name in fields:
        by_value: dict[str, list[int]] = {}
        for rank, answer in alive:
            by_value.setdefault(repr(answer["compared"].get(name)), []).append(rank)
        if len(by_value) > 1:
            differing.append(f"{name} is " + ", ".join(f"{value} on {_name_ranks(ranks)}" for value, ranks in by_value.items()))
    if differing:
        raise Error("AllToAll() must be called alike on all ranks, but " + "; ".join(differing))


def _node(request: Request, comm: Communicator, rank: int) -> int:
    """Which node a rank belongs to for this AllToAll."""
    if request.node_size is not None:
        return rank // request.node_size
    # Replicas share memory also where all other peers are to be reached by the proxy.
    return rank // request.config.replicas if request.transport == "proxy" else comm._node_of[rank]


def _check_replicas(request: Request, comm: Communicator, alive: list[int]) -> None:
    replicas = request.config.replicas
    for peer in alive:
        if peer // replicas != comm.rank // replicas:
            continue
        if not comm._same_node(peer):
            why = "they cannot map each other's memory: they run on different hosts, or in different network or IPC namespaces"
        elif _node(request, comm, peer) != _node(request, comm, comm.rank):
            why = f"node_size={request.node_size} puts them on different nodes"
        else:
            continue
        raise Error(f"replicas={replicas} makes ranks {comm.rank} and {peer} hold the same tokens, and {why}")


def _peers(request: Request, comm: Communicator, alive: list[int]) -> tuple[list[int], list[int]]:
    """Mapped and remote peers, oneself left out."""
    mapped: list[int] = []
    remote: list[int] = []
    _check_replicas(request, comm, alive)
    for peer in alive:
        if peer == comm.rank:
            continue
        together = _node(request, comm, peer) == _node(request, comm, comm.rank)
        if together and not comm._same_node(peer):
            raise Error(
                f"node_size={request.node_size} puts ranks {comm.rank} and {peer} on one node, but they cannot map "
                "each other's memory: they run on different hosts, or in different network or IPC namespaces"
            )
        (mapped if together else remote).append(peer)
    if request.transport == "mapped" and remote:
        raise Error(
            f"transport='mapped' reaches only ranks of one node, and {_name_ranks(remote)} cannot share memory with "
            f"rank {comm.rank}: use transport='auto'"
        )
    return mapped, remote


def _place(request: Request) -> Place:
    """Where this rank lives, and its NICs are to be near its GPU."""
    return this_place(None if request.gpu is None else _gpu.cuda_module().pci_address(request.gpu))


def _blocks_on_gpu(request: Request, places: list[Place], place: int) -> bool:
    """Whether the blocks of remote peers lie in GPU memory. Opens what the proxy will open."""
    assert request.gpu is not None
    if request.placement == "host":
        return False
    ordering = _gpu.cuda_module().write_ordering(places[place].gpu)
    refusal = refuses_device_memory(provider_of(request), list(request.nics) or None, places, place)
    chosen = placement(ordering, provider_of(request) or "the provider", refusal)
    if request.placement == "device" and chosen.where != "device":
        raise Error(f"placement='device': {chosen.why}; placement='auto' would take pinned host memory")
    log.debug("blocks of remote peers: %s, %s", chosen.where, chosen.why)
    return chosen.where == "device"


def provider_of(request: Request) -> str | None:
    return request.provider or os.environ.get("PPLX_COMM_PROVIDER") or None


def wire_up(comm: Communicator, request: Request, used_objects: set[int]) -> tuple[Wiring, int]:
    """Builds everything that needs the other ranks. Returns it with the AllToAll's number."""
    config, timeout = request.config, request.patience
    errors: list[str] = [request.error] if request.error else []
    sides = _attempt(errors, lambda: _peers(request, comm, [r for r in range(comm.world_size) if comm._peek_alive[r]]))
    place = _attempt(errors, lambda: _place(request))
    answers = _agree(
        comm,
        "AllToAll: arguments",
        {
            "error": errors[0] if errors else None,
            "compared": {"version": __version__, **request.compared},
            "used": sorted(used_objects),
            "host": host_key(),
            "place": asdict(place) if place else None,
            "remote": len(sides[1]) if sides else 0,
        },
        timeout,
    )
    _compare(answers)
    assert sides is not None
    mapped, remote = sides
    alive = [rank for rank, answer in enumerate(answers) if answer is not None]
    taken = {number for answer in answers if answer is not None for number in answer["used"]}
    free = [number for number in range(8) if number not in taken]
    if not free:
        raise Error(
            "8 AllToAlls live on this Communicator already, which is all that it carries: close one, or use one for all "
            "layers of a shape"
        )
    config.object = free[0]
    config.remote_peers = len(remote)
    config.spaced_sends = request.gpu is not None
    hosts = {rank: answer["host"] for rank, answer in enumerate(answers) if answer is not None}
    ranks_here = list(hosts.values()).count(host_key())

    proxied = any(answer is not None and answer["remote"] for answer in answers)
    here = [(rank, answer) for rank, answer in enumerate(answers) if answer is not None and answer["host"] == host_key()]
    places = {rank: Place(**answer["place"]) for rank, answer in here}
    exchange: Any
    blocks_on_gpu = False
    if request.gpu is None:
        exchange = _share(comm, request, mapped, ranks_here)
    else:
        shared = _share_gpu(comm, request, mapped, remote, proxied, places)
        exchange, mapped, remote = shared.exchange, shared.mapped, shared.remote
        proxied, blocks_on_gpu = shared.proxied, shared.blocks_on_gpu
    if len(alive) < comm.world_size:  # made after a reset, by those that are left
        exchange.reset(exchange.generation, [rank in alive for rank in range(comm.world_size)])
    wiring = Wiring(exchange, mapped, remote, hosts, places, blocks_on_gpu)
    if proxied:
        _connect(comm, request, wiring, alive)
    # Nobody writes before everybody can receive.
    _agree(comm, "AllToAll: ready", {}, timeout)
    return wiring, config.object


def _share(comm: Communicator, request: Request, mapped: list[int], ranks_here: int) -> _core.Exchange:
    """Memory that peers of this node map."""
    config, timeout = request.config, request.patience
    errors: list[str] = []
    fd = _attempt(errors, lambda: _memory.allocate(config.heap_bytes, f"the blocks of an AllToAll on rank {comm.rank}"))
    try:
        _agree(comm, "AllToAll: memory", {"error": errors[0] if errors else None}, timeout)
        assert fd is not None
        exchange = _attempt(errors, lambda: _map(comm, request, fd, mapped, ranks_here))
    finally:
        if fd is not None:
            os.close(fd)
    _agree(comm, "AllToAll: mappings", {"error": errors[0] if errors else None}, timeout)
    assert exchange is not None
    return exchange


@dataclass(frozen=True)
class Shared:
    """What came of it."""

    exchange: Any  # _cuda.Exchange
    mapped: list[int]
    remote: list[int]
    proxied: bool  # some rank has a proxy
    blocks_on_gpu: bool  # those that this rank's proxy moves


@dataclass
class Mapped:
    """Memory of GPUs of this node, as far as this rank's GPU reaches it."""

    peers: dict[int, Any] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)  # and why

    def open(self, gpu: int, rank: int, description: dict[str, Any], fds: list[int]) -> None:
        try:
            self.peers[rank] = _gpu.open_peer(gpu, description, fds)
        except Error as why:
            self.refused[rank] = str(why)


def _share_gpu(
    comm: Communicator, request: Request, mapped: list[int], remote: list[int], proxied: bool, places: dict[int, Place]
) -> Shared:
    """The same in device memory, and memory for the proxy if any rank has one. GPUs of a node that do not reach each other are
    remote to each other."""
    config, timeout, gpu = request.config, request.patience, request.gpu
    assert gpu is not None
    errors: list[str] = []
    own = _attempt(errors, lambda: _gpu.allocate(config, gpu, f"the blocks of an AllToAll on rank {comm.rank}"))
    described = None if own is None else _attempt(errors, lambda: _gpu.describe(own))
    answers = _agree(comm, "AllToAll: memory", {"error": errors[0] if errors else None, "memory": described}, timeout)
    assert own is not None
    fds = [own.descriptor()] if own.has_descriptor else []
    try:
        received = comm._share_fds(fds, "AllToAll: memory")
    finally:
        _gpu.close_all(fds)
    theirs = Mapped()
    try:
        for rank in mapped:
            theirs.open(gpu, rank, answers[rank]["memory"], received[rank])  # type: ignore[index]
    finally:
        for of_peer in received.values():
            _gpu.close_all(of_peer)
    # By rank as text: JSON has no other keys.
    refused = {str(rank): why for rank, why in theirs.refused.items()}
    answers = _agree(comm, "AllToAll: mappings", {"refused": refused}, timeout)
    apart = {(a, int(b)): why for a, answer in enumerate(answers) if answer is not None for b, why in answer["refused"].items()}
    _check_apart(request, apart)
    proxied = proxied or bool(apart)
    for peer in [peer for peer in mapped if (comm.rank, peer) in apart or (peer, comm.rank) in apart]:
        mapped.remove(peer)
        remote.append(peer)
        theirs.peers.pop(peer, None)
    remote.sort()
    config.remote_peers = len(remote)
    make = _gpu.cuda_module().Exchange
    on_gpu = _attempt(errors, lambda: proxied and _blocks_on_gpu(request, list(places.values()), list(places).index(comm.rank)))
    exchange = None
    if not errors:
        gdrcopy = os.environ.get("PPLX_COMM_GDRCOPY", "1") != "0"
        arguments = config, own, theirs.peers, remote, proxied, bool(on_gpu), gdrcopy, gpu, request.timeout, request.num_sms
        exchange = _attempt(errors, lambda: make(*arguments))
    _agree(comm, "AllToAll: device", {"error": errors[0] if errors else None}, timeout)
    return Shared(exchange, mapped, remote, proxied, bool(on_gpu))


def _check_apart(request: Request, apart: dict[tuple[int, int], str]) -> None:
    """Raises, alike on all ranks, where ranks whose GPUs do not reach each other must share memory."""
    replicas = request.config.replicas
    for (a, b), why in sorted(apart.items()):
        text = f"the GPU of rank {a} cannot map the memory of rank {b}'s: {why}"
        if request.transport == "mapped":
            raise Error(f"transport='mapped': {text}. transport='auto' lets the proxy carry between them")
        if a // replicas == b // replicas:
            raise Error(f"replicas={replicas} makes ranks {a} and {b} hold the same tokens, and {text}")


def rewire(comm: Communicator, request: Request, wiring: Wiring, survivors: list[int]) -> None:
    """After a failure: the mappings stay; the proxy is made anew, for the dead may have left the old one in any state."""
    wiring.mapped = [rank for rank in wiring.mapped if rank in survivors]
    wiring.remote = [rank for rank in wiring.remote if rank in survivors]
    answers = _agree(comm, "reset: survivors", {"remote": len(wiring.remote)}, request.patience)
    if any(answer is not None and answer["remote"] for answer in answers):
        _connect(comm, request, wiring, survivors)
    _agree(comm, "reset: ready", {}, request.patience)


def threads_of_a_rank(ranks_here: int) -> int:
    """PPLX_COMM_THREADS, or this rank's share of the cores."""
    share = max(1, len(os.sched_getaffinity(0)) // max(1, ranks_here))
    return positive_setting("PPLX_COMM_THREADS", min(share, 8))


def _map(comm: Communicator, request: Request, fd: int, mapped: list[int], ranks_here: int) -> _core.Exchange:
    config = request.config
    received = comm._share_fds([fd], "AllToAll: memory")
    try:
        own = _core.Mapping(fd, config.heap_bytes)
        peers = {rank: _core.Mapping(received[rank][0], os.fstat(received[rank][0]).st_size) for rank in mapped}
    finally:
        for fds in received.values():
            for other in fds:
                if other != fd:
                    os.close(other)
    return _core.Exchange(config, own, peers, threads_of_a_rank(ranks_here), request.timeout)


def _unpack(texts: list[str]) -> list[bytes]:
    return [bytes.fromhex(text) for text in texts]


def _connect(comm: Communicator, request: Request, wiring: Wiring, alive: list[int]) -> None:
    """The proxy: one per provider for all AllToAlls of the Communicator."""
    timeout = request.patience
    one_host = len({wiring.hosts[rank] for rank in alive}) == 1
    places = list(wiring.places.values())  # with the dead: the others keep their shares of the NICs
    place = list(wiring.places).index(comm.rank)
    carriers = Carriers.of(comm)
    provider = provider_of(request)
    key = (provider, comm._generation, request.nics, request.proxies, wiring.blocks_on_gpu)
    errors: list[str] = []
    carrier = carriers.proxies.get(key)
    fresh = carrier is None
    if carrier is None:
        carrier = _attempt(
            errors,
            lambda: ProxyCarrier(comm.rank, provider, request.nics, one_host, places, place, request.proxies, wiring.blocks_on_gpu),
        )
    answers = _agree(
        comm,
        "AllToAll: fabric",
        {
            "error": errors[0] if errors else None,
            "addresses": [address.hex() for address in carrier.addresses] if carrier else None,
            "fabric": carrier.name if carrier else None,
            "fresh": fresh,
        },
        timeout,
    )
    assert carrier is not None
    if len({answer["fresh"] for answer in answers if answer is not None}) > 1:
        old = [rank for rank, answer in enumerate(answers) if answer is not None and not answer["fresh"]]
        raise Error(
            "the NICs of an AllToAll must be those of an earlier one on all ranks, or on none: here they are on "
            f"{_name_ranks(old)} and not on the others"
        )
    if fresh:
        addresses = {r: _unpack(answers[r]["addresses"]) for r in alive if r != comm.rank}  # type: ignore[index]
        _attempt(errors, lambda: carrier.connect(addresses))
        if not errors:
            carriers.proxies[key] = carrier
    regions = None if errors else _attempt(errors, lambda: carrier.register(wiring.carried))
    answers = _agree(
        comm,
        "AllToAll: regions",
        {"error": errors[0] if errors else None, "regions": [region.description.hex() for region in regions or []]},
        timeout,
    )
    assert regions is not None
    descriptions = {r: _unpack(answers[r]["regions"]) for r in wiring.remote}  # type: ignore[index]
    _attempt(errors, lambda: carrier.attach(wiring.carried, regions, descriptions))
    if not errors:
        wiring.carrier, wiring.regions = carrier, regions
        network = f"{carrier.name} on {', '.join(carrier.nics)}"
        wiring.exchange.name_networks([network if rank in wiring.remote else "" for rank in range(comm.world_size)])
    _agree(comm, "AllToAll: proxy", {"error": errors[0] if errors else None}, timeout)
