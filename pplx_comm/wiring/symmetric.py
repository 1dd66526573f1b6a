"""Memory of a carrier that kernels drive: blocks that are put, and heaps that stores reach.

Peers of other nodes whose symmetric memory this GPU's stores reach are near. Where there are any, the heaps of all ranks lie
in symmetric memory, in front of the blocks for other peers. So near peers, and those of the node, are mapped alike: the same words;
and where no rank puts, the same kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import pplx_comm._core as _core
from pplx_comm.control.plane import ControlPlane
from pplx_comm.gpus import cuda_module
from pplx_comm.wiring import nvshmem
from pplx_comm.wiring.compare import Attempts, agree
from pplx_comm.wiring.peers import Peers
from pplx_comm.wiring.request import Request


@dataclass
class Heaps:
    """Memory that peers write into: this rank's, and that of ranks whose memory it maps."""

    own: Any = None
    of_peers: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Symmetric:
    """Symmetric memory of one AllToAll. It exists where some rank has remote peers."""

    segment: nvshmem.Segment
    peers: Peers
    puts: bool  # some rank has peers that are put to
    kernels: Any  # the module of the exchange
    blocks: int  # where blocks for them begin, and come; 0: nowhere


def lay_symmetric_memory(
    control: ControlPlane, request: Request, peers: Peers, remote: dict[int, set[int]], kernels: Any, heaps: Heaps
) -> Symmetric:
    """Collective. Heaps in symmetric memory take the place of those that are there. Near peers are taken out of `remote`, each
    rank's."""
    config, timeout, gpu, given = request.config, request.patience, request.gpu, request.symmetric_memory
    assert gpu is not None
    most = config.mapped_bytes + config.heap_bytes
    reach = nvshmem.library.start(control, gpu, most, given, timeout, peers.mapped, request.settings.near, nvshmem.queue_of(config))
    for rank in remote:
        remote[rank] -= reach.near_of(rank)
    peers = peers.with_remote(remote[control.rank])
    config.remote_peers, config.remote_slots = len(peers.remote), max(map(len, remote.values()))
    puts = config.remote_slots > 0
    before = config.mapped_bytes if reach.any_near else 0
    if reach.any_near:
        heaps.own, heaps.of_peers = None, {}  # given back first
    kernels = kernels if puts else cuda_module()  # these know no carrier, and are leaner
    nbytes = before + (config.heap_bytes if puts else 0)
    segment = nvshmem.library.segment(control, gpu, nbytes, given, reach, timeout)
    if reach.any_near:
        attempts = Attempts()
        heaps.own = attempts.run(lambda: _fresh_heap(config, kernels, gpu, segment.address))
        heaps.of_peers = {rank: kernels.SharedMemory.lent(gpu, segment.near[rank], config.mapped_bytes) for rank in peers.mapped}
        try:
            agree(control, "AllToAll: heaps", {"error": attempts.error}, timeout)
        except BaseException:
            segment.close(True)
            raise
    return Symmetric(segment, peers, puts, kernels, segment.address + before if puts else 0)


def _fresh_heap(config: _core.Config, kernels: Any, gpu: int, address: int) -> Any:
    """Returns a heap that no peer writes yet: all have given back what they had."""
    heap = kernels.SharedMemory.lent(gpu, address, config.mapped_bytes)
    with torch.cuda.device(gpu):
        kernels.clear(heap)
        kernels.leave_blank(config, heap)
    return heap
