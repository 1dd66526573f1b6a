"""Handles and events of deep_ep's Buffer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pplx_comm.compat.shared import Lane, Routes, Step
from pplx_comm.errors import Error
from pplx_comm.handles import Dispatched


class EventHandle:
    """An event on the current stream. CPU calls return when they are done, so there it stands for nothing."""

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

    def current_stream_wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """The end of a call with async_finish=True. As a context manager, it waits where the block ends."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        if self.event is None:
            raise Error("current_stream_wait: this event is of a call without async_finish=True, which needs no wait")
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


NO_EVENT = EventOverlap()
"""Calls without async_finish=True return it."""


class Handle(Routes, Sequence[Any]):
    """The routing of a dispatch, for combine and cached dispatches. Elements that DeepEP documents are made when they are read. Its
    internals are None."""

    rows: int | None = None
    """Normal mode: rows of recv_x."""

    def elements(self) -> tuple[Any, ...]:
        """Values, and methods that make them."""
        raise NotImplementedError

    def dispatched(self) -> Dispatched:
        """Raises an Error once the step is closed."""
        if self.step is None:
            raise Error("nothing was dispatched")
        return self.step.rows()

    def lane(self, x: torch.Tensor) -> Lane | None:
        """The AllToAll of its last step, if rows like those of x can go back there."""
        lane = None if self.step is None else self.step.lane
        return lane if lane is not None and not lane.closed and lane.a2a.dtype == x.dtype else None

    def open_rows(self) -> torch.Tensor | None:
        """The rows of its open step, whose memory a combine reads."""
        return None if self.step is None or self.step.d is None else self.step.d.x

    def sources(self) -> torch.Tensor:
        return self.dispatched().src_token[: self.rows]

    def __len__(self) -> int:
        return len(self.elements())

    def __getitem__(self, index: Any) -> Any:
        element = self.elements()[index]
        return element() if callable(element) else element

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


def _noting(lane: Lane, half: str, costs: torch.Tensor) -> Callable[[], None]:
    """Returns what adds the nanoseconds that are waited from now on."""
    before = lane.a2a.waits(half)

    def note() -> None:
        costs.add_(lane.a2a.waits(half) - before)

    return note


def _after(scale: torch.Tensor | None, packed: torch.Tensor | None, noted: Callable[[], None] | None) -> None:
    """Ends a dispatch of low latency mode, behind its receive half."""
    if noted is not None:
        noted()
    if packed is not None and scale is not None:
        _pack(scale, packed)


class LowLatencyHandle(Handle):
    given: torch.Tensor | None = None
    """See get_next_low_latency_combine_buffer."""

    def __init__(self, ids: torch.Tensor, world_size: int, shape: tuple[int, int, int]) -> None:
        """shape: M, hidden, experts."""
        self.ids, self.step, self.ranks, self.shape = ids, None, world_size, shape

    def receive(
        self, lane: Lane, x: torch.Tensor, hook: bool, stats: torch.Tensor | None, waits: torch.Tensor | None, packs: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, Step]:
        """Rows, scales, counts, and their step. hook: they are there once it was received. packs: scales as UE8M0."""
        noted = None if waits is None else _noting(lane, "dispatch", waits)
        self.step = step = lane.dispatch(x, self.ids, send_only=hook, totals=stats)
        d = step.d
        assert d is not None
        rows, scale, counts = lane.a2a.calls.device.rows(d)
        if packs or noted is not None:
            packed = _packed_like(scale) if packs and scale is not None else None
            then = functools.partial(_after, scale, packed, noted)
            if hook:
                step.then = then
            else:
                then()
            scale = scale if packed is None else packed
        return rows, scale, counts, step

    def combine(
        self, lane: Lane, x: torch.Tensor, hook: bool, weights: torch.Tensor, out: torch.Tensor | None, waits: torch.Tensor | None
    ) -> tuple[torch.Tensor, Step]:
        """hook: the sums are there once the step has finished."""
        step = self.open_step(lane)
        if hook and out is None:
            out = torch.empty((len(self.ids), lane.a2a.hidden), dtype=x.dtype, device=x.device)
        noted = None if waits is None else _noting(lane, "combine", waits)
        y = step.combine(x, send_only=hook, weights=weights, out=out)
        if hook:
            step.then = noted
        elif noted is not None:
            noted()
        return y, step

    def elements(self) -> tuple[Any, ...]:
        return (self.sources, self._layout_range, *self.shape)

    def _layout_range(self) -> torch.Tensor:
        """int64 [local experts, ranks]: where the rows of each rank begin; the low 32 bits are their number."""
        d, ranks = self.dispatched(), self.ranks
        experts, most = d.src_rank.shape
        valid = torch.arange(most, device=d.counts.device) < d.counts.unsqueeze(1)
        rank = torch.where(valid, d.src_rank, ranks).to(torch.int64)
        counts = torch.zeros((experts, ranks + 1), dtype=torch.int64, device=rank.device)
        counts = counts.scatter_add_(1, rank, torch.ones_like(rank))[:, :ranks]
        return (counts.cumsum(1) - counts) << 32 | counts


class NormalHandle(Handle):
    def __init__(self, ids: torch.Tensor, experts: int, wanted: torch.Tensor, where: tuple[int, int, int]) -> None:
        """experts: of the AllToAll: with top-k the layer's, else one for each rank. where: this rank, ranks and nodes."""
        super().__init__(ids)
        self.experts, self.wanted = experts, wanted
        self.rank, self.ranks, self.nodes = where

    def elements(self) -> tuple[Any, ...]:
        if self.nodes == 1:
            return self._matrix, None, None, self.sources, self.wanted, None
        return self.wanted, None, None, None, None, None, self._prefix_sums, None, None, None

    def _prefix_sums(self) -> torch.Tensor:
        """Returns the ends of the rows of each source."""
        d = self.dispatched()
        assert d.num_rows is not None
        return d.src_rank[: int(d.num_rows)].bincount(minlength=self.ranks).cumsum(0).to(torch.int32)

    def _matrix(self) -> torch.Tensor:
        """The column of this rank, and -1 in the others."""
        ends = self._prefix_sums()
        matrix = torch.full((self.ranks, self.ranks), -1, dtype=torch.int32, device=ends.device)
        matrix[:, self.rank] = ends
        return matrix


def _packed_like(scale: torch.Tensor) -> torch.Tensor:
    """Memory for those scales, four in an int32, column by column."""
    experts, rows, scales = scale.shape
    return torch.empty((experts, scales // 4, rows), dtype=torch.int32, device=scale.device).transpose(1, 2)


def _pack(scale: torch.Tensor, packed: torch.Tensor) -> None:
    """The exponents of powers of two."""
    exponents = (scale.view(torch.int32) >> 23).unflatten(-1, (-1, 4))
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scale.device)
    torch.sum(exponents << shifts, -1, dtype=torch.int32, out=packed)
