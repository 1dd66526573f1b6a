"""The CUDA device's memory: a heap on each GPU, which the GPUs of its node map, and memory for the proxy where any rank has one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import pplx_comm._core as _core
from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error
from pplx_comm.gpus import cuda_module
from pplx_comm.wiring import nvshmem
from pplx_comm.wiring.compare import Attempts, agree
from pplx_comm.wiring.libfabric import Locality
from pplx_comm.wiring.peers import NoRelays, Peers, mapped_range, nodes_of, remote_of_all
from pplx_comm.wiring.placement import blocks_on_gpu
from pplx_comm.wiring.request import Request
from pplx_comm.wiring.symmetric import Heaps, Symmetric, lay_symmetric_memory

if TYPE_CHECKING:
    import pplx_comm._cuda as _cuda


@dataclass(frozen=True)
class GpuExchange:
    """The exchange, and how its peers are reached."""

    exchange: _cuda.Exchange
    peers: Peers
    proxied: bool  # some rank has a proxy
    blocks_on_gpu: bool  # those that this rank's proxy moves
    kernels: Any  # the module that it is of
    symmetric: Symmetric | None  # memory of a carrier that kernels drive


@dataclass
class Opened:
    """Memory of GPUs of this node, as far as this rank's GPU reaches it."""

    heaps: dict[int, Any] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)  # and why

    def open(self, gpu: int, rank: int, description: dict[str, Any], fds: list[int], kernels: Any) -> None:
        try:
            self.heaps[rank] = open_heap(gpu, description, fds, kernels)
        except Error as why:
            self.refused[rank] = str(why)


def make_gpu_exchange(
    control: ControlPlane, request: Request, peers: Peers, proxied: bool, localities: dict[int, Locality]
) -> GpuExchange:
    """Collective. GPUs of a node that do not reach each other are remote to each other."""
    config, timeout, gpu = request.config, request.patience, request.gpu
    assert gpu is not None
    attempts = Attempts()
    if not request.by_kernels:  # else near peers may be of any node
        config.mapped_first, config.mapped_slots = mapped_range(request, control)
    kernels = attempts.run(nvshmem.usable_kernels if request.by_kernels else cuda_module)
    heaps, apart, large_tokens = _map_heaps(control, request, peers, kernels, attempts)
    proxied = proxied or bool(apart)
    remote = remote_of_all(request, control, sorted([control.rank, *peers.mapped, *peers.remote]), apart)
    peers = peers.with_remote(remote[control.rank])
    heaps.of_peers = {rank: heap for rank, heap in heaps.of_peers.items() if rank in peers.mapped}
    config.remote_peers, config.remote_slots = len(peers.remote), max(map(len, remote.values()))
    # Such a carrier is there for all remote peers, and no proxy.
    carried = proxied and request.by_kernels
    proxied = proxied and not carried
    symmetric = None
    if carried:
        symmetric = lay_symmetric_memory(control, request, peers, remote, kernels, heaps)
        peers, kernels = symmetric.peers, symmetric.kernels
    on_gpu = attempts.run(
        lambda: proxied and blocks_on_gpu(request, list(localities.values()), list(localities).index(control.rank))
    )
    slots = {peer: sorted(remote[peer]).index(control.rank) for peer in peers.remote}
    arguments: list[Any] = [config, heaps.own, heaps.of_peers, nodes_of(request, control), slots, proxied, bool(on_gpu)]
    arguments += [request.settings.gdrcopy, gpu, request.timeout, request.num_sms, large_tokens, request.settings.sending_share]
    arguments.append(request.settings.stats)
    if request.by_kernels and (symmetric is None or symmetric.puts):
        arguments += _where_blocks_are(symmetric)
    exchange = attempts.run(lambda: kernels.Exchange(*arguments))  # type: ignore[union-attr]
    try:
        agree(control, "AllToAll: device", {"error": attempts.error}, timeout)
    except BaseException:
        if symmetric is not None:
            symmetric.segment.close(True)  # no peer has put anything there
        raise
    assert exchange is not None
    return GpuExchange(exchange, peers, proxied, bool(on_gpu), kernels, symmetric)


def lay_gpu_relays(control: ControlPlane, request: Request, exchange: Any, peers: Peers, kernels: Any) -> None:
    """Collective, anew in each generation: relays serve other sources then. Mates map the blocks that a relay's proxy moves."""
    gpu, tag = request.gpu, "AllToAll: memory of relays"
    attempts = Attempts()

    def allocate() -> Any:
        nbytes = max(1, exchange.relay_bytes(control.rank))
        return kernels.SharedMemory(gpu, nbytes, f"the relayed rows of an AllToAll on rank {control.rank}")

    own: Any = attempts.run(allocate)
    with contextlib.ExitStack() as held:
        fds = attempts.run(lambda: [own.descriptor(), exchange.host.descriptor()])
        held.callback(close_all, fds or [])
        mine = {"error": attempts.error, "area": own and own.nbytes, "blocks": exchange.host.blocks_nbytes}
        answers = agree(control, tag, mine, request.patience)

        def lay() -> None:
            received = control.share_fds(fds or [], tag)
            for of_peer in received.values():
                held.callback(close_all, of_peer)
            areas, blocks = {control.rank: own}, {}
            for rank in peers.mapped:
                (area, block), theirs = received[rank], answers[rank]
                assert theirs is not None
                areas[rank] = kernels.SharedMemory.from_descriptor(gpu, area, theirs["area"])
                if theirs["blocks"]:
                    blocks[rank] = kernels.SharedMemory.from_descriptor(gpu, block, theirs["blocks"])
                else:
                    blocks[rank] = kernels.SharedMemory.from_host(gpu, block, exchange.host)
            exchange.lay_relays(areas, blocks)

        attempts.run(lay)
    agree(control, "AllToAll: relays", {"error": attempts.error}, request.patience)


