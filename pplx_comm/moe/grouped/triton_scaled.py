"""The product of codes by our own kernel: see kernels/scaled.py."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pplx_comm.moe.grouped.backend import laid_out
from pplx_comm.moe.grouped.triton_mm import FEW, LARGEST_TILES, Shape, by_tma, described, shared_memory
from pplx_comm.moe.kernels.launch import strides_of_scales
from pplx_comm.moe.kernels.usable import power_of_two_at_least, programs, usable
from pplx_comm.moe.quantise import BLOCK
from pplx_comm.moe.segments import Segments

# Several programs on a multiprocessor: the tensor cores have one's block while another adds up its last one. See bench/notes.md.
SHAPE_OF_FEW = Shape(64, 128, BLOCK, 8, 4, 4, flat=True, programs=2)
SHAPE_OF_MANY = Shape(64, 128, BLOCK, 8, 4, 3, programs=3)
REGISTERS = 64 << 10
"""Of a multiprocessor."""


def shape_of_codes(average: int, device: torch.device) -> Shape:
    """By the rows that an expert can have on average."""
    return SHAPE_OF_FEW if average <= FEW and shared_memory(device) >= LARGEST_TILES else SHAPE_OF_MANY


def most_registers(s: Shape) -> dict[str, int]:
    """Of a thread, so that all of a shape's programs fit."""
    each = REGISTERS // (s.programs * s.warps * 32) // 8 * 8
    return {"maxnreg": each} if each < 255 else {}


@functools.cache
def _kernels() -> Any:
    from pplx_comm.moe.kernels import scaled

    return scaled


class TritonScaledMm:
    name, waits, takes_parts, mx = "triton", False, True, False

    def __init__(self, tma: bool | None = None) -> None:
        """tma: None where it is possible."""
        self._tma = tma

    def takes(self, codes: torch.Tensor, where: Segments) -> bool:
        device = codes.device
        return usable(device) and (device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9))

    def product(
        self,
        x: tuple[torch.Tensor, torch.Tensor],
        w: tuple[torch.Tensor, torch.Tensor],
        where: Segments,
        transposed: bool,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        codes, scale = laid_out(w, transposed)
        (experts, width, inner), rows, device = codes.shape, x[0].contiguous(), codes.device
        many = rows.shape[0]
        out = torch.empty(many, width, dtype=dtype, device=device) if out is None else out
        if not out.numel() or not experts:
            return out
        tma = by_tma(rows, codes) if self._tma is None else self._tma
        s = shape_of_codes(where.average(many), device)
        _kernels().scaled_rows_by_weights[(s.programs * programs(device),)](
            described(rows, [s.rows, s.inner]) if tma else rows, x[1], described(codes, [s.side, s.inner]) if tma else codes, scale,
            where.where, out, experts, where.room, many, inner, width, *strides_of_scales(x[1]),
            EXPERTS=power_of_two_at_least(experts), PADDED=where.room > 0, TMA=tma,
            ROWS=s.rows, SIDE=s.side, GROUP=s.group, BLOCK=BLOCK, FLAT=s.flat, num_warps=s.warps, num_stages=s.stages,
            **most_registers(s),
        )  # fmt: skip
        return out
