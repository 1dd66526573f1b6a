"""Quantising in plain torch, as a user would write it: for the peers, and for the reference."""

from __future__ import annotations

import torch

from pplx_comm.wire import Wire


def scale_and_factor(wire: Wire, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of blocks with these largest magnitudes, as a number, and what their values are multiplied with."""
    zero = largest == 0
    if wire is Wire.FP8:
        # Not 448 / largest, which torch computes as a product with the reciprocal: two roundings.
        factor = torch.full_like(largest, 448) / largest
        return torch.where(zero, 1.0, largest / 448), torch.where(zero, 1.0, factor)
    mantissa, exponent = torch.frexp(largest)
    exponent = torch.where(zero, 0, exponent - 9 + (mantissa > 0.875))
    one = torch.ones_like(largest)
    return torch.ldexp(one, exponent), torch.ldexp(one, -exponent)


def stored(wire: Wire, scale: torch.Tensor) -> torch.Tensor:
    """Scales as they travel."""
    return (torch.frexp(scale)[1] + 126).to(torch.uint8) if wire is Wire.MXFP8 else scale


def number(wire: Wire, scales: torch.Tensor) -> torch.Tensor:
    """Decodes stored scales."""
    return torch.ldexp(torch.ones(scales.shape), scales.int() - 127) if wire is Wire.MXFP8 else scales


def quantise(wire: Wire, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and stored scales of each row."""
    block = wire.scale_block
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % block)).view(len(x), -1, block)
    scale, factor = scale_and_factor(wire, blocks.abs().amax(-1, keepdim=True))
    codes = (blocks * factor).to(torch.float8_e4m3fn)
    return codes.view(len(x), -1)[:, : x.shape[1]].contiguous(), stored(wire, scale[..., 0])
