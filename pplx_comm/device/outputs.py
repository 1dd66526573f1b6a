"""The tensors that dispatch_recv fills, from a pool: page faults of fresh memory would cost more than the copies."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

import pplx_comm._core as _core
from pplx_comm.device.parts import parts_of
from pplx_comm.handles import Dispatched


class Reserved(NamedTuple):
    """Memory of the pool for the outputs of one dispatch; None for what is empty."""

    x: _core.OutputBuffer | None
    scale: _core.OutputBuffer | None
    small: _core.OutputBuffer | None


class Filled(NamedTuple):
    """The outputs of one dispatch_recv."""

    addresses: _core.Outputs
    small: torch.Tensor
    """The memory of all but x and scale."""


class Outputs:
    """Allocates the outputs of one AllToAll's dispatches."""

    def __init__(self, config: _core.Config) -> None:
        layout = _core.output_layout(config)
        self.parts = parts_of(layout)
        """Small outputs: they lie in one buffer, behind a line that is the handle's own."""
        self.x = self.parts.pop("x")
        self.scale = self.parts.pop("scale", None)
        self.small_bytes = layout.nbytes
        self._x_bytes = layout.parts["x"].nbytes
        self._scale_bytes = 0 if self.scale is None else layout.parts["scale"].nbytes
        self._pool = _core.OutputPool()

    def close(self) -> None:
        self._pool.close()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, memory: _core.OutputBuffer | None = None) -> torch.Tensor:
        """Uninitialised; its memory returns to the pool with its last reference."""
        elements = math.prod(shape)
        if elements == 0:
            return torch.empty(shape, dtype=dtype)
        if memory is None:
            memory = self._pool.take(elements * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype, count=elements).view(shape)

    def reserve(self) -> Reserved:
        """The memory of a dispatch's outputs. Before anything is sent, so that a rank that has none left loses no step."""
        return Reserved(self._take(self._x_bytes), self._take(self._scale_bytes), self._take(self.small_bytes))

    def _take(self, nbytes: int) -> _core.OutputBuffer | None:
        return self._pool.take(nbytes) if nbytes else None

    def fill(self, d: Dispatched, memory: Reserved, zeroed: bool) -> Filled:
        """Gives d its tensors. zeroed: rows that nothing fills are zero."""
        d.x = self.tensor(self.x.shape, self.x.dtype, memory.x)
        if self.scale is not None:
            whole = self.tensor((self._scale_bytes // self.scale.dtype.itemsize,), self.scale.dtype, memory.scale)
            d.scale = self.scale.of(whole)
        small = self.tensor((self.small_bytes // 4,), torch.int32, memory.small)
        if zeroed:
            d.x.zero_()
            small.zero_()
        for name, part in self.parts.items():
            setattr(d, name, part.of(small))
        scales = 0 if d.scale is None else d.scale.data_ptr()
        hooks = 0 if d.hooks is None else d.hooks.words.data_ptr()
        return Filled(_core.Outputs(x=d.x.data_ptr(), scales=scales, small=small.data_ptr(), hooks=hooks), small)
