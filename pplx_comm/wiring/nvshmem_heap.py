"""NVSHMEM's symmetric heap: what it needs to take in an AllToAll, and what is said where it cannot.

One of CUDA's virtual memory, the default, grows. Where that fails on any PE, NVSHMEM 3.4.5 unmaps all of it, and its own barrier,
whose words lie there, then ends the process. So ranks look before they ask. Others (NVSHMEM_DISABLE_CUDA_VMM) have the size that
NVSHMEM_SYMMETRIC_SIZE gave them, and nothing happens to what is in them.
"""

from __future__ import annotations

import re
from typing import Any

from pplx_comm.errors import Error
from pplx_comm.settings import foreign
from pplx_comm.wiring.compare import name_ranks

GRANULE = 2 << 20
OWN_BYTES = 64 << 20
"""NVSHMEM's own share of its heap: more than its teams were seen to need."""
_GROWTH = 512 << 20
"""NVSHMEM_CUMEM_GRANULARITY where the environment does not set it: a heap grows in multiples of it."""
_GROWTH_AT_MOST = 2 << 30
_SPARE = 64 << 20
"""Reserve for page tables, and for others on the GPU, between the question and the growth."""


def too_small(nbytes: int) -> str:
    size = foreign("NVSHMEM_SYMMETRIC_SIZE")
    return (
        f"transport='nvshmem': NVSHMEM's heap (NVSHMEM_SYMMETRIC_SIZE={size or 'its default'}) has no room for {nbytes} bytes "
        f"of this AllToAll: set NVSHMEM_SYMMETRIC_SIZE to at least {nbytes + OWN_BYTES} more than it is, before NVSHMEM starts"
    )


def failed_to_grow(nbytes: int) -> str:
    return (
        f"transport='nvshmem': NVSHMEM's heap could not grow by {growth(nbytes)} bytes for {nbytes} of this AllToAll; "
        "NVSHMEM_DEBUG=INFO makes it say why"
    )


def lost_heap(why: str) -> str:
    return (
        "transport='nvshmem': an allocation has failed, after which NVSHMEM has unmapped its whole heap, or ranks differ in what "
        "theirs holds. This process cannot use NVSHMEM any more, nor AllToAlls that it has over it: start the ranks again. "
        f"What failed: {why}"
    )


def growth(nbytes: int) -> int:
    """Returns how much a full heap of virtual memory grows."""
    granule = min(max(_bytes_of(foreign("NVSHMEM_CUMEM_GRANULARITY")) or _GROWTH, GRANULE), _GROWTH_AT_MOST)
    return -(-nbytes // granule) * granule


def _bytes_of(text: str) -> int | None:
    """As NVSHMEM reads a size: a number, and one letter."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?)b?\s*", text, re.IGNORECASE)
    return int(float(found[1]) * 1024 ** " kmgt".index(found[2].lower() or " ")) if found else None


def check_growth(rooms: dict[int, dict[str, Any]], nbytes: int, made: int) -> None:
    """Raises, alike on all ranks, where some heap could not grow: NVSHMEM would unmap all that is in it. It does not tell whether
    what is asked for finds room without, so each must be able to. rooms: what `room()` says, by rank."""
    more = growth(nbytes)
    at_most = min(room["at_most"] for room in rooms.values())
    if OWN_BYTES + made + more >= at_most:
        raise Error(
            f"transport='nvshmem': NVSHMEM's heap may come to {at_most} bytes (NVSHMEM_MAX_MEMORY_PER_GPU), AllToAlls have {made} "
            f"of them, and this one needs {more} more: set NVSHMEM_MAX_MEMORY_PER_GPU higher before NVSHMEM starts"
        )
    on_gpu: dict[str, list[int]] = {}
    for rank, room in rooms.items():
        on_gpu.setdefault(room["gpu"], []).append(rank)
    for ranks in on_gpu.values():
        free, needed = min(rooms[rank]["free"] for rank in ranks), len(ranks) * more + _SPARE
        if free < needed:
            raise Error(
                f"transport='nvshmem': NVSHMEM's heap may have to grow by {more} bytes on each rank for {nbytes} of this AllToAll. "
                f"That takes {needed} bytes of the GPU of {name_ranks(ranks)}, and {free} are free: free some (torch's cache: "
                "torch.cuda.empty_cache(); a serving engine's share), or set NVSHMEM_CUMEM_GRANULARITY, in whose multiples it "
                f"grows ({_GROWTH} if unset), before NVSHMEM starts"
            )
