"""Tensors that lie together in one buffer: one allocation, and views on request."""

from __future__ import annotations

from typing import NamedTuple

import torch

import pplx_comm._core as _core

TENSORS = ("x", "scale", "counts", "offsets", "weights", "src_rank", "src_token", "topk_ids", "topk_weights", "num_rows")
"""Those of a Dispatched."""


class Part(NamedTuple):
    at: int  # bytes from the start of the buffer
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int  # its first element, in elements from there

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """`buffer` is contiguous and starts where its storage does."""
        _, dtype, shape, strides, first = self
        return buffer.view(dtype).as_strided(shape, strides, first)


def parts_of(layout: _core.OutputLayout) -> dict[str, Part]:
    def part(given: _core.OutputPart) -> Part:
        dtype: torch.dtype = getattr(torch, given.dtype)
        return Part(given.at, dtype, tuple(given.shape), tuple(given.strides), given.at // dtype.itemsize)

    return {name: part(given) for name, given in layout.parts.items()}


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
