"""Changes of a row's format, for the rows that there are: the device knows how many."""

from __future__ import annotations

import triton
import triton.language as tl

from pplx_comm.moe.kernels.blocks import codes_and_scales, codes_of, power_of_two
from pplx_comm.moe.kernels.tiles import row_tiles, rows_of_tile, scales_of


@triton.jit
def quantise_rows(
    x, where, codes, scales, experts, room, width, row_stride, scale_stride, skew,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x[rows, width] to e4m3 bytes, and a scale for each row and BLOCK."""
    blocks = tl.cdiv(width, BLOCK)
    ends, total = row_tiles(where, experts, room, blocks, EXPERTS, ROWS, PADDED)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        rows, used, block, expert = rows_of_tile(tile, ends, where, experts, room, blocks, ROWS, PADDED)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = (rows < used)[:, None] & (columns < width)[None, :]
        places = rows[:, None].to(tl.int64) * width + columns[None, :]
        found, scale = codes_and_scales(tl.load(x + places, mask=inside, other=0.0).to(tl.float32))
        tl.store(codes + places, found, mask=inside)
        tl.store(scales_of(scales, rows, expert, row_stride, skew) + block * scale_stride, scale, mask=rows < used)


@triton.jit
def quantise_squares(w, codes, scales, height, width, BLOCK: tl.constexpr, ACROSS: tl.constexpr):
    """w[experts, height, width] to e4m3 bytes, and a scale for each BLOCK x BLOCK. A program has one of those.

    ACROSS: codes are [experts, width, height].
    """
    down, across = tl.cdiv(height, BLOCK), tl.cdiv(width, BLOCK)
    square = tl.program_id(0)
    expert, within = square // (down * across), square % (down * across)
    rows, columns = within // across * BLOCK + tl.arange(0, BLOCK), within % across * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    places = (expert.to(tl.int64) * height + rows[:, None]) * width + columns[None, :]
    values = tl.load(w + places, mask=inside, other=0.0).to(tl.float32)
    bad = tl.max(tl.max((~(tl.abs(values) < float("inf"))).to(tl.int32), 1), 0) > 0
    scale = power_of_two(tl.max(tl.max(tl.abs(values), 1), 0), bad)
    found = codes_of(values, scale, bad)
    if ACROSS:
        inside = (columns < width)[:, None] & (rows < height)[None, :]
        tl.store(codes + (expert.to(tl.int64) * width + columns[:, None]) * height + rows[None, :], found.T, mask=inside)
    else:
        tl.store(codes + places, found, mask=inside)
    tl.store(scales + square, scale)


@triton.jit
def numbers_of_rows(
    codes, scales, where, out, experts, room, width, row_stride, scale_stride, skew,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, E8M0: tl.constexpr,
):  # fmt: skip
    """Decodes e4m3 codes with their scales. E8M0: scales are bytes."""
    blocks = tl.cdiv(width, BLOCK)
    ends, total = row_tiles(where, experts, room, blocks, EXPERTS, ROWS, PADDED)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        rows, used, block, expert = rows_of_tile(tile, ends, where, experts, room, blocks, ROWS, PADDED)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = (rows < used)[:, None] & (columns < width)[None, :]
        places = rows[:, None].to(tl.int64) * width + columns[None, :]
        scale = tl.load(scales_of(scales, rows, expert, row_stride, skew) + block * scale_stride, mask=rows < used, other=0)
        if E8M0:
            scale = e8m0_number(scale.to(tl.int32))
        values = tl.load(codes + places, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
        tl.store(out + places, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def e8m0_number(byte):
    """2^(byte - 127); NaN for 255. 2^-127 has no exponent of its own in float32."""
    number = tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)
    return tl.where(byte == 255, float("nan"), number)


@triton.jit
def rescale_rows(
    codes, scales, where, out, out_scales, became_subnormal, experts, room, width, row_stride, scale_stride, skew,
    out_row_stride, out_scale_stride, out_skew,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, MX: tl.constexpr, GROUPS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """See quantise.rescale_mx: GROUPS blocks of MX codes with a byte each, to one block with a float32.

    codes, out: words of four codes, which are treated at once. width: in codes.
    ASSEMBLY: False in Triton's interpreter, which has none.
    """
    blocks, mx_blocks, words = tl.cdiv(width, MX * GROUPS), tl.cdiv(width, MX), width // 4
    ends, total = row_tiles(where, experts, room, blocks, EXPERTS, ROWS, PADDED)
    became = tl.zeros((ROWS, GROUPS), dtype=tl.int32)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        rows, used, block, expert = rows_of_tile(tile, ends, where, experts, room, blocks, ROWS, PADDED)
        groups = block * GROUPS + tl.arange(0, GROUPS)
        columns = groups[:, None] * (MX // 4) + tl.arange(0, MX // 4)[None, :]
        inside = (rows < used)[:, None, None] & (columns < words)[None, :, :]
        places = rows[:, None, None].to(tl.int64) * words + columns[None, :, :]
        word = tl.load(codes + places, mask=inside, other=0)
        there = (rows < used)[:, None] & (groups < mx_blocks)[None, :]
        of_scales = scales_of(scales, rows, expert, row_stride, skew)[:, None] + groups[None, :] * scale_stride
        exponent = tl.load(of_scales, mask=there, other=0).to(tl.int32) - 127
        magnitudes = word & 0x7F7F7F7F
        seen = tl.reduce(magnitudes | (magnitudes + 0x01010101 & -0x7F7F7F80), 2, either)  # the top bit of a byte: NaN
        silent = (seen == 0) | ((seen & -0x7F7F7F80) != 0)
        common = tl.max(tl.where(silent, -126, tl.maximum(exponent, -126)), 1)
        common = tl.where(tl.min(silent.to(tl.int32), 1) > 0, 0, common)
        # A shift of 24 leaves nothing of a code, and float16 can hold each product.
        shift = tl.where(silent, 0, tl.maximum(exponent - common[:, None], -24))[:, :, None] + tl.zeros_like(word)
        if ASSEMBLY:
            moved, fallen = rescaled_words(word, shift)
        else:
            moved, fallen = rescaled_words_slowly(word, shift)
        tl.store(out + places, moved, mask=inside)
        place = scales_of(out_scales, rows, expert, out_row_stride, out_skew) + block * out_scale_stride
        tl.store(place, ((common + 127) << 23).to(tl.float32, bitcast=True), mask=rows < used)
        became += tl.sum(fallen, 2)
    all_of_them = tl.sum(became.to(tl.int64))
    if all_of_them > 0:  # one word for all programs
        tl.atomic_add(became_subnormal, all_of_them)


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def rescaled_words(word, shift):
    """Four codes times 2^shift, from -24 to 0; and how many of them become subnormal."""
    half = tl.where(shift >= -14, (shift + 15) << 10, 1 << (shift + 24))  # 2^shift as float16
    # 0x80 less the first magnitude that stays normal: 8, and an exponent more for each step.
    below = (0x80 - tl.minimum(8 - 8 * shift, 0x80)) * 0x01010101
    return tl.inline_asm_elementwise(
        """{ .reg .b16 l, h; .reg .b32 a, b, m; mov.b32 {l, h}, $2;
        cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h; mul.rn.f16x2 a, a, $3; mul.rn.f16x2 b, b, $3;
        cvt.rn.satfinite.e4m3x2.f16x2 l, a; cvt.rn.satfinite.e4m3x2.f16x2 h, b; mov.b32 $0, {l, h};
        and.b32 m, $2, 0x7F7F7F7F; add.u32 a, m, 0x78787878; add.u32 b, m, $4; not.b32 b, b; and.b32 a, a, b;
        and.b32 a, a, 0x80808080; popc.b32 $1, a; }""",
        "=r,=r,r,r,r", [word, half | (half << 16), below], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def rescaled_words_slowly(word, shift):
    """The same, code by code."""
    moved, fallen = tl.zeros_like(word), tl.zeros_like(word)
    for at in tl.static_range(0, 32, 8):
        byte = (word >> at) & 0xFF
        value = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        value = value * ((shift + 127) << 23).to(tl.float32, bitcast=True)
        moved |= value.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << at
        magnitude = byte & 0x7F
        fallen += ((magnitude >= 8) & (magnitude < 8 - 8 * shift)).to(tl.int32)
    return moved, fallen
