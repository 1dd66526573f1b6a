"""The grouped product as autograd knows it."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pplx_comm.moe.grouped import products


class _GroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, backend: str) -> torch.Tensor:
        ctx.save_for_backward(x, w, offsets)
        ctx.backend = backend
        return products.forward(x, w, offsets, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, w, offsets = ctx.saved_tensors
        dy = dy.contiguous()
        dx = products.dgrad(dy, w, offsets, ctx.backend) if ctx.needs_input_grad[0] else None
        dw = products.wgrad(dy, x, offsets, torch.empty_like(w), False, ctx.backend) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


def grouped_mm(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """x @ w^T by expert, with gradients for both: x is [rows, k] as dispatch writes it, w [experts, n, k], the result [rows, n].

    offsets: int32 [experts + 1], d.offsets. Rows between segments must be zero where w needs a gradient: Ragged(zero_pad=True).
    backend: "auto", or "loop", "torch", "triton".
    """
    result: torch.Tensor = _GroupedMm.apply(x, w, offsets, backend)
    return result
