"""e4m3 codes and their scales, powers of two throughout: then a block can be transposed, and a format changed, without rounding.

activations, gradients   a float32 per 1x128
weights                  a float32 per 128x128, so that their transpose has the same codes
MXFP8, as it travels     an e8m0 byte per 1x32, which becomes 1x128 for GEMMs that have no such blocks

`where` says where there are rows: d.offsets, or segments(d). With it, on a GPU with Triton, each function is one kernel that reads
and writes no others; without, or elsewhere, it is torch's operators on all rows.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from pplx_comm.moe.kernels import launch
from pplx_comm.moe.kernels.usable import usable
from pplx_comm.moe.segments import Segments

BLOCK, MX_BLOCK = 128, 32
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
_NAN_CODE, _NAN_E8M0, _E8M0_BIAS = 0x7F, 0xFF, 127


def power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """The least power of two that is at least amax / 448, not below 2^-126; 1 for 0, NaN for what is not finite.

    amax is m * 2^e with m from 0.5 up to 1, and 448 is 0.875 * 2^9: comparing the two m is exact, where a division would round.
    """
    m, e = torch.frexp(amax.float())
    exponent = (e - 9 + (m > 0.875).to(e.dtype)).clamp(min=-126)
    scale = torch.ldexp(torch.ones_like(m), exponent)
    return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), scale, torch.nan))


def _codes(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes = (values / scale).clamp(-LARGEST, LARGEST).to(E4M3)
    bad = scale.isnan().expand_as(values)
    return torch.where(bad, _NAN_CODE, codes.view(torch.uint8)).view(E4M3)


def _padded(x: torch.Tensor, *multiples: int) -> torch.Tensor:
    """With zeros, so that the last dimensions are multiples of these, the last one first."""
    pads = [n for size, multiple in zip(reversed(x.shape), multiples, strict=False) for n in (0, -size % multiple)]
    return F.pad(x, pads) if any(pads) else x


def quantise(x: torch.Tensor, where: torch.Tensor | Segments | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [rows, n]. e4m3 codes of the same shape, and float32 [rows, ceil(n / 128)]. As wire="fp8_ue8m0" does it."""
    if where is not None and usable(x.device):
        return launch.quantise(x, Segments.of(where))
    values = _padded(x.float(), BLOCK).unflatten(-1, (-1, BLOCK))
    scale = power_of_two_scale(values.abs().amax(-1))
    return _codes(values, scale[..., None]).flatten(-2)[..., : x.shape[-1]].contiguous(), scale


def quantise_weights(w: torch.Tensor, across: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """w: [experts, n, k]. e4m3 codes of the same shape, and float32 [experts, ceil(n / 128), ceil(k / 128)].

    across: in memory the codes lie as the transposed weights would, which is what a product with those reads.
    """
    if usable(w.device):
        return launch.quantise_weights(w, across)
    n, k = w.shape[-2:]
    values = _padded(w.float(), BLOCK, BLOCK).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scale = power_of_two_scale(values.abs().amax((-3, -1)))
    codes = _codes(values, scale[..., :, None, :, None]).flatten(-4, -3).flatten(-2)
    codes = codes[..., :n, :k]
    return (codes.mT.contiguous().mT if across else codes.contiguous()), scale


def dequantise(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32, where: torch.Tensor | Segments | None = None
) -> torch.Tensor:
    """Decodes codes [rows, n] with their scales. With scales that are powers of two, bfloat16 holds it exactly.

    scale: float32 per 128 elements, or e8m0 bytes (uint8) per 32; [rows, blocks], or by expert as d.scale of Padded.
    """
    if where is not None and usable(codes.device):
        return launch.dequantise(codes, scale, dtype, Segments.of(where))
    scale = scale.flatten(0, -2)
    numbers, block = (e8m0_numbers(scale), MX_BLOCK) if scale.dtype == torch.uint8 else (scale, BLOCK)
    values = _padded(codes.float(), block).unflatten(-1, (-1, block)) * numbers[..., None]
    return values.flatten(-2)[..., : codes.shape[-1]].to(dtype)


def dequantise_weights(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Reverses quantise_weights()."""
    n, k = codes.shape[-2:]
    values = _padded(codes.float(), BLOCK, BLOCK).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    values = values * scale[..., :, None, :, None]
    return values.flatten(-4, -3).flatten(-2)[..., :n, :k].to(dtype)


def e8m0_numbers(scale: torch.Tensor) -> torch.Tensor:
    """float32 of e8m0 bytes."""
    numbers = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.to(torch.int32) - _E8M0_BIAS)
    return torch.where(scale == _NAN_E8M0, torch.nan, numbers)


def rescale_mx(
    codes: torch.Tensor, scale: torch.Tensor, where: torch.Tensor | Segments | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """MXFP8 for GEMMs with a float32 per 1x128: codes of four blocks move to the largest of their scales.

    That is exact but for codes that become subnormal, whose number is the third result (int64, on the device). A block of zeros
    says nothing about the scale, though it has one.
    """
    if where is not None and usable(codes.device):
        return launch.rescale_mx(codes, scale, Segments.of(where))
    scale = scale.flatten(0, -2)
    n = codes.shape[-1]
    values = _padded(codes.float(), BLOCK).unflatten(-1, (-1, BLOCK // MX_BLOCK, MX_BLOCK))
    exponent = _padded(scale.to(torch.int32) - _E8M0_BIAS, BLOCK // MX_BLOCK).unflatten(-1, (-1, BLOCK // MX_BLOCK))
    silent = (values == 0).all(-1) | values.isnan().any(-1)
    common = exponent.masked_fill(silent, -126).amax(-1, keepdim=True).clamp(min=-126)
    common = torch.where(silent.all(-1, keepdim=True), 0, common)
    shift = torch.where(silent, 0, exponent - common)
    moved = torch.ldexp(values, shift[..., None])
    subnormal = (moved.abs() < 2.0**-6) & (values.abs() >= 2.0**-6)
    rescaled = moved.to(E4M3).flatten(-3)[..., :n].contiguous()
    return rescaled, torch.ldexp(torch.ones_like(common, dtype=torch.float32), common).squeeze(-1), subnormal.sum()
