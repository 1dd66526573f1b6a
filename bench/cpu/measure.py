"""One run: every number of tokens, every transport, floors and peers by turns."""

from __future__ import annotations

import gc
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from bench.cpu.floor import Copies
from bench.cpu.ours import Ours
from bench.cpu.peers import Collective, Gloo, Mpi, Peer
from bench.harness.batch import Batch, Shape, Source
from bench.harness.clock import Clock, Figure, Key, Times, Traffic
from bench.harness.options import Options, Transport
from bench.harness.progress import Progress
from bench.harness.reference import Checks, Wrong
from bench.harness.results import FUSED, HALVES, PHASES, PeerPoint, Point, Results
from bench.harness.world import Off, World
from bench.harness.writes import Writes, remote_ranks
from pplx_comm.errors import Error

ROUNDS = 4
"""Measuring is spread over this many blocks of each backend, so that a moment in which the machine is busy hits all.

The first is short and says how many iterations the others can have.
"""

FEWEST, MOST = 4, 500
"""Iterations of a block."""

CHECK_EVERY = 20
PEERS_EVERY = 2
"""They take most of the time."""


class Backend(Protocol):
    name: str

    def step(self, batch: Batch, clock: Clock, checks: Checks | None) -> None: ...

    def close(self) -> None: ...


def run(options: Options, world: World) -> Results:
    torch.set_num_threads(world.threads)
    results = Results()
    collectives = _open_collectives(options, world, results)
    progress = Progress(options.tokens, quiet=world.rank != 0)
    try:
        for tokens in options.tokens:
            _Size(options, world, collectives, tokens, progress).measure(results)
    finally:
        progress.close()
    for collective in collectives:
        collective.close()
    if all(point.off for point in results.points):
        raise Error("; ".join(dict.fromkeys(f"{point.transport} is off: {point.off}" for point in results.points)))
    return results


def _open_collectives(options: Options, world: World, results: Results) -> list[Collective]:
    makers: dict[str, Callable[[], Collective]] = {
        "gloo": lambda: Gloo(world, options.timeout),
        "mpi": lambda: Mpi(world),
    }
    opened = []
    for name in options.peers:
        try:
            opened.append(makers[name]())
        except Off as off:
            results.peers_off[name] = str(off)
    return opened


def _weight(tokens: int) -> float:
    """The share of the time that a number of tokens gets: iterations of many tokens take longer."""
    return 2 + math.log2(tokens)


