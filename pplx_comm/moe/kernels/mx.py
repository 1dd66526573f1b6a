"""The grouped product of MXFP8 rows, with an e8m0 byte per 1x32 as they travel, by tensor cores that know such blocks:
persistent, as in grouped.py. Weights have a float32 power of two per 128x128, of which the kernel takes the exponent.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pplx_comm.moe.kernels.grouped import load_tile, store_tile
from pplx_comm.moe.kernels.tiles import find_expert, in_supergroups, scales_of, segment, tiles_before


@triton.jit
def mx_rows_by_weights(
    x, x_scale, w, w_scale, where, out, experts, room, rows, inner, width, row_stride, scale_stride, skew,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TMA: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, MX: tl.constexpr,
):  # fmt: skip
    """out[rows, width] = x[rows, inner] @ w[experts * width, inner]^T. row_stride, scale_stride, skew: of x_scale, in bytes."""
    columns, depth, scales = tl.cdiv(width, BLOCK), tl.cdiv(inner, BLOCK), tl.cdiv(inner, MX)
    ends = tiles_before(where, experts, room, columns, EXPERTS, ROWS, PADDED)
    total = tl.max(ends, 0)
    within = tl.arange(0, BLOCK // MX)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, first_tile = find_expert(tile, ends)
        begin, end = segment(where, expert, room, PADDED)
        row_tile, column_tile = in_supergroups(tile - first_tile, tl.cdiv(end - begin, ROWS), columns, GROUP)
        row, column, above = begin + row_tile * ROWS, column_tile * BLOCK, expert * width
        here = row + tl.arange(0, ROWS)
        row_scales = scales_of(x_scale, here, expert, row_stride, skew)
        weight_scales = w_scale + (expert * columns + column_tile) * depth
        sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for block in range(depth):
            a = load_tile(x, row, block * BLOCK, rows, inner, inner, ROWS, BLOCK, TMA)
            b = load_tile(w, above + column, block * BLOCK, above + width, inner, inner, BLOCK, BLOCK, TMA)
            places = block * (BLOCK // MX) + within
            there = (here < end)[:, None] & (places < scales)[None, :]
            of_rows = tl.load(row_scales[:, None] + places[None, :] * scale_stride, mask=there, other=127)
            exponent = (tl.load(weight_scales + block).to(tl.int32, bitcast=True) >> 23) & 0xFF
            of_weights = tl.zeros((BLOCK, BLOCK // MX), dtype=tl.uint8) + exponent.to(tl.uint8)
            sums = tl.dot_scaled(a, of_rows, "e4m3", b.T, of_weights, "e4m3", sums)
        store_tile(out, sums, row, column, end, width)
