"""The expected results, in plain torch. `Wrong` says what differs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from bench.harness.batch import Batch
from bench.harness.quantise import number
from pplx_comm.handles import Dispatched
from pplx_comm.wire import Wire

E4M3_RELATIVE = 2.0**-4
"""Half a step of three mantissa bits."""
E4M3_ABSOLUTE = 2.0**-10
"""Half a step of the subnormals, in units of the scale."""


class Wrong(Exception):
    """A result that is not what the reference says."""


def _first(differs: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in differs.nonzero()[0])


def _equal(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if got.shape != expected.shape:
        raise Wrong(f"{what} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    differs = got != expected.to(got.dtype)
    if differs.any():
        at = _first(differs)
        raise Wrong(
            f"{what}{list(at)} is {got[at].item()}, expected {expected[at].item()} "
            f"({int(differs.sum())} of {differs.numel()} differ)"
        )


def _same_bits(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(rows.view(torch.int32), expected.view(torch.int32))


def check_rows(batch: Batch, rows: torch.Tensor, scales: torch.Tensor | None, source: torch.Tensor, token: torch.Tensor) -> None:
    """Received rows against the tokens that they must be: the same bits, or as close as e4m3 can come."""
    for rank in range(batch.shape.world):
        mine = (source == rank).nonzero()[:, 0]
        if len(mine) == 0:
            continue
        got, tokens = rows[mine], token[mine]
        if scales is None:
            expected = batch.x_of(rank)[tokens]
            if not _same_bits(got, expected):
                _equal(f"rows received from rank {rank}: x", got, expected)
            continue
        codes, their_scales = batch.quantised_x_of(rank)
        if not (_same_bits(got, codes[tokens]) and torch.equal(scales[mine], their_scales[tokens])):
            _check_decoded(batch.shape.wire, rank, tokens, got, scales[mine], batch.x_of(rank)[tokens])


def _check_decoded(wire: Wire, rank: int, tokens: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> None:
    """Another order of operations rounds differently; every e4m3 quantiser keeps within this bound."""
    blocks = torch.repeat_interleave(number(wire, scales), wire.scale_block, dim=1)[:, : x.shape[1]]
    exact, decoded = x.float(), codes.float() * blocks
    bound = torch.maximum(exact.abs() * E4M3_RELATIVE, blocks * E4M3_ABSOLUTE) * (1 + 2.0**-16)
    bad = ~((decoded - exact).abs() <= bound)
    if bad.any():
        at = _first(bad)
        raise Wrong(
            f"token {int(tokens[at[0]])} from rank {rank} decodes to {decoded[at].item():.6g} at {at[1]}, where it was "
            f"{exact[at].item():.6g} ({int(bad.sum())} of {bad.numel()} elements beyond e4m3's rounding)"
        )


def check_dispatched(batch: Batch, d: Dispatched) -> None:
    shape, p = batch.shape, batch.placement
    hidden = shape.options.hidden
    place, source, token = (torch.from_numpy(array) for array in (p.place, p.source, p.token))
    _equal("d.counts", d.counts, torch.from_numpy(p.counts))
    if d.offsets is not None:
        _equal("d.offsets", d.offsets, torch.from_numpy(p.offsets))
    _equal("d.src_rank", d.src_rank.reshape(-1)[place], source)
    _equal("d.src_token", d.src_token.reshape(-1)[place], token)
    weights = torch.zeros(len(place))
    for rank in range(shape.world):
        mine = source == rank
        weights[mine] = batch.weights_of(rank)[token[mine], torch.from_numpy(p.k)[mine]]
    if d.topk_ids is not None and d.topk_weights is not None and d.num_rows is not None:
        rows = int(batch.rows[:, shape.rank].sum())
        _equal("d.num_rows", d.num_rows, torch.tensor([rows]))
        ids = torch.full((rows, shape.options.top_k), -1, dtype=torch.int64)
        ids[place, torch.from_numpy(p.k)] = torch.from_numpy(p.expert)
        _equal("d.topk_ids", d.topk_ids[:rows], ids)
        _equal("d.topk_weights", d.topk_weights[place, torch.from_numpy(p.k)], weights)
    elif d.weights is not None:
        _equal("d.weights", d.weights.reshape(-1)[place], weights)
    scales = None if d.scale is None else d.scale.reshape(-1, d.scale.shape[-1])[place]
    check_rows(batch, d.x.reshape(-1, hidden)[place], scales, source, token)


def combined(batch: Batch, table: torch.Tensor, compact: bool, nodes: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the expected result of combine, in the library's own order of roundings, and the magnitudes that errors scale
    with. nodes: of ranks, whose rows are added first; none: all are of one."""
    shape = batch.shape
    values, dest = batch.value_of(shape.rank, compact), batch.dest[shape.rank]
    weights = batch.topk_weights
    total = torch.zeros(shape.tokens, shape.options.hidden)
    magnitude = torch.zeros_like(total)
    groups = nodes if len(set(nodes)) > 1 else tuple(range(shape.world))
    of_node = {node: torch.zeros_like(total) for node in sorted(groups)}
    for rank in range(shape.world):
        partial = torch.zeros_like(total)
        for k in range(shape.options.top_k):
            here = dest[:, k] == rank
            if compact:
                # One row per token and rank, not one per choice.
                here &= (dest[:, :k] != rank).all(axis=1)
            tokens = torch.from_numpy(np.nonzero(here)[0])
            if len(tokens) == 0:
                continue
            rows = table[torch.from_numpy(values[here, k])].float()
            term = rows if compact else rows * weights[tokens, k, None]
            partial[tokens] += term
            magnitude[tokens] += term.abs()
        of_node[groups[rank]] += partial.to(shape.options.dtype).float()
    for partial in of_node.values():
        total += partial.to(shape.options.dtype).float()
    return total.to(shape.options.dtype), magnitude


