"""The network's floor: the bare provider, writing the same bytes to the same peers."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

import pplx_comm._core as _core
from bench import _instruments
from bench.harness.batch import Batch, Ints, Shape
from bench.harness.clock import Clock
from bench.harness.options import Transport
from bench.harness.reference import Checks
from bench.harness.world import World
from pplx_comm.control import memfd
from pplx_comm.wiring import libfabric

PAGE = 4096


def nodes_of(world: World, transport: Transport) -> tuple[int, ...]:
    """The node of each rank, on which sums depend."""
    if transport.node_size is None:
        return tuple(world.comm.control.node_of)
    return tuple(rank // transport.node_size for rank in range(world.size))


def remote_ranks(world: World, transport: Transport) -> frozenset[int]:
    """The peers that the transport reaches through the proxy: with dedup one on each node, where nodes are of one size."""
    nodes = nodes_of(world, transport)
    same = [rank for rank in range(world.size) if nodes[rank] == nodes[world.rank]]
    number = [nodes[:rank].count(nodes[rank]) for rank in range(world.size)]
    rails = range(len(same)) if transport.dedup == "rank" else (number[world.rank],)
    return frozenset(rank for rank in range(world.size) if rank not in same and number[rank] in rails)


class Writes:
    """The bare provider: one write for each peer, of the rows that a block has. `prepare` comes before each, and is not timed."""

    def __init__(self, world: World, shape: Shape, transport: Transport, remote: frozenset[int]) -> None:
        self.name = f"writes, {transport.name}"
        self._shape, self._world = shape, world
        self._nodes = np.array(nodes_of(world, transport)) if transport.dedup == "node" else None
        self._remote = sorted(remote)
        self._early = 0
        self.prepare: Callable[[], None] = lambda: None
        most = shape.tokens * max(shape.row_bytes, shape.payload_bytes + shape.scale_bytes)
        self._slot = (most // PAGE + 1) * PAGE
        self._fabric = world.all_or_none(
            lambda: libfabric.open_fabric(transport.provider, peers_on_this_host=world.together), "floor's fabric"
        )
        nbytes = 2 * world.size * self._slot
        fd = memfd.allocate(nbytes, "the bare writes of the benchmark")
        try:
            self._memory = _core.Mapping(fd, nbytes)
        finally:
            os.close(fd)
        self._region = self._fabric.register_memory(self._memory.address, nbytes, shared_bytes=nbytes)
        cards = world.gather([self._fabric.address().hex(), self._region.description.hex()], "floor's addresses")
        self._regions = {}
        for peer in self._remote:
            self._fabric.insert_peer(peer, bytes.fromhex(cards[peer][0]))
            self._regions[peer] = self._fabric.import_region(peer, bytes.fromhex(cards[peer][1]))
        world.barrier()

    def step(self, batch: Batch, clock: Clock, checks: Checks | None) -> None:
        me, shape = self._shape.rank, self._shape
        out, back = batch.rows[me], batch.rows[:, me]
        if self._nodes is not None:
            wanted = np.stack([batch.wants[:, :, self._nodes == node].any(axis=2) for node in self._nodes], axis=2).sum(axis=1)
            out, back = wanted[me], wanted[:, me]
        wire = shape.payload_bytes + shape.scale_bytes
        self._time(clock, "dispatch", out * wire, back * wire)
        self._time(clock, "combine", back * shape.row_bytes, out * shape.row_bytes)

    def _time(self, clock: Clock, phase: str, sent: Ints, received: Ints) -> None:
        fabric, most = self._fabric, int(self._fabric.max_write_bytes)
        writes = []
        arrivals = 0
        ring = [(self._shape.rank + i) % self._shape.world for i in range(1, self._shape.world)]
        for peer in (peer for peer in ring if peer in self._regions):
            # A block without rows is written too.
            left, at = max(64, int(sent[peer])), 0
            while left > 0:
                part = min(left, most)
                source = (self._world.size + peer) * self._slot + at
                writes.append((peer, self._regions[peer], part, source, self._shape.rank * self._slot + at))
                left, at = left - part, at + part
            arrivals += -(-max(64, int(received[peer])) // most)

        def write() -> None:
            _, self._early = _instruments.bare_writes(
                fabric, self._region, writes, arrivals, timeout=self._world.patience, early_arrivals=self._early
            )

        self.prepare()
        clock.time(self.name, phase, write)

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of the memory that writes go to. The memory that they come from follows it and is as large."""
        return int(self._memory.address), self._world.size * self._slot

    def close(self) -> None:
        self._fabric.close()
