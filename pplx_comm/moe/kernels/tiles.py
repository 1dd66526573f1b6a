"""Finds the next tile of a program in a persistent grid, and its expert, from counts that only the device knows.

`where`, `experts` and `room` say where each expert's rows are: see pplx_comm.moe.segments. EXPERTS is a power of two, at least
`experts`; PADDED is whether there is a room; ROWS are those of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def segment(where, expert, room, PADDED: tl.constexpr):
    """Begin and end of an expert's rows."""
    if PADDED:
        begin = expert * room
        end = begin + tl.minimum(tl.load(where + expert), room)
    else:
        begin = tl.load(where + expert)
        end = tl.load(where + expert + 1)
    return begin, end


@triton.jit
def tiles_before(where, experts, room, columns, EXPERTS: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Inclusive prefix sums of the experts' tiles: [EXPERTS]. The last entries repeat the total.

    columns: tiles side by side.
    """
    each = tl.arange(0, EXPERTS)
    rows = tl.load(where + each, mask=each < experts, other=0)
    rows = tl.minimum(rows, room) if PADDED else tl.load(where + each + 1, mask=each < experts, other=0) - rows
    return tl.cumsum((rows + ROWS - 1) // ROWS * columns, 0)


@triton.jit
def find_expert(tile, ends):
    """The expert of a tile, and the number of the expert's first tile."""
    passed = ends <= tile
    return tl.sum(passed.to(tl.int32), 0), tl.max(tl.where(passed, ends, 0), 0)


@triton.jit
def in_supergroups(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile among rows x columns of them.

    Row after row within a group of GROUP rows, then the next column: what programs at work at one time share of both operands stays
    in the L2 cache. A group does not reach into the next expert, whose weights are others.
    """
    wide = GROUP * columns
    first = tile // wide * GROUP
    high = tl.minimum(rows - first, GROUP)
    within = tile % wide
    return first + within % high, within // high


@triton.jit
def row_tiles(where, experts, room, blocks, EXPERTS: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Tiles of a kernel that takes rows in memory order, `blocks` side by side: tiles_before() of Padded, and the number of tiles.
    Ragged's segments follow one another, so the end of one does not matter. The first one may begin anywhere.
    """
    ends = tiles_before(where, experts, room, blocks, EXPERTS, ROWS, PADDED)
    return ends, tl.max(ends, 0) if PADDED else tl.cdiv(tl.load(where + experts) - tl.load(where), ROWS) * blocks


@triton.jit
def rows_of_tile(tile, ends, where, experts, room, blocks, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Returns a tile's first rows, their end, its block, and its expert, which is 0 with Ragged."""
    if PADDED:
        expert, first = find_expert(tile, ends)
        begin, end = segment(where, expert, room, PADDED)
        rows = begin + (tile - first) // blocks * ROWS + tl.arange(0, ROWS)
        block = (tile - first) % blocks
    else:
        expert = tl.full((), 0, tl.int32)
        end = tl.load(where + experts)
        rows = tl.load(where) + tile // blocks * ROWS + tl.arange(0, ROWS)
        block = tile % blocks
    return rows, end, block, expert


@triton.jit
def scales_of(scales, rows, expert, row_stride, skew):
    """Where rows have their first scale. skew: how much further an expert's are than its rows say; 0 with Ragged."""
    return scales + expert.to(tl.int64) * skew + rows.to(tl.int64) * row_stride
