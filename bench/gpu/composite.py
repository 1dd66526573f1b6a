"""The composite floor of a step inside a node: which rows its two bare kernels read, and where they store them.

Dispatch: every token is read, and a row stored to each rank that wants it; the rows that lie here are read, and stored to all
their places. Combine: the expert rows of every row that lies here are read, and their sum stored to its source; the sums that lie
here are read, and the sum of each token's stored. As in a step of few tokens, a rank's own rows go through its own block. There is
no plan, no protocol, no quantising and no wait: all addresses are known, and what lies here came with an earlier launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from bench.harness.batch import Batch, Ints, Shape
from bench.harness.results import PHASES

MOST_PART = 4096
"""Bytes that a warp stores of a row, to each of its places."""
PART_STEP = 128
ALIGNMENT = 512
UNIT = np.dtype([("one", "<u8"), ("part", "<u2"), ("n", "u1"), ("kind", "u1"), ("reserved", "<u4")])
"""CompositeUnit of bench/native/cuda/kernels.h."""

Addresses = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Row:
    """Rows of one kind."""

    bytes: int
    """That are stored."""
    source_bytes: int
    """Bytes of a row where it is read."""
    most_part: int = MOST_PART

    @property
    def parts(self) -> int:
        return -(-self.bytes // self.most_part)

    @property
    def part_bytes(self) -> int:
        return -(-self.bytes // (self.parts * PART_STEP)) * PART_STEP


@dataclass(frozen=True)
class Moves:
    """Rows of one kind: an address each, and the others that belong to it, from the left."""

    row: Row
    one: Addresses
    others: Addresses
    """[rows, the most that one has]"""
    n: Ints
    """How many each has."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of a launch."""

    read: int
    written: int
    pushed: int
    """The part of them that goes to other GPUs."""


@dataclass(frozen=True)
class Work:
    """Arguments of a launch: units of one row's part each."""

    units: npt.NDArray[np.void]
    others: Addresses
    """[units, most]"""
    rows: tuple[Row, Row]
    traffic: Traffic


@dataclass(frozen=True)
class Places:
    """Memory of this rank's, and the area that every rank has."""

    area: tuple[int, ...]
    """Indexed by rank, mapped here: blocks of all sources' rows for dispatch, then for combine."""
    out: int
    """Rows as dispatch leaves them, payload and scales."""
    y: int
    x: int = 0
    expert_out: int = 0


