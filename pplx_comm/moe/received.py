"""The rows of a dispatch, as products take them."""

from __future__ import annotations

from pplx_comm.all_to_all import AllToAll
from pplx_comm.handles import Dispatched
from pplx_comm.layouts import Padded, Ragged
from pplx_comm.moe.arithmetic import Rows
from pplx_comm.moe.segments import Segments, segments


def received(a2a: AllToAll, d: Dispatched) -> Rows:
    """The rows of a dispatch that was received. The CPU device leaves out what lies behind the rows; on a GPU nobody waits to know.

    With max_rows there may be more than there is room for, which the next call reports.
    """
    if isinstance(a2a.layout, Padded):
        # The room is what all ranks' tokens together can be.
        return Rows(d.x.flatten(0, 1), d.scale, segments(d, -(-d.x.shape[1] * a2a.top_k // a2a.num_experts)))
    offsets = d.offsets
    assert offsets is not None
    assert isinstance(a2a.layout, Ragged)
    if a2a.layout.max_rows is not None:
        offsets = offsets.clamp(max=len(d.x))
    used = len(d.x) if d.x.device.type == "cuda" else int(offsets[-1])
    return Rows(d.x[:used], None if d.scale is None else d.scale[:used], Segments(offsets))
