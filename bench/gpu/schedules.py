"""The floor inside a node by schedule: the rows that a phase carries to other ranks, in an order, by pushes, pulls or bulk copies.

A rank pushes the rows that it sends, or pulls the rows that it gets, in the memory of the composite floor (composite.py). All
addresses are known beforehand. Nothing waits for a peer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.gpu.composite import MOST_PART, Geometry, Moves, Row, Traffic, Work, in_turns
from bench.harness.batch import Batch, Ints

MOST_BULK_PART = 8192
"""Bytes that a bulk copy stores of a row. MOST_PART is that of a warp's pushes and pulls."""


def _sorted(order: str, row: Ints, peer: Ints, seed: int) -> Ints:
    """Indices of rows that are given by token. `peer`: how many ranks behind this one."""
    match order:
        case "tokens":
            return np.arange(len(row))
        case "peers":
            return np.argsort(peer, kind="stable")
        case "shuffled":
            return np.random.default_rng(seed).permutation(len(row))
        case _:  # "runs-N": N rows of each peer in turn
            return np.lexsort((peer, row // int(order.removeprefix("runs-"))))


def schedule(batch: Batch, geometry: Geometry, area: Sequence[int], op: int, order: str, way: str) -> Work:
    """`area`: of every rank, mapped here. `op`: 0 for dispatch, 1 for combine."""
    me, world = batch.shape.rank, batch.shape.world
    # A rank gets in one phase the rows that it sends in the other one.
    sends = (op == 0) != (way == "pull")
    wants, rows = (of[me] if sends else of[:, :, me].T for of in (batch.wants, batch.row))  # [tokens, world]
    ring = (me + 1 + np.arange(world - 1)) % world
    token, peer = np.nonzero(wants[:, ring])
    row = rows[token, ring[peer]]
    chosen = _sorted(order, row, peer, batch.shape.options.seed + me)
    token, row, other = token[chosen], row[chosen], ring[peer[chosen]]
    mine = np.full_like(other, me)
    source, to = (other, mine) if way == "pull" else (mine, other)
    base, nbytes = np.array(area, dtype=np.uint64), int(batch.shape.config.row_bytes(op))
    moves = Moves(
        Row(nbytes, nbytes, MOST_BULK_PART if way == "bulk" else MOST_PART),
        geometry.slot(op, base[source], source, token),
        geometry.slot(op, base[to], source, row)[:, None],
        np.ones_like(row),
    )
    none = Moves(moves.row, moves.one[:0], moves.others[:0], moves.n[:0])
    return in_turns((moves, none), Traffic(*[len(row) * nbytes] * 3))
