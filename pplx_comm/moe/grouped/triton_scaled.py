"""The product of codes by our own kernel: see kernels/scaled.py."""

from __future__ import annotations

import torch

from pplx_comm.moe.grouped import tiles
from pplx_comm.moe.grouped.backend import Codes, laid_out
from pplx_comm.moe.grouped.triton_mm import by_tma, described
from pplx_comm.moe.kernels.launch import strides_of_scales
from pplx_comm.moe.kernels.usable import kernels, power_of_two_at_least, programs, usable
from pplx_comm.moe.quantise import BLOCK
from pplx_comm.moe.segments import Segments


class TritonScaledMm:
    name, waits, mx = "triton", False, False

    def __init__(self, tma: bool | None = None) -> None:
        """tma: None where it is possible."""
        self._tma = tma

    def takes(self, codes: torch.Tensor, where: Segments) -> bool:
        device = codes.device
        return usable(device) and (device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9))

    def product(self, x: Codes, w: Codes, where: Segments, transposed: bool, dtype: torch.dtype) -> torch.Tensor:
        codes, scale = laid_out(w, transposed)
        (experts, width, inner), rows, device = codes.shape, x[0].contiguous(), codes.device
        many = rows.shape[0]
        out = torch.empty(many, width, dtype=dtype, device=device)
        if not out.numel() or not experts:
            return out
        tma = by_tma(rows, codes) if self._tma is None else self._tma
        s = tiles.shape_of_codes(where.average(many), device)
        kernels("scaled").scaled_rows_by_weights[(s.programs * programs(device),)](
            described(rows, [s.rows, s.inner]) if tma else rows, x[1], described(codes, [s.side, s.inner]) if tma else codes, scale,
            where.where, out, experts, where.room, many, inner, width, *strides_of_scales(x[1]),
            EXPERTS=power_of_two_at_least(experts), PADDED=where.room > 0, TMA=tma,
            ROWS=s.rows, SIDE=s.side, GROUP=s.group, BLOCK=BLOCK, FLAT=s.flat, num_warps=s.warps, num_stages=s.stages,
            **tiles.most_registers(s),
        )  # fmt: skip
        return out
