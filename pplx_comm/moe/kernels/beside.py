"""Products that run beside their step: one that waits for the rows of each block, and one that says which blocks it has written.

The words are those of src/protocol/hooks.h: one for each block of 128 rows, with Padded one for each expert. Ragged's segments
begin at multiples of 128, and a block has whole tiles: BLOCK is a multiple of ROWS.

A *chunk* is what programs look at when they seek work: CHUNK neighbouring blocks, with Padded an expert. Its tiles are dealt out in
*units*, STRIP tiles side by side, by a count in `claimed`. A program takes a unit of the first chunk whose rows have all come. If
there is none, it takes one of the first chunk that has units left, and waits. So nobody waits while there are rows that nobody has
multiplied, in whatever order rows come: by token inside a node, by rank through a network.

`order` notes the chunks in the order in which they were begun, for the second product: about that of their tokens, so that combine
has whole tokens early.

Several programs share a multiprocessor. A GPU gives programs to the emptiest multiprocessor first, so that a grid for fewer than
all of them would leave many half empty, and none to combine, whose thread blocks want one to themselves. So the second product has
programs for all, which then give up as many multiprocessors as a step takes: see `stays`. Units and tiles are counted out: it does
not matter which programs stay, nor when they begin, and nobody waits for a program that has not begun.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pplx_comm.moe.kernels.grouped import store_tile, tile_of_product
from pplx_comm.moe.kernels.scaled import scaled_tile_of_product
from pplx_comm.moe.kernels.tiles import find_expert, in_supergroups, segment, tiles_before


@triton.jit
def await_raised(word):
    """Until its top bit is set. A dispatch that fails raises all of its words, so this ends."""
    while tl.atomic_add(word, 0, sem="acquire", scope="gpu") >= 0:
        pass


@triton.jit
def until_raised(word):
    """A launch of its own: what is launched behind it finds the word raised."""
    await_raised(word)


@triton.jit
def until_reached(count, least):
    """The same for a count."""
    while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < least:
        pass


@triton.jit
def blocks_of(where, experts, rows, BLOCK: tl.constexpr):
    """Ragged: blocks that have rows. Nobody knows what a dispatch that failed says, so `rows` bounds it."""
    return tl.cdiv(tl.maximum(tl.minimum(tl.load(where + experts), rows), 0), BLOCK)


@triton.jit
def tiles_high(
    chunks, blocks, where, experts, room, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Of these chunks, how many tiles one under the other."""
    if PADDED:
        filled = tl.load(where + chunks, mask=chunks < experts, other=0)
        high = tl.cdiv(tl.maximum(tl.minimum(filled, room), 0), ROWS)
    else:
        high = tl.maximum(tl.minimum(blocks - chunks * CHUNK, CHUNK), 0) * (BLOCK // ROWS)
    return high


@triton.jit
def claim(
    arrived, claimed, chunks, blocks, where, experts, room, strips,
    PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A unit: its chunk, its number in it, and how many tiles high the chunk is. The chunk is `chunks` when none are left."""
    picked, unit, high = chunks, 0, 0
    seeking = 1
    while seeking == 1:
        come, left, base = chunks, chunks, 0
        while (base < chunks) & (come == chunks):
            c = base + tl.arange(0, WINDOW)
            units = tiles_high(c, blocks, where, experts, room, PADDED, ROWS, BLOCK, CHUNK) * strips
            open_ = tl.load(claimed + c, mask=c < chunks, other=2147483647, volatile=True) < units
            if PADDED:
                word = tl.load(arrived + c, mask=c < chunks, other=-1, volatile=True)
            else:
                block = c[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
                word = tl.max(tl.load(arrived + block, mask=block < blocks, other=-1, volatile=True), 1)
            come = tl.minimum(come, tl.min(tl.where(open_ & (word < 0), c, chunks), 0))
            left = tl.minimum(left, tl.min(tl.where(open_, c, chunks), 0))
            base += WINDOW
        picked = tl.minimum(come, chunks)
        if come == chunks:
            picked = left
        if picked < chunks:
            high = tiles_high(picked, blocks, where, experts, room, PADDED, ROWS, BLOCK, CHUNK)
            unit = tl.atomic_add(claimed + picked, 1, sem="relaxed", scope="gpu")
            if unit < high * strips:
                seeking = 0
        else:
            seeking = 0
    return picked, unit, high


@triton.jit
def expert_of_row(row, where, experts, rows, EXPERTS: tl.constexpr):
    """Ragged: the expert of a row, and before which row its rows end."""
    each = tl.arange(0, EXPERTS)
    ends = tl.load(where + 1 + each, mask=each < experts, other=2147483647)
    expert = tl.minimum(tl.sum((ends <= row).to(tl.int32), 0), experts - 1)
    return expert, tl.minimum(tl.load(where + 1 + expert), rows)


@triton.jit
def prefetch_weights(weights, line, stride, lines, LINES: tl.constexpr, BYTES: tl.constexpr):
    """Asks for the first LINES * 128 bytes of each of these rows of weights, which then come to the L2 cache meanwhile."""
    at = tl.arange(0, LINES) * 128
    inside = (line < lines)[:, None] & (at < stride * BYTES)[None, :]
    places = weights.to(tl.int64) + (line[:, None].to(tl.int64) * stride * BYTES) + at[None, :]
    places = tl.where(inside, places, weights.to(tl.int64))
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_product(
    out, x, x_scale, w, w_scale, expert, row, column_tile, end, rows, inner, width, row_stride, scale_stride, skew,
    SCALED: tl.constexpr, TMA: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of the product, of codes if SCALED: ROWS rows from `row` on, as far as the expert's go."""
    if SCALED:
        sums = scaled_tile_of_product(
            x, x_scale, w, w_scale, expert, row, column_tile, end, inner, width, row_stride, scale_stride, skew,
            TMA, TMA, ROWS, SIDE, INNER,
        )  # fmt: skip
    else:
        sums = tile_of_product(x, w, expert, row, column_tile * SIDE, rows, inner, width, False, TMA, ROWS, SIDE, INNER)
    store_tile(out, sums, row, column_tile * SIDE, end, width)


@triton.jit
def rows_by_weights_as_they_come(
    x, x_scale, w, w_scale, weights, where, arrived, claimed, order, noted, out,
    experts, room, rows, chunks_in_all, inner, width, row_stride, scale_stride, skew,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, SCALED: tl.constexpr, TMA: tl.constexpr, ASSEMBLY: tl.constexpr,
    ROWS: tl.constexpr, SIDE: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STRIP: tl.constexpr,
    WINDOW: tl.constexpr, LINES: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """out[rows, width] = x[rows, inner] @ w[experts * width, inner]^T, of codes with their scales if SCALED, block after block as
    `arrived` says that they are there.

    weights: w, as a pointer to bytes of which an element has BYTES. ASSEMBLY: False in Triton's interpreter, which has none.
    """
    columns = tl.cdiv(width, SIDE)
    strips = tl.cdiv(columns, STRIP)
    blocks = 0 if PADDED else blocks_of(where, experts, rows, BLOCK)
    chunks = experts if PADDED else tl.minimum(tl.cdiv(blocks, CHUNK), chunks_in_all)
    chunk, unit, high = claim(arrived, claimed, chunks, blocks, where, experts, room, strips, PADDED, ROWS, BLOCK, CHUNK, WINDOW)
    while chunk < chunks:
        if unit == 0:
            tl.store(order + tl.atomic_add(noted, 1, sem="relaxed", scope="gpu"), chunk)
        within, strip = unit % high, unit // high
        if PADDED:
            word, expert = chunk, chunk
            begin, end = segment(where, chunk, room, PADDED)
            row = begin + within * ROWS
        else:
            word = chunk * CHUNK + within // (BLOCK // ROWS)
            row = chunk * CHUNK * BLOCK + within * ROWS
            expert, end = expert_of_row(row, where, experts, rows, EXPERTS)
        if ASSEMBLY:  # noqa: SIM102 (by itself: it is known when the kernel is compiled)
            if tl.load(arrived + word, volatile=True) >= 0:
                line = expert * width + strip * STRIP * SIDE + tl.arange(0, SIDE)
                prefetch_weights(weights, line, inner, expert * width + width, LINES, BYTES)
        await_raised(arrived + word)
        if ASSEMBLY and TMA:  # descriptors read by another proxy than the one that acquired
            tl.inline_asm_elementwise("fence.proxy.async; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        for column_tile in range(strip * STRIP, tl.minimum(strip * STRIP + STRIP, columns)):
            store_product(
                out, x, x_scale, w, w_scale, expert, row, column_tile, end, rows, inner, width, row_stride, scale_stride, skew,
                SCALED, TMA, ROWS, SIDE, INNER,
            )  # fmt: skip
        chunk, unit, high = claim(
            arrived, claimed, chunks, blocks, where, experts, room, strips, PADDED, ROWS, BLOCK, CHUNK, WINDOW
        )


@triton.jit
def stays(owners, taken, kept, OWNERS: tl.constexpr, PROGRAMS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Whether the programs of this multiprocessor stay: the first `kept` multiprocessors that have programs do.

    owners: OWNERS zeros, a word for each multiprocessor: 1 while its first program finds out, then 2, or 3 if they go. taken: the
    number of multiprocessors so far. In Triton's interpreter PROGRAMS neighbours are one.
    """
    if ASSEMBLY:
        number = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        number = tl.program_id(0) // PROGRAMS
    owner = owners + number % OWNERS
    found = tl.atomic_cas(owner, 0, 1, sem="acq_rel", scope="gpu")
    if found == 0:
        found = 2 + (tl.atomic_add(taken, 1, sem="relaxed", scope="gpu") >= kept).to(tl.int32)
        tl.atomic_xchg(owner, found, sem="release", scope="gpu")
    while found == 1:  # its first program runs
        found = tl.atomic_add(owner, 0, sem="acquire", scope="gpu")
    return found == 2


@triton.jit
def rows_by_weights_with_words(
    x, x_scale, w, w_scale, where, order, ready, counts, out,
    kept, experts, room, rows, inner, width, row_stride, scale_stride, skew,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, ORDERED: tl.constexpr, SCALED: tl.constexpr, TMA: tl.constexpr,
    ASSEMBLY: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, OWNERS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The same product of rows that are all there. Each tile adds to its block's word of `ready` when it is stored: a block that is
    written has as many as it has tiles, and with Padded, whatever the expert has, as many as its room would make.

    order: of Ragged's chunks, if ORDERED. counts, zeros: programs that have begun, so that the combine that waits for them comes
    later; tiles that were taken; multiprocessors; and `owners`: see `stays`. kept: multiprocessors that are not combine's.
    """
    tl.atomic_add(counts, 1, sem="relaxed", scope="gpu")
    if stays(counts + 3, counts + 2, kept, OWNERS, PROGRAMS, ASSEMBLY):
        columns = tl.cdiv(width, SIDE)
        if PADDED:
            ends = tiles_before(where, experts, room, columns, EXPERTS, ROWS, PADDED)
            total, blocks, high_chunk = tl.max(ends, 0), 0, 0
        else:
            blocks = blocks_of(where, experts, rows, BLOCK)
            high_chunk = CHUNK * (BLOCK // ROWS)
            total = tl.cdiv(blocks, CHUNK) * high_chunk * columns
        tile = tl.atomic_add(counts + 1, 1, sem="relaxed", scope="gpu")
        while tile < total:
            if PADDED:
                expert, first_tile = find_expert(tile, ends)
                begin, end = segment(where, expert, room, PADDED)
                high = tl.cdiv(end - begin, ROWS)
                row_tile, column_tile = in_supergroups(tile - first_tile, high, columns, GROUP)
                row, word, there = begin + row_tile * ROWS, expert, tile < total
                others = (tl.cdiv(room, ROWS) - high) * columns
                amount = 1 + tl.where((row_tile == 0) & (column_tile == 0), others, 0)
            else:
                chunk, within = tile // (high_chunk * columns), tile % (high_chunk * columns)
                if ORDERED:
                    chunk = tl.load(order + chunk)
                word = chunk * CHUNK + within % high_chunk // (BLOCK // ROWS)
                column_tile, there, amount = within // high_chunk, word < blocks, 1
                row = chunk * CHUNK * BLOCK + within % high_chunk * ROWS
                expert, end = expert_of_row(row, where, experts, rows, EXPERTS)
            if there:
                store_product(
                    out, x, x_scale, w, w_scale, expert, row, column_tile, end, rows, inner, width, row_stride, scale_stride, skew,
                    SCALED, TMA, ROWS, SIDE, INNER,
                )  # fmt: skip
                tl.debug_barrier()  # all threads have stored
                tl.atomic_add(ready + word, amount, sem="release", scope="gpu")
            tile = tl.atomic_add(counts + 1, 1, sem="relaxed", scope="gpu")
