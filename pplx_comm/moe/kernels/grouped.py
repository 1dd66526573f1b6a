"""The grouped product in bfloat16 and float16, and both products of its backward pass:
persistent, over rows as dispatch writes them.

The grid is as large as the GPU. Its programs read the offsets on the device, so nothing is compiled or launched anew for another
routing, and the host waits for nothing. Tiles of an expert go in supergroups (tiles.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pplx_comm.moe.kernels.tiles import find_expert, in_supergroups, segment, tiles_before


@triton.jit
def load_tile(source, row, column, row_end, column_end, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """ROWS x COLUMNS of a row-major matrix: by its descriptor, or by its pointer and the ends within which to read.

    A descriptor reads zeros outside of the whole matrix only: what it finds behind an end inside of it is another expert's.
    """
    if TMA:
        return source.load([row, column])
    else:
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        inside = (rows < row_end)[:, None] & (columns < column_end)[None, :]
        return tl.load(source + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def rows_by_weights(
    x, w, where, out, experts, room, rows, inner, width,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TRANSPOSED: tl.constexpr, TMA: tl.constexpr,
    ROWS: tl.constexpr, SIDE: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """out[rows, width] = x[rows, inner] @ w. w is [experts * width, inner], and with TRANSPOSED [experts * inner, width].

    FLAT: one loop over all blocks of all tiles, so that a tile's first blocks are loaded while the one before it is stored.
    """
    columns = tl.cdiv(width, SIDE)
    ends = tiles_before(where, experts, room, columns, EXPERTS, ROWS, PADDED)
    total = tl.max(ends, 0)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLAT):
        expert, first_tile = find_expert(tile, ends)
        begin, end = segment(where, expert, room, PADDED)
        row_tile, column_tile = in_supergroups(tile - first_tile, tl.cdiv(end - begin, ROWS), columns, GROUP)
        row, column = begin + row_tile * ROWS, column_tile * SIDE
        sums = tile_of_product(x, w, expert, row, column, rows, inner, width, TRANSPOSED, TMA, ROWS, SIDE, INNER)
        store_tile(out, sums, row, column, end, width)


@triton.jit
def tile_of_product(
    x, w, expert, row, column, rows, inner, width,
    TRANSPOSED: tl.constexpr, TMA: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """ROWS x SIDE of what rows_by_weights says, in float32."""
    sums = tl.zeros((ROWS, SIDE), dtype=tl.float32)
    for k in range(0, inner, INNER):
        a = load_tile(x, row, k, rows, inner, inner, ROWS, INNER, TMA)
        if TRANSPOSED:
            above = expert * inner
            b = load_tile(w, above + k, column, above + inner, width, width, INNER, SIDE, TMA)
            sums = tl.dot(a, b, sums)
        else:
            above = expert * width
            b = load_tile(w, above + column, k, above + width, inner, inner, SIDE, INNER, TMA)
            sums = tl.dot(a, b.T, sums)
    return sums


@triton.jit
def store_tile(out, sums, row, column, row_end, width):
    """Stores the part of the tile that is inside of the segment."""
    rows, columns = row + tl.arange(0, sums.shape[0]), column + tl.arange(0, sums.shape[1])
    inside = (rows < row_end)[:, None] & (columns < width)[None, :]
    tl.store(out + rows[:, None].to(tl.int64) * width + columns[None, :], sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def weights_gradient(
    dy, x, offsets, out, experts, rows, height, width,
    ACCUMULATE: tl.constexpr, TMA: tl.constexpr,
    HIGH: tl.constexpr, SIDE: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[expert, height, width] = dy[rows, height]^T @ x[rows, width] over the expert's rows, or that much more."""
    high, wide = tl.cdiv(height, HIGH), tl.cdiv(width, SIDE)
    for tile in tl.range(tl.program_id(0), experts * high * wide, tl.num_programs(0)):
        expert = tile // (high * wide)
        begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
        row_tile, column_tile = in_supergroups(tile % (high * wide), high, wide, GROUP)
        up, left = row_tile * HIGH, column_tile * SIDE
        sums = tl.zeros((HIGH, SIDE), dtype=tl.float32)
        whole = begin + (end - begin) // INNER * INNER
        for k in range(begin, whole, INNER):
            a = load_tile(dy, k, up, rows, height, height, INNER, HIGH, TMA)
            b = load_tile(x, k, left, rows, width, width, INNER, SIDE, TMA)
            sums = tl.dot(a.T, b, sums)
        if whole < end:  # the last rows come with rows of the next expert, or of none
            mine = (whole + tl.arange(0, INNER) < end)[:, None]
            a = load_tile(dy, whole, up, rows, height, height, INNER, HIGH, TMA)
            b = load_tile(x, whole, left, rows, width, width, INNER, SIDE, TMA)
            sums = tl.dot(tl.where(mine, a, 0.0).to(a.dtype).T, tl.where(mine, b, 0.0).to(b.dtype), sums)
        ups, lefts = up + tl.arange(0, HIGH), left + tl.arange(0, SIDE)
        inside = (ups < height)[:, None] & (lefts < width)[None, :]
        places = out + expert.to(tl.int64) * height * width + ups[:, None].to(tl.int64) * width + lefts[None, :]
        if ACCUMULATE:
            sums += tl.load(places, mask=inside, other=0.0).to(tl.float32)
        tl.store(places, sums.to(out.dtype.element_ty), mask=inside)
