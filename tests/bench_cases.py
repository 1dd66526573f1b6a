"""What a rank of test_bench.py's crew runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pplx_comm.bench.batch import Shape, Source
from pplx_comm.bench.clock import Clock
from pplx_comm.bench.floor import Copies
from pplx_comm.bench.options import parse
from pplx_comm.bench.world import World


def floor_copies(me: Any, arguments: list[str], remote: list[int]) -> dict[str, int]:
    """Runs the floor's copies and looks where the bytes went. Returns how many were read and written."""
    options = parse(arguments, "test")
    world = World(options, None)
    try:
        shape = Shape(options, options.tokens[0], me.rank, me.world_size)
        source = Source(shape)
        copies = Copies(world, shape, frozenset(remote) - {me.rank}, "test")
        batch = source.batch(7)
        batch.run_experts()
        clock = Clock(world)
        for _ in range(2):  # the second reads what the first one's peers wrote
            copies._y.fill_(float("nan"))
            copies.step(batch, clock, None)
            world.barrier()

        p = batch.placement
        rows = copies._out[torch.from_numpy(p.place)]
        for rank in range(shape.world):
            if rank in remote and rank != shape.rank:
                continue  # what the proxy would bring did not come
            mine = p.source == rank
            sent = batch.x_of(rank)[torch.from_numpy(p.token[mine])].view(torch.uint8)[:, : shape.payload_bytes]
            assert torch.equal(rows[torch.from_numpy(mine)], sent)
        assert not copies._y.isnan().any() or shape.rank in remote
        dispatch, combine = copies.dispatch_ops(batch), copies.combine_ops(batch)
        return {
            "dispatch read": int(dispatch[:, 2].sum()),
            "dispatch written": int(dispatch[dispatch[:, 0] != 0, 2].sum()),
            "combine read": int(combine[:, 2].sum()),
            "combine written": int(combine[combine[:, 0] != 0, 2].sum()),
            "sent": int(batch.rows[me.rank].sum() - batch.rows[me.rank, me.rank]),
            "returned": int(batch.rows[:, me.rank].sum() - batch.rows[me.rank, me.rank]),
            "placed": len(np.unique(p.place)),
            "tokens": int(batch.wants[me.rank].any(axis=1).sum()),
            "only here": int((batch.wants[me.rank].sum(axis=1) == 1)[batch.wants[me.rank, :, me.rank]].sum()),
        }
    finally:
        world.close()
