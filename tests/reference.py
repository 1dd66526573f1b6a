"""Expected results of dispatch and combine, in plain torch, from docs/design.md alone: nothing here is shared with the library.

Every result is meant to the last bit: sums in fp32, multiply then add, each rounded; choices in k order; every rank's partial
sum rounded to the row's dtype; ranks ascending; one rounding at the end. With several nodes, the rows of a node's ranks are added first,
ranks ascending, and rounded to the row's dtype; then nodes ascending.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BLOCK = {"fp8": 128, "fp8_ue8m0": 128, "mxfp8": 32}  # elements of a row that share a scale


@dataclass(frozen=True)
class Shape:
    """The part of a configuration that results follow from."""

    world_size: int
    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    dtype: torch.dtype = torch.bfloat16
    wire: str = "native"
    layout: str = "ragged"  # or padded, compact
    align: int = 1
    rows: int | None = None  # Ragged(max_rows=), Padded(max_tokens_per_expert=); None: no limit
    replicas: int = 1  # ranks in a row that hold the same tokens; those of them that live send them in turn
    dead: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()  # the node of each rank; none: all are of one
    combine_fp8: bool = False  # sums of other nodes travel as codes and scales

    @property
    def quantised(self) -> bool:
        return self.wire != "native"

    @property
    def experts_per_rank(self) -> int:
        return -(-self.num_experts // self.world_size)

    def sends(self, rank: int, tokens: int) -> torch.Tensor:
        """[tokens]: whether this rank is the one that sends the token."""
        first = rank - rank % self.replicas
        living = [r for r in range(first, first + self.replicas) if r not in self.dead]
        return torch.tensor([living[t % len(living)] == rank for t in range(tokens)], dtype=torch.bool)

    @property
    def added_first(self) -> list[list[int]]:
        """Ranks whose rows are added, and rounded, before they are added to others': those of each of several nodes."""
        if len(set(self.nodes)) < 2:
            return [[rank] for rank in range(self.world_size)]
        return [[rank for rank in range(self.world_size) if self.nodes[rank] == node] for node in sorted(set(self.nodes))]

    def experts_of(self, rank: int) -> range:
        first = min(rank * self.experts_per_rank, self.num_experts)
        return range(first, min(first + self.experts_per_rank, self.num_experts))


@dataclass
class Tokens:
    """A rank's input to one step."""

    x: torch.Tensor  # [tokens, hidden]; e4m3 if the caller quantised
    ids: torch.Tensor  # int32 or int64 [tokens, top_k]
    weights: torch.Tensor | None  # float32 [tokens, top_k]
    x_scale: torch.Tensor | None = None

    @property
    def effective_weights(self) -> torch.Tensor:
        return torch.ones(self.ids.shape) if self.weights is None else self.weights


