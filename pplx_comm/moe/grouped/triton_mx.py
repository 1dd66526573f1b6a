"""The product of MXFP8 rows as they travel, by our own kernel for tensor cores that have such blocks: see kernels/mx.py."""

from __future__ import annotations

import torch

from pplx_comm.moe.grouped.backend import Codes, laid_out
from pplx_comm.moe.grouped.triton_mm import by_tma, described
from pplx_comm.moe.kernels.launch import strides_of_scales
from pplx_comm.moe.kernels.usable import kernels, power_of_two_at_least, programs, usable
from pplx_comm.moe.quantise import BLOCK, MX_BLOCK
from pplx_comm.moe.segments import Segments


class TritonMx:
    """Takes rows whose scales are e8m0 bytes, uint8, and weights whose scales are powers of two."""

    name, waits, mx = "mx", False, True

    def __init__(self, tma: bool | None = None) -> None:
        """tma: None where it is possible."""
        self._tma = tma

    def takes(self, codes: torch.Tensor, where: Segments) -> bool:
        device = codes.device
        return device.type == "cuda" and usable(device) and torch.cuda.get_device_capability(device)[0] == 10

    def product(self, x: Codes, w: Codes, where: Segments, transposed: bool, dtype: torch.dtype) -> torch.Tensor:
        codes, scale = laid_out(w, transposed)
        experts, width, inner = codes.shape
        rows = x[0].contiguous()
        out = torch.empty(len(rows), width, dtype=dtype, device=rows.device)
        if not out.numel() or not experts:
            return out
        tma = by_tma(rows, codes) if self._tma is None else self._tma
        kernels("mx").mx_rows_by_weights[(programs(rows.device),)](
            described(rows, [128, BLOCK]) if tma else rows, x[1], described(codes, [BLOCK, BLOCK]) if tma else codes, scale,
            where.where, out, experts, where.room, len(rows), inner, width, *strides_of_scales(x[1]),
            EXPERTS=power_of_two_at_least(experts), PADDED=where.room > 0, TMA=tma, ROWS=128, GROUP=8, BLOCK=BLOCK, MX=MX_BLOCK,
            num_warps=4, num_stages=4,
        )  # fmt: skip
        return out
