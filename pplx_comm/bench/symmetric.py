"""torch's symmetric memory as a peer: counts go from device to device. bfloat16 both ways; the sum is the user's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .batch import Shape

Allocate = Callable[..., torch.Tensor]

MOST_EXPERTS = 16
"""all_to_all_vdev_2d takes fewer than so many experts of a rank."""


class Way(Protocol):
    def dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> None: ...

    def combine(self) -> torch.Tensor:
        """A row per choice, in the order of `order`."""
        ...

    order: torch.Tensor


class ByExpert:
    """all_to_all_vdev_2d brings rows to their experts, aligned, and its reverse brings them back."""

    order: torch.Tensor

    def __init__(self, shape: Shape, group: str, symmetric: Allocate) -> None:
        o, local = shape.options, shape.config.experts_per_rank
        self._group, self._top_k, self._experts = group, o.top_k, local * shape.world
        choices = shape.tokens * o.top_k
        self._send = symmetric(choices, o.hidden, dtype=o.dtype)
        self._recv = symmetric(shape.world * choices + local * 128, o.hidden, dtype=o.dtype)
        self._back = symmetric(choices, o.hidden, dtype=o.dtype)
        self._splits = symmetric(self._experts, dtype=torch.int64)
        self._placed, self._returned = (symmetric(2, self._experts, dtype=torch.int64) for _ in range(2))

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        flat = ids.view(-1)
        self.order = torch.argsort(flat, stable=True)
        self._splits.copy_(torch.bincount(flat, minlength=self._experts))
        torch.index_select(x, 0, self.order // self._top_k, out=self._send)
        torch.ops.symm_mem.all_to_all_vdev_2d(self._send, self._recv, self._splits, self._placed, self._group, major_align=128)

    def combine(self) -> torch.Tensor:
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(self._recv, self._back, self._placed, self._returned, self._group)
        return self._back


class ByRank:
    """For more experts: all_to_all_vdev brings rows and their experts' numbers to ranks, which sort them by expert themselves.

    How many have come the host must know, for the sort; a sort of all the room that there might have to be takes longer."""

    order: torch.Tensor

    def __init__(self, shape: Shape, group: str, symmetric: Allocate) -> None:
        o = shape.options
        self._group, self._top_k, self._local, self._world = group, o.top_k, shape.config.experts_per_rank, shape.world
        choices = shape.tokens * o.top_k
        room = shape.world * choices
        self._send, self._back = (symmetric(choices, o.hidden, dtype=o.dtype) for _ in range(2))
        self._recv = symmetric(room, o.hidden, dtype=o.dtype)
        self._send_ids, self._recv_ids = symmetric(choices, dtype=torch.int64), symmetric(room, dtype=torch.int64)
        self._splits, self._back_splits = (symmetric(shape.world, dtype=torch.int64) for _ in range(2))
        self._placed, self._placed_ids, self._returned = (symmetric(2, shape.world, dtype=torch.int64) for _ in range(3))

    def _exchange(self, send: torch.Tensor, recv: torch.Tensor, splits: torch.Tensor, placed: torch.Tensor) -> None:
        torch.ops.symm_mem.all_to_all_vdev(send, recv, splits, placed, self._group)

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        flat = ids.view(-1)
        self.order = torch.argsort(flat, stable=True)
        self._splits.copy_(torch.bincount(flat // self._local, minlength=self._world))
        torch.index_select(flat, 0, self.order, out=self._send_ids)
        torch.index_select(x, 0, self.order // self._top_k, out=self._send)
        self._exchange(self._send_ids, self._recv_ids, self._splits, self._placed_ids)
        self._exchange(self._send, self._recv, self._splits, self._placed)
        received = int(self._placed[0].sum())
        self._by_expert = torch.argsort(self._recv_ids[:received], stable=True)
        self._sorted = self._recv[:received].index_select(0, self._by_expert)

    def combine(self) -> torch.Tensor:
        self._recv.index_copy_(0, self._by_expert, self._sorted)
        self._back_splits.copy_(self._placed[0])
        self._exchange(self._recv, self._back, self._back_splits, self._returned)
        return self._back


def opened(device: torch.device) -> Any:
    """torch's module, set up; None where there is no NVSHMEM."""
    memory = importlib.import_module("torch.distributed._symmetric_memory")
    if device.type != "cuda" or not memory.is_nvshmem_available():
        return None
    memory.set_backend("NVSHMEM")
    return memory


def enable(memory: Any, group: str) -> None:
    """Newer versions of torch do it by themselves, and call the call deprecated."""
    if not hasattr(memory.enable_symm_mem_for_group, "__deprecated__"):
        memory.enable_symm_mem_for_group(group)


def way_of(shape: Shape, group: str, symmetric: Allocate) -> Way:
    return (ByExpert if shape.config.experts_per_rank < MOST_EXPERTS else ByRank)(shape, group, symmetric)
