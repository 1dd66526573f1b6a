"""Where the blocks of remote peers lie: in GPU memory that the NIC reads and writes, or in pinned host memory that kernels do."""

from __future__ import annotations

from dataclasses import dataclass

from pplx_comm.errors import Error
from pplx_comm.gpus import cuda_module
from pplx_comm.log import log
from pplx_comm.wiring.libfabric import Locality, refuses_device_memory
from pplx_comm.wiring.request import Request

OWNER = 100
"""CUDA's GPUDirect write ordering "owner": the GPU that owns the memory sees a NIC's writes in their order."""


@dataclass(frozen=True)
class Placement:
    where: str
    """device or host."""
    why: str


PLACEMENTS = ("auto", "host", "device")


def placement(write_ordering: int | None, provider: str, refusal: str | None) -> Placement:
    """write_ordering: of the GPU, as CUDA says it (0, 100, 200); None: no NIC can reach its memory.
    refusal: why no fabric over the provider could be opened for GPU memory; None: one was.
    """
    if write_ordering is None:
        return Placement("host", "this GPU's memory is closed to NICs (no GPUDirect RDMA)")
    if refusal is not None:
        return Placement("host", refusal)
    if write_ordering < OWNER:
        # The proxy raises a word in host memory after a write has landed; the GPU might see the rows later than that word.
        return Placement("host", "the order in which a NIC's writes become visible to this GPU is not certain")
    return Placement("device", f"{provider} registers this GPU's memory and needs no CUDA call to move it")


def blocks_on_gpu(request: Request, localities: list[Locality], locality: int) -> bool:
    """True if the blocks of remote peers lie in GPU memory. Opens what the proxy will open."""
    assert request.gpu is not None
    if request.placement == "host":
        return False
    ordering = cuda_module().write_ordering(localities[locality].gpu)
    refusal = refuses_device_memory(request.provider, list(request.nics) or None, localities, locality)
    chosen = placement(ordering, request.provider or "the provider", refusal)
    if request.placement == "device" and chosen.where != "device":
        raise Error(f"placement='device': {chosen.why}; placement='auto' would take pinned host memory")
    log.debug("blocks of remote peers: %s, %s", chosen.where, chosen.why)
    return chosen.where == "device"
