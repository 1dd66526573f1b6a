"""The ranks of a benchmark: a barrier that costs next to nothing, a clock, shared memory, and fresh Communicators."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pplx_comm._core as _core
from bench import _instruments
from pplx_comm.communicator import Communicator
from pplx_comm.control import memfd
from pplx_comm.control.launch import detect
from pplx_comm.control.rendezvous import Alone, Gathered
from pplx_comm.errors import Error
from pplx_comm.settings import Settings, read
from pplx_comm.wiring.memory import threads_of_a_rank

T = TypeVar("T")
Span = tuple[int, int]
"""When a rank began and ended, nanoseconds of CLOCK_MONOTONIC, which the ranks of a host share."""


class Limits(Protocol):
    """Options of a benchmark that its ranks need."""

    @property
    def timeout(self) -> float:
        """Seconds after which a silent rank fails the run."""
        ...

    @property
    def threads(self) -> int | None:
        """Per rank. None: its share of the cores."""
        ...


class Off(Exception):
    """Something is not available here, and every rank knows it."""


@dataclass(frozen=True)
class NodeMemory:
    """This rank's memory, and that of the other ranks of its node as this rank sees it."""

    rank: int
    own: _core.Mapping
    peers: dict[int, _core.Mapping]

    def address(self, rank: int) -> int:
        return int((self.own if rank == self.rank else self.peers[rank]).address)


class World:
    def __init__(self, options: Limits, mpi: Any) -> None:
        self.mpi = mpi
        """mpi4py's MPI, when mpirun started this process."""
        self.comm = Communicator.from_mpi(timeout=options.timeout) if mpi else Communicator.from_env(timeout=options.timeout)
        self.rank, self.size = self.comm.rank, self.comm.world_size
        self.together = self.comm.node_size == self.size
        """All ranks on one host: clocks can be compared, memory mapped."""
        self.patience = options.timeout
        if options.threads is not None:
            os.environ["PPLX_COMM_THREADS"] = str(options.threads)
        self.threads = threads_of_a_rank(self.comm.node_size, read(Settings))
        self._barrier: _instruments.SpinBarrier | None = None
        if self.together:
            self._lines = self.share(64 * self.size, "the benchmark's barrier")
            self._barrier = _instruments.SpinBarrier(self._lines.address(0), self.rank, self.size)

    def barrier(self, patient: bool = True) -> None:
        """patient: waiting ranks leave the cores to those still at work. Otherwise all leave within microseconds of each other."""
        if self._barrier is None:
            self.comm.barrier(self.patience)
            return
        self._barrier.arrive()
        given_up = time.monotonic() + self.patience
        while not self._barrier.wait(0.1, patient):
            self.comm.control.raise_if_failed()
            if time.monotonic() > given_up:
                raise Error(f"rank {self.rank} waited {self.patience:g} s for the others: one of them hangs")

    def timed(self, call: Callable[[], T]) -> tuple[T, Span]:
        """All ranks enter together. None goes on to other work, on a core that another may need, before all are out."""
        self.barrier()
        self.barrier(patient=False)
        begun = time.perf_counter_ns()
        result = call()
        span = begun, time.perf_counter_ns()
        self.barrier()
        return result, span

    def gather(self, value: Any, tag: str, patience: float | None = None) -> list[Any]:
        """The value of every rank, by rank. JSON must be able to carry it."""
        answers = self.comm.control.all_gather({"value": value}, f"bench: {tag}", self.patience if patience is None else patience)
        return [answer["value"] if answer is not None else None for answer in answers]

    def all_or_none(self, attempt: Callable[[], T], tag: str, patience: float | None = None) -> T:
        """The result; or Off on every rank if the attempt failed on any. It must not wait longer than `patience` for ranks where
        it failed."""
        result: list[T] = []
        failed = None
        begun = time.monotonic()
        try:
            result.append(attempt())
        except Exception as problem:  # whatever one rank lacks, the others must hear of it
            failed = [time.monotonic() - begun, f"{problem}" or type(problem).__name__]
        failures = [found for found in self.gather(failed, tag, patience) if found is not None]
        if failures:  # a rank that failed later may have waited for one that failed first
            raise Off(min(failures)[1])
        return result[0]

    def share(self, nbytes: int, what: str) -> NodeMemory:
        fd = memfd.allocate(nbytes, what)
        try:
            received = self.comm.control.share_fds([fd], f"bench: {what}")
            try:
                peers = {rank: _core.Mapping(fds[0], nbytes) for rank, fds in received.items()}
            finally:
                for fds in received.values():
                    for other in fds:
                        os.close(other)
            return NodeMemory(self.rank, _core.Mapping(fd, nbytes), peers)
        finally:
            os.close(fd)

    def fresh(self) -> Communicator:
        """A Communicator of the same ranks. Its close() ends whatever threads its AllToAlls started."""
        if self.size == 1:
            return Communicator(Alone(), timeout=self.patience)
        gathered = Gathered(self.rank, self.size, lambda text: self.gather(text, "another Communicator"))
        return Communicator(gathered, timeout=self.patience)

    def close(self) -> None:
        self.comm.close()


def started_by_mpi() -> Any:
    """mpi4py's MPI if an MPI launcher started this process and mpi4py can join it; else None."""
    if not detect(os.environ).source.startswith(("OMPI", "PMI")):
        return None
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return MPI
