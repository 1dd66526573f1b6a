"""The products that a layer needs, each by the backend that was chosen for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pplx_comm.errors import Error
from pplx_comm.moe.grouped.backend import Backend, Codes, ScaledBackend
from pplx_comm.moe.grouped.choose import backends, named, pick, rows_class, scaled_backends
from pplx_comm.moe.grouped.pair import TritonPair
from pplx_comm.moe.grouped.triton_scaled import TritonScaledMm
from pplx_comm.moe.ran import note
from pplx_comm.moe.segments import Segments
from pplx_comm.moe.swiglu import swiglu_quantise
from pplx_comm.trace import product


def _backend(op: str, rows: torch.Tensor, weights: torch.Tensor, name: str, where: Segments, other: torch.Tensor) -> Backend:
    backend = _chosen(op, rows, weights, name, where, other)
    note(op, weights.shape, backend.name)
    return backend


def _chosen(op: str, rows: torch.Tensor, weights: torch.Tensor, name: str, where: Segments, other: torch.Tensor) -> Backend:
    if where.room and op != "forward":
        raise Error("products of rows in Padded layout have no gradients: use Ragged")
    if name != "auto":
        return named(backends(), name)
    found = [each for each in backends() if each.takes(rows.device, rows.dtype)]

    def run(backend: Backend) -> object:
        if op == "wgrad":
            backend.wgrad(rows, other, where, torch.empty_like(weights), False)
            return None
        return (backend.forward if op == "forward" else backend.dgrad)(rows, weights, where)

    key = (op, rows.dtype, weights.dtype, tuple(weights.shape), *_like(where, rows))
    return pick(found, key, rows.device, run)


def _like(where: Segments, rows: torch.Tensor) -> tuple[bool, int, int]:
    """Returns a key of rows that share a fastest backend: above all how many an expert has in this call."""
    return where.room > 0, rows_class(where.average(len(rows))), rows_class(len(rows))


@product
def forward(x: torch.Tensor, w: torch.Tensor, where: Segments, backend: str = "auto") -> torch.Tensor:
    """x @ w^T by expert: [rows, k] and [experts, n, k] to [rows, n]."""
    return _backend("forward", x, w, backend, where, x).forward(x, w, where)


@product
def dgrad(dy: torch.Tensor, w: torch.Tensor, where: Segments, backend: str = "auto") -> torch.Tensor:
    """dy @ w by expert: [rows, n] and [experts, n, k] to [rows, k]."""
    return _backend("dgrad", dy, w, backend, where, dy).dgrad(dy, w, where)


@product
def wgrad(
    dy: torch.Tensor, x: torch.Tensor, where: Segments, out: torch.Tensor, accumulate: bool = False, backend: str = "auto"
) -> torch.Tensor:
    """dy^T @ x by expert: [rows, n] and [rows, k] to out, [experts, n, k], or added to it. Padding must be zero."""
    _backend("wgrad", dy, out, backend, where, x).wgrad(dy, x, where, out, accumulate)
    return out


def takes_mx(w: Codes, where: Segments, backend: str) -> bool:
    """True if rows of MXFP8 are multiplied as they are. Otherwise they become 1x128 first."""
    if backend != "auto":
        return named(scaled_backends(), backend).mx
    return any(each.mx and each.takes(w[0], where) for each in scaled_backends())


@product
def scaled(
    x: Codes, w: Codes, where: Segments, *, transposed: bool = False, dtype: torch.dtype, backend: str = "auto"
) -> torch.Tensor:
    """The product of codes, in dtype: x @ w^T, or with `transposed` x @ w. Scales are 1x128 of x, 128x128 of w.

    Scales of x may be those of MXFP8 where takes_mx() says so. A backend for nothing else leaves other products to the rest.
    """
    chosen = _chosen_scaled(x, w, where, transposed, dtype, backend)
    note("dgrad" if transposed else "forward", w[0].shape, chosen.name)
    return chosen.product(x, w, where, transposed, dtype)


def _chosen_scaled(x: Codes, w: Codes, where: Segments, transposed: bool, dtype: torch.dtype, backend: str) -> ScaledBackend:
    mx = x[1].dtype == torch.uint8
    if backend == TritonPair.name:
        backend = TritonScaledMm.name  # a product by itself
    if backend != "auto" and named(scaled_backends(), backend).mx == mx:
        return named(scaled_backends(), backend)
    found = [each for each in scaled_backends() if each.mx == mx and each.takes(w[0], where)]
    if not found:
        raise Error("no backend here multiplies MXFP8 directly: convert it to 1x128 with rescale_mx()")

    def run(each: ScaledBackend) -> object:
        return each.product(x, w, where, transposed, dtype)

    key = ("scaled", transposed, tuple(w[0].shape), *_like(where, x[0]))
    return pick(found, key, x[0].device, run)


@dataclass(frozen=True)
class Apart:
    """Both products by launches of their own, and what is between them by one."""

    backend: str = "auto"
    name: str = "apart"
    waits: bool = False

    def through(self, x: Codes, gate_up: Codes, down: Codes, where: Segments, dtype: torch.dtype) -> torch.Tensor:
        h = scaled(x, gate_up, where, dtype=dtype, backend=self.backend)
        return scaled(swiglu_quantise(h, where), down, where, dtype=dtype, backend=self.backend)


@product
def through_experts(
    x: Codes, gate_up: Codes, down: Codes, where: Segments, *, dtype: torch.dtype, backend: str = "auto"
) -> torch.Tensor:
    """The product of codes with gate_up, SwiGLU, and the product with down, in dtype: for callers that keep nothing in between.

    Few rows may be taken by one launch, with the bits that our products have: "auto" measures it beside the launches apart.
    """
    chosen = for_both(x, gate_up, down, where, dtype, backend)
    if isinstance(chosen, TritonPair):
        for weights in (gate_up, down):
            note("forward", weights[0].shape, chosen.name)
    return chosen.through(x, gate_up, down, where, dtype)


def for_both(
    x: Codes, gate_up: Codes, down: Codes, where: Segments, dtype: torch.dtype, backend: str = "auto"
) -> Apart | TritonPair:
    """Chooses the backend of through_experts()."""
    apart = Apart(backend)
    asked = [each for each in scaled_backends() if isinstance(each, TritonPair) and backend in ("auto", each.name)]
    able = [each for each in asked if each.takes_both(x, gate_up, down, where)]
    if not able or backend != "auto":
        return able[0] if able else apart

    def run(each: Apart | TritonPair) -> object:
        return each.through(x, gate_up, down, where, dtype)

    key = ("through", tuple(gate_up[0].shape), tuple(down[0].shape), *_like(where, x[0]))
    both: list[Apart | TritonPair] = [apart, *able]
    return pick(both, key, x[0].device, run)
