"""The products of codes for layers of one's own."""

from __future__ import annotations

import torch

from pplx_comm.moe.grouped import products
from pplx_comm.moe.grouped.backend import Codes
from pplx_comm.moe.segments import Segments


def scaled_grouped_mm(
    x: Codes, w: Codes, where: torch.Tensor | Segments, *, transposed: bool = False, dtype: torch.dtype, backend: str = "auto"
) -> torch.Tensor:
    """The product of codes by expert, in dtype: x @ w^T, or with `transposed` x @ w. Scales are 1x128 of x, 128x128 of w.

    where: d.offsets, or segments(d), with x as d.x.flatten(0, 1) and d.scale where rows lie as Padded lays them.
    """
    return products.scaled(x, w, Segments.of(where), transposed=transposed, dtype=dtype, backend=backend)


def scaled_experts(
    x: Codes, gate_up: Codes, down: Codes, where: torch.Tensor | Segments, *, dtype: torch.dtype, backend: str = "auto"
) -> torch.Tensor:
    """Both products of codes by expert with SwiGLU between, in dtype and without gradients. Few rows may take one launch.

    x, where: as of scaled_grouped_mm(). gate_up: [experts, 2 * intermediate, hidden], down: [experts, hidden, intermediate].
    """
    return products.through_experts(x, gate_up, down, Segments.of(where), dtype=dtype, backend=backend)
