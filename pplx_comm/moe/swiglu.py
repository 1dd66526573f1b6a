"""The activation between an expert's two products.

`offsets`, int32 [experts + 1], says how many rows there are. With it, on a GPU with Triton, each function is one kernel that reads
and writes no others; without, or elsewhere, it is torch's operators on all rows.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from pplx_comm.moe.kernels import launch
from pplx_comm.moe.kernels.usable import usable
from pplx_comm.moe.quantise import quantise


def swiglu(h: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """h: [rows, 2 * intermediate], gates before ups. silu(gate) * up in float32, rounded once to h's dtype."""
    if offsets is not None and usable(h.device):
        return launch.swiglu(h, offsets)
    gate, up = h.float().chunk(2, -1)
    return (F.silu(gate) * up).to(h.dtype)


def swiglu_quantise(h: torch.Tensor, offsets: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [rows, intermediate] of swiglu(h), and their float32 scales per 1x128.

    The activation is rounded to h's dtype first, as if it were stored between.
    """
    if offsets is not None and usable(h.device):
        return launch.swiglu_quantise(h, offsets)
    return quantise(swiglu(h))


def swiglu_backward(
    h: torch.Tensor, da: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For y = weight * (a @ down^T) with a = swiglu(h), and da the gradient of a without the weight.

    Returns the gradient of h; weight * a, which the gradient of down wants; and the gradient of each row's weight. That one is
    <da, a>, so nobody keeps what the expert returned.
    """
    if offsets is not None and usable(h.device):
        return launch.swiglu_backward(h, da, weights, offsets)
    gate, up = h.float().chunk(2, -1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    a, da = silu * up, da.float()
    weight = weights[:, None]
    weighted = weight * da
    d_gate = weighted * up * sigmoid * (1 + gate * (1 - sigmoid))
    dh = torch.cat([d_gate, weighted * silu], -1)
    return dh.to(h.dtype), (weight * a).to(h.dtype), (da * a).sum(-1)
