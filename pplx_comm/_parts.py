"""Tensors that lie together in one buffer: one allocation, and views for who asks."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Part(NamedTuple):
    at: int  # bytes from the start of the buffer
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Part:
        return cls(at, dtype, shape, torch.empty(shape, device="meta").stride())

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """`buffer` is contiguous and starts where its storage does."""
        return buffer.view(self.dtype).as_strided(self.shape, self.strides, self.at // self.dtype.itemsize)


class Links(NamedTuple):
    """The tensors that a dispatch is to the operators of _ops.py."""

    x_shape: tuple[int, ...]
    parts: dict[str, Part]
    """What lies in a link."""
    weights_shape: tuple[int, ...]
    words: int
    """Of a link."""
    plan: tuple[torch.dtype, int]
    scale: Part | None
