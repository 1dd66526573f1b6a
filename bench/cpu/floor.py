"""The CPU's floor: the same threads copy, in the same kind of memory, every byte that a phase must read and write.

They neither plan, quantise, add, check, nor wait for a peer's rows.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from bench import _instruments
from bench.harness.batch import Batch, Ints, Shape
from bench.harness.clock import Clock
from bench.harness.reference import Checks
from bench.harness.results import PHASES
from bench.harness.world import World

KERNELS = ("memcpy", "copy", "stream")
PREFAULT_LIMIT = 256 << 20


def _ops(to: Ints, source: Ints, nbytes: int) -> Ints:
    """Copies of one size, as Copier takes them."""
    return np.stack([to, source, np.full_like(source, nbytes)], axis=1)


class Copies:
    """The copies of a dispatch and of a combine."""

    def __init__(self, world: World, shape: Shape, remote: frozenset[int], name: str) -> None:
        self.name = f"copies, {name}"
        self._shape, self._remote, self._world = shape, remote, world
        self._copier = _instruments.Copier(world.threads)
        self._kernel = dict.fromkeys(PHASES, KERNELS[0])
        wire = shape.payload_bytes + shape.scale_bytes
        # As far apart as rows lie in a block.
        self._pitch = {"dispatch": -(-wire // 64) * 64 + 64, "combine": -(-shape.row_bytes // 64) * 64 + 64}
        self._slot = {phase: pitch * shape.tokens for phase, pitch in self._pitch.items()}
        self._send_area = world.size * sum(self._slot.values())
        self._memory = world.share(2 * self._send_area, "the blocks of the benchmark's floor")
        self._out = torch.empty(shape.out_rows, shape.payload_bytes, dtype=torch.uint8)
        self._out_scale = torch.empty(shape.out_rows, shape.scale_bytes, dtype=torch.uint8)
        self._y = torch.empty(shape.tokens, shape.options.hidden, dtype=shape.options.dtype)
        for tensor in (self._out, self._out_scale, self._y):
            if tensor.nbytes <= PREFAULT_LIMIT:
                tensor.fill_(0)

    def _block(self, phase: str, rank: int, peer: int) -> int:
        """Where the block that `peer` sends to `rank` lies. What a proxy would carry stays in the send area."""
        at = peer * self._slot[phase] + (self._world.size * self._slot["dispatch"] if phase == "combine" else 0)
        if rank in self._remote:
            return self._memory.address(peer) + self._send_area + rank * self._slot[phase] + (at - peer * self._slot[phase])
        return self._memory.address(rank) + at

    def _blocks(self, phase: str) -> Ints:
        """The blocks that come in, by source."""
        me = self._shape.rank
        return np.array([self._block(phase, me, source) for source in range(self._shape.world)])

    def dispatch_ops(self, batch: Batch) -> Ints:
        shape, me = self._shape, self._shape.rank
        x, wire, pitch = batch.x.data_ptr(), shape.payload_bytes + shape.scale_bytes, self._pitch["dispatch"]
        ops = []
        for i in range(1, shape.world):
            peer = (me + i) % shape.world
            tokens = np.nonzero(batch.wants[me, :, peer])[0]
            ops.append(
                _ops(
                    self._block("dispatch", peer, me) + np.arange(len(tokens)) * pitch,
                    x + tokens * shape.row_bytes,
                    wire,
                )
            )
        if shape.quantised:
            # The rest of each token is read too, though it does not travel.
            tokens = np.nonzero(batch.wants[me].any(axis=1))[0]
            ops.append(_ops(np.zeros_like(tokens), x + tokens * shape.row_bytes + wire, shape.row_bytes - wire))
        p = batch.placement
        source, token, place = p.source, p.token, p.place
        if shape.compact:
            place, first = np.unique(place, return_index=True)
            source, token = source[first], token[first]
        block = self._blocks("dispatch")[source] + batch.row[source, token, me] * pitch
        block = np.where(source == me, x + token * shape.row_bytes, block)
        ops.append(_ops(self._out.data_ptr() + place * shape.payload_bytes, block, shape.payload_bytes))
        if shape.quantised:
            ops.append(
                _ops(
                    self._out_scale.data_ptr() + place * shape.scale_bytes,
                    block + shape.payload_bytes,
                    shape.scale_bytes,
                )
            )
        return np.concatenate(ops)

    def combine_ops(self, batch: Batch) -> Ints:
        shape, me = self._shape, self._shape.rank
        row_bytes, pitch = shape.row_bytes, self._pitch["combine"]
        p = batch.placement
        # Rows that share a partial sum: the first is copied to it and the others are read. Own sums go nowhere.
        ring = (p.source - me - 1) % shape.world * shape.tokens + p.token
        order = np.argsort(ring, kind="stable")
        source, token, place = p.source[order], p.token[order], p.place[order]
        first = np.concatenate([[True], ring[order][1:] != ring[order][:-1]])[: len(order)]
        if shape.compact:
            source, token, place, first = source[first], token[first], place[first], first[first]
        target = np.array([self._block("combine", peer, me) for peer in range(shape.world)])[source]
        to = np.where(first & (source != me), target + batch.row[source, token, me] * pitch, 0)
        out = _ops(to, batch.expert_out.data_ptr() + place * row_bytes, row_bytes)

        tokens, peers = np.nonzero(batch.wants[me])
        own = peers == me
        first_own = {int(t): int(at) for t, at in zip(token[source == me][::-1], place[source == me][::-1], strict=True)}
        back = self._blocks("combine")[peers] + batch.row[me, tokens, peers] * pitch
        alone = batch.wants[me].sum(axis=1)[tokens] == 1
        back[own & alone] = [batch.expert_out.data_ptr() + first_own[int(t)] * row_bytes for t in tokens[own & alone]]
        keep = ~own | alone
        tokens, back = tokens[keep], back[keep]
        first = np.concatenate([[True], tokens[1:] != tokens[:-1]])[: len(tokens)]
        return np.concatenate([out, _ops(np.where(first, self._y.data_ptr() + tokens * row_bytes, 0), back, row_bytes)])

    def calibrate(self, batches: list[Batch]) -> None:
        """Takes, for each phase, the copy that is fastest here and now."""
        clock = Clock(self._world)
        clock.recording = True
        for batch in batches:
            batch.run_experts()
            ops = {"dispatch": self.dispatch_ops(batch), "combine": self.combine_ops(batch)}
            for _ in range(2):
                for kernel in KERNELS:
                    for phase in PHASES:
                        clock.time(kernel, phase, partial(self._copier.run, ops[phase], kernel))
        times = clock.collect()
        # The same on every rank, for all see the same times.
        for phase in PHASES:
            self._kernel[phase] = min(KERNELS, key=lambda kernel: float(np.median(times[kernel, phase])))

    @property
    def kernels(self) -> dict[str, str]:
        return dict(self._kernel)

    def step(self, batch: Batch, clock: Clock, checks: Checks | None) -> None:
        dispatch, combine = self.dispatch_ops(batch), self.combine_ops(batch)
        clock.time(self.name, "dispatch", lambda: self._copier.run(dispatch, self._kernel["dispatch"]))
        clock.time(self.name, "combine", lambda: self._copier.run(combine, self._kernel["combine"]))

    def close(self) -> None:
        """Memory goes with its last reference."""
