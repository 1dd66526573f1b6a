"""One rank of a benchmark of GPUs without one: bench_on_cpu.py PROGRAM PLANT and the program's arguments.

The device runs what it would capture, over an AllToAll on the CPU. What is measured means nothing. That every step is taken, what is
checked, and what is written, does. PLANT is an error on rank 1, or none: see PLANTS.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from bench.gpu import measure as gpu
from bench.gpu import peers
from bench.harness.rank import leave
from pplx_comm import AllToAll

RIGHT_ONES = 20
"""Steps before the planted error, where it comes late."""


class Cpu:
    device = torch.device("cpu")
    name = "no GPU"
    multiprocessors = 132

    def capture(self, steps: Any) -> Any:
        return steps

    def time(self, run: Any) -> float:
        begun = time.perf_counter()
        run()
        return (time.perf_counter() - begun) * 1e6

    def synchronize(self) -> None: ...

    def begins(self, a2a: AllToAll, steps: int) -> list[int]:
        """As of a dispatch and a combine, one after the other."""
        dispatch, combine = took(*opened[id(a2a)])
        return [1000 + step * (dispatch + combine) + after for step in range(steps) for after in (0, dispatch)]

    def large_launches(self, a2a: AllToAll) -> int:
        return int(opened[id(a2a)][0]) * 7

    def ping(self, rounds: int) -> list[float]:
        return [2.0] * rounds

    @contextlib.contextmanager
    def using(self, address: int, nbytes: int) -> Iterator[Any]:
        yield lambda: None

    @contextlib.contextmanager
    def sharing(self, world: Any, nbytes: int, what: str) -> Iterator[list[int]]:
        assert len(set(world.gather(nbytes, "test"))) == 1
        memory = world.share(nbytes, what)
        yield [memory.address(rank) for rank in range(world.size)]
        world.barrier()

    def composite(self, kind: str, work: Any, geometry: Any) -> Any:
        return lambda num_sms: None

    # A stream is a name. What is launched on it runs at once.

    def streams(self, n: int, *, first: bool) -> list[str]:
        return [f"{'first' if first else 'last'} {i}" for i in range(n)]

    def on(self, stream: str) -> Any:
        return contextlib.nullcontext()

    def delay(self, microseconds: float) -> None:
        assert 0 < microseconds < 1000

    def gate(self, microseconds: float) -> Any:
        return SimpleNamespace(hold=lambda stream: None)

    def stopwatch(self, stream: str) -> Any:
        begun, ended = time.perf_counter(), list[float]()
        return SimpleNamespace(stop=lambda: ended.append(time.perf_counter()), microseconds=lambda: (ended[0] - begun) * 1e6)

    def leaving(self, num_sms: int) -> Any:
        return contextlib.nullcontext()


def took(by_large: bool, tokens: int, num_sms: int | None) -> tuple[int, int]:
    """Nanoseconds of a dispatch and of a combine. crossover.py: large ones both take 4 and 3 us whatever there is to carry; else
    a dispatch takes 1 us a token, and a combine half, on 8 multiprocessors twice as long."""
    if program != "crossover":
        return 3000, 5000
    scale = tokens * (2 if num_sms == 8 else 1)
    return (4000, 3000) if by_large else (1000 * scale, 500 * scale)


opened: dict[int, tuple[bool, int, int | None]] = {}
"""AllToAlls: whether they are large; tokens; multiprocessors."""
right_open = gpu.Size.open


def noted(size: gpu.Size, comm: Any, transport: Any, num_sms: int | None, *rest: Any) -> AllToAll:
    """Mapped memory takes the place of kernels that post."""
    if transport.transport == "nvshmem":
        transport = replace(transport, transport="mapped", node_size=None)
    a2a = right_open(size, comm, transport, num_sms, *rest)
    by_large = program == "crossover" and plant != "deaf" and int(os.environ[module.VARIABLE]) <= a2a.max_tokens_per_rank
    opened[id(a2a)] = by_large, a2a.max_tokens_per_rank, num_sms
    return a2a


steps = 0


def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
    """A combine, or its receive half."""

    def combine(a2a: AllToAll, *arguments: Any, **options: Any) -> Any:
        global steps
        y = right(a2a, *arguments, **options)
        steps += 1
        if a2a._comm.rank == 1 and (plant == "combine" or steps > RIGHT_ONES):
            y[0, 0] += 1
        return y

    return combine


def wrong_dispatch(right: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(a2a: AllToAll, d: Any) -> Any:
        right(a2a, d)
        if a2a._comm.rank == 1:
            d.src_token.add_(1)
        return d

    return dispatch


PLANTS: dict[str, list[tuple[type, str, Any]]] = {
    "none": [],
    "pairs": [(peers.GatherAndReduce, "in_pairs", lambda right: True)],
    "deaf": [],  # an AllToAll that does not heed crossover.py's setting
    "combine": [(AllToAll, "combine", wrong), (AllToAll, "combine_recv", wrong)],
    "later": [(AllToAll, "combine_recv", wrong)],
    "dispatch": [(AllToAll, "dispatch_recv", wrong_dispatch)],
}


if __name__ == "__main__":
    program, plant = sys.argv.pop(1), sys.argv.pop(1)
    module = importlib.import_module(f"bench.{program}")
    setattr(gpu, "opened", lambda rank: Cpu())  # noqa: B010
    setattr(gpu.Size, "open", noted)  # noqa: B010
    for owner, name, around in PLANTS[plant]:
        setattr(owner, name, around(getattr(owner, name)))
    leave(module.main())
