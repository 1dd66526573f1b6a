"""Layers that users of other libraries write, in bfloat16, and DeepGEMM's of one call. DeepEP's is deep_ep.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.peers import group_of
from bench.harness.world import Off, World
from bench.moe.options import LayerOptions
from bench.moe.problem import Problem
from pplx_comm.moe import functional as F

Mark = Callable[[str], None]
"""Called behind a stage, with its name."""


class Exchange(torch.autograd.Function):
    """all_to_all_single of rows, with gradients. Without splits all ranks get the same number."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, come: list[int] | None, go: list[int] | None) -> torch.Tensor:
        ctx.splits = come, go
        out = rows.new_empty(len(rows) if come is None else sum(come), *rows.shape[1:])
        torch.distributed.all_to_all_single(out, rows.contiguous(), come, go)
        return out

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[Any, ...]:
        come, go = ctx.splits
        out = d.new_empty(len(d) if go is None else sum(go), *d.shape[1:])
        torch.distributed.all_to_all_single(out, d.contiguous(), go, come)
        return out, None, None


def swiglu(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class Theirs:
    """The common part of other libraries' layers."""

    product = "torch._grouped_mm"
    """The function that multiplies."""

    def __init__(self, world: World, options: LayerOptions, device: torch.device) -> None:
        self.group = group_of(world, options, device)
        self.o = options

    def prepare(self, problem: Problem) -> None:
        self.p = problem
        self.rows: int | None = None
        """Computed by this rank's experts, padding included, where that is known."""

    def forward(self, mark: Mark) -> torch.Tensor:
        return self.run(self.p.x, self.p.choice_weights, self.p.weights.gate_up, self.p.weights.down, mark)

    def train(self, x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return self.run(x, weights, gate_up, down, lambda _: None)

    def run(self, x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, mark: Mark) -> torch.Tensor:
        raise NotImplementedError

    def notes(self) -> dict[str, Any]:
        return {"product": self.product} | ({} if self.rows is None else {"rows": self.rows})

    def close(self) -> None: ...


def by_all_to_all(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, mark: Mark
) -> tuple[torch.Tensor, int]:
    """A sort by expert, all_to_all_single of counts and of copies, a sort on the other side, torch._grouped_mm. The host waits for
    the counts, as torchtitan's and Megatron-Core's all-to-all dispatchers do.

    Returns sums of tokens, and how many rows there were.
    """
    k, local, world = ids.shape[1], len(gate_up), torch.distributed.get_world_size()
    chosen = ids.flatten()
    order = chosen.argsort(stable=True)
    mine = torch.bincount(chosen, minlength=local * world)
    theirs = torch.empty_like(mine)
    torch.distributed.all_to_all_single(theirs, mine)
    go, come = (counts.view(world, -1).sum(1).tolist() for counts in (mine, theirs))
    rows = Exchange.apply(x[order // k], come, go)
    expert = torch.arange(local, device=x.device).repeat(world).repeat_interleave(theirs)
    by_expert = expert.argsort(stable=True)
    offsets = theirs.view(world, -1).sum(0).cumsum(0, dtype=torch.int32)
    rows = rows[by_expert]
    mark("dispatch")
    h = torch._grouped_mm(rows, gate_up.mT, offs=offsets)
    mark("up")
    a = swiglu(h)
    mark("activation")
    out = torch._grouped_mm(a, down.mT, offs=offsets)
    mark("down")
    back = Exchange.apply(out[by_expert.argsort()], go, come)
    copies = back[order.argsort()].view(len(x), k, -1)
    y = torch.bmm(weights[:, None].to(copies.dtype), copies).squeeze(1)
    mark("combine")
    return y, len(rows)


class Nccl(Theirs):
    name, trains, in_graphs = "nccl", True, False

    def run(self, x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, mark: Mark) -> torch.Tensor:
        y, self.rows = by_all_to_all(x, self.p.ids, weights, gate_up, down, mark)
        return y


class GatherAndReduce(Theirs):
    """Every rank gets all tokens, computes what its experts add to each, and the sums are scattered, as in vLLM."""

    name, trains, in_graphs = "ag_rs", False, True

    def run(self, x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, mark: Mark) -> torch.Tensor:
        p, k = self.p, self.o.top_k
        rows, ids, all_weights = (t.new_empty(p.world * p.tokens, t.shape[1]) for t in (x, p.ids, weights))
        for out, t in ((rows, x), (ids, p.ids), (all_weights, weights)):
            torch.distributed.all_gather_into_tensor(out, t.contiguous())
        mark("dispatch")
        local = ids.flatten() - p.rank * p.local_experts
        local = torch.where((local >= 0) & (local < p.local_experts), local, p.local_experts)  # those of others come last
        local, order = local.sort(stable=True)
        offsets = torch.searchsorted(local, torch.arange(p.local_experts, device=x.device), right=True, out_int32=True)
        h = torch._grouped_mm(rows[order // k], gate_up.mT, offs=offsets)
        mark("up")
        a = swiglu(h)
        mark("activation")
        out = torch._grouped_mm(a, down.mT, offs=offsets)
        mark("down")
        weighted = out * all_weights.flatten()[order, None].to(out.dtype)
        weighted = weighted.masked_fill((local == p.local_experts)[:, None], 0)  # no expert computed those rows
        sums = torch.zeros_like(rows).index_add_(0, order // k, weighted)
        y = torch.empty_like(x)
        torch.distributed.reduce_scatter_tensor(y, sums)
        mark("combine")
        return y


class Capacity(Theirs):
    """An equal room for each rank's tokens at each expert, as GShard and Tutel have it: rows beyond it are dropped, padding is
    computed. "most": the room that the fullest expert takes; all ranks ask for it, and nothing is dropped."""

    trains, product = True, "torch.bmm"

    def __init__(self, world: World, options: LayerOptions, device: torch.device, factor: str) -> None:
        super().__init__(world, options, device)
        self.name, self.factor, self.in_graphs = f"capacity {factor}", factor, factor != "most"
        self._kept: torch.Tensor | None = None

    def _room(self, mine: torch.Tensor) -> int:
        if self.factor != "most":
            return max(1, round(self.p.tokens * self.o.top_k / self.o.experts * float(self.factor)))
        most = mine.max()
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return max(1, int(most))

    def run(self, x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, mark: Mark) -> torch.Tensor:
        p, k = self.p, self.o.top_k
        chosen, order = p.ids.flatten().sort(stable=True)
        starts = torch.searchsorted(chosen, torch.arange(self.o.experts, device=x.device))
        number = torch.arange(len(chosen), device=x.device) - starts[chosen]
        room = self._room(number + 1)
        place = torch.where(number < room, chosen * room + number, self.o.experts * room)  # the last one is a dummy
        self._kept = (number < room).float().mean()
        buffer = x.new_zeros(self.o.experts * room + 1, x.shape[1]).index_copy(0, place, x[order // k])
        came = Exchange.apply(buffer[:-1], None, None).view(p.world, p.local_experts, room, -1)
        rows = came.transpose(0, 1).reshape(p.local_experts, p.world * room, -1)
        self.rows = p.local_experts * p.world * room
        mark("dispatch")
        h = torch.bmm(rows, gate_up.mT)
        mark("up")
        a = swiglu(h)
        mark("activation")
        out = torch.bmm(a, down.mT)
        mark("down")
        back = Exchange.apply(out.view(p.local_experts, p.world, room, -1).transpose(0, 1).flatten(0, 2), None, None)
        back = torch.cat([back, back.new_zeros(1, back.shape[1])])
        copies = back[place][order.argsort()].view(p.tokens, k, -1)
        y = torch.bmm(weights[:, None].to(copies.dtype), copies).squeeze(1)
        mark("combine")
        return y

    def notes(self) -> dict[str, Any]:
        return {**super().notes(), "dropped": 1 - float(self._kept) if self._kept is not None else 0.0}


class Mega(Theirs):
    """DeepGEMM's layer in one call, for compute capability 9.0: dispatch, both products and combine, in FP8."""

    name, trains, in_graphs, product = "mega", False, True, "deepgemm, with its step in one kernel"

    def __init__(self, world: World, options: LayerOptions, device: torch.device) -> None:
        self._gemm = found("deep_gemm", device)
        if not hasattr(self._gemm, "fp8_mega_moe"):
            raise Off("this deep_gemm has no fp8_mega_moe: sgl-deep-gemm 0.1.4.post1 does")
        super().__init__(world, options, device)
        self._buffer: Any = None

    def prepare(self, problem: Problem) -> None:
        super().prepare(problem)
        o, weights = self.o, [F.quantise_weights(t) for t in (problem.weights.gate_up, problem.weights.down)]
        if self._buffer is None:
            self._buffer = self._gemm.get_symm_buffer_for_sm90_mega_moe(
                self.group, o.experts, max(o.tokens), o.top_k, o.hidden, o.intermediate
            )
        self._weights = self._gemm.transform_weights_for_mega_moe_sm90(*weights)
        self._ids = problem.ids.to(torch.int32)

    def forward(self, mark: Mark) -> torch.Tensor:
        p, b = self.p, self._buffer
        self._gemm.mega_moe_pre_dispatch_sm90(p.x, self._ids, p.choice_weights, b.x, b.x_sf, b.topk_idx, b.topk_weights, p.tokens)
        y = torch.empty_like(p.x)
        self._gemm.fp8_mega_moe(y, *self._weights, b)
        mark("all")
        return y

    def close(self) -> None:
        self._buffer = self._weights = None


def found(library: str, device: torch.device) -> Any:
    if device.type != "cuda":
        raise Off(f"{library} is for GPUs")
    try:
        return importlib.import_module(library)
    except ImportError as problem:
        raise Off(f"import {library}: {problem}") from None