def _where_blocks_are(symmetric: Symmetric | None) -> list[Any]:
    """Returns the addresses of blocks that are put, for the exchange."""
    if symmetric is None:
        return [0, 0, []]
    segment = symmetric.segment
    return [symmetric.blocks, segment.address + segment.nbytes - symmetric.blocks, segment.pes]


def _map_heaps(
    control: ControlPlane, request: Request, peers: Peers, kernels: Any, attempts: Attempts
) -> tuple[Heaps, dict[tuple[int, int], str], int]:
    """Collective. Also which ranks of a node do not reach each other, and why; and from how many tokens on steps are large,
    which is one number for all ranks, whatever their GPUs and num_sms are."""
    config, timeout, gpu = request.config, request.patience, request.gpu
    assert gpu is not None
    own = attempts.run(lambda: _allocate(config, kernels, gpu, f"the blocks of an AllToAll on rank {control.rank}"))
    described = attempts.run(lambda: describe(own))  # type: ignore[arg-type]
    many = attempts.run(lambda: request.settings.large_tokens or kernels.large_tokens(config, gpu, request.num_sms))
    with contextlib.ExitStack() as held:
        fds = attempts.run(lambda: [own.descriptor()] if own.has_descriptor else [])  # type: ignore[union-attr]
        held.callback(close_all, fds or [])
        mine = {"error": attempts.error, "memory": described, "large_tokens": many}
        answers = agree(control, "AllToAll: memory", mine, timeout)
        if config.node_ranks and any(answer["memory"]["ipc"] is not None for answer in answers if answer is not None):
            raise NoRelays("dedup='node' needs a driver that hands over GPU memory as file descriptors: use dedup='rank'")
        large_tokens = max(answer["large_tokens"] for answer in answers if answer is not None)
        descriptions = {rank: answers[rank]["memory"] for rank in peers.mapped}  # type: ignore[index]
        opened = attempts.run(lambda: _open_all(control, kernels, fds or [], gpu, descriptions))
    # The rank is text: JSON has no other keys.
    refused = {} if opened is None else {str(rank): why for rank, why in opened.refused.items()}
    answers = agree(control, "AllToAll: mappings", {"error": attempts.error, "refused": refused}, timeout)
    assert opened is not None
    apart = {(a, int(b)): why for a, answer in enumerate(answers) if answer is not None for b, why in answer["refused"].items()}
    _check_apart(request, apart)
    return Heaps(own, opened.heaps), apart, large_tokens


def _allocate(config: _core.Config, kernels: Any, gpu: int, what: str) -> _cuda.SharedMemory:
    memory = kernels.SharedMemory(gpu, config.mapped_bytes, what)
    with torch.cuda.device(gpu):  # the GPU need not be the current one; only it can write there
        kernels.leave_blank(config, memory)
    return memory


def describe(memory: _cuda.SharedMemory) -> dict[str, Any]:
    """Describes the memory to peers that map it. The descriptor, if there is one, goes another way."""
    return {"nbytes": memory.nbytes, "ipc": None if memory.has_descriptor else memory.ipc_handle().hex()}


def _open_all(control: ControlPlane, kernels: Any, fds: list[int], gpu: int, descriptions: dict[int, dict[str, Any]]) -> Opened:
    received = control.share_fds(fds, "AllToAll: memory")
    opened = Opened()
    with contextlib.ExitStack() as held:
        for of_peer in received.values():
            held.callback(close_all, of_peer)
        for rank, description in descriptions.items():
            opened.open(gpu, rank, description, received[rank], kernels)
    return opened


def open_heap(gpu: int, description: dict[str, Any], fds: Sequence[int], kernels: Any = None) -> _cuda.SharedMemory:
    heap = (kernels or cuda_module()).SharedMemory
    if description["ipc"] is not None:
        return heap.from_ipc(gpu, bytes.fromhex(description["ipc"]), description["nbytes"])
    return heap.from_descriptor(gpu, fds[0], description["nbytes"])


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _check_apart(request: Request, apart: dict[tuple[int, int], str]) -> None:
    """Raises, alike on all ranks, where ranks whose GPUs do not reach each other must share memory."""
    replicas = request.config.replicas
    for (a, b), why in sorted(apart.items()):
        text = f"the GPU of rank {a} cannot map the memory of rank {b}'s: {why}"
        if request.config.node_ranks:
            raise NoRelays(f"dedup='node' needs GPUs of a node that map each other's memory, and {text}. Use dedup='rank'")
        if request.transport == "mapped":
            raise Error(f"transport='mapped': {text}. transport='auto' lets the proxy carry between them")
        if a // replicas == b // replicas:
            raise Error(f"replicas={replicas} makes ranks {a} and {b} hold the same tokens, and {text}")
