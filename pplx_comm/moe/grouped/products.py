"""The products that a layer needs, each by the backend that was chosen for it."""

from __future__ import annotations

import torch

from pplx_comm.moe.grouped.backend import Backend, ScaledBackend
from pplx_comm.moe.grouped.choose import backends, named, pick, rows_class, scaled_backends

Codes = tuple[torch.Tensor, torch.Tensor]


def _backend(op: str, rows: torch.Tensor, weights: torch.Tensor, name: str, offsets: torch.Tensor, other: torch.Tensor) -> Backend:
    if name != "auto":
        return named(backends(), name)
    found = [backend for backend in backends() if backend.takes(rows.device, rows.dtype)]

    def run(backend: Backend) -> object:
        if op == "wgrad":
            backend.wgrad(rows, other, offsets, torch.empty_like(weights), False)
            return None
        return (backend.forward if op == "forward" else backend.dgrad)(rows, weights, offsets)

    key = (op, rows.dtype, weights.dtype, tuple(weights.shape), rows_class(rows.shape[0]))
    return pick(found, key, rows.device, run)


def forward(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """x @ w^T by expert: [rows, k] and [experts, n, k] to [rows, n]."""
    return _backend("forward", x, w, backend, offsets, x).forward(x, w, offsets)


def dgrad(dy: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """dy @ w by expert: [rows, n] and [experts, n, k] to [rows, k]."""
    return _backend("dgrad", dy, w, backend, offsets, dy).dgrad(dy, w, offsets)


def wgrad(
    dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, accumulate: bool = False, backend: str = "auto"
) -> torch.Tensor:
    """dy^T @ x by expert: [rows, n] and [rows, k] to out, [experts, n, k], or added to it. Padding must be zero."""
    _backend("wgrad", dy, out, backend, offsets, x).wgrad(dy, x, offsets, out, accumulate)
    return out


def scaled(
    x: Codes, w: Codes, offsets: torch.Tensor, *, transposed: bool = False, dtype: torch.dtype, backend: str = "auto"
) -> torch.Tensor:
    """The product of codes, in dtype: x @ w^T, or with `transposed` x @ w. Scales are 1x128 of x, 128x128 of w."""
    if backend != "auto":
        return named(scaled_backends(), backend).product(x, w, offsets, transposed, dtype)
    found = [each for each in scaled_backends() if each.takes(w[0])]

    def run(each: ScaledBackend) -> object:
        return each.product(x, w, offsets, transposed, dtype)

    key = ("scaled", transposed, tuple(w[0].shape), rows_class(x[0].shape[0]))
    return pick(found, key, x[0].device, run).product(x, w, offsets, transposed, dtype)
