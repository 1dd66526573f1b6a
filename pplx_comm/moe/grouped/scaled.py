"""The product of codes for layers of one's own."""

from __future__ import annotations

import torch

from pplx_comm.moe.grouped import products
from pplx_comm.moe.segments import Segments


def scaled_grouped_mm(
    x: products.Codes,
    w: products.Codes,
    where: torch.Tensor | Segments,
    *,
    transposed: bool = False,
    dtype: torch.dtype,
    backend: str = "auto",
) -> torch.Tensor:
    """The product of codes by expert, in dtype: x @ w^T, or with `transposed` x @ w. Scales are 1x128 of x, 128x128 of w.

    where: d.offsets, or segments(d), with x as d.x.flatten(0, 1) and d.scale where rows lie as Padded lays them.
    """
    return products.scaled(x, w, Segments.of(where), transposed=transposed, dtype=dtype, backend=backend)
