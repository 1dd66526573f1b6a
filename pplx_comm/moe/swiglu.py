"""The activation between an expert's two products.

`where` says where there are rows: d.offsets, or segments(d). With it, on a GPU with Triton, each function is one kernel that reads
and writes no others; without, or elsewhere, it is torch's operators on all rows.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from pplx_comm.moe.kernels import launch
from pplx_comm.moe.kernels.usable import usable
from pplx_comm.moe.quantise import quantise
from pplx_comm.moe.segments import Segments


def swiglu(h: torch.Tensor, where: torch.Tensor | Segments | None = None) -> torch.Tensor:
    """h: [rows, 2 * intermediate], gates before ups. silu(gate) * up in float32, rounded once to h's dtype."""
    if where is not None and usable(h.device):
        return launch.swiglu(h, Segments.of(where))
    gate, up = h.float().chunk(2, -1)
    return (F.silu(gate) * up).to(h.dtype)


def swiglu_quantise(h: torch.Tensor, where: torch.Tensor | Segments | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [rows, intermediate] of swiglu(h), and their float32 scales per 1x128.

    The activation is rounded to h's dtype first, as if it were stored between.
    """
    if where is not None and usable(h.device):
        return launch.swiglu_quantise(h, Segments.of(where))
    return quantise(swiglu(h))


def swiglu_backward(
    h: torch.Tensor, da: torch.Tensor, weights: torch.Tensor, where: torch.Tensor | Segments | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of y = weight * (a @ down^T), where a = swiglu(h) and da is the gradient of a without the weight.

    Returns the gradient of h; weight * a, which the gradient of down wants; and the gradient of each row's weight. That one is
    <da, a>, so the expert's output is not kept. Rows lie as Ragged lays them.
    """
    if where is not None and usable(h.device):
        return launch.swiglu_backward(h, da, weights, Segments.of(where))
    gate, up = h.float().chunk(2, -1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    a, da = silu * up, da.float()
    weight = weights[:, None]
    weighted = weight * da
    d_gate = weighted * up * sigmoid * (1 + gate * (1 - sigmoid))
    dh = torch.cat([d_gate, weighted * silu], -1)
    return dh.to(h.dtype), (weight * a).to(h.dtype), (da * a).sum(-1)
