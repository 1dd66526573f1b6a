"""DeepEP and DeepGEMM as their users put them together, in FP8: decode sizes in the low-latency mode with masked kernels, more in
the normal mode with contiguous ones. Settings are those of bench/gpu/deep_ep_buffers.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from bench.gpu import deep_ep_buffers
from bench.gpu.deep_ep_buffers import SMS, Modes
from bench.harness.world import World
from bench.moe.options import LayerOptions
from bench.moe.problem import Problem
from bench.moe.theirs import Mark, Theirs, found
from pplx_comm.moe import functional as F

ALIGN = 128
"""Rows of an expert begin at multiples of it: DeepGEMM's kernels ask for that."""


class Mode(Protocol):
    in_graphs: bool
    product: str

    def prepare(self, problem: Problem, weights: list[Any]) -> None: ...

    def forward(self, mark: Mark) -> torch.Tensor: ...

    def close(self) -> None: ...


class DeepEp(Theirs):
    name, trains = "deep_ep", False

    def __init__(self, world: World, options: LayerOptions, device: torch.device) -> None:
        libraries = found("deep_ep", device), found("deep_gemm", device)
        super().__init__(world, options, device)
        made = *libraries, self.group, world, self.o
        self._modes: Modes[Mode] = Modes(partial(LowLatency, *made), partial(Normal, *made))

    def prepare(self, problem: Problem) -> None:
        super().prepare(problem)
        mode = self._mode = self._modes.at(problem.tokens)
        weights = [F.quantise_weights(t) for t in (problem.weights.gate_up, problem.weights.down)]
        mode.prepare(problem, weights)
        self.in_graphs, self.product = mode.in_graphs, mode.product

    def forward(self, mark: Mark) -> torch.Tensor:
        return self._mode.forward(mark)

    def close(self) -> None:
        self._modes.close()