def check_combined(y: torch.Tensor, expected: torch.Tensor) -> None:
    """The library's result: every bit must be right."""
    if not torch.equal(y, expected):
        _equal("combine: y", y, expected)


def check_close(y: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Another library's result, whose order of sums and roundings is its own."""
    bound = 4 * torch.finfo(y.dtype).eps * magnitude + 1e-6
    bad = ~((y.float() - expected.float()).abs() <= bound)
    if bad.any():
        at = _first(bad)
        raise Wrong(
            f"combine: y{list(at)} is {y[at].item()}, expected {expected[at].item()} ({int(bad.sum())} of {bad.numel()} too far)"
        )


class Checks:
    """One iteration's results against the reference.

    Notes what is wrong rather than raise it: a rank that left in the middle would let the others wait.
    """

    def __init__(self, batch: Batch, table: torch.Tensor, notes: list[str]) -> None:
        self._batch = batch
        self._table = table
        self._notes = notes
        self._sums: dict[tuple[int, ...], torch.Tensor] = {}

    @cached_property
    def _expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        return combined(self._batch, self._table, compact=False)

    def _expected_of_ours(self, nodes: tuple[int, ...]) -> torch.Tensor:
        if nodes not in self._sums:
            self._sums[nodes] = combined(self._batch, self._table, self._batch.shape.compact, nodes)[0]
        return self._sums[nodes]

    def _note(self, backend: str, check: Callable[[], None]) -> None:
        try:
            check()
        except Wrong as wrong:
            shape = self._batch.shape
            self._notes.append(f"{backend}, {shape.tokens} tokens, rank {shape.rank}, iteration {self._batch.iteration}: {wrong}")

    def dispatched(self, backend: str, d: Dispatched) -> None:
        self._note(backend, lambda: check_dispatched(self._batch, d))

    def combined(self, backend: str, y: torch.Tensor, nodes: tuple[int, ...] = ()) -> None:
        self._note(backend, lambda: check_combined(y, self._expected_of_ours(nodes)))

    def rows(self, backend: str, rows: torch.Tensor, scales: torch.Tensor | None) -> None:
        """A peer's received rows, by expert without gaps."""
        p = self._batch.placement
        self._note(
            backend,
            lambda: check_rows(self._batch, rows, scales, torch.from_numpy(p.source), torch.from_numpy(p.token)),
        )

    def close(self, backend: str, y: torch.Tensor) -> None:
        self._note(backend, lambda: check_close(y, *self._expected))
