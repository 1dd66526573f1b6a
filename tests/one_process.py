"""Several ranks in one process, each a thread with a Communicator of its own: what a fabric between GPUs of one process needs.

Its blocks lie in GPU memory, and its NIC is the GPU's copy engine (src/cuda/copy_fabric.h).

That NIC's driver is CUDA, whose locks all threads of the process share: a thread that waits for kernels inside of CUDA would keep the
proxies from the copies that those kernels wait for. What does so: allocations, a copy to or from memory that is not pinned, and a
launch behind some hundreds of others. So ranks reserve what they will allocate, wait by looking (gpu_cases.settle), and do not run far ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

import pplx_comm as pc
from pplx_comm import _carriers, _gpu, _setup
from pplx_comm._rendezvous import Gathered

LIMIT = 60.0
PROVIDER = "copy"


class Rank:
    """What crew.Member is to a process."""

    def __init__(self, rank: int, world_size: int, comm: pc.Communicator) -> None:
        self.rank, self.world_size, self.comm = rank, world_size, comm
        self.kept: dict[str, Any] = {}


class _Board:
    """An allgather between threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=LIMIT)
        self._texts = [""] * size

    def gather(self, rank: int, text: str) -> list[str]:
        self._texts[rank] = text
        self._barrier.wait()
        texts = list(self._texts)
        self._barrier.wait()
        return texts


def copying() -> None:
    """From now on provider "copy" is that fabric, and takes blocks in GPU memory."""
    if _carriers.open_fabric.__module__ == __name__:
        return
    real_open, real_choice = _carriers.open_fabric, _setup._blocks_on_gpu

    def open_fabric(provider: str | None = None, **options: Any) -> Any:
        if provider != PROVIDER:
            return real_open(provider, **options)
        return _gpu.cuda_module().CopyFabric(torch.cuda.current_device())

    def blocks_on_gpu(request: Any, *places: Any) -> bool:
        return request.placement == "device" if request.provider == PROVIDER else real_choice(request, *places)

    def nothing_left(carrier: Any, rank: int) -> None:
        """In /dev/shm, by a rank that died: of this process, so the threads died with it."""

    setattr(_carriers.ProxyCarrier, "peer_died", nothing_left)  # noqa: B010
    setattr(_carriers, "open_fabric", open_fabric)  # noqa: B010
    setattr(_setup, "_blocks_on_gpu", blocks_on_gpu)  # noqa: B010


def _reserve() -> None:
    """What PyTorch will allocate, so that it asks CUDA for none later."""
    small = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(64)]
    large = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    del small, large


def run(world_size: int, call: Callable[[Rank], Any]) -> list[Any]:
    """Calls it on all ranks at once. What one of them raises first is raised here."""
    board = _Board(world_size)
    results: list[Any] = [None] * world_size
    problems: list[BaseException] = []

    def member(rank: int) -> None:
        try:
            torch.cuda.set_device(rank % torch.cuda.device_count())
            _reserve()
            board.gather(rank, "")
            gathered = Gathered(rank, world_size, lambda text: board.gather(rank, text))
            with pc.Communicator(gathered, timeout=30) as comm:
                results[rank] = call(Rank(rank, world_size, comm))
        except BaseException as problem:
            problems.append(problem)

    torch.set_num_threads(1)  # its own pool is one process's, and is not for several to resize
    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for problem in problems:
        raise problem
    return results
