"""GEMMs that steps run beside: one that computes all the time, and one that reads weights all the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

NAMES = ("compute", "weights")


@dataclass(frozen=True)
class Gemms:
    """As they are measured."""

    size: int = 8192
    """All three sides of the GEMM that is bound by computing."""
    experts: int = 32
    intermediate: int = 2048
    rows: int = 16
    """Rows of an expert in the GEMM that is bound by reading the weights of all."""


@dataclass(frozen=True)
class Gemm:
    name: str
    about: str
    run: Callable[[], object]


def _compute(g: Gemms, hidden: int, device: torch.device) -> Gemm:
    a, b = (torch.randn(g.size, g.size, device=device).bfloat16() for _ in range(2))
    c = torch.empty_like(a)
    return Gemm("compute", f"BF16, {g.size} x {g.size} x {g.size}", lambda: torch.mm(a, b, out=c))


def _weights(g: Gemms, hidden: int, device: torch.device) -> Gemm:
    """The first one of an MoE layer's experts. The second has half the weights and is bound by the same."""
    x = torch.randn(g.experts * g.rows, hidden, device=device).bfloat16()
    weights = torch.randn(g.experts, 2 * g.intermediate, hidden, device=device, dtype=torch.bfloat16)
    ends = torch.arange(1, g.experts + 1, device=device, dtype=torch.int32) * g.rows
    about = f"BF16, {g.rows} rows for each of {g.experts} experts, {hidden} x {2 * g.intermediate}"

    def grouped() -> object:
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)

    def one_by_one() -> object:
        return torch.bmm(x.view(g.experts, g.rows, hidden), weights.transpose(1, 2))

    try:
        grouped()
    except (AttributeError, NotImplementedError, RuntimeError):
        return Gemm("weights", f"{about}, batched", one_by_one)
    return Gemm("weights", f"{about}, grouped", grouped)


def gemm(name: str, g: Gemms, hidden: int, device: torch.device) -> Gemm:
    return (_compute if name == "compute" else _weights)(g, hidden, device)
