"""The experts of a pass beside its step: rows are multiplied while others travel, and sent home while others are multiplied.

"groups"   group after group of experts, by any product; combine is told of each block of rows when it is written
"signals"  our own products wait for the words of dispatch, block by block, and raise those of combine: see kernels/beside.py

The step runs in a lane (lanes.py). Both have the bits of a pass without: the same rows, multiplied and added up in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pplx_comm.all_to_all import AllToAll
from pplx_comm.errors import Error
from pplx_comm.handles import Dispatched
from pplx_comm.hooks import HOOK_ROWS
from pplx_comm.layouts import Ragged
from pplx_comm.moe.arithmetic import Arithmetic, Rows
from pplx_comm.moe.kernels.usable import programs, usable
from pplx_comm.moe.lanes import Lane
from pplx_comm.moe.received import received
from pplx_comm.moe.segments import Segments

NONE, GROUPS, SIGNALS = "none", "groups", "signals"
OVERLAPS = (NONE, GROUPS, SIGNALS)
SMS_OF_STEP = 24
"""Multiprocessors of a step beside products, where nobody says: enough to fill the links of eight GPUs."""
LEAST_SMS = 4
_BETWEEN_LOOKS = 20e-6  # seconds, of a CPU: threads that raise words wake nobody

Make = Callable[[range, Segments], Arithmetic]
"""The arithmetic of some local experts, on rows that lie so."""
Kept = tuple[Rows, torch.Tensor]


@dataclass(frozen=True)
class Middle:
    """Of a pass: from the receive half of its dispatch to the send half of its combine, or to the end of that if `whole`."""

    a2a: AllToAll
    d: Dispatched
    tokens: int
    """See received.expected_rows()."""
    width: int
    """Of the first product."""
    whole: bool


def sms_of_step(device: torch.device) -> int | None:
    """SMS_OF_STEP, or a quarter of what this process has, if that is less: parts of GPUs have few. None: not a GPU."""
    return max(LEAST_SMS, min(SMS_OF_STEP, programs(device) // 4)) if device.type == "cuda" else None


def check(overlap: str, a2a: AllToAll, quantised: bool) -> None:
    """Before anything is sent."""
    if overlap == NONE:
        return
    if not a2a.hooks:
        raise Error(f"overlap={overlap!r} needs an AllToAll with hooks=True")
    if a2a.num_sms is None and a2a.device.type == "cuda":
        raise Error(
            f"overlap={overlap!r} needs an AllToAll with num_sms=: a combine that has the whole GPU leaves nothing to the products "
            f"whose rows it waits for (a layer by itself takes {sms_of_step(a2a.device)} here)"
        )
    if overlap != SIGNALS:
        return
    if not usable(a2a.device):
        raise Error(
            'overlap="signals" is for our Triton kernels, on a GPU with triton installed: overlap="groups" takes any product'
        )
    if not quantised and a2a.dtype not in (torch.bfloat16, torch.float16):
        raise Error(f'overlap="signals" is for products in bfloat16 and float16, not in {a2a.dtype}: overlap="groups" takes any')
    if isinstance(a2a.layout, Ragged) and a2a.layout.align % HOOK_ROWS:
        raise Error(f'overlap="signals" needs Ragged(align={HOOK_ROWS}), or a multiple: a tile must have the rows of one word')


def groups_of(a2a: AllToAll, groups: int) -> int:
    """Not more than this rank has experts."""
    return max(1, min(groups, a2a.num_local_experts))


def run(lane: Lane, middle: Middle, overlap: str, make: Make) -> Kept:
    """lane.result() has what combine returned. Returns the rows that were received, and the first product: for a backward pass."""
    d = middle.d
    lane.receive(middle.a2a, d)
    try:
        return (_groups if overlap == GROUPS else _signals)(lane, middle, make)
    except BaseException:
        lane.give_up(d.hooks is not None and d.hooks.failed)
        raise


def _on_gpu(t: torch.Tensor) -> bool:
    """Where the host knows nothing, and streams wait."""
    return t.device.type == "cuda"


def _received(m: Middle) -> Rows:
    rows = received(m.a2a, m.d, m.tokens)
    if not _on_gpu(m.d.x):
        return rows
    # Nobody knows what a dispatch that failed says, and kernels must not read beyond the rows.
    most = rows.where.room or len(rows.x)
    return replace(rows, where=replace(rows.where, where=rows.where.where.clamp(0, most)))


def _memory(m: Middle, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For the first product, for the second, and for what combine returns."""
    a2a = m.a2a
    h, out = (torch.empty(len(rows.x), n, dtype=a2a.dtype, device=a2a.device) for n in (m.width, a2a.hidden))
    return h, out, torch.empty(m.d.plan.tokens, a2a.hidden, dtype=a2a.dtype, device=a2a.device)


