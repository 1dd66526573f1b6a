"""A fabric between the GPUs of one process, whose ranks are threads: blocks lie in GPU memory, and the NIC is the GPU's copy engine
(bench/native/cuda/copy_fabric.h).

That NIC's driver is CUDA, whose locks all threads of the process share: a thread that waits for kernels inside of CUDA would keep the
proxies from the copies that those kernels wait for. What does so: allocations, a copy to or from memory that is not pinned, and a
launch behind some hundreds of others. So ranks reserve what they will allocate, wait by looking (gpu_cases.settle), and do not run far ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import Member, threads

from bench.gpu.device import instruments
from pplx_comm.wiring import carriers, gpu_memory

PROVIDER = "copy"


def copying() -> None:
    """From now on provider "copy" is that fabric, and takes blocks in GPU memory."""
    if carriers.open_fabric.__module__ == __name__:
        return
    real_open, real_choice = carriers.open_fabric, gpu_memory.blocks_on_gpu

    def open_fabric(provider: str | None = None, **options: Any) -> Any:
        if provider != PROVIDER:
            return real_open(provider, **options)
        return instruments().CopyFabric(torch.cuda.current_device())

    def blocks_on_gpu(request: Any, *places: Any) -> bool:
        return request.placement == "device" if request.provider == PROVIDER else real_choice(request, *places)

    def nothing_left(carrier: Any, rank: int) -> None:
        """In /dev/shm, by a rank that died: of this process, so the threads died with it."""

    setattr(carriers.ProxyCarrier, "peer_died", nothing_left)  # noqa: B010
    setattr(carriers, "open_fabric", open_fabric)  # noqa: B010
    setattr(gpu_memory, "blocks_on_gpu", blocks_on_gpu)  # noqa: B010


def reserve() -> None:
    """Allocates all that PyTorch will need, so that it asks CUDA for none later."""
    small = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(64)]
    large = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    del small, large


def run(world_size: int, call: Callable[[Member], Any]) -> list[Any]:
    def prepare(rank: int) -> None:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        reserve()

    torch.set_num_threads(1)  # its own pool is one process's, and is not for several to resize
    return threads.run(world_size, call, prepare)
