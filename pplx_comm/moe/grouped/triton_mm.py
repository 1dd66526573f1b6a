"""The grouped product by our own kernels: see kernels/grouped.py."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from pplx_comm.moe.grouped import tiles
from pplx_comm.moe.kernels.usable import kernels, power_of_two_at_least, programs, usable
from pplx_comm.moe.segments import Segments


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def by_tma(*tensors: torch.Tensor) -> bool:
    """True if descriptors can describe them: rows that begin at multiples of 16 bytes, on compute capability 9.0 and up."""
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


class TritonGroupedMm:
    name, waits = "triton", False

    def __init__(self, tma: bool | None = None) -> None:
        """tma: None where it is possible."""
        self._tma = tma

    def takes(self, device: torch.device, dtype: torch.dtype) -> bool:
        return usable(device) and dtype in (torch.bfloat16, torch.float16)

    def forward(self, x: torch.Tensor, w: torch.Tensor, where: Segments) -> torch.Tensor:
        return self._rows_by_weights(x, w, where, False)

    def dgrad(self, dy: torch.Tensor, w: torch.Tensor, where: Segments) -> torch.Tensor:
        return self._rows_by_weights(dy, w, where, True)

    def _rows_by_weights(self, x: torch.Tensor, w: torch.Tensor, where: Segments, transposed: bool) -> torch.Tensor:
        (rows, inner), experts, width = x.shape, w.shape[0], w.shape[2 if transposed else 1]
        out = x.new_empty(rows, width)
        if not out.numel() or not experts:
            return out
        device = x.device
        s = tiles.shape_of_rows(where.average(rows), device)
        x, w = x.contiguous(), w.contiguous()
        tma = by_tma(x, w) if self._tma is None else self._tma
        block = [s.inner, s.side] if transposed else [s.side, s.inner]
        kernels("grouped").rows_by_weights[(s.programs * programs(device),)](
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
        s = tiles.SHAPE_OF_WEIGHTS
        dy, x = dy.contiguous(), x.contiguous()
        tma = by_tma(dy, x) if self._tma is None else self._tma
        kernels("grouped").weights_gradient[(programs(x.device),)](
            described(dy, [s.inner, s.rows]) if tma else dy, described(x, [s.inner, s.side]) if tma else x,
            where.where, out, experts, x.shape[0], height, width,
            ACCUMULATE=accumulate, TMA=tma,
            HIGH=s.rows, SIDE=s.side, INNER=s.inner, GROUP=s.group, num_warps=s.warps, num_stages=s.stages,
        )  # fmt: skip
