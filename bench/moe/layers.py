"""Layers that do the same: ours, and by name what users of other libraries write. They begin behind the router."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from bench.harness.world import World
from bench.moe.deep_ep import DeepEp
from bench.moe.options import LayerOptions
from bench.moe.problem import Problem
from bench.moe.theirs import Capacity, GatherAndReduce, Mark, Mega, Nccl
from pplx_comm.all_to_all import AllToAll
from pplx_comm.layouts import Padded, Ragged
from pplx_comm.moe import functional as F
from pplx_comm.moe.arithmetic import Rows
from pplx_comm.moe.grouped import products
from pplx_comm.moe.grouped.pair import TritonPair
from pplx_comm.moe.received import received
from pplx_comm.moe.shared_all_to_all import shared_all_to_all
from pplx_comm.wire import Wire

WIRES = {"bf16": Wire.NATIVE, "fp8-dispatch": Wire.FP8_UE8M0, "fp8": Wire.FP8_UE8M0, "mxfp8": Wire.MXFP8}


class Layer(Protocol):
    name: str
    trains: bool
    in_graphs: bool
    """True if a forward pass never asks the host, so that a graph captures it."""

    def prepare(self, problem: Problem) -> None:
        """Collective, before any call at this size."""
        ...

    def forward(self, mark: Mark) -> torch.Tensor:
        """Runs a forward pass on the problem's tokens, without gradients."""
        ...

    def train(self, x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """The same with gradients for all four. weights: of choices."""
        ...

    def notes(self) -> dict[str, Any]:
        """Further facts about this problem, for the report."""
        ...

    def close(self) -> None: ...


class Ours:
    trains, in_graphs = True, True

    name = "ours"

    def __init__(self, world: World, options: LayerOptions, device: torch.device, precision: str) -> None:
        self._o, self._device, self._precision, self._ranks = options, device, precision, world.size
        self._comm = world.fresh()  # a Communicator carries a limited number of AllToAlls
        self._quantised = precision in ("fp8", "mxfp8")

    def _all_to_all(self, tokens: int, padded: bool, zero_pad: bool) -> AllToAll:
        o = self._o
        align = 128 if self._precision != "bf16" else 16
        most = most_rows(o, self._ranks, tokens, align, 1 if self._precision != "bf16" else 2)
        return shared_all_to_all(
            self._comm, num_experts=o.experts, top_k=o.top_k, hidden=o.hidden, max_tokens_per_rank=tokens,
            dtype=torch.bfloat16, wire=WIRES[self._precision],
            layout=Padded(align=align) if padded else Ragged(align, zero_pad, max_rows=most),
            scale_layout="tma" if self._precision.startswith("fp8") else "row", device=self._device, timeout=o.timeout,
            transport=o.transport, provider=o.provider, node_size=o.node_size, slot_bytes=o.slot_bytes,
        )  # fmt: skip

    def prepare(self, problem: Problem) -> None:
        """One AllToAll for decoding and one for all larger sizes, as a model has them."""
        p = self._p = problem
        decoding = [n for n in self._o.tokens if n <= self._o.decode_tokens]
        self._padded = p.tokens in decoding
        self._a2a = self._all_to_all(max(decoding) if self._padded else max(self._o.tokens), self._padded, False)
        self._training = self._all_to_all(max(self._o.tokens), False, True)
        self._plain = p.weights.gate_up, p.weights.down
        self._weights: Any = self._plain
        if self._quantised:
            self._weights = tuple(F.quantise_weights(t) for t in self._plain)

    def _options(self) -> F.Options:
        return F.Options(self._quantised)

    def forward(self, mark: Mark) -> torch.Tensor:
        p, a2a = self._p, self._a2a
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
            x = rows.codes()
            if isinstance(products.for_both(x, gate_up, down, where, dtype), TritonPair):
                out = F.scaled_experts(x, gate_up, down, where, dtype=dtype)
                mark("experts")
                return out
            h = F.scaled_grouped_mm(x, gate_up, where, dtype=dtype)
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
        ran = F.Ran("padded" if self._padded else "ragged")
        with ran.noted():
            self.forward(lambda _: None)
        rows = int(d.counts.sum() if d.offsets is None else d.offsets[-1])
        product = products_of(ran, *self._plain)
        return {"layout": repr(self._a2a.layout), "rows": rows, "product": product}

    def close(self) -> None:
        self._comm.close()


def products_of(ran: F.Ran, gate_up: torch.Tensor, down: torch.Tensor) -> str:
    """The backends of both products of a forward pass."""
    first, second = (ran.products[f"forward {w.shape[2]}x{w.shape[1]}"] for w in (gate_up, down))
    return first if first == second else f"up {first}, down {second}"


UNASKED = 0.95 * 2**30
"""Bytes of rows that an AllToAll takes unasked, about: told how many rows there can be, a pass has a launch more."""


def most_rows(options: LayerOptions, ranks: int, tokens: int, align: int, size: int) -> int | None:
    """That a rank's experts can receive, padding included, where that must be said. size: of an element."""
    local = options.experts // ranks
    most = ranks * tokens * options.top_k + local * (align - 1)
    return most if most * options.hidden * size > UNASKED else None


def makers(options: LayerOptions, precision: str) -> dict[str, Callable[[World, torch.device], Layer]]:
    """Name -> maker of each requested layer that computes in this precision."""
    every: dict[str, Callable[[World, torch.device], Layer]] = {
        "ours": lambda world, device: Ours(world, options, device, precision),
    }
    if precision == "bf16":
        every["nccl"] = lambda world, device: Nccl(world, options, device)
        every["ag_rs"] = lambda world, device: GatherAndReduce(world, options, device)
        for factor in options.capacities if "capacity" in options.layers else ():
            every[f"capacity {factor}"] = lambda world, device, factor=factor: Capacity(world, options, device, factor)  # type: ignore[misc]
    if precision == "fp8":
        every["deep_ep"] = lambda world, device: DeepEp(world, options, device)
        every["mega"] = lambda world, device: Mega(world, options, device)
    return {name: maker for name, maker in every.items() if name.split()[0] in options.layers}