class Geometry:
    """Where rows lie, and how long they are."""

    def __init__(self, shape: Shape) -> None:
        c = shape.config
        self._shape = shape
        self._row_bytes = tuple(int(c.row_bytes(op)) for op, _ in enumerate(PHASES))
        self._blocks = self._row_bytes[0] * shape.world * shape.tokens
        self._blocks += -self._blocks % ALIGNMENT
        self.area_bytes = self._blocks + self._row_bytes[1] * shape.world * shape.tokens
        self.fold = shape.options.dtype.itemsize if shape.quantised else 1
        """Bytes of a token that become one."""
        self.dtype = c.dtype
        placed = -(-(shape.payload_bytes + shape.scale_bytes) // 16) * 16
        self.sent = Row(self._row_bytes[0], shape.row_bytes)
        self.placed = Row(placed, placed)
        self.summed = Row(shape.row_bytes, shape.row_bytes)

    def slot(self, op: int, area: Addresses, source: Ints, row: Ints) -> Addresses:
        """Returns the addresses of sources' rows in such an area."""
        begin = self._blocks if op == 1 else 0
        return area + (begin + (source * self._shape.tokens + row) * self._row_bytes[op]).astype(np.uint64)

    def out_bytes(self, batch: Batch) -> int:
        places = batch.placement.place
        return (int(places.max()) + 1 if len(places) else 1) * self.placed.bytes


def _left(mask: Mask, addresses: Addresses) -> tuple[Addresses, Ints]:
    """Each row's addresses that the mask has, from the left; how many."""
    n = mask.sum(axis=1)
    order = np.argsort(~mask, axis=1, kind="stable")[:, : max(1, int(n.max(initial=0)))]
    return np.take_along_axis(addresses, order, axis=1), n


def _groups(of: Ints, addresses: Addresses) -> tuple[Ints, Addresses, Ints]:
    """The distinct numbers, and the addresses of each, from the left; how many."""
    order = np.argsort(of, kind="stable")
    distinct, first, n = np.unique(of[order], return_index=True, return_counts=True)
    others = np.zeros((len(distinct), int(n.max(initial=1))), dtype=np.uint64)
    which = np.repeat(np.arange(len(distinct)), n)
    others[which, np.arange(len(of)) - first[which]] = addresses[order]
    return distinct, others, n


def in_turns(kinds: tuple[Moves, Moves], traffic: Traffic) -> Work:
    """Both kinds take turns all along, so that the links and the memory are busy at the same time."""
    most = max(moves.others.shape[1] for moves in kinds)
    units, others, turns = [], [], []
    for kind, moves in enumerate(kinds):
        parts, n = moves.row.parts, len(moves.one)
        unit = np.zeros(n * parts, dtype=UNIT)
        unit["one"], unit["n"], unit["kind"] = np.repeat(moves.one, parts), np.repeat(moves.n, parts), kind
        unit["part"] = np.tile(np.arange(parts), n)
        units.append(unit)
        wide = np.zeros((n, most), dtype=np.uint64)
        wide[:, : moves.others.shape[1]] = moves.others
        others.append(np.repeat(wide, parts, axis=0))
        turns.append((np.arange(n * parts) + 0.5) / max(1, n * parts))
    order = np.argsort(np.concatenate(turns), kind="stable")
    return Work(np.concatenate(units)[order], np.concatenate(others)[order], (kinds[0].row, kinds[1].row), traffic)


class Plan:
    """One input's work."""

    def __init__(self, batch: Batch, geometry: Geometry, places: Places) -> None:
        shape = batch.shape
        self._batch, self._geometry, self._places = batch, geometry, places
        self._area = np.array(places.area, dtype=np.uint64)
        self._me = shape.rank
        self._ring = (shape.rank + 1 + np.arange(shape.world)) % shape.world
        """Other ranks first, each rank's next one first, oneself last: ranks do not all send to one at a time."""
        p = batch.placement
        distinct = np.unique(np.stack([p.source * shape.tokens + p.token, p.place]), axis=1)
        self._key, self._place = distinct[0], distinct[1]
        """Key and place of each received row, which is a source's token. With Compact, choices of a row share their place."""

    def _received(self, op: int) -> tuple[Ints, Ints, Ints]:
        """Received rows in the order in which all sources have them: source, row in its block, and which of `_key` it is."""
        tokens = self._batch.shape.tokens
        keys = np.unique(self._key)
        source, token = keys // tokens, keys % tokens
        row = self._batch.row[source, token, self._me]
        order = np.lexsort(((source - self._me - 1) % self._batch.shape.world, row))
        return source[order], row[order], order

    def _sent_rows(self, op: int) -> tuple[Mask, Addresses]:
        """[tokens, world]: whether, and where, each token has a row of that op, ranks from this one's next on."""
        row = self._batch.row[self._me][:, self._ring]
        if op == 0:  # at those that it goes to
            area, source = self._area[self._ring], np.full(len(self._ring), self._me)
        else:  # here, from those that it comes from
            area, source = np.full(len(self._ring), self._area[self._me]), self._ring
        return self._batch.wants[self._me][:, self._ring], self._geometry.slot(op, area[None], source[None], row)

    def _tokens(self, begin: int, row_bytes: int) -> Addresses:
        return (begin + np.arange(self._batch.shape.tokens) * row_bytes).astype(np.uint64)

    def dispatch(self) -> Work:
        g = self._geometry
        others, n = _left(*self._sent_rows(0))
        wanted = n > 0
        send = Moves(g.sent, self._tokens(self._places.x, g.sent.source_bytes)[wanted], others[wanted], n[wanted])
        places = (self._places.out + self._place * g.placed.bytes).astype(np.uint64)
        _, others, n = _groups(self._key, places)
        source, row, order = self._received(0)
        place = Moves(g.placed, g.slot(0, self._area[self._me], source, row), others[order], n[order])
        traffic = Traffic(
            read=len(send.one) * g.sent.source_bytes + len(place.one) * g.placed.bytes,
            written=int(send.n.sum()) * g.sent.bytes + int(place.n.sum()) * g.placed.bytes,
            pushed=self._to_others(self._batch.rows[self._me]) * g.sent.bytes,
        )
        return in_turns((send, place), traffic)

    def combine(self) -> Work:
        g = self._geometry
        answers = (self._places.expert_out + self._place * g.summed.bytes).astype(np.uint64)
        _, others, n = _groups(self._key, answers)
        source, row, order = self._received(1)
        back = g.slot(1, self._area[source], np.full_like(source, self._me), row)
        send = Moves(g.summed, back, others[order], n[order])
        others, n = _left(*self._sent_rows(1))
        wanted = n > 0
        add = Moves(g.summed, self._tokens(self._places.y, g.summed.bytes)[wanted], others[wanted], n[wanted])
        traffic = Traffic(
            read=(int(send.n.sum()) + int(add.n.sum())) * g.summed.bytes,
            written=(len(send.one) + len(add.one)) * g.summed.bytes,
            pushed=self._to_others(self._batch.rows[:, self._me]) * g.summed.bytes,
        )
        return in_turns((send, add), traffic)

    def _to_others(self, rows: Ints) -> int:
        return int(rows.sum() - rows[self._me])

    def of(self, phase: str) -> Work:
        return self.dispatch() if phase == "dispatch" else self.combine()


def mean_traffic(works: list[Work]) -> Traffic:
    names = [field.name for field in fields(Traffic)]
    return Traffic(*(round(math.fsum(getattr(work.traffic, name) for work in works) / len(works)) for name in names))
