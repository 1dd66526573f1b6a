"""Cases of test_deep_ep.py: what DeepEP's documentation promises of its V1 Buffer."""

from __future__ import annotations

import logging
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import until
from outcomes import raised

import pplx_comm as pc
from pplx_comm.compat import deep_ep
from pplx_comm.compat.deep_ep import Buffer, Config, EventOverlap

Layer = dict[str, int]
CLOSE = 2**-6
"""The relative error of sums of a few terms in bfloat16, rounded once for each rank."""


def buffer(me: Any, fresh: bool = False, **arguments: Any) -> Buffer:
    """The one that cases share, over a gloo group, as vLLM makes it."""
    if fresh:
        return Buffer(dist.group.WORLD, **arguments)
    if "buffer" not in me.kept:
        me.kept["buffer"] = Buffer(group=dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    return me.kept["buffer"]


class World:
    """The tokens of all ranks. Every rank knows all of them."""

    def __init__(self, seed: int, ranks: int, tokens: list[int], *, hidden: int, experts: int, top_k: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.ranks, self.tokens, self.hidden, self.experts, self.local = ranks, tokens, hidden, experts, experts // ranks
        self.x = [torch.randn(t, hidden, generator=g).to(torch.bfloat16) for t in tokens]
        self.ids = [torch.rand(t, experts, generator=g).topk(top_k, dim=1).indices for t in tokens]
        for ids in self.ids:
            ids.masked_fill_(torch.rand(ids.shape, generator=g) < 0.2, -1)
        self.weights = [torch.rand(t, top_k, generator=g) for t in tokens]

    def owner(self, source: int) -> torch.Tensor:
        """The rank of each choice, or -1."""
        ids = self.ids[source]
        return torch.where(ids < 0, -1, ids // self.local)

    def wanted(self, source: int) -> torch.Tensor:
        """bool [tokens, ranks]"""
        return (self.owner(source).unsqueeze(2) == torch.arange(self.ranks)).any(1)

    def by_expert(self, expert: int) -> list[list[int]]:
        """Tokens of each source that choose it."""
        return [(ids == expert).any(1).nonzero().flatten().tolist() for ids in self.ids]

    def combined(self, source: int, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Expert e multiplies by 1 + e."""
        ids = self.ids[source] if ids is None else ids
        factors = torch.where(ids < 0, 0.0, (1.0 + ids) * self.weights[source])
        return self.x[source].float() * factors.sum(1, keepdim=True)


def close(y: torch.Tensor, wanted: torch.Tensor, tolerance: float = CLOSE) -> bool:
    if y.shape != wanted.shape or y.numel() == 0:
        return y.shape == wanted.shape
    return bool((y.float() - wanted.float()).abs().max() <= tolerance * (1 + wanted.float().abs().max()))


def decoded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows of codes as float32; packed scales are exponents."""
    if scale.dtype == torch.int32:
        bits = scale.contiguous().view(torch.uint8).to(torch.int32) << 23
        scale = bits.view(torch.float32)
    return (x.float().unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)


# ---- low latency -----------------------------------------------------------------------------------------------------------


def waits(b: Buffer, half: str) -> torch.Tensor:
    """Nanoseconds by source, of all its AllToAlls."""
    each = [lane.a2a.waits(half) for lane in lanes(b)]
    return torch.stack(each).sum(0) if each else torch.zeros(b.group_size, dtype=torch.int64)


def low_latency(me: Any, seed: int, layer: Layer, tokens: list[int], most: int, kind: str, how: str) -> None:
    """One dispatch and its combines. kind: of rows. how: "whole", "async" or "hook"."""
    world, b = World(seed, me.world_size, tokens, **layer), buffer(me)
    x, ids, weights = world.x[me.rank], world.ids[me.rank], world.weights[me.rank]
    stats = torch.full((world.local,), 7, dtype=torch.int32)
    costs = {half: torch.full((me.world_size,), 7) for half in ("dispatch", "combine")}
    waited = {half: waits(b, half) for half in costs}
    quantised = {"use_fp8": kind != "bf16", "round_scale": kind in ("powers", "packed"), "use_ue8m0": kind == "packed"}
    mode = {"async_finish": how == "async", "return_recv_hook": how == "hook"}
    back: dict[str, Any] = {**mode, "combine_wait_recv_cost_stats": costs["combine"]}
    received, counts, handle, event, hook = b.low_latency_dispatch(
        x, ids, most, world.experts, cumulative_local_expert_recv_stats=stats, dispatch_wait_recv_cost_stats=costs["dispatch"],
        **quantised, **mode,
    )  # fmt: skip
    ended(how, event, hook)
    assert torch.equal(costs["dispatch"] - 7, waits(b, "dispatch") - waited["dispatch"])
    rows = received
    if kind != "bf16":
        rows, scale = received
        blocks = world.hidden // (512 if kind == "packed" else 128)
        assert scale.shape == (world.local, me.world_size * most, blocks) and scale.stride(1) == 1
        assert scale.dtype == (torch.int32 if kind == "packed" else torch.float32) and rows.dtype == torch.float8_e4m3fn
        rows = decoded(rows, scale)
    assert rows.shape == (world.local, me.world_size * most, world.hidden) and counts.dtype == torch.int32
    assert torch.equal(stats - 7, counts)
    source, layout, *shape = handle
    assert shape == [most, world.hidden, world.experts] and layout.shape == (world.local, me.world_size)
    for e in range(world.local):
        meant = world.by_expert(me.rank * world.local + e)
        assert int(counts[e]) == sum(map(len, meant))
        for rank, their in enumerate(meant):
            begin, count = int(layout[e, rank]) >> 32, int(layout[e, rank]) & 0xFFFFFFFF
            own = slice(begin, begin + count)
            assert source[e, own].tolist() == their
            sent = world.x[rank][their].float()
            assert torch.equal(rows[e, own], sent) if kind == "bf16" else close(rows[e, own], sent, 1 / 15)
    # Rows that hold nothing stay out of all sums.
    factors = 1.0 + torch.arange(me.rank * world.local, (me.rank + 1) * world.local).view(-1, 1, 1)
    answers = (rows * factors).to(torch.bfloat16)
    beyond = torch.arange(answers.shape[1]) >= counts.unsqueeze(1)
    answers[beyond] = float("nan")
    tolerance = CLOSE if kind == "bf16" else 1 / 15
    made = []
    for zero_copy in (False, True, True):  # the second and the third are combines of a handle that was combined
        given, out = answers, torch.empty_like(x)
        if zero_copy:
            b.get_next_low_latency_combine_buffer(handle)[:, :, :] = answers
            given = torch.empty_like(answers)
        y, event, hook = b.low_latency_combine(given, ids, weights, handle, zero_copy=zero_copy, out=out, **back)
        ended(how, event, hook)
        assert y is out and close(y, world.combined(me.rank), tolerance)
        made.append(y)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    # Choices that are dropped between dispatch and combine count for nothing.
    fewer = ids.clone()
    fewer[:, 0] = -1
    y, event, hook = b.low_latency_combine(answers, fewer, weights, handle, **back)
    ended(how, event, hook)
    assert close(y, world.combined(me.rank, fewer), tolerance)
    assert torch.equal(costs["combine"] - 7, waits(b, "combine") - waited["combine"])


def ended(how: str, event: EventOverlap, hook: Any) -> None:
    assert (hook is not None) == (how == "hook") and (event.event is not None) == (how == "async")
    if how == "hook":
        hook()
        hook()  # changes nothing
    elif how == "async":
        with event:
            pass


def many_open(me: Any, seed: int, layer: Layer, tokens: list[int], most: int) -> None:
    """Five dispatches before any combine, then combines in another order; and combines whose hooks come late."""
    b = buffer(me)
    worlds = [World(seed + n, me.world_size, tokens, **layer) for n in range(5)]
    opened = []
    for world in worlds:
        stats = torch.zeros(world.local, dtype=torch.int32)
        rows, counts, handle, _, hook = b.low_latency_dispatch(
            world.x[me.rank], world.ids[me.rank], most, world.experts, stats, use_fp8=False, return_recv_hook=True
        )
        opened.append((world, rows, counts, handle, stats, hook))
    results = []
    for world, rows, counts, handle, stats, hook in [opened[n] for n in (1, 4, 0, 3, 2)]:
        hook()
        assert torch.equal(stats, counts)
        factors = 1.0 + torch.arange(me.rank * world.local, (me.rank + 1) * world.local).view(-1, 1, 1)
        y, _, finish = b.low_latency_combine(
            rows * factors.to(torch.bfloat16), world.ids[me.rank], world.weights[me.rank], handle, return_recv_hook=True
        )
        results.append((world, y, finish))
    for world, y, finish in reversed(results):
        finish()
        assert close(y, world.combined(me.rank))


# ---- normal mode -----------------------------------------------------------------------------------------------------------


def normal(
    me: Any, seed: int, layer: Layer, tokens: list[int], nodes: int, kind: str, with_top_k: bool, asynchronous: bool
) -> None:
    world, b = World(seed, me.world_size, tokens, **layer), buffer(me)
    x, ids, weights, wanted = world.x[me.rank], world.ids[me.rank], world.weights[me.rank], world.wanted(me.rank)
    per_rank, per_node, per_expert, found, event = b.get_dispatch_layout(ids, world.experts, async_finish=asynchronous)
    assert torch.equal(found, wanted) and found.is_contiguous()
    assert per_rank.tolist() == wanted.sum(0).tolist() and per_rank.dtype == torch.int32
    assert per_expert.tolist() == [int((ids == e).sum()) for e in range(world.experts)] and per_expert.dtype == torch.int32
    by_node = wanted.view(len(x), nodes, me.world_size // nodes).any(2).sum(0).tolist()
    assert (per_node is None) if nodes == 1 else per_node.tolist() == by_node
    sent: Any = x
    if kind == "fp8":  # one value in each block, so codes are exact; scales column by column
        x = x[:, ::128].repeat_interleave(128, 1).contiguous()
        scale = (x[:, ::128].float().abs() / 448).clamp(1e-10)
        sent = (x.float() / scale.repeat_interleave(128, 1)).to(torch.float8_e4m3fn), scale.t().contiguous().t()
        world.x = [rows[:, ::128].repeat_interleave(128, 1) for rows in world.x]
    layout = {
        "num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_node, "is_token_in_rank": found,
        "num_tokens_per_expert": per_expert,
    }  # fmt: skip
    choices = {"topk_idx": ids, "topk_weights": weights} if with_top_k else {}
    mode = {"async_finish": asynchronous, "previous_event": b.capture() if asynchronous else None, "config": Config(24, 8)}
    received, recv_ids, recv_weights, numbers, handle, event = b.dispatch(sent, **layout, **choices, **mode)
    done(asynchronous, event)
    meant = [(rank, int(t)) for rank in range(me.world_size) for t in world.wanted(rank)[:, me.rank].nonzero()]
    rows_meant = torch.stack([world.x[rank][t] for rank, t in meant]) if meant else x[:0]
    assert close(decoded(*received) if kind == "fp8" else received, rows_meant, 0 if kind == "bf16" else 1e-6)
    mine = range(me.rank * world.local, (me.rank + 1) * world.local)
    counts = [sum(int((other == e).sum()) for other in world.ids) for e in mine]
    assert numbers == counts
    ends = torch.tensor([sum(r <= rank for r, _ in meant) for rank in range(me.world_size)])
    assert torch.equal(handle[0][:, me.rank] if nodes == 1 else handle[-4], ends.int())
    assert torch.equal(handle[4] if nodes == 1 else handle[0], found)
    if nodes == 1:
        assert handle[3].tolist() == [t for _, t in meant]
    if with_top_k:
        here = (
            torch.stack([world.owner(r)[t] == me.rank for r, t in meant])
            if meant
            else torch.zeros(0, ids.shape[1], dtype=torch.bool)
        )
        their = torch.stack([world.ids[r][t] for r, t in meant]) if meant else ids[:0]
        numbers_of = torch.stack([world.weights[r][t] for r, t in meant]) if meant else weights[:0]
        assert recv_ids.dtype == deep_ep.topk_idx_t
        assert torch.equal(recv_ids, torch.where(here, their - mine.start, -1))
        assert torch.equal(recv_weights, torch.where(here, numbers_of, 0.0))
        worst = 260 if kind == "bf16" else sum(tokens) + 3  # more than there is room for, and fewer
        large, large_ids, large_weights, none, again, event = b.dispatch(
            sent, **layout, **choices, **mode, num_worst_tokens=worst, expert_alignment=8
        )
        done(asynchronous, event)
        assert none == [] and len(large_ids) == len(large_weights) == worst
        assert torch.equal(large_ids[: len(meant)], recv_ids) and bool((large_ids[len(meant) :] == -1).all())
        assert torch.equal(large_weights[: len(meant)], recv_weights)
        whole = large[0] if kind == "fp8" else large
        assert len(whole) == worst and torch.equal(
            whole[: len(meant)].float(), (received[0] if kind == "fp8" else received).float()
        )
        aligned = b.dispatch(sent, **layout, **choices, expert_alignment=8)[3]
        assert aligned == [-(-count // 8) * 8 for count in counts]
        y, _, event = b.combine(torch.ones(worst, world.hidden, dtype=torch.bfloat16), again, **mode)
        done(asynchronous, event)
        assert torch.equal(y.float(), wanted.sum(1, keepdim=True).float().expand_as(y))
    else:
        assert recv_ids is None and recv_weights is None
    # Other rows on the same routing, of another dtype than before.
    other = torch.arange(len(x)).view(-1, 1).expand(-1, world.hidden) + 100.0 * me.rank
    again, *rest, event = b.dispatch(other.to(torch.bfloat16).contiguous(), handle=handle, **mode)
    done(asynchronous, event)
    assert rest == [None] * 4
    assert torch.equal(again[:, 0].float(), torch.tensor([t + 100.0 * r for r, t in meant]).bfloat16().float())
    # Sums have no weights; biases and numbers of choices are added.
    rows = (decoded(*received) if kind == "fp8" else received).to(torch.bfloat16)
    biases = [torch.full_like(x, 0.5), torch.full_like(x, -2.0)]
    numbers_back = torch.arange(len(meant) * ids.shape[1]).view(-1, ids.shape[1]) + 0.125 + me.rank
    gathered: list[Any] = [None] * me.world_size
    dist.all_gather_object(gathered, (meant, numbers_back))
    sums = torch.zeros(ids.shape)
    for pairs, given in gathered:
        for (rank, t), row in zip(pairs, given, strict=True):
            if rank == me.rank:
                sums[t] += row
    for bias in (None, biases[0], tuple(biases)):
        given = numbers_back if with_top_k else None
        y, combined, event = b.combine(rows, handle, topk_weights=given, bias=bias, **mode)
        done(asynchronous, event)
        shift = 0.0 if bias is None else 0.5 if bias is biases[0] else -1.5
        assert close(y, world.x[me.rank].float() * wanted.sum(1, keepdim=True) + shift)
        assert torch.equal(combined, sums) if with_top_k else combined is None


def done(asynchronous: bool, event: EventOverlap) -> None:
    assert (event.event is not None) == asynchronous
    if asynchronous:
        event.current_stream_wait()


def backward(me: Any, seed: int, layer: Layer, tokens: list[int]) -> None:
    """Gradients as Megatron-Core takes them: dispatch's backward pass is a combine, combine's a dispatch by handle. Two layers, the
    second one's backward pass first; nothing is sent twice."""
    b, worlds = buffer(me), [World(seed + n, me.world_size, tokens, **layer) for n in range(2)]
    handles = []
    for world in worlds:
        x, ids, weights = (of[me.rank] for of in (world.x, world.ids, world.weights))
        per_rank, _, per_expert, wanted, _ = b.get_dispatch_layout(ids, world.experts)
        x = x.float().requires_grad_()  # its own dtype is kept
        rows, _, _, _, handle, _ = b.dispatch(
            x, None, per_rank, None, wanted, per_expert, ids, weights.requires_grad_(), num_worst_tokens=0
        )
        assert rows.dtype == torch.float32 and not rows.requires_grad
        y, _, _ = b.combine(2 * rows, handle)
        assert torch.allclose(y, 2 * x.detach() * wanted.sum(1, keepdim=True))
        handles.append((world, handle, wanted))
    steps = []
    for world, handle, wanted in reversed(handles):
        before = sum(lane.a2a.stats()["steps"] for lane in lanes(b))
        gradient = world.x[me.rank].float()
        rows, _, _, _, _, _ = b.dispatch(gradient, handle=handle)
        back, _, _ = b.combine(rows, handle)
        assert torch.allclose(back, gradient * wanted.sum(1, keepdim=True))
        steps.append(sum(lane.a2a.stats()["steps"] for lane in lanes(b)) - before)
    assert steps == [1, 1]


def lanes(b: Buffer) -> list[Any]:
    return list(b._pool._lanes.values())


def sent(me: Any, b: Buffer, world: World) -> tuple[Any, ...]:
    """Dispatches in normal mode."""
    x, ids, weights = world.x[me.rank], world.ids[me.rank], world.weights[me.rank]
    per_rank, per_node, per_expert, wanted, _ = b.get_dispatch_layout(ids, world.experts)
    return b.dispatch(x, None, per_rank, per_node, wanted, per_expert, ids, weights)


def returned(me: Any, b: Buffer, world: World, rows: torch.Tensor, handle: Any, weights: torch.Tensor | None = None) -> None:
    """Combines the rows as they came, and their weights."""
    y, sums, _ = b.combine(rows, handle, topk_weights=weights)
    assert close(y, world.x[me.rank].float() * world.wanted(me.rank).sum(1, keepdim=True))
    assert weights is None or torch.equal(sums, world.weights[me.rank].masked_fill(world.ids[me.rank] < 0, 0.0))


class Arrives:
    """An event behind which the layout is there."""

    def __init__(self, *written: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.written = written

    def current_stream_wait(self) -> None:
        for tensor, value in self.written:
            tensor.copy_(value)


def layout_behind_an_event(me: Any, seed: int, layer: Layer, tokens: list[int], asynchronous: bool) -> None:
    """Without top-k dispatch reads the layout on the host, once previous_event is over."""
    world, b = World(seed, me.world_size, tokens, **layer), buffer(me)
    x = world.x[me.rank]
    _, _, per_expert, wanted, _ = b.get_dispatch_layout(world.ids[me.rank], world.experts)
    given = torch.zeros_like(wanted), torch.zeros_like(per_expert)
    event: Any = Arrives((given[0], wanted), (given[1], per_expert))
    rows, _, _, numbers, handle, _ = b.dispatch(
        x, is_token_in_rank=given[0], num_tokens_per_expert=given[1], previous_event=EventOverlap(event), async_finish=asynchronous
    )
    mine = range(me.rank * world.local, (me.rank + 1) * world.local)
    assert numbers == [sum(int((ids == e).sum()) for ids in world.ids) for e in mine]
    assert len(rows) == sum(int(world.wanted(rank)[:, me.rank].sum()) for rank in range(me.world_size))
    returned(me, b, world, rows, handle)


def in_pieces(me: Any, seed: int, layer: Layer, tokens: list[int]) -> None:
    """Two dispatches whose blocks go in pieces, the second one combined first. Then rows that are routed once more before the combine."""
    with mock.patch.dict(os.environ, PPLX_COMM_COMPAT_MAX_TOKENS="1024"):
        b = buffer(me, fresh=True, num_nvl_bytes=2)
    worlds = [World(seed + n, me.world_size, tokens, **layer) for n in range(2)]
    opened = [sent(me, b, world) for world in worlds]
    assert all(lane.a2a.calls.session.config.in_pieces for lane in lanes(b))
    for n in (1, 0):
        returned(me, b, worlds[n], opened[n][0], opened[n][4])
    rows, *_, handle, _ = sent(me, b, worlds[0])
    again = b.dispatch(worlds[0].x[me.rank], handle=handle)[0]
    assert torch.equal(again, rows)
    returned(me, b, worlds[0], again, handle)
    assert sum(lane.a2a.stats()["open_steps"] for lane in lanes(b)) == 0
    b.destroy()


def closed_lanes(me: Any, seed: int, layer: Layer, tokens: list[int]) -> None:
    """Combines on handles whose AllToAll makes room for that of the weights, and whose buffer is gone."""
    b = buffer(me, fresh=True)
    world = World(seed, me.world_size, tokens, **layer)
    rows, _, weights, _, handle, _ = sent(me, b, world)
    for n in range(1, 8):
        b.low_latency_dispatch(
            torch.ones(1, 64 * n, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64), 1, 8, use_fp8=False
        )
    assert len(lanes(b)) == 8 and not handle.step.lane.closed
    returned(me, b, world, rows, handle, weights)
    rows, *_, handle, _ = sent(me, b, world)
    dist.barrier()
    b.destroy()
    other = buffer(me, fresh=True)
    returned(me, other, world, rows, handle)
    other.destroy()


def captured(me: Any) -> tuple[str, str]:
    """Returns what a dispatch in a capture says while two from before it are open, and one whose host would wait for its rows. torch is made
    to see a capture."""
    b = buffer(me, fresh=True)
    x, ids = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, -1]])
    call = lambda: b.low_latency_dispatch(x, ids, 2, 8, use_fp8=False)  # noqa: E731
    for _ in range(2):
        call()
    _, _, per_expert, wanted, _ = b.get_dispatch_layout(ids, 8)
    normal = lambda: b.dispatch(x, is_token_in_rank=wanted, num_tokens_per_expert=per_expert, topk_idx=ids)  # noqa: E731
    normal()
    for other in lanes(b):
        other._gpu = True
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        told = raised(call)["message"], raised(normal)["message"]
    for other in lanes(b):
        other._gpu = False
    call()  # the refusals took no step
    normal()
    dist.barrier()
    b.destroy()
    return told


# ---- shapes, refusals, deaths ------------------------------------------------------------------------------------------------


def many_shapes(me: Any, seed: int) -> tuple[int, bool]:
    """Returns how many AllToAlls there are in the end, and if the one that was used in between is the same as at first."""
    b = buffer(me, fresh=True)

    def world(n: int) -> World:
        return World(seed + n, me.world_size, [3, 1, 0, 2], hidden=64 + 64 * n, experts=8, top_k=2)

    def dispatch(world: World) -> tuple[World, torch.Tensor, Any]:
        rows, _, handle, _, _ = b.low_latency_dispatch(world.x[me.rank], world.ids[me.rank], 4, 8, use_fp8=False)
        return world, rows, handle

    def combine(world: World, rows: torch.Tensor, handle: Any) -> None:
        factors = 1.0 + torch.arange(me.rank * world.local, (me.rank + 1) * world.local).view(-1, 1, 1)
        y, _, _ = b.low_latency_combine(rows * factors.to(torch.bfloat16), world.ids[me.rank], world.weights[me.rank], handle)
        assert close(y, world.combined(me.rank))

    first, often = dispatch(world(1)), world(0)
    combine(*first)
    combine(*dispatch(often))
    used = lanes(b)[-1]
    for n in range(2, 12):
        combine(*dispatch(world(n)))
        combine(*dispatch(often))
    combine(*first)  # the AllToAll of its dispatch is closed, and made again
    kept = len(lanes(b)), any(lane is used for lane in lanes(b))
    b.destroy()
    return kept


def dropped(me: Any) -> list[bool]:
    """Returns if the Communicators of two buffers that nothing refers to are closed; the second one was to be destroyed explicitly."""
    closed = []
    for explicitly in (False, True):
        b = buffer(me, fresh=True, explicitly_destroy=explicitly)
        ids = torch.zeros(1, 1, dtype=torch.int64)
        x = torch.ones(1, 64, dtype=torch.bfloat16)
        _, _, handle, _, _ = b.low_latency_dispatch(x, ids, 1, 8, use_fp8=False)
        rows = torch.zeros(8 // me.world_size, me.world_size, 64, dtype=torch.bfloat16)
        b.low_latency_combine(rows, ids, torch.ones(1, 1), handle)
        comm = b._pool.comm
        comm.barrier()
        del b
        closed.append("this Communicator is closed" in raised(comm.barrier)["message"])
        comm.close()
    return closed


def logged(me: Any) -> list[str]:
    """Returns the lines that two buffers log."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("pplx_comm")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    deep_ep.announce.cache_clear()
    for _ in range(2):
        buffer(me, fresh=True).destroy()
    log.removeHandler(handler)
    return [line for line in said if "deep_ep" in line]


def refusals(me: Any) -> dict[str, str]:
    b = buffer(me)
    x, ids = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, -1]])
    _, _, handle, _, _ = b.low_latency_dispatch(x, ids, 2, 8, use_fp8=False)
    rows, weights = torch.zeros(8 // me.world_size, 2 * me.world_size, 128, dtype=torch.bfloat16), torch.ones(2, 2)
    ll = lambda **more: b.low_latency_dispatch(x, ids, 2, 8, **more)  # noqa: E731
    combine = lambda **more: b.low_latency_combine(rows, ids, weights, handle, **more)  # noqa: E731
    wanted = b.get_dispatch_layout(ids, 8)[3]
    calls = {
        "shrink": lambda: Buffer(dist.group.WORLD, enable_shrink=True),
        "no group": lambda: Buffer(),
        "nvfp4": lambda: ll(use_nvfp4=True),
        "ue8m0 alone": lambda: ll(use_ue8m0=True),
        "packed": lambda: ll(round_scale=True, use_ue8m0=True),
        "uneven layout": lambda: b.get_dispatch_layout(ids, 9),
        "few experts": lambda: b.get_dispatch_layout(ids, me.world_size - 1),
        "async and hook": lambda: ll(async_finish=True, return_recv_hook=True),
        "uneven": lambda: b.low_latency_dispatch(x, ids, 2, 9),
        "logfmt": lambda: combine(use_logfmt=True),
        "overlap": lambda: combine(overlap=True, block_m=64),
        "zero copy": lambda: combine(zero_copy=True),
        "mask": lambda: b.low_latency_update_mask_buffer(1, True),
        "memory": lambda: b.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True),
        "no layout": lambda: b.dispatch(x, topk_idx=ids),
        "scales": lambda: b.dispatch((x, torch.zeros(2, 1, dtype=torch.int32)), is_token_in_rank=wanted),
        "no wait": lambda: EventOverlap().current_stream_wait(),
    }
    told = {name: raised(call)["message"] for name, call in calls.items()}
    y, _, _ = combine()  # no refusal took a step
    assert torch.equal(y, torch.zeros_like(y))
    return told


def too_many(me: Any) -> dict[str, Any]:
    """Rank 1 comes with more tokens than there is room for."""
    b = buffer(me, fresh=True)
    told: dict[str, Any] = {}
    for tokens in (8, 70 if me.rank == 1 else 8):
        ids = torch.zeros(tokens, 1, dtype=torch.int64)
        _, _, per_expert, wanted, _ = b.get_dispatch_layout(ids, 8)
        call = lambda: b.dispatch(torch.ones(tokens, 64, dtype=torch.bfloat16), None, None, None, wanted, per_expert, ids)  # noqa: E731
        told = raised(call) if tokens == 70 or told == {"first": True} else {"first": call() is not None}
    b.destroy()
    return told


def a_death(me: Any, dead: int) -> list[int]:
    """Goes on without a rank that was killed. Returns the mask."""
    b = buffer(me, fresh=True)
    world = World(5, me.world_size, [3] * me.world_size, hidden=64, experts=2 * me.world_size, top_k=2)
    x, ids, weights = world.x[me.rank], world.ids[me.rank], world.weights[me.rank]
    mask = torch.full((me.world_size,), 9, dtype=torch.int32)

    def step() -> torch.Tensor:
        rows, _, handle, _, _ = b.low_latency_dispatch(x, ids, 3, world.experts, use_fp8=False)
        factors = 1.0 + torch.arange(me.rank * world.local, (me.rank + 1) * world.local).view(-1, 1, 1)
        return b.low_latency_combine(rows * factors.to(torch.bfloat16), ids, weights, handle)[0]

    step()
    b.low_latency_query_mask_buffer(mask)
    assert mask.tolist() == [0] * me.world_size
    b.low_latency_dispatch(x, ids, 3, world.experts, use_fp8=False, return_recv_hook=True)  # stays open
    me.say("ready")
    if me.rank == dead:
        me.hear()

    def fails() -> bool:
        try:
            step()
        except pc.PeerError:
            return True
        return False

    until("the death is noticed", fails)
    b.low_latency_query_mask_buffer(mask)
    b.low_latency_clean_mask_buffer()
    left = ids.masked_fill(world.owner(me.rank) == dead, -1)
    for _ in range(2):  # the second one takes the memory of the step that was open
        assert close(step(), world.combined(me.rank, left))
    b.destroy()
    return mask.tolist()
