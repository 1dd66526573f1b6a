"""The activation between the products, forward and backward, for the rows that there are: the device knows how many."""

from __future__ import annotations

import triton
import triton.language as tl

from pplx_comm.moe.kernels.blocks import codes_and_scales
from pplx_comm.moe.kernels.tiles import row_tiles, rows_of_tile, scales_of


@triton.jit
def gate_and_up(h, rows, columns, inside, width):
    """Both halves of [rows, 2 * width] at some columns, in float32."""
    places = h + rows[:, None].to(tl.int64) * (2 * width) + columns[None, :]
    gate = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    return gate, tl.load(places + width, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def activated(h, rows, columns, inside, width):
    """silu(gate) * up at some columns, rounded once to h's dtype."""
    gate, up = gate_and_up(h, rows, columns, inside, width)
    return (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty)


@triton.jit
def swiglu_forward(
    h, where, out, scales, experts, room, width, row_stride, scale_stride, skew,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """out[rows, width] of h[rows, 2 * width]; QUANTISED: as e4m3 bytes, with a scale for each row and BLOCK."""
    blocks = tl.cdiv(width, BLOCK)
    ends, total = row_tiles(where, experts, room, blocks, EXPERTS, ROWS, PADDED)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        rows, used, block, expert = rows_of_tile(tile, ends, where, experts, room, blocks, ROWS, PADDED)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = (rows < used)[:, None] & (columns < width)[None, :]
        a = activated(h, rows, columns, inside, width)
        places = out + rows[:, None].to(tl.int64) * width + columns[None, :]
        if QUANTISED:
            codes, scale = codes_and_scales(a.to(tl.float32))
            tl.store(places, codes, mask=inside)
            tl.store(scales_of(scales, rows, expert, row_stride, skew) + block * scale_stride, scale, mask=rows < used)
        else:
            tl.store(places, a, mask=inside)


@triton.jit
def swiglu_gradients(h, da, weights, offsets, dh, weighted, d_weights, experts, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """See swiglu.swiglu_backward. A program has whole rows, since the gradient of a row's weight is a sum over them."""
    used = tl.load(offsets + experts)
    for tile in tl.range(tl.program_id(0), tl.cdiv(used, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        weight = tl.load(weights + rows, mask=rows < used, other=0.0)[:, None]
        products = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for left in range(0, width, BLOCK):
            columns = left + tl.arange(0, BLOCK)
            inside = (rows < used)[:, None] & (columns < width)[None, :]
            gate, up = gate_and_up(h, rows, columns, inside, width)
            narrow = rows[:, None].to(tl.int64) * width + columns[None, :]
            wide = narrow + rows[:, None].to(tl.int64) * width
            d = tl.load(da + narrow, mask=inside, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            a, scaled = silu * up, weight * d
            d_gate = scaled * up * sigmoid * (1 + gate * (1 - sigmoid))
            tl.store(dh + wide, d_gate.to(dh.dtype.element_ty), mask=inside)
            tl.store(dh + wide + width, (scaled * silu).to(dh.dtype.element_ty), mask=inside)
            tl.store(weighted + narrow, (weight * a).to(weighted.dtype.element_ty), mask=inside)
            products += d * a
        tl.store(d_weights + rows, tl.sum(products, 1), mask=rows < used)
