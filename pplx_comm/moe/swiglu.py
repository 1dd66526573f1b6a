"""The activation between an expert's two products."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def swiglu(h: torch.Tensor) -> torch.Tensor:
    """h: [rows, 2 * intermediate], gates before ups. silu(gate) * up in float32, rounded once to h's dtype."""
    gate, up = h.float().chunk(2, -1)
    return (F.silu(gate) * up).to(h.dtype)


def swiglu_backward(h: torch.Tensor, da: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For y = weight * (a @ down^T) with a = swiglu(h), and da the gradient of a without the weight.

    Returns the gradient of h; weight * a, which the gradient of down wants; and the gradient of each row's weight. That one is
    <da, a>, so nobody keeps what the expert returned.
    """
    gate, up = h.float().chunk(2, -1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    a, da = silu * up, da.float()
    weight = weights[:, None]
    weighted = weight * da
    d_gate = weighted * up * sigmoid * (1 + gate * (1 - sigmoid))
    dh = torch.cat([d_gate, weighted * silu], -1)
    return dh.to(h.dtype), (weight * a).to(h.dtype), (da * a).sum(-1)