class _Size:
    """Everything at one number of tokens."""

    def __init__(self, options: Options, world: World, collectives: Sequence[Collective], tokens: int, progress: Progress) -> None:
        self._options, self._world, self._progress = options, world, progress
        self._shape = Shape(options, tokens, world.rank, world.size)
        self._source = Source(self._shape)
        self._clock = Clock(world)
        self._notes: list[str] = []
        self._last = -1
        """The iteration that ends the measuring: it is checked."""
        self._times: defaultdict[Key, list[Times]] = defaultdict(list)
        self._traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._points = {transport.name: Point(transport.name, tokens) for transport in options.transports}
        self._proxied: list[Transport] = []
        self._copies: dict[int | None, Copies] = {}
        self._floors: dict[str, tuple[Copies, Writes | None]] = {}
        self._peers = [Peer(world, self._shape, collective) for collective in collectives]
        self._passive: list[Backend] = list(self._peers)
        """Backends that do nothing while others are measured."""

    def measure(self, results: Results) -> None:
        options = self._options
        given_up = time.monotonic() + options.seconds * _weight(self._shape.tokens) / sum(map(_weight, options.tokens))
        self._progress.show(self._shape.tokens, "opening", 0.0)
        self._open_all()
        if all(point.off for point in self._points.values()):
            results.points += self._points.values()
            return
        first = max(2, options.warmup)
        self._round(0, 0, first)
        self._times.clear()
        self._traffic.clear()
        gc.collect()
        gc.freeze()  # today's objects stay: later collections need not look at them
        per_iteration = opening = 0.0
        for turn in range(ROUNDS):
            self._progress.show(self._shape.tokens, "measuring", turn / ROUNDS)
            if options.iters is not None:
                count = options.iters * (turn + 1) // ROUNDS - options.iters * turn // ROUNDS
            elif turn == 0:
                count = FEWEST
            else:
                each = (given_up - time.monotonic()) / (ROUNDS - turn) - opening
                count = max(FEWEST, min(MOST, int(each / per_iteration)))
            count = self._world.gather(count, "iterations")[0]
            if count == 0:
                continue
            self._last = first + count - 1 if turn == ROUNDS - 1 else -1
            in_blocks, opening = self._round(turn, first, count)
            per_iteration = in_blocks / count
            first += count
        for backend in self._passive:
            backend.close()
        self._store(results)

    # ---- opening -----------------------------------------------------------------------------------------------------

    def _open(self, transport: Transport) -> Ours | None:
        """Collective: the constructor fails on all ranks or on none."""
        try:
            return self._world.all_or_none(
                lambda: Ours(self._world, self._shape, transport, self._options.timeout), f"transport {transport.name}"
            )
        except Off as off:
            self._points[transport.name].off = str(off)
            return None

    def _open_all(self) -> None:
        """Transports without a proxy stay open; the others are only tried."""
        for transport in self._options.transports:
            ours = self._open(transport)
            if ours is None:
                continue
            if remote_ranks(self._world, transport):
                ours.close()
                self._proxied.append(transport)
            else:
                self._passive.insert(0, ours)
        for transport in self._options.transports:
            if self._points[transport.name].off is None:
                self._make_floor(transport)

    def _make_floor(self, transport: Transport) -> None:
        world, shape = self._world, self._shape
        remote = remote_ranks(world, transport)

        copies = self._copies.get(transport.node_size)
        if copies is None:
            copies = Copies(world, shape, remote, transport.name)
            copies.calibrate([self._source.batch(i) for i in range(3)])
            self._passive.append(copies)
            self._copies[transport.node_size] = copies
        try:
            writes = Writes(world, shape, transport, remote) if remote else None
        except Off as off:
            self._points[transport.name].floor_off = str(off)
            return
        self._floors[transport.name] = (copies, writes)
        if writes is not None:
            self._passive.append(writes)

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def _round(self, turn: int, first: int, count: int) -> tuple[float, float]:
        """One block of everything passive, by turns, and one of each transport that has a proxy.

        A proxy's thread lives as long as its Communicator and would take time from whatever else is measured, so it is
        alone. Returns the seconds in blocks and outside.
        """
        begun, in_blocks = time.monotonic(), 0.0
        order: list[Transport | None] = [None, *self._proxied]
        turn %= len(order)
        for transport in order[turn:] + order[:turn]:
            if transport is None:
                if self._passive:
                    in_blocks += self._block(self._passive, first, count)
                continue
            ours = self._open(transport)
            if ours is None:
                raise Error(f"{transport.name} could be opened before, but not now: {self._points[transport.name].off}")
            # Its first steps touch memory for the first time.
            self._block([ours], first, min(2, count), recorded=False)
            in_blocks += self._block([ours], first, count)
            ours.close()
        return in_blocks, time.monotonic() - begun - in_blocks

    def _block(self, backends: Sequence[Backend], first: int, count: int, recorded: bool = True) -> float:
        begun = time.monotonic()
        clock = self._clock
        clock.recording = recorded
        gc.collect()
        gc.disable()
        try:
            for iteration in range(first, first + count):
                batch = self._source.batch(iteration)
                batch.run_experts()
                checks = None
                if self._options.check and recorded and (iteration % CHECK_EVERY == 0 or iteration == self._last):
                    checks = Checks(batch, self._source.table, self._notes)
                # Shuffled, alike on all ranks: each backend leaves its bytes in the caches for the next one.
                for which in np.random.default_rng(iteration).permutation(len(backends)):
                    if iteration % PEERS_EVERY == 0 or not isinstance(backends[which], Peer):
                        backends[which].step(batch, clock, checks)
                clock.time("nothing", "call", lambda: None)
        finally:
            gc.enable()
        for key, times in clock.collect().items():
            self._times[key].append(times)
        for backend in backends:
            if isinstance(backend, (Ours, Peer)):
                self._traffic[backend.name].add(backend.traffic)
                backend.traffic = Traffic()
        self._fail_if_wrong()
        return time.monotonic() - begun

    def _fail_if_wrong(self) -> None:
        notes = [note for notes in self._world.gather(self._notes, "wrong results") for note in notes]
        if notes:
            raise Wrong(
                "\n  ".join(["wrong results:", *notes[:8], *([f"... and {len(notes) - 8} more"] if len(notes) > 8 else [])])
            )

    # ---- results -----------------------------------------------------------------------------------------------------

    def _figures(self, backend: str, phases: Sequence[str]) -> dict[str, Figure]:
        return {
            phase: Figure.of(np.concatenate(self._times[backend, phase])) for phase in phases if (backend, phase) in self._times
        }

    def _bytes_per_rank(self, backend: str) -> dict[str, float]:
        """Bytes of a step, the mean over ranks."""
        t = self._traffic[backend]
        everybody = self._world.gather([t.dispatch / max(1, t.steps), t.combine / max(1, t.steps)], f"bytes of {backend}")
        return {phase: float(np.mean([rank[i] for rank in everybody])) for i, phase in enumerate(PHASES)}

    def _floor_times(self, name: str) -> tuple[dict[str, Times], dict[str, dict[str, Times]]]:
        copies, writes = self._floors[name]
        parts = {phase: {"copies": np.concatenate(self._times[copies.name, phase])} for phase in PHASES}
        if writes is not None:
            for phase in PHASES:
                parts[phase]["writes"] = np.concatenate(self._times[writes.name, phase])
        total: dict[str, Times] = {phase: np.sum(list(part.values()), axis=0) for phase, part in parts.items()}
        total["round trip"] = np.sum([total[phase] for phase in PHASES], axis=0)
        return total, parts

    def _store(self, results: Results) -> None:
        tokens = self._shape.tokens
        for name, point in self._points.items():
            results.points.append(point)
            if point.off is not None:
                continue
            point.phases = self._figures(name, (*FUSED, *HALVES))
            point.bytes_per_rank = self._bytes_per_rank(name)
            if name in self._floors:
                total, parts = self._floor_times(name)
                point.floor = {phase: Figure.of(times) for phase, times in total.items()}
                point.floor_parts = {phase: {part: Figure.of(times) for part, times in of.items()} for phase, of in parts.items()}
                point.floor_copy = self._floors[name][0].kernels
        for peer in self._peers:
            results.peers.append(PeerPoint(peer.name, tokens, self._figures(peer.name, FUSED), self._bytes_per_rank(peer.name)))
        results.nothing[tokens] = Figure.of(np.concatenate(self._times["nothing", "call"]))
        ids = np.ascontiguousarray(self._source.batch(0).ids)
        results.routing_digest[tokens] = hashlib.sha256(ids.tobytes()).hexdigest()[:16]
