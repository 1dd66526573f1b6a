"""The library under the clock: fused, back to back, and in halves."""

from __future__ import annotations

import torch

from bench.harness.batch import Batch, Shape
from bench.harness.clock import Clock, Traffic
from bench.harness.options import Transport
from bench.harness.reference import Checks
from bench.harness.world import World
from bench.harness.writes import nodes_of
from pplx_comm import all_to_all
from pplx_comm.handles import Dispatched


class Ours:
    """One AllToAll on a Communicator of its own: its proxy's thread must not run while others are measured."""

    def __init__(self, world: World, shape: Shape, transport: Transport, timeout: float) -> None:
        o = shape.options
        self.name = transport.name
        self._comm = world.fresh()
        try:
            self._a2a = all_to_all.AllToAll(
                self._comm, num_experts=o.experts, top_k=o.top_k, hidden=o.hidden, max_tokens_per_rank=shape.tokens,
                dtype=o.dtype, wire=o.wire, layout=shape.layout, transport=transport.transport,
                provider=transport.provider, node_size=transport.node_size, dedup=transport.dedup, timeout=timeout,
                slot_bytes=o.slot_bytes, device="cpu",
            )  # fmt: skip
        except BaseException:
            self._comm.close()
            raise
        self._nodes = nodes_of(world, transport)
        self._y = torch.empty(shape.tokens, o.hidden, dtype=o.dtype)
        self.traffic = Traffic()

    def step(self, batch: Batch, clock: Clock, checks: Checks | None) -> None:
        a2a, x, ids, weights = self._a2a, batch.x, batch.topk_ids, batch.topk_weights
        expert_out = batch.expert_out
        if checks:
            self._poison(batch, self._throw_away(batch))

        before = sum(a2a.stats()["bytes_sent"])
        d = clock.time(self.name, "dispatch", lambda: a2a.dispatch(x, ids, weights))
        between = sum(a2a.stats()["bytes_sent"])
        if checks:
            checks.dispatched(self.name, d)
        clock.time(self.name, "combine", lambda: a2a.combine(expert_out, d, out=self._y))
        if clock.recording:
            self.traffic.count(between - before, sum(a2a.stats()["bytes_sent"]) - between)
        if checks:
            checks.combined(self.name, self._y, self._nodes)
            self._poison(batch, d)
        del d

        def round_trip() -> Dispatched:
            d = a2a.dispatch(x, ids, weights)
            a2a.combine(expert_out, d, out=self._y)
            return d

        d = clock.time(self.name, "round trip", round_trip)
        if checks:
            checks.dispatched(self.name, d)
            checks.combined(self.name, self._y, self._nodes)
            self._poison(batch, d)
        del d

        d = clock.time(self.name, "dispatch_send", lambda: a2a.dispatch_send(x, ids, weights))
        clock.time(self.name, "dispatch_recv", lambda: a2a.dispatch_recv(d))
        if checks:
            checks.dispatched(self.name, d)
        c = clock.time(self.name, "combine_send", lambda: a2a.combine_send(expert_out, d, out=self._y))
        clock.time(self.name, "combine_recv", lambda: a2a.combine_recv(c))
        if checks:
            checks.combined(self.name, self._y, self._nodes)

    def _throw_away(self, batch: Batch) -> Dispatched:
        """A dispatch whose output's memory the next one will get."""
        d = self._a2a.dispatch(batch.x, batch.topk_ids, batch.topk_weights)
        d.release()
        return d

    def _poison(self, batch: Batch, d: Dispatched) -> None:
        """Fills the memory that the next dispatch and combine of this batch must overwrite."""
        place = torch.from_numpy(batch.placement.place)
        for tensor in (d.x, d.scale):
            if tensor is not None:
                rows = tensor.view(torch.uint8).reshape(-1, tensor.shape[-1] * tensor.element_size())
                rows[place] = 0xFF  # a NaN in every format
        for small in (d.src_rank, d.src_token, d.counts, d.offsets, d.num_rows, d.topk_ids):
            if small is not None:
                small.fill_(-7)
        for floats in (d.weights, d.topk_weights):
            if floats is not None:
                floats.fill_(float("nan"))
        self._y.fill_(float("nan"))

    def close(self) -> None:
        self._a2a.close()
        self._comm.close()
