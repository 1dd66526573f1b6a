"""Measures the calling thread's time in Python for a CUDA dispatch + combine, up to the launches: no GPU is needed.

    python bench/host.py [--profile]

Tensors are on the CPU, and the launches do nothing, so what is left is the library's own: checks, allocations, handles. Rows are
short: torch's allocator on a GPU hands out what it has, but on the CPU large tensors are mapped anew.
Microseconds per call, the best of several rounds; also with `out=`, and how many tensors a pair allocates. And in a shape of
DeepEP's low latency mode: our calls, `deep_ep.Buffer`'s over them, and both in a program that has set a default device, where every
function of torch takes longer.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import pstats
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

if __name__ == "__main__":
    import checkout  # noqa: F401

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pplx_comm as pc
from pplx_comm.compat.deep_ep import Buffer
from pplx_comm.device import cuda
from pplx_comm.device.steps import Steps
from pplx_comm.gpus import built
from pplx_comm.torch_ops.graph import Graph


class NoLaunches:
    """Stands in for _cuda.Exchange."""

    generation = 1
    teller = None

    def dispatch(self, *arguments: Any) -> int:
        return 1

    def combine(self, *arguments: Any) -> None: ...

    def raise_trouble(self) -> None: ...

    def ended(self, seconds: float) -> bool:
        return True


@contextlib.contextmanager
def without_launches(a2a: pc.AllToAll, core: Any) -> Iterator[None]:
    """Gives a CPU AllToAll the host path of a CUDA one."""
    real = a2a._steps, a2a._graph, cuda.raw_stream
    given = a2a._steps.session
    wiring = replace(given.wiring, exchange=core, kernels=built(), carrier=None)
    session = replace(given, wiring=wiring, request=replace(given.request, hooks=False))
    a2a._steps = Steps(session, cuda.Cuda(session))
    a2a._graph = Graph(a2a._steps)
    setattr(cuda, "raw_stream", lambda device: 0)  # noqa: B010
    try:
        yield
    finally:
        a2a._steps, a2a._graph = real[:2]
        setattr(cuda, "raw_stream", real[2])  # noqa: B010


class Counted(TorchDispatchMode):
    """Counts the tensors that torch allocates; views are none."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "empty" in function.name()
        return function(*args, **(kwargs or {}))


def allocations(call: Callable[[], object]) -> int:
    with Counted() as counted:
        call()
    return counted.count


def compare_with_deep_ep() -> None:
    """Prints what deep_ep.Buffer adds to a pair of calls."""
    tokens, hidden, experts = 8, 128, 32
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    buffer = Buffer(torch.distributed.new_group([0]), low_latency_mode=True)
    x, ids = torch.zeros(tokens, hidden, dtype=torch.bfloat16), torch.zeros(tokens, 8, dtype=torch.int64)
    weights, out = torch.zeros(tokens, 8), torch.zeros(experts, tokens, hidden, dtype=torch.bfloat16)
    buffer.low_latency_dispatch(x, ids, tokens, experts)
    [lane] = buffer._pool._lanes.values()
    lane.steps.popleft().end()

    def ours() -> float:
        d = lane.a2a.dispatch(x, ids)
        _ = d.x, d.scale, d.counts
        between = time.perf_counter()
        lane.a2a.combine(out, d, weights=weights)
        return between

    def theirs() -> float:
        received = buffer.low_latency_dispatch(x, ids, tokens, experts)  # until the combine, as a caller keeps it
        between = time.perf_counter()
        buffer.low_latency_combine(out, ids, weights, received[2])
        return between

    with without_launches(lane.a2a, NoLaunches()), torch.no_grad():
        for device in (None, "cpu"):
            torch.set_default_device(device)
            for name, pair in (("pplx_comm", ours), ("deep_ep", theirs)):
                best = measure(pair)
                where = "" if device is None else ", with a default device"
                print(f"{name}: dispatch {best[0]:.1f} us, combine {best[1]:.1f} us, together {sum(best):.1f} us{where}")
    torch.set_default_device(None)
    torch.distributed.destroy_process_group()


def measure(pair: Callable[[], float]) -> list[float]:
    """Microseconds of both calls; `pair` returns the time between them."""
    best = [float("inf")] * 2
    for _ in range(40):
        dispatch = combine = 0.0
        before = time.perf_counter()
        for _ in range(500):
            between = pair()
            after = time.perf_counter()
            dispatch, combine, before = dispatch + between - before, combine + after - between, after
        best = [min(best[0], dispatch / 500 * 1e6), min(best[1], combine / 500 * 1e6)]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    comm = pc.Communicator.from_env()
    a2a = pc.AllToAll(
        comm, num_experts=32, top_k=8, hidden=128, max_tokens_per_rank=128, wire="fp8", layout=pc.Ragged(align=8), device="cpu"
    )
    x, ids = torch.zeros(128, 128, dtype=torch.bfloat16), torch.zeros(128, 8, dtype=torch.int64)
    weights = torch.zeros(128, 8)
    out = torch.zeros(a2a._steps.session.config.max_rows, 128, dtype=torch.bfloat16)

    y = torch.zeros(128, 128, dtype=torch.bfloat16)

    def pairs(n: int) -> None:
        for _ in range(n):
            a2a.combine(out, a2a.dispatch(x, ids, weights))

    def pair(into: torch.Tensor | None) -> float:
        d = a2a.dispatch(x, ids, weights)
        between = time.perf_counter()
        a2a.combine(out, d, out=into)
        return between

    compare_with_deep_ep()
    with without_launches(a2a, NoLaunches()), torch.no_grad():
        pairs(100)
        if arguments.profile:
            profile = cProfile.Profile()
            profile.runcall(pairs, 2000)
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)
        for name, into in (("combine", None), ("combine with out=", y)):
            best = measure(functools.partial(pair, into))
            allocated = allocations(lambda: a2a.dispatch(x, ids, weights))
            d = a2a.dispatch(x, ids, weights)
            allocated += allocations(functools.partial(a2a.combine, out, d, out=into))
            print(f"dispatch {best[0]:.1f} us, {name} {best[1]:.1f} us, together {sum(best):.1f} us; {allocated} allocations")


if __name__ == "__main__":
    main()
