"""What a rank of test_bench.py's crew runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pplx_comm.bench import gpu_peers, symmetric
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


def symmetric_by_rank(me: Any, arguments: list[str]) -> None:
    """The peer for many experts a rank, over an all_to_all_vdev made of gloo's collectives: rows get to their experts and back."""
    options = parse(arguments, "test")
    world = World(options, None)
    library = torch.library.Library("symm_mem", "IMPL")

    def exchange(send: torch.Tensor, recv: torch.Tensor, splits: torch.Tensor, placed: torch.Tensor, group: str) -> None:
        assert group == "everybody" and splits.shape == (world.size,) and placed.shape == (2, world.size)
        dist.all_to_all_single(placed[0], splits)
        placed[1] = placed[0].cumsum(0) - placed[0]
        mine, theirs = splits.tolist(), placed[0].tolist()
        dist.all_to_all_single(recv[: sum(theirs)], send[: sum(mine)], theirs, mine)

    library.impl("all_to_all_vdev", exchange, "CPU")
    gpu_peers.group(world, options, "gloo")
    try:
        shape = Shape(options, options.tokens[0], me.rank, me.world_size)
        way = symmetric.way_of(shape, "everybody", lambda *size, dtype: torch.empty(*size, dtype=dtype))
        assert isinstance(way, symmetric.ByRank)
        local = shape.config.experts_per_rank
        source = Source(shape)
        for i in range(3):
            batch = source.batch(i)
            ids = batch.topk_ids
            x = torch.arange(shape.tokens)[:, None].expand(-1, options.hidden).to(options.dtype) + 256 * me.rank
            way.dispatch(x, ids)
            everybody = [None] * world.size
            dist.all_gather_object(everybody, ids)
            expected = [
                256 * rank + token
                for expert in range(me.rank * local, (me.rank + 1) * local)
                for rank, of in enumerate(everybody)
                for token in range(shape.tokens)
                for choice in of[token].tolist()  # type: ignore[index]
                if choice == expert
            ]
            assert way._sorted[:, -1].tolist() == expected
            back = way.combine()
            assert torch.equal(back, x.index_select(0, way.order // options.top_k))
            way._recv.fill_(-1)
    finally:
        dist.destroy_process_group()
        library._destroy()
        world.close()
