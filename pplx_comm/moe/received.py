"""The rows of a dispatch, as products take them."""

from __future__ import annotations

from pplx_comm.all_to_all import AllToAll
from pplx_comm.handles import Dispatched
from pplx_comm.layouts import Padded, Ragged
from pplx_comm.moe.arithmetic import Rows
from pplx_comm.moe.segments import Segments, segments


def received(a2a: AllToAll, d: Dispatched, tokens: int | None = None) -> Rows:
    """Returns the rows of a received dispatch. The CPU device leaves out what lies behind the rows; on a GPU the host does not wait
    to know.

    With max_rows there may be more than there is room for, which the next call reports.

    tokens: see expected_rows(). None takes this rank's.
    """
    expected = expected_rows(a2a, d.plan.tokens if tokens is None else tokens)
    if isinstance(a2a.layout, Padded):
        return Rows(d.x.flatten(0, 1), d.scale, segments(d, expected))
    offsets = d.offsets
    assert offsets is not None
    assert isinstance(a2a.layout, Ragged)
    if a2a.layout.max_rows is not None:
        offsets = offsets.clamp(max=len(d.x))
    used = len(d.x) if d.x.device.type == "cuda" else int(offsets[-1])
    return Rows(d.x[:used], None if d.scale is None else d.scale[:used], Segments(offsets, expected=expected))


def expected_rows(a2a: AllToAll, tokens: int) -> int:
    """An expert's rows, on average, if each rank has `tokens` tokens in this call. Tiles and backends follow from it, not from the
    room.

    Ranks need not agree. One without tokens cannot know, and expects the most that there may be.
    """
    return max(1, -(-(tokens or a2a.max_tokens_per_rank) * a2a.world_size * a2a.top_k // a2a.num_experts))
