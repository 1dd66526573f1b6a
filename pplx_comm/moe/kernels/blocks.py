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
def inverse(scale, bad):
    """Scales are powers of two, so that one over them is exact; a division takes twenty instructions. 1 where `bad`."""
    return ((254 << 23) - tl.where(bad, 1.0, scale).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def codes_of(values, scale, bad):
    """e4m3 as bytes."""
    codes = (values * inverse(scale, bad)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(bad, 0x7F, codes).to(tl.uint8)


@triton.jit
def codes_and_scales(values):
    """values: float32 [rows, block]. e4m3 codes as bytes, and a float32 for each row.

    These kernels are bound by instructions as much as by memory, so that there are few for each value. As integers NaN and infinity
    are larger than any number: one maximum finds both. A row that has one is multiplied by NaN, whose code is 0x7F.
    """
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    bad = largest >= 0x7F800000
    scale = power_of_two(largest.to(tl.float32, bitcast=True), bad)
    factor = tl.where(bad, float("nan"), inverse(scale, bad))
    return (values * factor[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True), scale