def _combine(m: Middle, out: torch.Tensor, y: torch.Tensor, value: int) -> Callable[[], Any]:
    d = m.d
    rows = out.view_as(d.x) if d.x.dim() == 3 else out
    return lambda: (m.a2a.combine if m.whole else m.a2a.combine_send)(rows, d, out=y, ready=d.ready, ready_value=value)


def _groups(lane: Lane, m: Middle, make: Make) -> Kept:
    a2a, d = m.a2a, m.d
    groups = [d.group(i) for i in range(d.expert_groups)]
    if a2a.num_local_experts == 0:
        lane.wait()  # no group waits for the plan
    groups[0].wait()
    rows = _received(m)
    h, out, y = _memory(m, rows)

    def compute(some: list[Any]) -> None:
        for group in some:
            if group is not groups[0]:
                group.wait()
            part, here = _part(rows, group.experts)
            arithmetic = make(group.experts, part.where)
            arithmetic.up(part, h[here])
            arithmetic.down(h[here], out[here])
            _raise_words(d, rows.where, group.experts)

    before = min(lane.groups_before_combine, len(groups) - 1)
    compute(groups[:before])
    lane.kept += [d, out, y]
    lane.combine(_combine(m, out, y, 1), lambda: compute(groups[before:]), lambda: None)
    return rows, h


def _part(rows: Rows, experts: range) -> tuple[Rows, slice]:
    """The rows of some experts. On a GPU with Ragged these are all rows, for only the device knows which ones; else a slice."""
    where, first, end = rows.where, experts.start, experts.stop
    if where.room:
        here = slice(first * where.room, end * where.room)
        scale = rows.scale
        some = replace(where, where=where.where[first:end], part=True)
        return Rows(rows.x[here], scale if scale is None else scale[first:end], some), here
    offsets = where.where[first : end + 1]
    if _on_gpu(rows.x):
        return replace(rows, where=Segments(offsets, expected=where.average(len(rows.x)), part=True)), slice(None)
    begin, stop = int(offsets[0]), int(offsets[-1])
    here = slice(begin, stop)
    some = Segments(offsets - begin, expected=where.average(len(rows.x)))
    return Rows(rows.x[here], rows.scale if rows.scale is None else rows.scale[here], some), here


def _raise_words(d: Dispatched, where: Segments, experts: range) -> None:
    """Of blocks whose rows are written now: with those of earlier groups, all before the next group's."""
    ready = d.ready.view(torch.int32)
    if where.room:
        ready[experts.start : experts.stop].fill_(1)
    elif experts.stop == where.experts:
        ready.fill_(1)
    elif _on_gpu(ready):
        ends = torch.arange(HOOK_ROWS, (len(ready) + 1) * HOOK_ROWS, HOOK_ROWS, dtype=torch.int32, device=ready.device)
        ready.copy_(ends <= where.where[experts.stop])
    else:  # an x86 stores in order, so who sees a word sees its rows
        ready[: int(where.where[experts.stop]) // HOOK_ROWS].fill_(1)


def _signals(lane: Lane, m: Middle, make: Make) -> Kept:
    from pplx_comm.moe.grouped.beside import Beside

    a2a, d = m.a2a, m.d
    _await_plan(lane, d)
    rows = _received(m)
    h, out, y = _memory(m, rows)
    arithmetic = make(range(a2a.num_local_experts), rows.where)
    beside = Beside.of(d, rows.where, a2a.num_sms or SMS_OF_STEP)
    if (operand := arithmetic.as_it_comes(rows)) is not None:
        beside.up(operand, arithmetic.gate_up, rows.where, h)
        beside = replace(beside, ordered=True)
    else:  # of another format than products take, which is changed for all of them
        lane.wait()
        arithmetic.up(rows, h)
    activated = arithmetic.activated(h)
    value = beside.ready_value(activated, arithmetic.down_weights, rows.where)
    lane.kept += [d, out, y, activated, beside]
    lane.combine(
        _combine(m, out, y, value),
        lambda: beside.down(activated, arithmetic.down_weights, rows.where, out),
        lambda: _await_producers(beside, beside.producers(activated, rows.where)),
    )
    return rows, h


def _await_plan(lane: Lane, d: Dispatched) -> None:
    """Until counts and offsets are there. On a GPU the current stream waits, and the dispatch has its multiprocessors by then."""
    planned = d.planned.view(torch.int32)
    if _on_gpu(planned):
        from pplx_comm.moe.kernels.beside import until_raised

        d.watch()
        until_raised[(1,)](planned, num_warps=1)
        return
    while not (d.received or int(planned[0]) < 0):
        time.sleep(_BETWEEN_LOOKS)
    if d.hooks is not None and d.hooks.failed:
        lane.wait()


def _await_producers(beside: Any, producers: int) -> None:
    """Combine's thread blocks come when the product's have their multiprocessors: a product on what they leave would be slow."""
    from pplx_comm.moe.kernels.beside import until_reached

    until_reached[(1,)](beside.begun, producers, num_warps=1)
