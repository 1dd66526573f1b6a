"""The GPU of a rank, as the benchmark needs it: every call to CUDA is here, so that all the rest runs without one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from bench.gpu.composite import Geometry, Work
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
        self.multiprocessors = int(torch.cuda.get_device_properties(self.device).multi_processor_count)

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

    def begins(self, a2a: Any, steps: int) -> list[int]:
        """Nanoseconds: when the dispatch and the combine of each of the latest steps began."""
        return a2a._steps.device.core.begins(steps)

    def large_launches(self, a2a: Any) -> int:
        """Launches of large dispatches and combines."""
        stats = a2a.stats()
        return int(stats["large_dispatches"] + stats["large_combines"])

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
    def sharing(self, world: World, nbytes: int, what: str) -> Iterator[list[int]]:
        """As much memory on each rank's GPU: the addresses, by rank. Collective, on one node."""
        own = cuda_module().SharedMemory(self.device.index, nbytes, what)
        descriptions = world.gather(describe(own), what)
        fds = [own.descriptor()] if own.has_descriptor else []
        received: dict[int, list[int]] = {}
        try:
            received = world.comm.control.share_fds(fds, f"bench: {what}")
            memory = {rank: open_heap(self.device.index, descriptions[rank], theirs) for rank, theirs in received.items()}
        finally:
            for some in (fds, *received.values()):
                close_all(some)
        yield [(own if rank == world.rank else memory[rank]).address for rank in range(world.size)]
        self.synchronize()
        world.barrier()  # peers have stored in it

    def composite(self, kind: str, work: Work, geometry: Geometry) -> Callable[[int | None], None]:
        """A call that launches it on the given number of multiprocessors. `kind`: a phase, or the way of a schedule."""
        units, others = (torch.from_numpy(array.view("u1")).to(self.device) for array in (work.units, work.others))
        bare = instruments().Composite(
            units=units.data_ptr(), count=len(work.units), others=others.data_ptr(), most=work.others.shape[1],
            rows=[(row.bytes, row.part_bytes, row.source_bytes) for row in work.rows],
        )  # fmt: skip
        kept = units, others

        def launch(num_sms: int | None) -> None:
            assert kept
            if kind == "combine":
                bare.gather(self.stream(), self._blocks(num_sms), geometry.dtype)
            elif kind == "bulk":
                bare.bulk(self.stream(), self._blocks(num_sms))
            else:
                bare.spread(self.stream(), self._blocks(num_sms), geometry.fold if kind == "dispatch" else 1)

        return launch

    # ---- several streams ---------------------------------------------------------------------------------------------

    def streams(self, n: int, *, first: bool) -> list[torch.cuda.Stream]:
        """New ones; `first`: thread blocks of theirs get multiprocessors that become free before those of others."""
        return [torch.cuda.Stream(self.device, priority=-1 if first else 0) for _ in range(n)]

    def on(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def delay(self, microseconds: float) -> None:
        """On the current stream, by one thread."""
        torch.cuda._sleep(int(microseconds * self._cycles_of_microsecond))

    @functools.cached_property
    def _cycles_of_microsecond(self) -> float:
        cycles = 10_000_000
        took = [self.time(lambda: torch.cuda._sleep(cycles)) for _ in range(3)]
        return cycles / min(took)

    def gate(self, microseconds: float) -> Gate:
        """Opens so long after what is queued on the current stream."""
        self.delay(microseconds)
        return Gate()

    def stopwatch(self, stream: torch.cuda.Stream) -> Stopwatch:
        """Runs from now on."""
        return Stopwatch(stream)

    @contextlib.contextmanager
    def leaving(self, num_sms: int) -> Iterator[None]:
        """GEMMs that are launched meanwhile leave `num_sms` multiprocessors to others, where torch can tell them to."""
        tell = getattr(torch._C, "_set_sm_carveout_experimental", lambda n: None)
        torch.backends.cuda.preferred_blas_library("cublaslt")  # cublas cannot be told
        tell(num_sms or None)
        try:
            yield
        finally:
            tell(None)

    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def _blocks(self, num_sms: int | None) -> int:
        return min(num_sms or self.multiprocessors, self.multiprocessors)


class Gate:
    """Behind what is queued on the current stream."""

    def __init__(self) -> None:
        self._opened = torch.cuda.Event()
        self._opened.record()

    def hold(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._opened)


class Stopwatch:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin.record(stream)

    def stop(self) -> None:
        self._end.record(self._stream)

    def microseconds(self) -> float:
        """When all that it timed has ended."""
        return float(self._begin.elapsed_time(self._end)) * 1000


def local_rank() -> int:
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMIX_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK", "PMI_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0
