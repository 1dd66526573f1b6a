"""Tensors that lie together in one buffer: one allocation, and views on request."""

from __future__ import annotations

from typing import NamedTuple

import torch

import pplx_comm._core as _core


class Part(NamedTuple):
    at: int  # bytes from the start of the buffer
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """`buffer` is contiguous and starts where its storage does."""
        return buffer.view(self.dtype).as_strided(self.shape, self.strides, self.at // self.dtype.itemsize)


def parts_of(layout: _core.OutputLayout) -> dict[str, Part]:
    return {
        name: Part(part.at, getattr(torch, part.dtype), tuple(part.shape), tuple(part.strides))
        for name, part in layout.parts.items()
    }


class Tickets(NamedTuple):
    """The tensors that a dispatch is to the operators of torch_ops."""

    x_shape: tuple[int, ...]
    parts: dict[str, Part]
    """Those that lie in a ticket."""
    weights_shape: tuple[int, ...]
    words: int
    """The size of a ticket in 4-byte words."""
    plan: tuple[torch.dtype, int]
    scale: Part | None
