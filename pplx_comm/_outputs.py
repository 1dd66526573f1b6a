"""The tensors that dispatch_recv fills, from a pool: page faults of fresh memory would cost more than the copies."""

from __future__ import annotations

import math
from typing import Any

import torch

from . import _core
from ._parts import Part
from .handles import Dispatched
from .layouts import Compact, Padded, Ragged
from .wire import Wire

_ALIGN = 64


def _round_up(value: int, to: int) -> int:
    return (value + to - 1) // to * to


class Outputs:
    """Allocates the outputs of one AllToAll's dispatches."""

    def __init__(self, config: _core.Config, layout: Ragged | Padded | Compact, dtype: torch.dtype, wire: Wire) -> None:
        self._layout = layout
        self._hidden = config.hidden
        self._top_k = config.top_k
        self._experts = config.local_experts
        self._dtype = torch.float8_e4m3fn if wire.quantised else dtype
        self._scales = config.scales_per_row
        self._scale_dtype = wire.scale_dtype
        self._tma = config.scale_tma
        padded = isinstance(layout, Padded)
        self._group = config.max_per_expert if padded else 0
        self._rows = self._experts * self._group if padded else config.max_rows
        self._shape = (self._experts, self._group) if padded else (self._rows,)
        self.x_shape = (*self._shape, self._hidden)
        self.parts = self._small_parts()
        self._pool = _core.OutputPool()

    def close(self) -> None:
        self._pool.close()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised; its memory returns to the pool with its last reference."""
        elements = 1
        for n in shape:
            elements *= n
        if elements == 0:
            return torch.empty(shape, dtype=dtype)
        buffer = self._pool.take(elements * dtype.itemsize)
        return torch.frombuffer(buffer, dtype=dtype, count=elements).view(shape)

    def _scale(self) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """The scales and their strides in bytes: from row to row, from scale to scale, from expert to expert."""
        n, dtype, size = self._scales, self._scale_dtype, self._scale_dtype.itemsize
        if not self._tma:
            return self.tensor((*self._shape, n), dtype), (size * n, size, size * n * self._group)
        # Columns start at multiples of 16 bytes, which is what tensor memory access wants.
        rows = _round_up(self._group or self._rows, 16 // size)
        if self._group:
            whole = self.tensor((self._experts, n, rows), dtype)
            return whole.transpose(1, 2)[:, : self._group], (size, size * rows, size * rows * n)
        return self.tensor((n, rows), dtype).t()[: self._rows], (size, size * rows, 0)

    def scale_like(self) -> Part | None:
        if not self._scales:
            return None
        scale, _ = self._scale()
        return Part(0, scale.dtype, tuple(scale.shape), scale.stride())

    def _small_parts(self) -> dict[str, Part]:
        """All that is small lies in one buffer, behind a line that is the handle's own."""
        rows, experts = self._shape, self._experts
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "counts": (torch.int32, (experts,)),
            "src_rank": (torch.int32, rows),
            "src_token": (torch.int32, rows),
        }
        if isinstance(self._layout, Ragged):
            shapes["offsets"] = torch.int32, (experts + 1,)
        if isinstance(self._layout, Compact):
            shapes["topk_ids"] = torch.int32, (*rows, self._top_k)
            shapes["topk_weights"] = torch.float32, (*rows, self._top_k)
            shapes["num_rows"] = torch.int32, (1,)
        else:
            shapes["weights"] = torch.float32, rows
        parts, at = {}, _ALIGN
        for name, (dtype, shape) in shapes.items():
            parts[name] = Part.contiguous(at, dtype, shape)
            at += _round_up(4 * math.prod(shape), _ALIGN)
        self.small_bytes = at
        return parts

    def allocate(self, d: Dispatched, zeroed: bool) -> dict[str, Any]:
        """Gives d its tensors; returns the addresses, as the core wants them. zeroed: rows that nothing fills are zero."""
        d.x = self.tensor(self.x_shape, self._dtype)
        arguments: dict[str, Any] = {"x": d.x.data_ptr()}
        if self._scales:
            d.scale, strides = self._scale()
            arguments.update(scales=d.scale.data_ptr())
            arguments.update(zip(("scale_row_stride", "scale_stride", "scale_group_stride"), strides, strict=True))
        d._small = small = self.tensor((self.small_bytes // 4,), torch.int32)
        if zeroed:
            d.x.zero_()
            small.zero_()
        begin = small.data_ptr()
        for name, part in self.parts.items():
            setattr(d, name, part.of(small))
            arguments[name] = begin + part.at
        return arguments
