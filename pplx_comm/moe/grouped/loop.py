"""An ordinary product per expert: the reference, and what CPUs run. The host reads where rows are."""

from __future__ import annotations

import torch

from pplx_comm.moe.grouped.backend import Codes
from pplx_comm.moe.quantise import dequantise, dequantise_weights
from pplx_comm.moe.segments import Segments


class Loop:
    name, waits = "loop", True

    def takes(self, device: torch.device, dtype: torch.dtype) -> bool:
        return True

    def forward(self, x: torch.Tensor, w: torch.Tensor, where: Segments) -> torch.Tensor:
        out = x.new_empty(x.shape[0], w.shape[1])
        for e, rows in where.slices():
            torch.mm(x[rows], w[e].mT, out=out[rows])
        return out

    def dgrad(self, dy: torch.Tensor, w: torch.Tensor, where: Segments) -> torch.Tensor:
        out = dy.new_empty(dy.shape[0], w.shape[2])
        for e, rows in where.slices():
            torch.mm(dy[rows], w[e], out=out[rows])
        return out

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, where: Segments, out: torch.Tensor, accumulate: bool) -> None:
        if not accumulate:
            out.zero_()
        for e, rows in where.slices():
            a, b = dy[rows].mT, x[rows]
            if out.dtype == a.dtype:
                out[e] += a @ b
            else:  # to a wider dtype: nothing is rounded to the rows' dtype between
                out[e] += a.to(out.dtype) @ b.to(out.dtype)


class ScaledLoop:
    """Multiplies decoded codes in float32."""

    name, waits, mx = "loop", True, False

    def takes(self, codes: torch.Tensor, where: Segments) -> bool:
        return True

    def product(self, x: Codes, w: Codes, where: Segments, transposed: bool, dtype: torch.dtype) -> torch.Tensor:
        codes, scale = x[0], x[1].flatten(0, -2)
        out = torch.empty(codes.shape[0], w[0].shape[2 if transposed else 1], dtype=dtype, device=codes.device)
        for e, rows in where.slices():
            weights = dequantise_weights(w[0][e : e + 1], w[1][e : e + 1])[0]
            out[rows] = (dequantise(codes[rows], scale[rows]) @ (weights if transposed else weights.mT)).to(dtype)
        return out