class LowLatency:
    in_graphs, product = True, "deepgemm, masked"

    def __init__(self, library: Any, gemm: Any, group: Any, world: World, options: LayerOptions) -> None:
        self._gemm, self._o = gemm, options
        # An expert's room: masked kernels write whole tiles, also into the next expert's rows.
        self._buffer = deep_ep_buffers.LowLatency(library, group, world, options, ALIGN)

    def prepare(self, problem: Problem, weights: list[Any]) -> None:
        self._buffer.prepare(problem.tokens)
        self._p, self._weights, self._ids = problem, weights, self._buffer.ids(problem.ids)
        self._expected = max(1, problem.world * problem.tokens * self._o.top_k // self._o.experts)

    def forward(self, mark: Mark) -> torch.Tensor:
        p = self._p
        (x, scale), counts, handle = self._buffer.dispatch(p.x, self._ids, use_fp8=True)
        mark("dispatch")
        h = self._product((x, scale), 0, counts)
        mark("up")
        where = F.Segments(counts, x.shape[1], self._expected)
        codes, scales = F.swiglu_quantise(h.flatten(0, 1), where)
        mark("activation")
        out = self._product((codes.unflatten(0, (-1, x.shape[1])), scales), 1, counts)
        mark("down")
        y = self._buffer.combine(out, self._ids, p.choice_weights, handle)
        mark("combine")
        return y

    def _product(self, x: Any, which: int, counts: torch.Tensor) -> torch.Tensor:
        codes, scale = self._weights[which]
        out = torch.empty(*x[0].shape[:2], codes.shape[1], dtype=torch.bfloat16, device=codes.device)
        self._gemm.m_grouped_fp8_fp4_gemm_nt_masked(x, (codes, scale), out, counts, self._expected)
        return out

    def close(self) -> None:
        self._buffer.close()


class Normal:
    """Each token once a rank: its user copies rows to their experts and adds up what comes of them. The host waits for the counts,
    which say how many rows to make."""

    in_graphs, product = False, "deepgemm, contiguous"

    def __init__(self, library: Any, gemm: Any, group: Any, world: World, options: LayerOptions) -> None:
        self._gemm = gemm
        row = options.hidden * torch.bfloat16.itemsize
        self._buffer = deep_ep_buffers.Normal(library, group, world, options.experts, row, [SMS])

    def prepare(self, problem: Problem, weights: list[Any]) -> None:
        self._p, self._weights, self._ids = problem, weights, self._buffer.ids(problem.ids)
        tokens = torch.tensor([0, problem.tokens], dtype=torch.int32, device=problem.device)
        self._tokens = F.Segments(tokens)
        x = self._codes()

        def dispatch() -> tuple[torch.Tensor, Any]:
            (rows, _), _, _, _, handle = self._dispatched(x)
            return rows, handle

        self._buffer.tune(SMS, dispatch, lambda rows: torch.zeros_like(rows, dtype=torch.bfloat16), x, microseconds)

    def _codes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This mode carries what it is given."""
        codes, scale = F.quantise(self._p.x, self._tokens)
        return codes, scale.contiguous()

    def _dispatched(self, x: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
        """Rows of each expert are rounded up to ALIGN."""
        return self._buffer.dispatch(x, self._ids, self._p.choice_weights, expert_alignment=ALIGN)

    def forward(self, mark: Mark) -> torch.Tensor:
        (codes, scale), ids, weights, counts, handle = self._dispatched(self._codes())
        begins = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=codes.device)
        places, experts = places_of(ids, begins), experts_of_rows(counts, codes.device)
        x = copied(codes, places, len(experts)), copied_scales(scale, places, len(experts))
        mark("dispatch")
        h = self._product(x, 0, experts)
        mark("up")
        a = F.swiglu_quantise(h, F.Segments(begins))
        mark("activation")
        out = self._product(a, 1, experts)
        mark("down")
        y = self._buffer.combine(added_up(out, places, weights), handle)
        mark("combine")
        return y

    def _product(self, x: Any, which: int, experts: torch.Tensor) -> torch.Tensor:
        codes, scale = self._weights[which]
        out = torch.empty(len(experts), codes.shape[1], dtype=torch.bfloat16, device=codes.device)
        if len(experts):
            self._gemm.m_grouped_fp8_gemm_nt_contiguous(x, (codes, scale), out, experts)
        return out

    def close(self) -> None:
        self._buffer.close()


def places_of(ids: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """Where each choice's row goes among those by expert: [rows, top_k], and begins[-1], past all, for another rank's expert."""
    experts = len(begins) - 1
    chosen, order = torch.where(ids < 0, experts, ids).flatten().to(torch.int32).sort(stable=True)
    first = torch.searchsorted(chosen, torch.arange(experts + 1, dtype=torch.int32, device=ids.device))
    number = torch.arange(len(chosen), device=ids.device) - first[chosen]
    sorted_places = torch.where(chosen < experts, begins[chosen] + number, begins[-1])
    return torch.empty_like(sorted_places).index_copy_(0, order, sorted_places).view(ids.shape)


def experts_of_rows(counts: list[int], device: torch.device) -> torch.Tensor:
    numbers = torch.tensor(counts, dtype=torch.int64, device=device)
    experts = torch.arange(len(counts), dtype=torch.int32, device=device)
    return experts.repeat_interleave(numbers, output_size=sum(counts))


def copied(codes: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
    """Each row to the places of its choices."""
    made = torch.empty(rows + 1, codes.shape[1], dtype=torch.uint8, device=codes.device)
    made[places] = codes.view(torch.uint8)[:, None]
    return made[:rows].view(codes.dtype)


def copied_scales(scale: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
    """The same, column by column, as DeepGEMM reads them; a column has a multiple of 16 bytes."""
    made = torch.empty(scale.shape[1], -(-(rows + 1) // 4) * 4, dtype=scale.dtype, device=scale.device)
    made[:, places] = scale.T[:, :, None]
    return made.T[:rows]


def added_up(out: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns for each received row the weighted sum of its experts' outputs."""
    nowhere = places == len(out)
    rows = torch.cat([out, out.new_zeros(1, out.shape[1])])[places]
    return torch.bmm(weights.masked_fill(nowhere, 0)[:, None].to(out.dtype), rows).squeeze(1)


def microseconds(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return 1000 * float(begin.elapsed_time(end))
