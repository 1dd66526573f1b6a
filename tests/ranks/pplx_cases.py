"""Cases of test_pplx_packages.py: what pplx_kernels and pplx_garden promise of their all-to-all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from outcomes import raised

from pplx_comm.compat.pplx_garden import P2PAllToAll
from pplx_comm.compat.pplx_kernels import AllToAll, nvshmem_init

BLOCK = 128
"""Elements with a scale, of rows of codes. Other rows have scales where a case has a "block". 0: no rows have any."""


class World:
    """Tokens of each group of `same` ranks, which hold the same."""

    def __init__(self, me: Any, seed: int, same: int, case: dict[str, Any]) -> None:
        g = torch.Generator().manual_seed(seed)
        self.groups, self.mine, self.same = me.world_size // same, me.rank // same, same
        self.hidden, self.experts, self.top_k, self.most = case["hidden"], case["experts"], case["top_k"], case["most"]
        self.local, dtype = self.experts // me.world_size, getattr(torch, case["in"])
        self.block = case.get("block", BLOCK)
        self.scales = -(-self.hidden // self.block) if self.block and (dtype.itemsize == 1 or "block" in case) else 0
        self.used = [int(torch.randint(self.most + 1, (), generator=g)) for _ in range(self.groups)]
        self.x, self.scale, self.ids, self.weights = [], [], [], []
        for _ in range(self.groups):
            x = torch.randn(self.most, self.hidden, generator=g)
            self.scale.append(torch.rand(self.most, self.scales, generator=g) if self.scales else None)
            self.x.append(x.to(dtype))
            self.ids.append(torch.rand(self.most, self.experts, generator=g).topk(self.top_k).indices.to(torch.uint32))
            self.weights.append(torch.rand(self.most, self.top_k, generator=g))

    def rows(self, expert: int) -> list[tuple[int, int]]:
        """Group and token."""
        return [
            (group, t) for group in range(self.groups) for t in range(self.used[group])
            if expert in self.ids[group][t].tolist()
        ]  # fmt: skip

    def arrived(self, expert: int, x: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Its rows came, in any order, with their scales."""
        rows = self.rows(expert)
        meant = [_bytes(self.x[group][t], None if scale is None else self.scale[group][t]) for group, t in rows]
        found = [_bytes(x[row], None if scale is None else scale[row]) for row in range(len(rows))]
        assert sorted(found) == sorted(meant)

    def value(self, group: int) -> torch.Tensor:
        x, scale = self.x[group].float(), self.scale[group]
        return x if scale is None else x * scale.repeat_interleave(self.block, 1)[:, : self.hidden]

    def combined(self) -> torch.Tensor:
        """Expert e multiplies by 1 + e."""
        factors = ((1.0 + self.ids[self.mine].to(torch.int64)) * self.weights[self.mine]).sum(1, keepdim=True)
        return (self.value(self.mine) * factors)[: self.used[self.mine]]


def _bytes(x: torch.Tensor, scale: torch.Tensor | None) -> bytes:
    return x.float().numpy().tobytes() + (b"" if scale is None else scale.contiguous().numpy().tobytes())


def _halves(call: Any, halves: bool, **arguments: Any) -> None:
    if halves:
        call(**arguments, do_recv=False)
        call(**arguments, do_send=False)
    else:
        call(**arguments)


