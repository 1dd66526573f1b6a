"""The grouped product of e4m3 codes with a scale per 1x128 of the rows and per 128x128 of the weights:
persistent, as in grouped.py.

Each block of 128 is summed up by the tensor cores and then added in float32, with both of its scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pplx_comm.moe.kernels.grouped import load_tile, store_tile
from pplx_comm.moe.kernels.tiles import find_expert, in_supergroups, scales_of, segment, tiles_before


@triton.jit
def scaled_rows_by_weights(
    x, x_scale, w, w_scale, where, out, experts, room, rows, inner, width, row_stride, scale_stride, skew,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TMA: tl.constexpr,
    ROWS: tl.constexpr, SIDE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """out[rows, width] = x[rows, inner] @ w[experts * width, inner]^T. row_stride, scale_stride, skew: of x_scale.

    A tile is no wider than the weights' blocks, and has one of their scales at a time: SIDE divides BLOCK. FLAT: as in grouped.py.
    """
    columns = tl.cdiv(width, SIDE)
    ends = tiles_before(where, experts, room, columns, EXPERTS, ROWS, PADDED)
    total = tl.max(ends, 0)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLAT):
        expert, first_tile = find_expert(tile, ends)
        begin, end = segment(where, expert, room, PADDED)
        row_tile, column_tile = in_supergroups(tile - first_tile, tl.cdiv(end - begin, ROWS), columns, GROUP)
        row = begin + row_tile * ROWS
        sums = scaled_tile_of_product(
            x, x_scale, w, w_scale, expert, row, column_tile, end, inner, width, row_stride, scale_stride, skew,
            TMA, TMA, ROWS, SIDE, BLOCK,
        )  # fmt: skip
        store_tile(out, sums, row, column_tile * SIDE, end, width)


@triton.jit
def scaled_tile_of_product(
    x, x_scale, w, w_scale, expert, row, column_tile, end, inner, width, row_stride, scale_stride, skew,
    ROWS_TMA: tl.constexpr, TMA: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS x SIDE of what scaled_rows_by_weights says, in float32. end: before which row the expert's end.

    ROWS_TMA: x is a descriptor, by which whole tiles are read. By its pointer nothing behind `end` is.
    """
    columns, depth = tl.cdiv(width, BLOCK), tl.cdiv(inner, BLOCK)
    column, above = column_tile * SIDE, expert * width
    here = row + tl.arange(0, ROWS)
    row_scales = scales_of(x_scale, here, expert, row_stride, skew)
    weight_scales = w_scale + (expert * columns + column // BLOCK) * depth
    sums = tl.zeros((ROWS, SIDE), dtype=tl.float32)
    of_rows, of_weights = tl.load(row_scales, mask=here < end, other=0.0), tl.load(weight_scales)
    for block in range(depth):
        a = load_tile(x, row, block * BLOCK, end, inner, inner, ROWS, BLOCK, ROWS_TMA)
        b = load_tile(w, above + column, block * BLOCK, above + width, inner, inner, SIDE, BLOCK, TMA)
        scale, later = of_rows * of_weights, tl.minimum(block + 1, depth - 1)  # scales come a turn ahead
        of_rows, of_weights = tl.load(row_scales + later * scale_stride, mask=here < end, other=0.0), tl.load(weight_scales + later)
        sums += tl.dot(a, b.T) * scale[:, None]
    return sums
