"""The grouped product as autograd knows it."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pplx_comm.moe.grouped import products
from pplx_comm.moe.segments import Segments


class _GroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, where: Segments, backend: str) -> torch.Tensor:
        ctx.save_for_backward(x, w, where.where)
        ctx.backend, ctx.like = backend, (where.room, where.expected)
        return products.forward(x, w, where, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, w, where = ctx.saved_tensors
        where = Segments(where, *ctx.like)
        dy = dy.contiguous()
        dx = products.dgrad(dy, w, where, ctx.backend) if ctx.needs_input_grad[0] else None
        dw = products.wgrad(dy, x, where, torch.empty_like(w), False, ctx.backend) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


def grouped_mm(x: torch.Tensor, w: torch.Tensor, where: torch.Tensor | Segments, backend: str = "auto") -> torch.Tensor:
    """x @ w^T by expert, with gradients for both: x is [rows, k] as dispatch writes it, w [experts, n, k], the result [rows, n].

    where: d.offsets, or segments(d). Gradients are those of Ragged: with zero_pad=True where w needs one.
    backend: "auto", or "loop", "torch", "triton".
    """
    result: torch.Tensor = _GroupedMm.apply(x, w, Segments.of(where), backend)
    return result
