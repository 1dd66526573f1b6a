"""Rows of codes through their experts in one launch: the product with gate and up, SwiGLU, quantisation, and the product with down.

A product of few rows reads weights, and each launch has a beginning and an end in which memory is idle. Here there is one of each.

Tiles of both products are dealt out by one count, in order: all of gate and up, expert by expert, then all of down. A *block* has
128 columns of the activation and the rows of a tile. The program that stores the last of its tiles of gate and up quantises it, and
adds to its expert's count of blocks. A tile of down waits for that count.

Only running programs have tiles, and tiles of gate and up wait for nothing: so waits end, however many programs run at a time. Few
ever wait, as most of down is dealt long after what it needs.

`words` are zeros before a launch and behind it: the last program at a block clears its count, and the last program of all clears
the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pplx_comm.moe.kernels.activation import activated
from pplx_comm.moe.kernels.blocks import codes_and_scales
from pplx_comm.moe.kernels.grouped import store_tile
from pplx_comm.moe.kernels.scaled import scaled_tile_of_product
from pplx_comm.moe.kernels.tiles import find_expert, scales_of, segment, tiles_before

DEALT, LEFT, WRITTEN = tl.constexpr(0), tl.constexpr(32), tl.constexpr(64)
"""Places in `words`, in lines of their own: tiles dealt, programs that have left, and by expert the blocks that are written. Behind
EXPERTS of these: by block, tiles of gate and up that are stored."""


@triton.jit
def until_reached(count, least):
    """Until a count is as high."""
    while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < least:
        pass


@triton.jit
def prefetch_weights(weights, line, stride, lines, LINES: tl.constexpr, BYTES: tl.constexpr):
    """Asks for the first LINES * 128 bytes of each of these rows of weights, which then come to the L2 cache meanwhile."""
    at = tl.arange(0, LINES) * 128
    inside = (line < lines)[:, None] & (at < stride * BYTES)[None, :]
    places = weights.to(tl.int64) + (line[:, None].to(tl.int64) * stride * BYTES) + at[None, :]
    places = tl.where(inside, places, weights.to(tl.int64))
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def quantise_block(
    h, codes, scales, row, end, block, expert, width, row_stride, scale_stride, skew,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """As activation.swiglu_forward does, but SOME rows at a time: few are there."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    for first in tl.range(row, tl.minimum(row + ROWS, end), SOME, num_stages=1):
        rows = first + tl.arange(0, SOME)
        inside = (rows < end)[:, None] & (columns < width)[None, :]
        found, scale = codes_and_scales(activated(h, rows, columns, inside, width).to(tl.float32))
        tl.store(codes + rows[:, None].to(tl.int64) * width + columns[None, :], found, mask=inside)
        tl.store(scales_of(scales, rows, expert, row_stride, skew) + block * scale_stride, scale, mask=rows < end)