def as_bits(t: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(integers[t.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bits(a), as_bits(b))


# ---- FP8 -----------------------------------------------------------------------------------------------------------------


POWERS = torch.arange(-127, 128, dtype=torch.float64).exp2()


def block_scales(wire: str, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scale for a float32 amax, and the factor of the values, as float64."""
    none = torch.ones((), dtype=torch.float64)
    if wire == "fp8":
        # Below 2^-118 the reciprocal would overflow: such a block uses the smallest normal scale.
        tiny = amax.double() < 2.0**-118
        scale = torch.where(tiny, torch.full((), 2.0**-126), amax / 448.0).double()
        factor = torch.where(tiny, torch.full((), 2.0**126), torch.full((), 448.0) / amax).double()
    else:
        # The first of the powers, 2^-127 to 2^127, that is at least amax / 448. Products with 448 are exact in float64.
        scale = POWERS[torch.searchsorted(POWERS * 448.0, amax.double().nan_to_num(0.0, 0.0, 0.0))]
        factor = 1.0 / scale
    zero, bad = amax == 0, ~amax.isfinite()
    scale, factor = torch.where(zero, none, scale), torch.where(zero, none, factor)
    return torch.where(bad, none * torch.nan, scale), torch.where(bad, none * torch.nan, factor)


def quantise(x: torch.Tensor, wire: str = "fp8") -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [rows, hidden], and scales as they travel: [rows, blocks] float32, or uint8 on mxfp8."""
    rows, hidden = x.shape
    block = BLOCK[wire]
    blocks = -(-hidden // block)
    padded = torch.zeros(rows, blocks * block)
    padded[:, :hidden] = x.float()
    values = padded.view(rows, blocks, block)
    scale, factor = block_scales(wire, values.abs().amax(dim=2))
    # A product of float32 is exact in float64, and its rounding to float32 is the one that the format asks for.
    scaled = (values.double() * factor[:, :, None]).float()
    codes = as_bits(scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn))
    codes = torch.where(scale.isnan()[:, :, None], 0x7F, codes).to(torch.uint8).view(torch.float8_e4m3fn)
    if wire == "mxfp8":
        exponent = torch.frexp(scale.nan_to_num(1.0))[1] - 1
        stored = torch.where(scale.isnan(), 0xFF, exponent + 127).to(torch.uint8)
    else:
        stored = torch.where(scale.isnan(), torch.nan, scale).float()
    return codes.view(rows, blocks * block)[:, :hidden].contiguous(), stored


def scale_numbers(scale: torch.Tensor) -> torch.Tensor:
    """Decodes scales, as float64."""
    if scale.dtype != torch.uint8:
        return scale.double()
    return torch.where(scale == 0xFF, torch.nan, POWERS[scale.long().clamp(max=254)])


def dequantise(codes: torch.Tensor, scale: torch.Tensor, wire: str = "fp8") -> torch.Tensor:
    hidden = codes.shape[-1]
    return codes.float() * scale_numbers(scale).float().repeat_interleave(BLOCK[wire], dim=-1)[..., :hidden]


def payload(shape: Shape, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the rows that travel, one a token, and their scales."""
    if not shape.quantised:
        return tokens.x, None
    if tokens.x_scale is not None:
        return tokens.x, tokens.x_scale
    return quantise(tokens.x, shape.wire)


# ---- dispatch --------------------------------------------------------------------------------------------------------------


@dataclass
class Segment:
    """The rows that one expert gets, in their order."""

    source: torch.Tensor
    token: torch.Tensor
    choice: torch.Tensor
    weight: torch.Tensor


def segments(shape: Shape, everybody: list[Tokens], rank: int) -> list[Segment]:
    """Returns for each local expert its rows in (source, token, choice) order."""
    result = []
    for expert in shape.experts_of(rank):
        parts = []
        for source, tokens in enumerate(everybody):
            sent = shape.sends(source, tokens.ids.shape[0])[:, None]
            at = ((tokens.ids == expert) & sent).reshape(-1).nonzero().reshape(-1)
            parts.append(
                (torch.full_like(at, source), at // shape.top_k, at % shape.top_k, tokens.effective_weights.reshape(-1)[at])
            )
        columns: list[Any] = [torch.cat(column) for column in zip(*parts, strict=True)]
        result.append(Segment(*columns))
    return result


def places(shape: Shape, counts: list[int]) -> tuple[list[int], list[int]]:
    """Where each expert's rows start, with the end behind them, and how many of its rows the buffer holds."""
    starts, fits, at = [], [], 0
    for e, count in enumerate(counts):
        if shape.layout == "padded":
            assert shape.rows is not None
            starts.append(e * shape.rows)
            fits.append(min(count, shape.rows))
            continue
        starts.append(at)
        fits.append(count if shape.rows is None else max(0, min(count, shape.rows - at)))
        at = -(-(at + count) // shape.align) * shape.align
    return [*starts, at], fits


def compact_rows(shape: Shape, everybody: list[Tokens], rank: int) -> list[tuple[int, int]]:
    """(source, token) of each row, in order."""
    experts = shape.experts_of(rank)
    rows = []
    for source, tokens in enumerate(everybody):
        here = ((tokens.ids >= experts.start) & (tokens.ids < experts.stop)).any(dim=1) & shape.sends(source, tokens.ids.shape[0])
        rows += [(source, int(t)) for t in here.nonzero().reshape(-1)]
    return rows


def overflows(shape: Shape, everybody: list[Tokens], rank: int) -> bool:
    if shape.rows is None or shape.layout == "compact":
        return False
    counts = [len(s.token) for s in segments(shape, everybody, rank)]
    if shape.layout == "padded":
        return any(count > shape.rows for count in counts)
    return places(shape, counts)[0][-1] > shape.rows


# ---- experts -----------------------------------------------------------------------------------------------------------------


def expert(shape: Shape, experts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Something that depends on the expert and on every element, the same wherever it is computed: [n], fp32 [n, hidden]."""
    gain = (experts.float() % 7 - 3) * 0.25 + 0.125
    offset = (experts.float() % 5 - 2) * 0.5
    return (rows * gain[:, None] + offset[:, None]).to(shape.dtype)


# ---- combine -----------------------------------------------------------------------------------------------------------------


def combine(
    shape: Shape,
    everybody: list[Tokens],
    rank: int,
    *,
    weights: torch.Tensor | None = None,
    weighted: bool = True,
    start: torch.Tensor | None = None,
    alive: list[bool] | None = None,
) -> torch.Tensor:
    """y of that rank: weights override the dispatch's; start is what accumulate=True adds to."""
    mine = everybody[rank]
    count = mine.ids.shape[0]
    codes, scale = payload(shape, mine)
    rows = codes.float() if scale is None else dequantise(codes, scale, shape.wire)
    w = mine.effective_weights if weights is None else weights
    kept = _kept(shape, everybody, rank)
    total = torch.zeros(count, shape.hidden) if start is None else start.float()
    owner = torch.where(mine.ids < 0, -1, mine.ids // shape.experts_per_rank)

    def partial_of(other: int) -> torch.Tensor:
        partial = torch.zeros(count, shape.hidden)
        for k in range(shape.top_k):
            use = ((owner[:, k] == other) & kept[:, k]).nonzero().reshape(-1)
            if not len(use):
                continue
            out = expert(shape, mine.ids[use, k], rows[use]).float()
            if weighted:
                out = w[use, k][:, None] * out
            partial[use] = partial[use] + out
        return partial.to(shape.dtype).float()

    for ranks in shape.added_first:
        of_node, some = torch.full((count, shape.hidden), -0.0), torch.zeros(count, dtype=torch.bool)
        for other in ranks:
            touched = (owner == other).any(dim=1)
            if alive is None or alive[other]:
                of_node[touched] = of_node[touched] + partial_of(other)[touched]
                some |= touched
        sums = of_node[some].to(shape.dtype)
        if shape.combine_fp8 and shape.nodes[ranks[0]] != shape.nodes[rank]:
            sums = dequantise(*quantise(sums), "fp8").to(shape.dtype)
        total[some] = total[some] + sums.float()
    return total.to(shape.dtype)


def _kept(shape: Shape, everybody: list[Tokens], rank: int) -> torch.Tensor:
    """[tokens, top_k]: whether the choice fitted into the buffer of its rank."""
    kept = torch.ones(everybody[rank].ids.shape, dtype=torch.bool)
    if shape.rows is None or shape.layout == "compact":
        return kept
    for other in range(shape.world_size):
        found = segments(shape, everybody, other)
        _, fits = places(shape, [len(s.token) for s in found])
        for segment, fit in zip(found, fits, strict=True):
            ours = segment.source // shape.replicas == rank // shape.replicas  # ranks that hold the same tokens lack the same
            lost = (torch.arange(len(segment.token)) >= fit) & ours
            kept[segment.token[lost], segment.choice[lost]] = False
    return kept


def tail(shape: Shape, everybody: list[Tokens], rank: int, given: torch.Tensor) -> torch.Tensor:
    """Returns the tails that come back to that rank, where `given` [tokens, top_k] was attached to its choices: 0 where a choice
    went nowhere."""
    return (
        torch.where((everybody[rank].ids >= 0) & _kept(shape, everybody, rank), as_bits(given), 0)
        .to(torch.int32)
        .view(torch.float32)
    )
