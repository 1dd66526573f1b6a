"""The GPU of a rank, as the benchmark needs it: every call to CUDA is here, so that all the rest runs without one."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from bench.harness.world import World
from pplx_comm.errors import Error
from pplx_comm.gpus import cuda_module
from pplx_comm.wiring.gpu_memory import close_all, describe, open_heap

Replay = Callable[[], None]


def instruments() -> ModuleType:
    cuda_module()  # its absence is told first
    from bench import _instruments_cuda

    return _instruments_cuda


class Cuda:
    def __init__(self, local_rank: int) -> None:
        index = local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name()

    def capture(self, steps: Callable[[], None]) -> Replay:
        """A graph of everything that `steps` launches."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps()
        return graph.replay

    def time(self, run: Replay) -> float:
        """Microseconds between events before and after it."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1000

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def stamps(self, a2a: Any, steps: int) -> torch.Tensor:
        """int64 [steps, 2], nanoseconds: launches from now on note there when they begin."""
        stamps = torch.zeros(steps, 2, dtype=torch.int64, device=self.device)
        a2a._steps.device.core.stamp(stamps.data_ptr(), steps)
        return stamps

    def no_stamps(self, a2a: Any) -> None:
        a2a._steps.device.core.stamp(0, 0)

    def ping(self, rounds: int) -> list[float]:
        """Microseconds from the host to the GPU and back."""
        return [ns / 1000 for ns in instruments().ping(self.device.index, rounds)]

    @contextlib.contextmanager
    def using(self, address: int, nbytes: int) -> Iterator[Callable[[], None]]:
        """A call that reads this host memory into the GPU, and writes as much behind it."""
        runtime = torch.cuda.cudart()
        if runtime.cudaHostRegister(address, 2 * nbytes, 0) != runtime.cudaError.success:
            raise Error(f"the bare writes of the benchmark: CUDA cannot pin their {2 * nbytes} bytes")
        try:
            host = torch.frombuffer((ctypes.c_char * (2 * nbytes)).from_address(address), dtype=torch.uint8)
            there = torch.ones(nbytes, dtype=torch.uint8, device=self.device)

            def use() -> None:
                there.copy_(host[:nbytes])
                host[nbytes:].copy_(there)

            yield use
        finally:
            runtime.cudaHostUnregister(address)

    @contextlib.contextmanager
    def pushing(self, world: World, area_bytes: int, num_sms: int | None) -> Iterator[Callable[[list[int]], None]]:
        """A call that stores that many bytes, at most `area_bytes`, in memory of each rank's GPU. Collective, on one node."""
        own = cuda_module().SharedMemory(self.device.index, world.size * area_bytes, "the floor of the benchmark")
        descriptions = world.gather(describe(own), "memory of the floor")
        fds = [own.descriptor()] if own.has_descriptor else []
        received: dict[int, list[int]] = {}
        try:
            received = world.comm.control.share_fds(fds, "bench: memory of the floor")
            memory = {rank: open_heap(self.device.index, descriptions[rank], theirs) for rank, theirs in received.items()}
        finally:
            for some in (fds, *received.values()):
                close_all(some)
        addresses = [(own if rank == world.rank else memory[rank]).address for rank in range(world.size)]
        blocks = num_sms or torch.cuda.get_device_properties(self.device).multi_processor_count

        def push(bytes_to: list[int]) -> None:
            instruments().push(torch.cuda.current_stream().cuda_stream, world.rank, blocks, addresses, area_bytes, bytes_to)

        yield push
        torch.cuda.synchronize()
        world.barrier()  # peers have stored in it


def local_rank() -> int:
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMIX_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK", "PMI_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0