def _experts(world: World, x: torch.Tensor, scale: torch.Tensor | None, factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows = x.float() if scale is None else x.float() * scale.repeat_interleave(world.block, -1)[..., : world.hidden]
    return (rows * factors).to(dtype)


def _same(out: torch.Tensor, wanted: torch.Tensor, case: dict[str, Any]) -> None:
    coarse = "bfloat16" in (case["in"], case["out"])
    torch.testing.assert_close(out.float(), wanted, rtol=2**-6 if coarse else 2**-9, atol=0.2 if coarse else 0.02)


def _ended(halves: Any) -> None:
    """No step is open."""
    assert not any(lane.a2a.stats()["open_steps"] for lane in halves._pool._lanes.values())


def kernels(me: Any, seed: int, case: dict[str, Any], same: int, across: bool, halves: bool) -> None:
    """Two steps of pplx_kernels; its batches of experts, with a bound that is on the device."""
    nvshmem_init(global_rank=me.rank, local_rank=me.rank, world_size=me.world_size, device=None)
    if not across and not me.kept.get("named"):
        torch._C._distributed_c10d._register_process_group("default", dist.group.WORLD)
        me.kept["named"] = True
    world = World(me, seed, same, case)
    size = getattr(torch, case["in"]).itemsize
    given: dict[str, Any] = {
        "max_num_tokens": world.most, "num_experts": world.experts, "experts_per_token": world.top_k, "rank": me.rank,
        "world_size": me.world_size, "dp_size": same, "hidden_dim": world.hidden, "hidden_dim_bytes": world.hidden * size,
        "hidden_dim_scale_bytes": world.scales * 4,
    }  # fmt: skip
    ata = AllToAll.internode(**given) if across else AllToAll.intranode(**given, group_name="default")
    mine = range(me.rank * world.local, (me.rank + 1) * world.local)
    for step in range(2):
        world = World(me, seed + step, same, case)
        bound = torch.tensor([world.used[world.mine]], dtype=torch.int32).view(torch.uint32)
        counts = torch.full((world.local,), -1, dtype=torch.int32)
        x = torch.zeros(world.local, world.most * world.groups, world.hidden).to(world.x[0].dtype)
        scale = None if world.scale[0] is None else torch.zeros(*x.shape[:2], world.scale[0].shape[1])
        tokens, ids, weights = world.x[world.mine], world.ids[world.mine], world.weights[world.mine]
        _halves(
            ata.dispatch, halves, out_expert_num_tokens=counts, out_expert_x=x, out_expert_x_scale=scale, dp_x=tokens,
            dp_x_scale=world.scale[world.mine], indices=ids, bound_m=bound,
        )  # fmt: skip
        for e, expert in enumerate(mine):
            assert int(counts[e]) == len(world.rows(expert))
            world.arrived(expert, x[e], None if scale is None else scale[e])
        dtype = getattr(torch, case["out"])
        y = _experts(world, x, scale, 1.0 + torch.tensor(mine).view(-1, 1, 1), dtype)
        out = torch.full((world.most, world.hidden), torch.nan, dtype=dtype)
        _halves(ata.combine, halves, out_tokens=out, indices=ids, weights=weights, expert_y=y, bound_m=bound)
        _same(out[: world.used[world.mine]], world.combined(), case)
        _ended(ata)
    ata.destroy()


def garden(me: Any, seed: int, case: dict[str, Any], same: int, padding: int, halves: bool, accumulate: bool) -> None:
    """Two steps of pplx_garden, its rows by expert at multiples of the padding."""

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * me.world_size
        dist.all_gather_object(values, value)
        return values

    group = SimpleNamespace(rank=me.rank, size=me.world_size, all_gather_object=gather)
    world = World(me, seed, same, case)
    dtype, out_dtype = getattr(torch, case["in"]), getattr(torch, case["out"])
    scales = world.scales or None
    p2p = P2PAllToAll(
        max_num_tokens=world.most, num_experts=world.experts, expert_padding=padding, hidden_dim=world.hidden,
        hidden_dim_scale=scales, in_dtype=dtype, out_dtype=out_dtype, scale_dtype=torch.float32 if scales else None,
        num_experts_per_token=world.top_k, nets_per_gpu=1, max_private_tokens=None, device=torch.device("cpu"),
        dp_group=SimpleNamespace(size=same) if same > 1 else None, node_group=None, global_group=group,
    )  # fmt: skip
    mine = range(me.rank * world.local, (me.rank + 1) * world.local)
    for step in range(2):
        world = World(me, seed + step, same, case)
        room = world.most * world.groups * world.local + world.local * padding
        counts = torch.full((world.local,), -1, dtype=torch.int32)
        x = torch.zeros(room, world.hidden).to(dtype)
        scale = None if scales is None else torch.zeros(scales, room).t()
        bound = torch.tensor([world.used[world.mine]], dtype=torch.int32)
        ids, weights = world.ids[world.mine], world.weights[world.mine]
        _halves(
            p2p.dispatch, halves, out_expert_num_tokens=counts, out_expert_x=x, out_expert_x_scale=scale,
            dp_x=world.x[world.mine], dp_x_scale=world.scale[world.mine], indices=ids, weights=weights, bound_m=bound,
        )  # fmt: skip
        at, factors = 0, torch.zeros(room, 1)
        for e, expert in enumerate(mine):
            count = int(counts[e])
            assert count == len(world.rows(expert))
            world.arrived(expert, x[at:], None if scale is None else scale[at:])
            factors[at : at + count] = 1.0 + expert
            at += -(-count // padding) * padding
        y = _experts(world, x, scale, factors, out_dtype)
        out = torch.full((world.most, world.hidden), 2.0 if accumulate else torch.nan, dtype=out_dtype)
        _halves(p2p.combine, halves, out_tokens=out, indices=ids, weights=weights, expert_y=y, bound_m=bound, accumulate=accumulate)
        _same(out[: world.used[world.mine]], world.combined() + 2.0 * accumulate, case)
        _ended(p2p)
    p2p.destroy()


def refusals(me: Any) -> dict[str, str]:
    given: dict[str, Any] = {
        "max_num_tokens": 2, "num_experts": 4, "experts_per_token": 1, "rank": me.rank, "world_size": me.world_size, "dp_size": 1,
        "hidden_dim": 128, "hidden_dim_bytes": 256, "hidden_dim_scale_bytes": 0,
    }  # fmt: skip
    x, scale, ids = (
        torch.ones(2, 128, dtype=torch.bfloat16),
        torch.ones(2, 1),
        torch.zeros(2, 1, dtype=torch.int32).view(torch.uint32),
    )
    out = torch.zeros(1, 2 * me.world_size, 128, dtype=torch.bfloat16)
    counts, weights = torch.zeros(1, dtype=torch.int32), torch.ones(2, 1)
    ata = AllToAll.internode(**given)
    told = {
        "rank": raised(lambda: AllToAll.internode(**{**given, "rank": 1 - me.rank}))["message"],
        "scales": raised(lambda: ata.dispatch(counts, out, scale, x, scale.half(), ids, None))["message"],
        "receive": raised(lambda: ata.dispatch(counts, out, None, x, None, ids, None, do_send=False))["message"],
        "combine": raised(lambda: ata.combine(x, ids, weights, out, None))["message"],
    }
    ata.destroy()
    return told