@triton.jit
def tile_of_expert(tile, tiles, where, room, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """The tile's expert, the tiles before that, the expert's rows from begin to end, and how many tiles high they are."""
    expert, before = find_expert(tile, tiles)
    begin, end = segment(where, expert, room, PADDED)
    return expert, before, begin, end, tl.cdiv(end - begin, ROWS)


@triton.jit
def leave(words, programs, EXPERTS: tl.constexpr):
    """The last program to leave clears the words: no program reads them any more."""
    if tl.atomic_add(words + LEFT, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(words + DEALT, 0)
        tl.store(words + LEFT, 0)
        tl.store(words + WRITTEN + tl.arange(0, EXPERTS), 0)


@triton.jit
def rows_through_experts(
    x, x_scale, up, up_scale, down, down_scale, weights, where, h, codes, a, a_scale, out, words,
    programs, experts, room, hidden, width, row_stride, scale_stride, skew, a_row_stride, a_scale_stride, a_skew,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS_TMA: tl.constexpr, TMA: tl.constexpr, ASSEMBLY: tl.constexpr,
    ROWS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """out[rows, hidden] = a @ down[experts * hidden, width]^T, with a[rows, width] the quantised swiglu(h), and
    h[rows, 2 * width] = x[rows, hidden] @ up[experts * 2 * width, hidden]^T.

    codes, weights: a and down as pointers to bytes. programs: of this launch. width: a multiple of BLOCK, which is one of SIDE.
    ROWS_TMA: x and a are descriptors. TMA: up and down are. LINES: of 128 bytes, for each row of a tile of down, that are asked for
    before its rows are there. ASSEMBLY: False in Triton's interpreter, which has none.
    """
    PARTS: tl.constexpr = BLOCK // SIDE
    blocks, columns = width // BLOCK, tl.cdiv(hidden, SIDE)
    met = words + WRITTEN + EXPERTS
    ups = tiles_before(where, experts, room, 2 * PARTS * blocks, EXPERTS, ROWS, PADDED)
    downs = tiles_before(where, experts, room, columns, EXPERTS, ROWS, PADDED)
    tiles_of_up = tl.max(ups, 0)
    total = tiles_of_up + tl.max(downs, 0)
    tile = tl.atomic_add(words + DEALT, 1, sem="relaxed", scope="gpu")
    while tile < tiles_of_up:
        expert, before, begin, end, high = tile_of_expert(tile, ups, where, room, ROWS, PADDED)
        row_tile, strip = (tile - before) % high, (tile - before) // high
        row, block, part = begin + row_tile * ROWS, strip // (2 * PARTS), strip % (2 * PARTS)
        column_tile = (part // PARTS * blocks + block) * PARTS + part % PARTS  # gates before ups
        sums = scaled_tile_of_product(
            x, x_scale, up, up_scale, expert, row, column_tile, end, hidden, 2 * width, row_stride, scale_stride, skew,
            ROWS_TMA, TMA, ROWS, SIDE, BLOCK,
        )  # fmt: skip
        store_tile(h, sums, row, column_tile * SIDE, end, 2 * width)
        meeting = met + before // (2 * PARTS) + block * high + row_tile
        tl.debug_barrier()  # all threads have stored
        if tl.atomic_add(meeting, 1, sem="acq_rel", scope="gpu") == 2 * PARTS - 1:
            tl.store(meeting, 0)
            quantise_block(
                h, codes, a_scale, row, end, block, expert, width, a_row_stride, a_scale_stride, a_skew, ROWS, BLOCK, SOME
            )
            tl.debug_barrier()
            tl.atomic_add(words + WRITTEN + expert, 1, sem="release", scope="gpu")
        tile = tl.atomic_add(words + DEALT, 1, sem="relaxed", scope="gpu")
    while tile < total:
        expert, before, begin, end, high = tile_of_expert(tile - tiles_of_up, downs, where, room, ROWS, PADDED)
        within = tile - tiles_of_up - before
        row, column_tile = begin + within % high * ROWS, within // high
        if ASSEMBLY and LINES > 0:
            line = expert * hidden + column_tile * SIDE + tl.arange(0, SIDE)
            prefetch_weights(weights, line, width, expert * hidden + hidden, LINES, 1)
        until_reached(words + WRITTEN + expert, blocks * high)
        if ASSEMBLY and ROWS_TMA:  # descriptors read by another proxy than the one that acquired
            tl.inline_asm_elementwise("fence.proxy.async; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        sums = scaled_tile_of_product(
            a, a_scale, down, down_scale, expert, row, column_tile, end, width, hidden, a_row_stride, a_scale_stride, a_skew,
            ROWS_TMA, TMA, ROWS, SIDE, BLOCK,
        )  # fmt: skip
        store_tile(out, sums, row, column_tile * SIDE, end, hidden)
        tile = tl.atomic_add(words + DEALT, 1, sem="relaxed", scope="gpu")
    leave(words, programs, EXPERTS)
