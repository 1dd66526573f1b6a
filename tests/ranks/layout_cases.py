"""Cases of test_layouts.py."""

from __future__ import annotations

from typing import Any

import torch

import pplx_comm as pc

HIDDEN, EXPERTS = 64, 4


def shape_of(me: Any, layout: pc.Padded) -> tuple[int, ...]:
    with pc.AllToAll(
        me.comm, num_experts=EXPERTS, top_k=2, hidden=HIDDEN, max_tokens_per_rank=8, layout=layout, device="cpu"
    ) as a2a:
        d = a2a.dispatch(torch.ones(8, HIDDEN, dtype=torch.bfloat16), torch.zeros(8, 2, dtype=torch.int64) + torch.arange(2))
        a2a.combine(d.x, d)
        return tuple(d.x.shape)


def whole_tiles(me: Any, align: int, tile: int) -> float:
    """Experts that double, by a kernel that writes whole tiles, also past an expert's count: how far off the worst result is."""
    layer = {"num_experts": EXPERTS, "top_k": 2, "hidden": HIDDEN, "max_tokens_per_rank": 8, "dtype": torch.float32}
    with pc.AllToAll(me.comm, layout=pc.Padded(align=align), device="cpu", **layer) as a2a:
        generator = torch.Generator().manual_seed(7 + me.rank)
        x = torch.randn(8, HIDDEN, generator=generator)
        ids = torch.rand(8, EXPERTS, generator=generator).topk(2).indices
        d = a2a.dispatch(x, ids)
        most = d.x.shape[1]
        out = torch.full(d.x.shape, float("nan"))
        for expert in reversed(range(len(d.counts))):  # as its thread blocks may end
            count = int(d.counts[expert])
            out[expert, :count] = 2 * d.x[expert, :count]
            begin, end = expert * most + count, expert * most + -(-count // tile) * tile
            out.view(-1, HIDDEN)[begin:end] = 1e6
        y = a2a.combine(out, d)
        assert isinstance(y, torch.Tensor)
        return float((y - 4 * x).abs().max())
