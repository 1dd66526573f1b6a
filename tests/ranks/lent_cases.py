"""Memory that is lent to experts: its holder keeps it; see harness and rank_cases.py."""

from __future__ import annotations

import gc
from typing import Any

import torch
from cases import Case
from outcomes import must
from rank_cases import Good, open_all_to_all


def held_as_long_as_wanted(me: Any, case: Case) -> None:
    """Two are lent: views outlive their handles, and further steps leave them as they are. Released memory is lent again."""
    with open_all_to_all(me, case, lent_outputs=2) as a2a:
        good = Good(me, case, a2a)
        for step in good.runner.steps:
            step.how = ["whole"] * me.world_size
            step.strided = [False] * me.world_size  # experts write where they are lent memory

        def step() -> Any:
            d = good.dispatch()
            good.combine(d)
            return getattr(d, "inner", d)  # on a GPU the runner is given copies

        held, made = list[torch.Tensor](), list[torch.Tensor]()
        for _ in range(2):
            d = step()
            must(d.expert_out is not None, "a dispatch is lent memory")
            held.append(d.expert_out[1:])
            made.append(good.runner.made[d.expert_out.data_ptr()][1:])  # the experts', before any peer fetched
        for _ in range(3):
            d = step()
            must(d.expert_out is None, "a dispatch has memory that is held")
        for x, rows in zip(held, made, strict=True):
            must(torch.equal(x.view(torch.uint8), rows), "rows that are held do not change")
        freed = held.pop(0).data_ptr()
        gc.collect()
        for _ in range(3):
            d = None  # else the next one is lent nothing
            d = step()
            must(d.expert_out is not None and d.expert_out[1:].data_ptr() == freed, "what is let go is lent again")
        must(torch.equal(held[0].view(torch.uint8), made[1]), "rows that are held do not change")
        must(a2a.stats()["lent_dispatches"] == 5, "dispatches that were lent memory:", a2a.stats())
