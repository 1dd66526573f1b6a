"""torch's symmetric memory as a peer: counts go from device to device. No row is quantised; the sum is the user's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bench.harness.batch import Shape

Allocate = Callable[..., torch.Tensor]

MOST_EXPERTS = 16
"""all_to_all_vdev_2d takes fewer experts of a rank than this."""


@dataclass(frozen=True)
class Route:
    """Everything that the routing alone determines."""

    order: torch.Tensor
    """The choices by expert."""
    token: torch.Tensor
    """The token of each, in that order."""
    splits: torch.Tensor
    """How many go to each expert, or rank."""
    placed: torch.Tensor
    """Received rows of each expert or rank, placed as a dispatch of this routing leaves them."""
    by_expert: torch.Tensor | None = None
    """Received rows, by expert."""


class Way(Protocol):
    how: str

    def route(self, ids: torch.Tensor) -> Route:
        """Collective."""
        ...

    def dispatch(self, x: torch.Tensor, route: Route) -> None: ...

    def combine(self, route: Route) -> torch.Tensor:
        """A row per choice, in the order of `route.order`. The answers are whatever rows lie where that routing has placed them."""
        ...


class ByExpert:
    """all_to_all_vdev_2d brings rows to their experts, aligned, and its reverse brings them back."""

    how = "all_to_all_vdev_2d"

    def __init__(self, shape: Shape, group: str, symmetric: Allocate) -> None:
        o, local = shape.options, shape.config.experts_per_rank
        self._group, self._top_k, self._experts = group, o.top_k, local * shape.world
        choices = shape.tokens * o.top_k
        self._send = symmetric(choices, o.hidden, dtype=o.dtype)
        self._recv = symmetric(shape.world * choices + local * 128, o.hidden, dtype=o.dtype)
        self._back = symmetric(choices, o.hidden, dtype=o.dtype)
        self._splits = symmetric(self._experts, dtype=torch.int64)
        self._placed, self._returned = (symmetric(2, self._experts, dtype=torch.int64) for _ in range(2))

    def route(self, ids: torch.Tensor) -> Route:
        flat = ids.view(-1)
        order = torch.argsort(flat, stable=True)
        splits = torch.bincount(flat, minlength=self._experts)
        self._exchange(splits)
        return Route(order, order // self._top_k, splits, self._placed.clone())

    def dispatch(self, x: torch.Tensor, route: Route) -> None:
        torch.index_select(x, 0, route.token, out=self._send)
        self._exchange(route.splits)

    def _exchange(self, splits: torch.Tensor) -> None:
        self._splits.copy_(splits)
        torch.ops.symm_mem.all_to_all_vdev_2d(self._send, self._recv, self._splits, self._placed, self._group, major_align=128)

    def combine(self, route: Route) -> torch.Tensor:
        self._placed.copy_(route.placed)
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(self._recv, self._back, self._placed, self._returned, self._group)
        return self._back


class ByRank:
    """Serves more experts: all_to_all_vdev brings rows to ranks, which sort them by expert themselves."""

    how = "all_to_all_vdev, sorted by expert"

    def __init__(self, shape: Shape, group: str, symmetric: Allocate) -> None:
        o = shape.options
        self._group, self._top_k, self._local, self._world = group, o.top_k, shape.config.experts_per_rank, shape.world
        choices = shape.tokens * o.top_k
        room = shape.world * choices
        self._send, self._back = (symmetric(choices, o.hidden, dtype=o.dtype) for _ in range(2))
        self._recv = symmetric(room, o.hidden, dtype=o.dtype)
        self.answers = torch.randn(room, o.hidden, device=self._recv.device).to(o.dtype)
        self._send_ids, self._recv_ids = symmetric(choices, dtype=torch.int64), symmetric(room, dtype=torch.int64)
        self._splits, self._back_splits = (symmetric(shape.world, dtype=torch.int64) for _ in range(2))
        self._placed, self._returned = (symmetric(2, shape.world, dtype=torch.int64) for _ in range(2))

    def _exchange(self, send: torch.Tensor, recv: torch.Tensor, splits: torch.Tensor, placed: torch.Tensor) -> None:
        torch.ops.symm_mem.all_to_all_vdev(send, recv, splits, placed, self._group)

    def route(self, ids: torch.Tensor) -> Route:
        flat = ids.view(-1)
        order = torch.argsort(flat, stable=True)
        splits = torch.bincount(flat // self._local, minlength=self._world)
        self._splits.copy_(splits)
        torch.index_select(flat, 0, order, out=self._send_ids)
        self._exchange(self._send_ids, self._recv_ids, self._splits, self._placed)
        by_expert = torch.argsort(self._recv_ids[: int(self._placed[0].sum())], stable=True)
        return Route(order, order // self._top_k, splits, self._placed.clone(), by_expert)

    def dispatch(self, x: torch.Tensor, route: Route) -> None:
        assert route.by_expert is not None
        self._splits.copy_(route.splits)
        torch.index_select(x, 0, route.token, out=self._send)
        self._exchange(self._send, self._recv, self._splits, self._placed)
        self.received = self._recv.index_select(0, route.by_expert)

    def combine(self, route: Route) -> torch.Tensor:
        assert route.by_expert is not None
        self._recv.index_copy_(0, route.by_expert, self.answers[: len(route.by_expert)])
        self._back_splits.copy_(route.placed[0])
        self._exchange(self._recv, self._back, self._back_splits, self._returned)
        return self._back


def opened(device: torch.device) -> Any:
    """torch's module, ready for use; None where there is no NVSHMEM."""
    memory = importlib.import_module("torch.distributed._symmetric_memory")
    if device.type != "cuda" or not memory.is_nvshmem_available():
        return None
    memory.set_backend("NVSHMEM")
    return memory


def enable(memory: Any, group: str) -> None:
    """Newer versions of torch do it by themselves and deprecate the call."""
    if not hasattr(memory.enable_symm_mem_for_group, "__deprecated__"):
        memory.enable_symm_mem_for_group(group)


def way_of(shape: Shape, group: str, symmetric: Allocate) -> Way:
    return (ByExpert if shape.config.experts_per_rank < MOST_EXPERTS else ByRank)(shape, group, symmetric)
