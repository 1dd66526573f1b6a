"""Layers that do the same: ours, and what users of other libraries write. They begin behind the router."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from bench.gpu.peers import group_of
from bench.harness.world import Off, World
from bench.moe.options import LayerOptions
from bench.moe.problem import Problem
from bench.moe.ran import noted
from pplx_comm.all_to_all import AllToAll
from pplx_comm.layouts import Padded, Ragged
from pplx_comm.moe import functional as F
from pplx_comm.moe import overlap as overlapping
from pplx_comm.moe.arithmetic import Rows
from pplx_comm.moe.received import received
from pplx_comm.moe.shared_all_to_all import shared_all_to_all
from pplx_comm.wire import Wire

Mark = Callable[[str], None]
"""Called behind a stage, with its name."""
WIRES = {"bf16": Wire.NATIVE, "fp8-dispatch": Wire.FP8_UE8M0, "fp8": Wire.FP8_UE8M0, "mxfp8": Wire.MXFP8}


class Layer(Protocol):
    name: str
    trains: bool
    in_graphs: bool
    """Whether a forward pass never asks the host, so that a graph captures it."""

    def prepare(self, problem: Problem) -> None:
        """Collective, before any call at this size."""
        ...

    def forward(self, mark: Mark) -> torch.Tensor:
        """Of the problem's tokens, without gradients."""
        ...

    def train(self, x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """The same with gradients for all four. weights: of choices."""
        ...

    def notes(self) -> dict[str, Any]:
        """What else is to be said of this problem."""
        ...

    def close(self) -> None: ...


class Ours:
    trains, in_graphs = True, True

    def __init__(
        self, world: World, options: LayerOptions, device: torch.device, precision: str, overlap: str = overlapping.NONE
    ) -> None:
        self.name = "ours" if overlap == overlapping.NONE else f"ours {overlap}"
        self._o, self._device, self._precision, self._overlap, self._ranks = options, device, precision, overlap, world.size
        self._comm = world.fresh()  # which carries so many AllToAlls and no more
        self._quantised = precision in ("fp8", "mxfp8")
        self._ran_beside = overlapping.NONE

    @property
    def in_turn(self) -> bool:
        """Whether step and products follow one another, so that each can be measured alone."""
        return self._overlap == overlapping.NONE

    def _all_to_all(self, tokens: int, padded: bool, zero_pad: bool) -> AllToAll:
        o, beside = self._o, self._overlap != overlapping.NONE
        align = 128 if self._precision != "bf16" or self._overlap == overlapping.SIGNALS else 16
        most = most_rows(o, self._ranks, tokens, align, 1 if self._precision != "bf16" else 2)
        return shared_all_to_all(
            self._comm, num_experts=o.experts, top_k=o.top_k, hidden=o.hidden, max_tokens_per_rank=tokens,
            dtype=torch.bfloat16, wire=WIRES[self._precision],
            layout=Padded(align=align) if padded else Ragged(align, zero_pad, max_rows=most),
            scale_layout="tma" if self._precision.startswith("fp8") else "row", device=self._device, timeout=o.timeout,
            transport=o.transport, provider=o.provider, node_size=o.node_size, slot_bytes=o.slot_bytes, hooks=beside,
            num_sms=overlapping.sms_of_step(self._device) if beside else None,
        )  # fmt: skip

    def prepare(self, problem: Problem) -> None:
        """One AllToAll for decoding and one for all larger sizes, as a model has them."""
        p = self._p = problem
        decoding = [n for n in self._o.tokens if n <= self._o.decode_tokens]
        self._padded = p.tokens in decoding
        self.a2a = self._a2a = self._all_to_all(max(decoding) if self._padded else max(self._o.tokens), self._padded, False)
        self._training = self._all_to_all(max(self._o.tokens), False, True)
        overlapping.check(self._overlap, self._a2a, self._quantised)
        self._plain = p.weights.gate_up, p.weights.down
        self._weights: Any = self._plain
        if self._quantised:
            self._weights = tuple(F.quantise_weights(t) for t in self._plain)
        self._extras = F.Extras(codes=self._weights if self._quantised else None)

    def _options(self) -> F.Options:
        return F.Options(self._quantised, overlap=self._overlap, expert_groups=self._o.expert_groups)

    def in_halves(self) -> torch.Tensor:
        """A forward pass whose dispatch and combine are two calls each, as with a shared expert between."""
        p, options = self._p, self._options()
        one = F.send(self._a2a, p.x, p.ids, p.choice_weights, options)
        F.compute(one, *self._plain, options, self._extras)
        return F.finish(one)

    def forward(self, mark: Mark) -> torch.Tensor:
        p, a2a = self._p, self._a2a
        if self._overlap != overlapping.NONE:
            options = self._options()
            one = F.send(a2a, p.x, p.ids, p.choice_weights, options, whole=True)
            y = F.receive(one, *self._plain, options, self._extras)
            self._ran_beside = one.options.overlap
            mark("all")
            return y
        d = a2a.dispatch(p.x, p.ids, p.choice_weights)
        mark("dispatch")
        rows = received(a2a, d)
        out = self._computed(rows, mark)
        sums = a2a.combine(out.view_as(d.x) if rows.where.room else out, d)
        assert isinstance(sums, torch.Tensor)
        mark("combine")
        return sums

    def _computed(self, rows: Rows, mark: Mark) -> torch.Tensor:
        where, dtype, (gate_up, down) = rows.where, self._a2a.dtype, self._weights
        if self._quantised:
            h = F.scaled_grouped_mm(rows.codes(), gate_up, where, dtype=dtype)
            mark("up")
            codes = F.swiglu_quantise(h, where)
            mark("activation")
            out = F.scaled_grouped_mm(codes, down, where, dtype=dtype)
        else:
            h = F.grouped_mm(rows.values(dtype), gate_up, where)
            mark("up")
            a = F.swiglu(h, where)
            mark("activation")
            out = F.grouped_mm(a, down, where)
        mark("down")
        return out

    @contextlib.contextmanager
    def computing(self) -> Iterator[Callable[[], object]]:
        """A call that multiplies the rows of one dispatch, and no rank waits for another."""
        p = self._p
        d = self._a2a.dispatch(p.x, p.ids, p.choice_weights)
        rows = received(self._a2a, d)
        try:
            yield lambda: self._computed(rows, lambda _: None)
        finally:
            d.release()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[Callable[[], object]]:
        """A call that dispatches the tokens and combines rows that are there already."""
        p, a2a = self._p, self._a2a
        d = a2a.dispatch(p.x, p.ids, p.choice_weights)
        d.release()
        answers = torch.ones(d.x.shape, dtype=a2a.dtype, device=a2a.device)
        yield lambda: a2a.combine(answers, a2a.dispatch(p.x, p.ids, p.choice_weights))

    def train(self, x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        one = F.send(self._training, x, self._p.ids, weights, self._options(), whole=True)
        return F.receive(one, gate_up, down, self._options())

    def notes(self) -> dict[str, Any]:
        p = self._p
        d = self._a2a.dispatch(p.x, p.ids, p.choice_weights)
        d.release()
        with noted(p.weights.gate_up.shape) as ran:
            self.forward(lambda _: None)
        rows = int(d.counts.sum() if d.offsets is None else d.offsets[-1])
        return {"layout": repr(self._a2a.layout), "rows": rows, "product": str(ran), "overlap": self._ran_beside}

    def close(self) -> None:
        self._comm.close()


UNASKED = 0.95 * 2**30
"""Bytes of rows that an AllToAll takes unasked, about: told how many rows there can be, a pass has a launch more."""


def most_rows(options: LayerOptions, ranks: int, tokens: int, align: int, size: int) -> int | None:
    """That a rank's experts can receive, padding included, where that must be said. size: of an element."""
    local = options.experts // ranks
    most = ranks * tokens * options.top_k + local * (align - 1)
    return most if most * options.hidden * size > UNASKED else None


class Exchange(torch.autograd.Function):
    """all_to_all_single of rows, with gradients. Without splits all ranks get as many."""

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
    """What layers of other libraries have in common here."""

    product = "torch._grouped_mm"
    """What multiplies."""

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
        weighted = weighted.masked_fill((local == p.local_experts)[:, None], 0)  # nobody computed those rows
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
        place = torch.where(number < room, chosen * room + number, self.o.experts * room)  # the last one is nobody's
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


class DeepEp(Theirs):
    """DeepEP's low-latency mode and DeepGEMM's masked kernels, in FP8, for decode sizes."""

    name, trains, in_graphs, product = "deep_ep", False, True, "deepgemm, masked"
    MOST = 512

    def __init__(self, world: World, options: LayerOptions, device: torch.device) -> None:
        self._library, self._gemm = found("deep_ep", device), found("deep_gemm", device)
        super().__init__(world, options, device)
        self._buffer: Any = None

    def prepare(self, problem: Problem) -> None:
        super().prepare(problem)
        o = self.o
        most = max((n for n in o.tokens if n <= self.MOST), default=0)
        if problem.tokens > self.MOST:
            raise Off(f"its low-latency mode is for up to {self.MOST} tokens")
        if self._buffer is None:
            self._rows = -(-most // 4) * 4
            size = self._library.Buffer.get_low_latency_rdma_size_hint(self._rows, o.hidden, problem.world, o.experts)
            self._buffer = self._library.Buffer(
                self.group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=problem.local_experts,
                explicitly_destroy=True,
            )  # fmt: skip
        self._weights = [F.quantise_weights(t) for t in (problem.weights.gate_up, problem.weights.down)]
        self._expected = max(1, problem.world * problem.tokens * o.top_k // o.experts)

    def forward(self, mark: Mark) -> torch.Tensor:
        p = self.p
        (x, scale), counts, handle, _, _ = self._buffer.low_latency_dispatch(p.x, p.ids, self._rows, self.o.experts, use_fp8=True)
        mark("dispatch")
        h = self._product((x, scale), 0, counts)
        mark("up")
        where = F.Segments(counts, x.shape[1], self._expected)
        codes, scales = F.swiglu_quantise(h.flatten(0, 1), where)
        mark("activation")
        out = self._product((codes.unflatten(0, (-1, x.shape[1])), scales), 1, counts)
        mark("down")
        y: torch.Tensor = self._buffer.low_latency_combine(out, p.ids, p.choice_weights, handle)[0]
        mark("combine")
        return y

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.destroy()
            self._buffer = None

    def _product(self, x: Any, which: int, counts: torch.Tensor) -> torch.Tensor:
        codes, scale = self._weights[which]
        out = torch.empty(*x[0].shape[:2], codes.shape[1], dtype=torch.bfloat16, device=codes.device)
        self._gemm.m_grouped_fp8_fp4_gemm_nt_masked(x, (codes, scale), out, counts, self._expected)
        return out


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
        self._ids = problem.ids.to(self._buffer.topk_idx.dtype)

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


def makers(options: LayerOptions, precision: str) -> dict[str, Callable[[World, torch.device], Layer]]:
    """By name: the layers that are asked for and compute in this precision."""
    every: dict[str, Callable[[World, torch.device], Layer]] = {
        "ours" if overlap == overlapping.NONE else f"ours {overlap}":
            lambda world, device, overlap=overlap: Ours(world, options, device, precision, overlap)  # type: ignore[misc]
        for overlap in options.overlaps
    }  # fmt: skip
    if precision == "bf16":
        every["nccl"] = lambda world, device: Nccl(world, options, device)
        every["ag_rs"] = lambda world, device: GatherAndReduce(world, options, device)
        for factor in options.capacities if "capacity" in options.layers else ():
            every[f"capacity {factor}"] = lambda world, device, factor=factor: Capacity(world, options, device, factor)  # type: ignore[misc]
    if precision == "fp8":
        every["deep_ep"] = lambda world, device: DeepEp(world, options, device)
        every["mega"] = lambda world, device: Mega(world, options, device)
    return {name: maker for name, maker in every.items() if name.split()[0] in options.layers}
