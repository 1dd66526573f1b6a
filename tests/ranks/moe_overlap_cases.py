"""A MoE layer's forward pass beside its step, and beside the same without: what ranks of test_moe_overlap.py do."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Any

import torch

from pplx_comm.all_to_all import AllToAll
from pplx_comm.layouts import Padded, Ragged
from pplx_comm.moe import functional as F
from pplx_comm.moe import lanes
from pplx_comm.moe.grouped.beside import CHUNK
from pplx_comm.moe.segments import Segments


@dataclass(frozen=True)
class OverlapCase:
    seed: int
    world_size: int
    overlap: str = "groups"
    groups: int = 3
    spread: str = "even"
    precision: str = "bf16"
    compute: str = "bf16"
    dtype: str = "bfloat16"
    layout: str = "ragged"
    align: int = 16
    hidden: int = 128
    intermediate: int = 128
    experts: int = 7
    top_k: int = 3
    most: int = 160
    """Tokens of a rank: fewer, or none, are drawn."""
    transport: str = "mapped"
    train: bool = True
    in_flight: int = 1
    steps: int = 2
    gemm: str = "auto"
    device: str = "cpu"

    @property
    def quantised(self) -> bool:
        return self.compute == "fp8"


WIRES = {"bf16": "native", "fp8": "fp8_ue8m0", "mxfp8": "mxfp8"}
NORMAL = {"native": torch.bfloat16}


def random_case(seed: int, world_size: int, **fields: Any) -> OverlapCase:
    r = random.Random(f"overlap {seed}")
    precision = r.choice(["bf16", "fp8", "mxfp8"])
    layout = r.choice(["ragged", "ragged", "padded"])
    drawn: dict[str, Any] = {
        "groups": r.choice([1, 2, 3, 8]),
        "spread": r.choice(["even", "zipf", "hot", "few"]),
        "precision": precision,
        "compute": "bf16" if precision == "bf16" else r.choice(["bf16", "fp8"]),
        "dtype": r.choice(["bfloat16", "float32", "float16"]),
        "layout": layout,
        "align": r.choice([16, 128]),
        "experts": r.choice([world_size - 1, world_size, 5, 9, 16]) or 1,
        "top_k": r.choice([1, 2, 4]),
        "most": r.choice([3, 40, 300]),
        "train": layout == "ragged" and r.random() < 0.5,
        "transport": r.choice(["mapped", "proxy:tcp"]),
    }
    drawn |= fields
    drawn["top_k"] = min(drawn["top_k"], drawn["experts"])
    return OverlapCase(seed, world_size, **drawn)


def open_all_to_all(me: Any, case: OverlapCase, overlap: bool, **more: Any) -> AllToAll:
    layout = Padded(align=case.align) if case.layout == "padded" else Ragged(case.align, zero_pad=case.train)
    carrier: dict[str, Any] = {"transport": case.transport}
    if case.transport.startswith("proxy:"):
        carrier = {"transport": "proxy", "provider": case.transport.removeprefix("proxy:")}
    return AllToAll(
        me.comm, num_experts=case.experts, top_k=case.top_k, hidden=case.hidden, max_tokens_per_rank=case.most,
        dtype=getattr(torch, case.dtype), wire=WIRES[case.precision], layout=layout, in_flight=case.in_flight, hooks=overlap,
        scale_layout="tma" if case.precision == "fp8" else "row", device=case.device, timeout=20.0, **carrier | more,
    )  # fmt: skip


def drawn_inputs(me: Any, case: OverlapCase, step: int, device: torch.device) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(case.seed * 1009 + 17 * step + me.rank)
    tokens = int(torch.randint(0, case.most + 1, (), generator=g)) * int(torch.rand((), generator=g) > 0.2)
    e = torch.arange(case.experts)
    liked = {
        "even": torch.zeros(case.experts), "zipf": -torch.log1p(e), "hot": torch.where(e == 1, 1e4, 0.0),
        "few": torch.where(e < case.top_k, 1e4, 0.0),
    }[case.spread]  # fmt: skip
    noise = -torch.log(-torch.log(torch.rand(tokens, case.experts, generator=g)))
    ids = (noise + liked).topk(case.top_k, dim=-1).indices
    ids[torch.rand(ids.shape, generator=g) < 0.1] = -1
    inputs = {
        "x": torch.randn(tokens, case.hidden, generator=g).to(getattr(torch, case.dtype)),
        "ids": ids,
        "weights": torch.rand(tokens, case.top_k, generator=g).softmax(-1),
        "dy": torch.randn(tokens, case.hidden, generator=g).to(getattr(torch, case.dtype)),
    }
    return {name: t.to(device) for name, t in inputs.items()}


def drawn_weights(me: Any, case: OverlapCase, local: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(case.seed * 7 + me.rank)
    shapes = (local, 2 * case.intermediate, case.hidden), (local, case.hidden, case.intermediate)
    up, down = (torch.randn(*shape, generator=g) * shape[-1] ** -0.5 for shape in shapes)
    return up.to(device, getattr(torch, case.dtype)), down.to(device, getattr(torch, case.dtype))


def passed(case: OverlapCase, a2a: AllToAll, weights: Any, inputs: Any, options: F.Options, whole: bool) -> list[torch.Tensor]:
    """The output, and gradients where the case trains."""
    leaves = [t.detach().requires_grad_(case.train) for t in (inputs["x"], inputs["weights"], *weights)]
    with torch.set_grad_enabled(case.train):
        x, choice, gate_up, down = leaves
        one = F.send(a2a, x, inputs["ids"], choice, options, whole=whole)
        if whole:
            y = F.receive(one, gate_up, down, options)
        else:
            F.compute(one, gate_up, down, options)
            y = F.finish(one)
        if case.train:
            y.backward(inputs["dy"])
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def options_of(case: OverlapCase, overlap: str) -> F.Options:
    return F.Options(case.quantised, case.gemm, case.gemm, overlap=overlap, expert_groups=case.groups)


def same_bits(me: Any, case: OverlapCase) -> list[bool]:
    """Of each step, by result."""
    plain, beside = (open_all_to_all(me, case, overlap) for overlap in (False, True))
    weights = drawn_weights(me, case, plain.num_local_experts, plain.device)
    found = []
    for step in range(case.steps):
        inputs = drawn_inputs(me, case, step, plain.device)
        wanted = passed(case, plain, weights, inputs, options_of(case, "none"), True)
        seen = passed(case, beside, weights, inputs, options_of(case, case.overlap), bool(step % 2))
        if not all(bool(t.isfinite().all()) for t in wanted):
            raise AssertionError(f"{case}: what is compared is not finite")
        found += [torch.equal(a, b) for a, b in zip(seen, wanted, strict=True)]
        assert beside.stats()["open_steps"] == 0
    for a2a in (plain, beside):
        a2a.close()
    return found
