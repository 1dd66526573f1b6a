"""Scales and codes of blocks, as pplx_comm.moe.quantise defines them, for kernels that hold a block's values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of_two(amax, bad):
    """The least power of two that is at least amax / 448 = amax / (1.75 * 2^8), not below 2^-126. 1 for 0, NaN where `bad`."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    scale = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    return tl.where(bad, float("nan"), tl.where(amax == 0.0, 1.0, scale))


@triton.jit
def codes_of(values, scale, bad):
    """e4m3 as bytes. Scales are powers of two, so that one over them is exact; a division takes twenty instructions."""
    inverse = ((254 << 23) - tl.where(bad, 1.0, scale).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    codes = (values * inverse).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(bad, 0x7F, codes).to(tl.uint8)


@triton.jit
def codes_and_scales(values):
    """values: float32 [rows, block]. e4m3 codes as bytes, and a float32 for each row."""
    bad = tl.max((~(tl.abs(values) < float("inf"))).to(tl.int32), 1) > 0
    scale = power_of_two(tl.max(tl.where(bad[:, None], 0.0, tl.abs(values)), 1), bad)
    return codes_of(values, scale[:, None], bad[:, None]), scale
