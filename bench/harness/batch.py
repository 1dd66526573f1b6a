"""The batch of one iteration: routing, values, and where every row must land.

A function of seed, iteration and rank, so that all backends, and all ranks for the reference, see the same.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

import pplx_comm._core as _core
from bench import _instruments
from bench.harness.options import Options
from bench.harness.quantise import quantise
from pplx_comm.layouts import Compact, Layout, Padded, Ragged
from pplx_comm.wire import Wire
from pplx_comm.wiring.config import make_config

Ints = npt.NDArray[np.int64]

ROTATION = 4
"""Token tensors that take turns, as a model's layers do; one that is always the same would live in the cache."""

REFERENCE_BYTES = 64 << 20
"""How much of other ranks' tokens is kept rather than made again."""

VALUES = 61
"""Distinct rows that the experts put out. Prime, so that neighbouring tokens, experts and ranks differ."""


@dataclass(frozen=True)
class Shape:
    """The layer at one number of tokens per rank, as one rank sees it."""

    options: Options
    tokens: int
    rank: int
    world: int

    @cached_property
    def layout(self) -> Layout:
        """With room for the worst case, which is taken without asking up to 1 GiB only."""
        o, everybody = self.options, self.world * self.tokens
        if isinstance(o.layout, Ragged) and o.layout.max_rows is None:
            choices, align = everybody * o.top_k, o.layout.align
            gaps = min(-(-o.experts // self.world), choices) * (align - 1)
            return replace(o.layout, max_rows=-(-(choices + gaps) // align) * align)
        if isinstance(o.layout, Padded) and o.layout.max_tokens_per_expert is None:
            return replace(o.layout, max_tokens_per_expert=everybody)
        return o.layout

    @cached_property
    def config(self) -> _core.Config:
        return self._config(None)

    def _config(self, slot_bytes: int | None) -> _core.Config:
        o = self.options
        return make_config(
            self.world, self.rank, num_experts=o.experts, top_k=o.top_k, hidden=o.hidden,
            max_tokens_per_rank=self.tokens, dtype=o.dtype, wire=o.wire, layout=self.layout, in_flight=1,
            scale_layout="row", slot_bytes=slot_bytes,
        )  # fmt: skip

    @property
    def in_pieces(self) -> bool:
        """True if blocks of max_tokens rows do not fit --slot-bytes."""
        return bool(self._config(self.options.slot_bytes).in_pieces)

    @property
    def wire(self) -> Wire:
        return Wire.of(self.options.wire)

    @property
    def quantised(self) -> bool:
        return self.wire.quantised

    @property
    def compact(self) -> bool:
        return isinstance(self.options.layout, Compact)

    @property
    def row_bytes(self) -> int:
        """A token in its own dtype: what comes in, and what combine carries."""
        return self.options.hidden * self.options.dtype.itemsize

    @property
    def payload_bytes(self) -> int:
        """A token as dispatch carries it, without scales."""
        return int(self.config.payload_bytes)

    @property
    def scale_bytes(self) -> int:
        return int(self.config.scale_bytes)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of d.x."""
        c = self.config
        rows = (c.local_experts, c.max_per_expert) if isinstance(self.options.layout, Padded) else (c.max_rows,)
        return (*rows, self.options.hidden)

    @property
    def out_rows(self) -> int:
        """Rows of d.x seen as [rows, hidden]."""
        return math.prod(self.out_shape[:-1])


@dataclass(frozen=True)
class Placement:
    """The local choices that this rank receives, by (expert, source, token, k), and where each lands in d.x."""

    source: Ints
    token: Ints
    k: Ints
    expert: Ints
    """Its number on this rank."""
    counts: Ints
    offsets: Ints
    """Ragged: where each expert's rows start, and the end."""
    place: Ints
    """Row of d.x seen as [rows, hidden]. Compact: of the token that the choice belongs to."""


def _rng(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


class Batch:
    """One iteration."""

    def __init__(self, source: Source, iteration: int) -> None:
        self.shape = shape = source.shape
        self.iteration = iteration
        self._source = source
        per_rank = shape.config.experts_per_rank
        self.ids: Ints = np.stack([source.ids(iteration, rank) for rank in range(shape.world)])
        """[world, tokens, top_k]"""
        self.dest: Ints = self.ids // per_rank
        """The rank of each choice."""
        self.wants = np.zeros((shape.world, shape.tokens, shape.world), dtype=bool)
        """[source, token, destination]"""
        np.put_along_axis(self.wants, self.dest, True, axis=2)
        self.row = np.cumsum(self.wants, axis=1) - 1
        """[source, token, destination]: the token's row in that block, where it has one."""
        self.rows: Ints = self.wants.sum(axis=1)
        """[source, destination]"""
        self.x = source.x(iteration, shape.rank)
        self.topk_ids = torch.from_numpy(self.ids[shape.rank].copy())
        self.topk_weights = source.weights(iteration, shape.rank)
        self.first_expert = shape.rank * per_rank

    @property
    def expert_out(self) -> torch.Tensor:
        """Returns the experts' answers, laid out as d.x."""
        return self._source.expert_out

    @property
    def expert_out_by_expert(self) -> torch.Tensor:
        """The answers by (expert, source, token, k), without gaps. With Compact, too, there is one for each choice."""
        return self._source.answers[: len(self.placement.expert)]

    def run_experts(self) -> None:
        """Writes the answers, as the experts would have just before combine."""
        self._source.answer(
            self.received_values(compact=False), self.received_values(compact=self.shape.compact), self.placement.place
        )

    def x_of(self, rank: int) -> torch.Tensor:
        return self._source.x(self.iteration, rank)

    def quantised_x_of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._source.quantised_x(self.iteration, rank)

    def weights_of(self, rank: int) -> torch.Tensor:
        return self._source.weights(self.iteration, rank)

    @cached_property
    def placement(self) -> Placement:
        shape, c = self.shape, self.shape.config
        source, token, k = np.nonzero(self.dest == shape.rank)
        expert = self.ids[source, token, k] - self.first_expert
        order = np.argsort(expert, kind="stable")
        source, token, k, expert = source[order], token[order], k[order], expert[order]
        counts = np.bincount(expert, minlength=c.local_experts)
        offsets = np.zeros(c.local_experts + 1, dtype=np.int64)
        np.cumsum(-(-counts // c.align) * c.align, out=offsets[1:])
        if shape.compact:
            begins = np.concatenate([[0], np.cumsum(self.rows[:, shape.rank])])
            place = begins[source] + self.row[source, token, shape.rank]
        else:
            begins = np.arange(c.local_experts) * c.max_per_expert if isinstance(shape.options.layout, Padded) else offsets
            first_of_expert = np.cumsum(counts) - counts
            place = begins[expert] + np.arange(len(expert)) - first_of_expert[expert]
        return Placement(source, token, k, expert, counts, offsets, place)

    def value_of(self, rank: int, compact: bool) -> Ints:
        """[tokens, top_k]: which of the table's rows the experts answer with to a rank's choices.

        compact: one answer per token and destination, the same for all choices there.
        """
        token = np.arange(self.shape.tokens)[:, None]
        return np.asarray((31 * rank + 17 * token + 7 * (self.dest if compact else self.ids)[rank]) % VALUES)

    def received_values(self, compact: bool) -> Ints:
        """value_of() for the choices of the placement."""
        p = self.placement
        target = np.full_like(p.expert, self.shape.rank) if compact else p.expert + self.first_expert
        return np.asarray((31 * p.source + 17 * p.token + 7 * target) % VALUES)


class Source:
    """Makes the batches of one shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        options = shape.options
        generator = torch.Generator().manual_seed(options.seed)
        self.table = torch.randn(VALUES, options.hidden, generator=generator).to(options.dtype)
        """Rows that the experts answer with."""
        popularity = 1.0 / np.arange(1, options.experts + 1)
        self._popularity = _rng(options.seed, 77).permutation(popularity).astype(np.float32)
        self.expert_out = torch.empty(shape.out_shape, dtype=options.dtype)
        self._copier = _instruments.Copier(1)
        self.answers = torch.empty(0, options.hidden, dtype=options.dtype)
        # Only the reference needs other ranks' tokens, plain and as e4m3.
        kept = max(shape.world, min(ROTATION * shape.world, REFERENCE_BYTES // (shape.tokens * shape.row_bytes)))
        self._x = functools.lru_cache(maxsize=kept)(self._make_x)
        self._quantised_x = functools.lru_cache(maxsize=kept)(self._quantise)
        self._own_x = [self._make_x(turn, shape.rank) for turn in range(ROTATION)]

    def ids(self, iteration: int, rank: int) -> Ints:
        o, tokens = self.shape.options, self.shape.tokens
        if o.routing == "one-hot":
            return np.tile(np.arange(o.top_k), (tokens, 1))
        # The top_k smallest of exponential clocks: without replacement, with these odds.
        clocks = _rng(o.seed, iteration, rank, 0).standard_exponential((tokens, o.experts), dtype=np.float32)
        if o.routing == "zipf":
            clocks /= self._popularity
        return np.argpartition(clocks, o.top_k - 1, axis=1)[:, : o.top_k].astype(np.int64)

    def weights(self, iteration: int, rank: int) -> torch.Tensor:
        raw = _rng(self.shape.options.seed, iteration, rank, 1).random(
            (self.shape.tokens, self.shape.options.top_k), dtype=np.float32
        )
        raw += 0.1
        return torch.from_numpy(raw / raw.sum(axis=1, keepdims=True))

    def x(self, iteration: int, rank: int) -> torch.Tensor:
        turn = iteration % ROTATION
        return self._own_x[turn] if rank == self.shape.rank else self._x(turn, rank)

    def quantised_x(self, iteration: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes, and the scales of their blocks."""
        return self._quantised_x(iteration % ROTATION, rank)

    def _quantise(self, turn: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return quantise(self.shape.wire, self.x(turn, rank))

    def _make_x(self, turn: int, rank: int) -> torch.Tensor:
        o, tokens = self.shape.options, self.shape.tokens
        generator = torch.Generator().manual_seed(int(_rng(o.seed, turn, rank, tokens).integers(1 << 62)))
        x = torch.randn(tokens, o.hidden, generator=generator)
        # Tokens of different size, so that no two have the same scales.
        return (x * torch.exp2(torch.arange(tokens) % 5)[:, None]).to(o.dtype)

    def answer(self, by_expert: Ints, in_place: Ints, place: Ints) -> None:
        if len(self.answers) < len(by_expert):
            self.answers = torch.empty(len(by_expert), *self.table.shape[1:], dtype=self.table.dtype)
        torch.index_select(self.table, 0, torch.from_numpy(by_expert), out=self.answers[: len(by_expert)])
        size = self.shape.row_bytes
        to, source = self.expert_out.data_ptr() + place * size, self.table.data_ptr() + in_place * size
        self._copier.run(np.stack([to, source, np.full_like(to, size)], axis=1), "copy")

    def batch(self, iteration: int) -> Batch:
        return Batch(self, iteration)
