"""One run: every number of tokens, every transport, floors and peers by turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ..errors import Error
from .batch import Batch, Shape, Source
from .clock import Clock, Figure, Key, Times
from .floor import PHASES, Copies, Writes, remote_ranks
from .options import Options, Transport
from .ours import FUSED, HALVES, Ours
from .peers import Collective, Gloo, Mpi, Peer
from .progress import Progress
from .reference import Checks, Wrong
from .world import World

ROUNDS = 3
"""Each transport's measuring is spread over so many blocks, so that a minute in which the machine is busy hits all alike."""

FEWEST, MOST = 12, 1500
CHECK_EVERY = 20

Step = Callable[[Batch, Clock, "Checks | None"], None]


@dataclass
class Point:
    """What was measured of one transport at one number of tokens."""

    transport: str
    tokens: int
    off: str | None = None
    phases: dict[str, Figure] = field(default_factory=dict)
    floor: dict[str, Figure] = field(default_factory=dict)
    floor_parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """p50 of the copies and of the bare writes, by phase."""
    floor_copy: dict[str, str] = field(default_factory=dict)
    """Which copy was the fastest, by phase."""
    floor_off: str | None = None
    bytes_per_rank: dict[str, float] = field(default_factory=dict)

    def ratio(self, phase: str) -> float | None:
        return self.phases[phase].p50 / self.floor[phase].p50 if phase in self.floor else None


@dataclass
class PeerPoint:
    peer: str
    tokens: int
    phases: dict[str, Figure]
    bytes_per_rank: dict[str, float]


@dataclass
class Results:
    points: list[Point] = field(default_factory=list)
    peers: list[PeerPoint] = field(default_factory=list)
    peers_off: dict[str, str] = field(default_factory=dict)
    routing_digest: dict[int, str] = field(default_factory=dict)

    def peer(self, name: str, tokens: int) -> PeerPoint | None:
        return next((point for point in self.peers if (point.peer, point.tokens) == (name, tokens)), None)


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
        collective, reason = world.everybody(makers[name], f"peer {name}")
        if reason is None and collective is not None:
            opened.append(collective)
        else:
            results.peers_off[name] = reason or "another rank has none"
    return opened


class _Size:
    """Everything at one number of tokens."""

    def __init__(
        self, options: Options, world: World, collectives: Sequence[Collective], tokens: int, progress: Progress
    ) -> None:
        self._options, self._world, self._progress = options, world, progress
        self._shape = shape = Shape(options, tokens, world.rank, world.size)
        self._source = Source(shape)
        self._clock = Clock(world)
        self._notes: list[str] = []
        self._times: dict[Key, list[Times]] = {}
        self._points = {transport.name: Point(transport.name, tokens) for transport in options.transports}
        self._peers = [Peer(world, shape, collective) for collective in collectives]
        self._expert_out = torch.empty(0, options.hidden, dtype=options.dtype)
        self._peer_out = torch.empty(0, options.hidden, dtype=options.dtype)
        self._copies: dict[int | None, Copies] = {}
        self._floors: dict[str, tuple[Copies, Writes | None]] = {}
        self._bytes: dict[str, list[tuple[dict[str, int], int]]] = {}

    def measure(self, results: Results) -> None:
        options = self._options
        begun = time.monotonic()
        spent = self._warm_up()
        iterations = self._world.gather(options.iters or self._iterations(spent, time.monotonic() - begun), "iterations")[0]
        at = options.warmup
        share = [iterations * (i + 1) // ROUNDS - iterations * i // ROUNDS for i in range(ROUNDS)]
        for i, count in enumerate(n for n in share if n > 0):
            self._progress.show(self._shape.tokens, f"{iterations} iterations of each", i / ROUNDS)
            self._round(i, at, count)
            at += count
        for _, writes in self._floors.values():
            if writes is not None:
                writes.close()
        self._store(results)

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def _proxied(self) -> list[Transport]:
        return [t for t in self._on() if remote_ranks(self._world, t)]

    def _on(self) -> list[Transport]:
        return [t for t in self._options.transports if self._points[t.name].off is None]

    def _warm_up(self) -> float:
        """Opens everything once; returns what an iteration of all costs, openings left out."""
        warmup = max(2, self._options.warmup)
        for transport in self._options.transports:
            self._fit_expert_out()
            ours = self._open(transport)
            if ours is None:
                continue
            self._block([self._ours(ours)], 0, 1, last_is_checked=True)
            ours.close()
        self._make_floors()
        begun = time.monotonic()
        opening = self._round(0, 0, warmup)
        self._world.barrier()
        spent = (time.monotonic() - begun - opening) / warmup
        self._times.clear()
        self._bytes.clear()
        return max(spent, 1e-4)

    def _iterations(self, per_iteration: float, warm_up: float) -> int:
        budget = self._options.seconds / len(self._options.tokens) - warm_up
        return max(FEWEST, min(MOST, int(budget / per_iteration)))

    def _round(self, turn: int, first: int, count: int) -> float:
        """One block of each transport that has a proxy, alone, and one of everything else by turns. Returns seconds spent opening."""
        self._clock.recording = True
        spent = 0.0
        blocks: list[Transport | None] = [None, *self._proxied()]
        turn %= len(blocks)
        for transport in blocks[turn:] + blocks[:turn]:
            begun = time.monotonic()
            # A proxy's thread lives as long as its Communicator, and would take time from whatever else is measured.
            members = [transport] if transport is not None else [t for t in self._on() if t not in self._proxied()]
            opened = [self._ours(ours) for ours in map(self._open, members) if ours is not None]
            spent += time.monotonic() - begun
            passive = [] if transport is not None else self._passive()
            self._block([*opened, *passive], first, count)
            begun = time.monotonic()
            for one in opened:
                one.close()
            spent += time.monotonic() - begun
        return spent
