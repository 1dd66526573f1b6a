"""The arguments of a call, as all_to_all.py hands them on to the device.

Plain tuples: an object with slots and names costs 0.15 us more, and a pair of calls makes two of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pplx_comm.handles import Dispatched, Plan

Optional = torch.Tensor | None

Sent = tuple[torch.Tensor, Optional, Optional, Optional, Plan | None]
"""x, topk_ids, topk_weights, x_scale and plan of AllToAll.dispatch."""


class How(NamedTuple):
    """Options of a dispatch that few callers give."""

    apart: bool = False
    """Its tensors share no memory: for as_tensors()."""
    zeroed: bool = False
    """Rows of d.x and d.weights that no token fills are zero."""
    unread: bool = False
    """The rows are not read on any rank, so they need not travel."""
    totals: Optional = None
    """int32 [local experts], to which the receive half adds d.counts."""


ORDINARY = How()

Returned = tuple[torch.Tensor, Dispatched, Optional, bool, Optional, Optional, bool]
"""expert_out, d, weights, weighted, tail, out and accumulate of AllToAll.combine."""

Rows = tuple[torch.Tensor, Optional, torch.Tensor]
"""x, scale and counts of a Dispatched."""
