"""The grouped product by our own kernels: see kernels/grouped.py."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from pplx_comm.moe.kernels.usable import power_of_two_at_least, programs, usable
from pplx_comm.moe.segments import Segments


@dataclass(frozen=True)
class Shape:
    """Of a kernel's tiles. It follows from sizes that no routing changes, so each size is compiled once."""

    rows: int
    side: int
    inner: int
    group: int
    warps: int
    stages: int
    flat: bool = False
    programs: int = 1
    """On a multiprocessor: several have more of the weights on their way."""


FEW = 64
"""Rows of an expert, on average, up to which a tile has as few rows: a product of few rows reads weights."""


LARGEST_TILES = 227 << 10
"""Bytes of shared memory, for 128 x 256 with four stages and a tile that is stored meanwhile: compute capability 9.0 and 10.0."""
SHAPE_OF_FEW = Shape(64, 128, 64, 8, 4, 4, programs=2)
SHAPE_OF_SOME = Shape(128, 256, 64, 16, 8, 4, flat=True)
SHAPE_OF_MANY = Shape(128, 256, 64, 8, 8, 4, flat=True)
SHAPES_OF_LESS_MEMORY = Shape(128, 256, 64, 8, 8, 3), Shape(128, 128, 64, 8, 8, 3)
SHAPE_OF_WEIGHTS = Shape(128, 256, 64, 8, 8, 3)


def shape_of_rows(average: int, device: torch.device) -> Shape:
    """By the rows that an expert can have on average: few want small tiles, since padding is computed too. See bench/notes.md."""
    if average <= FEW:
        return SHAPE_OF_FEW
    memory = shared_memory(device)
    if memory < LARGEST_TILES:
        return SHAPES_OF_LESS_MEMORY[memory <= 150 << 10]
    return SHAPE_OF_SOME if average <= 1024 else SHAPE_OF_MANY


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    if device.type != "cuda":
        return LARGEST_TILES
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)) or LARGEST_TILES


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def by_tma(*tensors: torch.Tensor) -> bool:
    """Whether descriptors can describe them: rows that begin at multiples of 16 bytes, on compute capability 9.0 and up."""
    if not _has_tma(tensors[0].device):
        return False
    return all(t.data_ptr() % 16 == 0 and t.shape[-1] * t.element_size() % 16 == 0 and t.numel() for t in tensors)


def described(t: torch.Tensor, block: list[int]) -> Any:
    """A descriptor of t's rows, one under the other: all but the last of its dimensions are one. t is contiguous."""
    *high, width = t.shape
    return _descriptor()(t, [math.prod(high), width], [width, 1], block)


# Imported at the first call, since triton is no dependency, and once: an import statement takes a microsecond each time.
@functools.cache
def _descriptor() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


@functools.cache
def _kernels() -> Any:
    from pplx_comm.moe.kernels import grouped

    return grouped


class TritonGroupedMm:
    name, waits, takes_parts = "triton", False, True

    def __init__(self, tma: bool | None = None) -> None:
        """tma: None where it is possible."""
        self._tma = tma

    def takes(self, device: torch.device, dtype: torch.dtype) -> bool:
        return usable(device) and dtype in (torch.bfloat16, torch.float16)

    def forward(self, x: torch.Tensor, w: torch.Tensor, where: Segments, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._rows_by_weights(x, w, where, False, out)

    def dgrad(self, dy: torch.Tensor, w: torch.Tensor, where: Segments) -> torch.Tensor:
        return self._rows_by_weights(dy, w, where, True)

    def _rows_by_weights(
        self, x: torch.Tensor, w: torch.Tensor, where: Segments, transposed: bool, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        (rows, inner), experts, width = x.shape, w.shape[0], w.shape[2 if transposed else 1]
        out = x.new_empty(rows, width) if out is None else out
        if not out.numel() or not experts:
            return out
        device = x.device
        s = shape_of_rows(where.average(rows), device)
        x, w = x.contiguous(), w.contiguous()
        tma = by_tma(x, w) if self._tma is None else self._tma
        block = [s.inner, s.side] if transposed else [s.side, s.inner]
        _kernels().rows_by_weights[(s.programs * programs(device),)](
            described(x, [s.rows, s.inner]) if tma else x, described(w, block) if tma else w,
            where.where, out, experts, where.room, rows, inner, width,
            EXPERTS=power_of_two_at_least(experts), PADDED=where.room > 0, TRANSPOSED=transposed, TMA=tma,
            ROWS=s.rows, SIDE=s.side, INNER=s.inner, GROUP=s.group, FLAT=s.flat, num_warps=s.warps, num_stages=s.stages,
        )  # fmt: skip
        return out

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, where: Segments, out: torch.Tensor, accumulate: bool) -> None:
        if not out.numel():
            return
        if not out.is_contiguous():
            whole = out.contiguous()
            self.wgrad(dy, x, where, whole, accumulate)
            out.copy_(whole)
            return
        experts, height, width = out.shape
        s = SHAPE_OF_WEIGHTS
        dy, x = dy.contiguous(), x.contiguous()
        tma = by_tma(dy, x) if self._tma is None else self._tma
        _kernels().weights_gradient[(programs(x.device),)](
            described(dy, [s.inner, s.rows]) if tma else dy, described(x, [s.inner, s.side]) if tma else x,
            where.where, out, experts, x.shape[0], height, width,
            ACCUMULATE=accumulate, TMA=tma,
            HIGH=s.rows, SIDE=s.side, INNER=s.inner, GROUP=s.group, num_warps=s.warps, num_stages=s.stages,
        )  # fmt: skip
