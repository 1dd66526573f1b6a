"""Which tile of which expert a program of a persistent grid takes next, from offsets that only the device knows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tiles_before(offsets, experts, columns, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """By expert, how many tiles those up to and with it have: [EXPERTS], of which the last entries repeat the total.

    EXPERTS: a power of two, at least `experts`. columns: tiles side by side. ROWS: of a tile.
    """
    each = tl.arange(0, EXPERTS)
    begin = tl.load(offsets + each, mask=each < experts, other=0)
    end = tl.load(offsets + each + 1, mask=each < experts, other=0)
    return tl.cumsum((end - begin + ROWS - 1) // ROWS * columns, 0)


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
