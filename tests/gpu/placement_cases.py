"""Cases of blocks in GPU memory, run in a process whose ranks are its threads."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import carried
import copies
import gpu_cases
import torch
from cases import Case
from rank_cases import open_all_to_all

import pplx_comm as pc

_moved = carried.moved


def _moved_in_a_thread(tensor: torch.Tensor | None, device: torch.device | str) -> torch.Tensor | None:
    if tensor is not None:
        gpu_cases.settle(tensor.device if tensor.is_cuda else device)  # the case's own threads are on GPU 0
    return _moved(tensor, device)


def _in_threads(world_size: int, function: Any, *args: Any) -> list[Any]:
    copies.copying()
    carried.moved = _moved_in_a_thread
    return copies.run(world_size, lambda me: function(me, *args))


def random_shapes(_: Any, cases: list[Case], chaos: str = "") -> None:
    if chaos:
        os.environ["PPLX_COMM_CHAOS"] = chaos
    try:
        for case in cases:
            _in_threads(case.world_size, gpu_cases.exchange, case)
    finally:
        os.environ.pop("PPLX_COMM_CHAOS", None)


def pinned_bytes(_: Any, case: Case) -> list[tuple[int, int]]:
    """Each rank's pinned host memory, without and with blocks there."""

    def of(me: Any) -> tuple[int, int]:
        with open_all_to_all(me, case, device=str(gpu_cases.gpu_of(me))) as a2a:
            return a2a._steps.device.core.host.pinned_bytes, a2a._steps.session.config.heap_bytes

    return _in_threads(case.world_size, of)


def soak(_: Any, case: Case, steps: int) -> list[int]:
    return _in_threads(case.world_size, gpu_cases.soak, case, steps, None, 8)


def one_row_steps(me: Any, case: Case, steps: int) -> int:
    """Steps of one row to the next rank, in a graph that is replayed: how many elements were not that step's.

    What was there before is another step's row, or poison where the row goes in the end. The last bytes of the row, which come
    last, are looked at first.
    """
    device = gpu_cases.gpu_of(me)
    per_replay = 10
    case = replace(case, top_k=1, max_tokens=1, num_experts=me.world_size, align=1, wire="native")
    with open_all_to_all(me, case, device=str(device), timeout=20.0) as a2a:
        to, source = (me.rank + 1) % me.world_size, (me.rank - 1) % me.world_size
        ids = torch.full((1, 1), to, device=device)
        step = torch.zeros((), dtype=torch.int64, device=device)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        x = torch.empty(1, case.hidden, dtype=a2a.dtype, device=device)

        def pair() -> None:
            step.add_(1)
            x.copy_(((step * 3 + me.rank) % 251).to(x.dtype).expand(1, case.hidden))
            d = a2a.dispatch(x, ids)
            expected = ((step * 3 + source) % 251).to(x.dtype)
            wrong.add_((d.x[0].flip(0) != expected).sum())
            y = a2a.combine(d.x + 1, d)
            wrong.add_((y.flip(1) != x + 1).sum())
            d.x.fill_(float("nan"))

        pair()
        gpu_cases.settle()
        me.comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
            for _ in range(per_replay):
                pair()
        me.comm.barrier()  # a capture allocates
        for replay in range(steps // per_replay):
            graph.replay()
            gpu_cases.settle()
            if replay % 500 == 499:
                a2a.check()
        a2a.check()
        me.comm.barrier()
        del graph
    return int(wrong)


def one_row_steps_on_gpu_memory(_: Any, case: Case, steps: int) -> list[int]:
    return _in_threads(case.world_size, one_row_steps, case, steps)


def device_memory_over_tcp(me: Any) -> str:
    """Returns the error where the provider does not reach GPU memory."""
    try:
        open_all_to_all(
            me, Case(1, me.world_size, transport="proxy:tcp"), device=str(gpu_cases.gpu_of(me)), placement="device"
        ).close()
    except pc.Error as problem:
        return str(problem)
    return "it took it"
