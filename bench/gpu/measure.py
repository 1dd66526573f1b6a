"""device="cuda" under the clock: kernel times from one graph of many pairs, the floor, and the peers, in one run.

A graph has --pairs dispatches and combines, each on its own input, so that L2 is not warm. Each launch keeps its start by
the GPU's clock; a time is the difference to the start of the next launch. Figures are of the slowest rank, pair by pair; a round
trip is a dispatch and a combine of one rank.

The floor inside a node is bare stores of the same bytes, by the fastest schedule (schedules.py); the composite floor (composite.py)
reads and stores all that the step does. Where peers are reached by the proxy, the floor is the sum of what cannot be left out: the
bare provider moving the same bytes between the same processes, the kernels' own time (that of transport mapped, in the same run),
and one way from the GPU to the host and back.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

from bench.gpu.composite import Geometry, Places, Plan, Traffic, mean_traffic
from bench.gpu.inputs import GpuPeer, Inputs
from bench.gpu.peers import PEERS
from bench.gpu.schedules import schedule
from bench.harness.batch import Batch, Shape, Source
from bench.harness.clock import Clock, Figure, Times, total
from bench.harness.options import Options, Transport
from bench.harness.progress import Progress
from bench.harness.reference import Checks, Wrong
from bench.harness.results import FUSED, PHASES, PeerPoint, Point, Results
from bench.harness.world import Off, World
from bench.harness.writes import Writes, nodes_of, remote_ranks
from pplx_comm.all_to_all import AllToAll
from pplx_comm.communicator import Communicator
from pplx_comm.errors import Error

T = TypeVar("T")
Launch = Callable[[int | None], None]
"""Launches on the given number of multiprocessors; None: all."""

WARMING = 2
"""Replays that do not count."""

MAPPED = "mapped"
PINGS = 1000
PEER_INPUTS = 8
"""Inputs that a peer gets at most: it keeps what it prepares of each."""
BARE_TURNS = 60
EXPERT_OUTPUTS, EXPERT_OUTPUT_BYTES = 8, 16 << 30
"""Different outputs, so that L2 is not warm. Large steps have fewer, down to one that is larger than L2."""
FLOOR_TURNS = 50
COMPOSITE_INPUTS, COMPOSITE_TURNS = 4, 12
EAGER_TURNS = 5
EAGER_WARMING = 2
EAGER_ROUNDS = 4
"""Rounds over all pairs: so few that all launches fit the GPU's queue, where the host would otherwise wait."""
_TENSORS = ("x", "scale", "counts", "offsets", "weights", "src_rank", "src_token", "topk_ids", "topk_weights", "num_rows")


def run(options: Options, world: World, device: Any) -> Results:
    results = Results(multiprocessors=device.multiprocessors)
    notes: list[str] = []
    peers: list[GpuPeer] = []
    for name in options.peers:
        try:
            peers.append(world.all_or_none(partial(PEERS[name], world, options, device), f"peer {name}"))
        except Off as off:
            results.peers_off[name] = str(off)
    progress = Progress(options.tokens, quiet=world.rank != 0)
    try:
        with torch.no_grad():
            for tokens in options.tokens:
                progress.show(tokens, "measuring", 0.0)
                Size(options, world, device, tokens, notes).measure(peers, results)
    finally:
        progress.close()
    for peer in peers:
        peer.close()
    said = [note for of_rank in world.gather(notes, "wrong results") for note in of_rank]
    if said:
        raise Wrong("\n  ".join(["wrong results:", *said[:8]]))
    return results


def _mapped(points: list[Point], num_sms: int | None) -> Point | None:
    """Beside a point of another transport."""
    return next((point for point in points if (point.transport, point.num_sms, point.off) == (MAPPED, num_sms, None)), None)


@dataclass(frozen=True)
class Bare:
    """The composite floor, by phase: a launch for each input, and a launch's bytes."""

    launches: dict[str, list[Launch]]
    traffic: dict[str, Traffic]


class Size:
    """Everything at one number of tokens."""

    def __init__(self, options: Options, world: World, device: Any, tokens: int, notes: list[str]) -> None:
        self._options, self._world, self._device, self._notes = options, world, device, notes
        self._shape = Shape(options, tokens, world.rank, world.size)
        source = Source(self._shape)
        self._source, self._batches = source, [source.batch(i) for i in range(options.pairs)]
        at = device.device
        # Equal tokens still lie in memory of their own.
        self.x = [batch.x.to(at, copy=True) for batch in self._batches]
        self.ids = [batch.topk_ids.to(at) for batch in self._batches]
        self.weights = [batch.topk_weights.to(at) for batch in self._batches]
        self._batches[0].run_experts()
        first = self._batches[0].expert_out
        self._outputs = [first.to(at, copy=True)]
        generator = torch.Generator().manual_seed(options.seed)
        for _ in range(min(EXPERT_OUTPUTS, options.pairs, EXPERT_OUTPUT_BYTES // first.nbytes) - 1):
            row = torch.randn(first.shape[-1:], generator=generator).to(at, first.dtype)
            self._outputs.append(row.expand(first.shape).clone())

    def answers(self, i: int) -> torch.Tensor:
        """Returns the experts' answers to input i."""
        return self._outputs[i % len(self._outputs)]

    def open(self, comm: Communicator, transport: Transport, num_sms: int | None, in_flight: int = 1) -> AllToAll:
        o = self._options
        return AllToAll(
            comm, num_experts=o.experts, top_k=o.top_k, hidden=o.hidden, max_tokens_per_rank=self._shape.tokens,
            dtype=o.dtype, wire=o.wire, layout=self._shape.layout, device=self._device.device, transport=transport.transport,
            provider=transport.provider, node_size=transport.node_size, dedup=transport.dedup, timeout=o.timeout,
            num_sms=num_sms, in_flight=in_flight, slot_bytes=o.slot_bytes,
        )  # fmt: skip

    def measure(self, peers: list[GpuPeer], results: Results) -> None:
        world, tokens = self._world, self._shape.tokens
        points: list[Point] = []
        inside = []
        for transport in self._options.transports:
            remote = remote_ranks(world, transport)
            across = any(world.gather(len(remote), "remote ranks"))
            for num_sms in self._options.num_sms:
                try:
                    if across and transport.transport == "nvshmem":
                        points.append(self._by_kernels(transport, num_sms, points))
                    elif across:
                        points.append(self._across(transport, remote, num_sms, points))
                    else:
                        points.append(self._inside(transport, num_sms))
                        inside.append(points[-1])
                except Off as off:
                    points.append(Point(transport.name, tokens, num_sms, off=str(off)))
        if inside:
            self._floors(inside)
            self._composites(inside)
        for point in points:
            if point.beside:
                mapped = _mapped(points, point.num_sms)
                assert mapped is not None
                point.floor, point.composite, point.traffic = mapped.floor, mapped.composite, mapped.traffic
        results.points += points
        self._peers(peers, results)
        ids = np.ascontiguousarray(self._batches[0].ids)
        results.routing_digest[tokens] = hashlib.sha256(ids.tobytes()).hexdigest()[:16]
        world.barrier()

    def _across(self, transport: Transport, remote: frozenset[int], num_sms: int | None, points: list[Point]) -> Point:
        world, point = self._world, Point(transport.name, self._shape.tokens, num_sms)
        comm = world.fresh()  # a proxy's thread must not run while others are measured
        try:
            a2a = world.all_or_none(lambda: self.open(comm, transport, num_sms), f"transport {transport.name}")
            with a2a:
                if self._options.check:
                    self._check(a2a, transport)
                self._kernels(a2a, point)
                self._eager(a2a, point)
        finally:
            comm.close()
        point.bytes_per_rank = {phase: float(sum(self._bytes_to(op))) for op, phase in enumerate(PHASES)}
        inside = _mapped(points, num_sms)
        if inside is None:
            point.floor_off = "its kernels' part needs --transport mapped before it, and all ranks on one node"
            return point
        try:
            writes = self._bare_writes(transport, remote)
        except Off as off:
            point.floor_off = str(off)
            return point
        handover = Figure.of(self._slowest(self._device.ping(PINGS), "handover"))
        for phase in PHASES:
            parts = {"writes": writes[phase], "kernels": inside.phases[phase], "handover": handover}
            point.floor_parts[phase] = parts
            point.floor[phase] = total(list(parts.values()))
        point.floor["round trip"] = total([point.floor[phase] for phase in PHASES])
        return point

    def _by_kernels(self, transport: Transport, num_sms: int | None, points: list[Point]) -> Point:
        """Kernels that post, or that store into symmetric memory. Its floors are those of the same bytes by bare stores where
        mapped memory reaches all ranks: what it takes beyond `mapped` there is the carrier's own."""
        world, point = self._world, Point(transport.name, self._shape.tokens, num_sms)
        a2a = world.all_or_none(lambda: self.open(world.comm, transport, num_sms), f"transport {transport.name}")
        with a2a:
            if self._options.check:
                self._check(a2a, transport)
            self._kernels(a2a, point)
            self._eager(a2a, point)
        point.bytes_per_rank = {phase: float(sum(self._bytes_to(op))) for op, phase in enumerate(PHASES)}
        inside = _mapped(points, num_sms)
        if inside is None:
            point.floor_off = "mapped's needs --transport mapped before it, and all ranks on one node"
            return point
        point.beside = {phase: inside.phases[phase] for phase in (*PHASES, "round trip")}
        return point

    def _bare_writes(self, transport: Transport, remote: frozenset[int]) -> dict[str, Figure]:
        """From memory that the GPU has just written to memory that it has just read, as kernels leave both to the proxy: neither is
        in the caches of the thread that copies as if that thread alone used it."""
        writes = Writes(self._world, self._shape, transport, remote)
        try:
            with self._device.using(*writes.memory) as writes.prepare:
                clock = Clock(self._world)
                for turn in range(BARE_TURNS + WARMING):
                    clock.recording = turn >= WARMING
                    writes.step(self._batches[turn % len(self._batches)], clock, None)
                times = clock.collect()
        finally:
            writes.close()
        return {phase: Figure.of(times[writes.name, phase]) for phase in PHASES}

    def _inside(self, transport: Transport, num_sms: int | None) -> Point:
        world, point = self._world, Point(MAPPED, self._shape.tokens, num_sms)
        a2a = world.all_or_none(lambda: self.open(world.comm, transport, num_sms), f"transport {transport.name}")
        with a2a:
            if self._options.check:
                self._check(a2a, transport)
            self._kernels(a2a, point)
            self._eager(a2a, point)
            point.bytes_per_rank = {phase: float(sum(self._bytes_to(op))) for op, phase in enumerate(PHASES)}
        return point

    def kernels(self, a2a: AllToAll) -> dict[str, Figure]:
        """A dispatch's, a combine's and a round trip's, after their results have been checked. Collective."""
        point = Point(MAPPED, self._shape.tokens)
        if self._options.check:
            self._check(a2a)
        self._kernels(a2a, point)
        return {phase: point.phases[phase] for phase in FUSED}

    def _peers(self, peers: list[GpuPeer], results: Results) -> None:
        tokens = self._shape.tokens
        for peer in list(peers):
            try:
                for num_sms in self._options.num_sms if peer.has_num_sms(self._shape) else (None,):
                    figures = self._peer(peer, num_sms)
                    how = f"{peer.how}, {'in a graph' if peer.in_graphs else 'call by call'}"
                    results.peers.append(PeerPoint(peer.name, tokens, figures, {}, how, num_sms))
            except Off as off:  # its state is unknown: neither used again nor closed
                peers.remove(peer)
                results.peers_off[peer.name] = f"at {tokens} tokens: {off}".splitlines()[0]

    def pairs(self, a2a: AllToAll) -> None:
        for i, (x, ids, weights) in enumerate(zip(self.x, self.ids, self.weights, strict=True)):
            d = a2a.dispatch(x, ids, weights)
            a2a.combine(self.answers(i), d)

    def _pairs_in_halves(self, a2a: AllToAll) -> None:
        for i, (x, ids, weights) in enumerate(zip(self.x, self.ids, self.weights, strict=True)):
            d = a2a.dispatch_recv(a2a.dispatch_send(x, ids, weights))
            a2a.combine_recv(a2a.combine_send(self.answers(i), d))

    def _check(self, a2a: AllToAll, transport: Transport | None = None) -> None:
        batch: Batch = self._batches[0]
        checks = Checks(batch, self._source.table, self._notes)
        d = a2a.dispatch(self.x[0], self.ids[0], self.weights[0])
        y = a2a.combine(self._outputs[0], d)
        assert isinstance(y, torch.Tensor)
        here = {name: None if (t := getattr(d, name)) is None else t.cpu() for name in _TENSORS}
        checks.dispatched("mapped", SimpleNamespace(**here))  # type: ignore[arg-type]
        checks.combined("mapped", y.cpu(), () if transport is None else nodes_of(self._world, transport))

    # ---- replays -----------------------------------------------------------------------------------------------------

    def _replay(self, steps: Callable[[], None], each: int, note: Callable[[], None] = lambda: None) -> list[float]:
        """Microseconds of a step of the graph, by replay, all ranks at once. note: called after each replay that counts."""
        replay, times = self._device.capture(steps), []
        for turn in range(self._options.replays + WARMING):
            self._world.barrier()
            took = self._device.time(replay)
            if turn >= WARMING:
                times.append(took / each)
                note()
        return times

    def _of_ranks(self, mine: list[float], what: str) -> Times:
        return np.array(self._world.gather(mine, what), dtype=np.float64)

    def _slowest(self, mine: list[float], what: str) -> Times:
        return self._of_ranks(mine, what).max(axis=0)

    def _kernels(self, a2a: AllToAll, point: Point) -> None:
        pairs = self._options.pairs

        dispatch: list[float] = []
        combine: list[float] = []

        def split() -> None:
            a2a.check()
            gaps = [(b - a) / 1000 for a, b in itertools.pairwise(self._device.begins(a2a, pairs))]
            dispatch.extend(gaps[0::2])
            combine.extend(gaps[1::2])

        wall = self._replay(lambda: self.pairs(a2a), pairs, split)
        halves = self._replay(lambda: self._pairs_in_halves(a2a), pairs)
        a2a.check()
        # Both phases of one rank: the slowest dispatch and the slowest combine of a step may be those of two ranks, one of which
        # waits for the other. The last combine of a graph has no launch after it.
        both = np.array(dispatch).reshape(len(wall), -1)[:, :-1].ravel() + combine
        for name, mine in (("dispatch", dispatch), ("combine", combine), ("round trip", both.tolist())):
            of_ranks = self._of_ranks(mine, name)
            point.phases[name] = Figure.of(of_ranks.max(axis=0))
            # All end together, so the fastest one is the one that began last, and waited for no rank to begin.
            point.phases[f"{name}, last start"] = Figure.of(of_ranks.min(axis=0))
        point.phases["wall"] = Figure.of(self._slowest(wall, "wall"))
        point.phases["halves"] = Figure.of(self._slowest(halves, "halves"))

    def _eager(self, a2a: AllToAll, point: Point) -> None:
        """Calls back to back, as layers make them. Rounds of 32 pairs that each began with a wait told of a host gone cold: its
        code took twice as long there (9.6 us a pair up to the launches, 17.8 after 20 ms of sleep)."""
        calls: dict[str, list[float]] = {"host dispatch": [], "host combine": [], "host": [], "eager": []}
        for _ in range(EAGER_TURNS):
            self._world.barrier()
            for _ in range(EAGER_WARMING):
                self._calls(a2a)
            self._device.synchronize()
            begun = time.perf_counter()
            for _ in range(EAGER_ROUNDS):
                dispatch, combine = self._calls(a2a)
                for name, took in (("host dispatch", dispatch), ("host combine", combine), ("host", dispatch + combine)):
                    calls[name].append(took)
            self._device.synchronize()
            calls["eager"].append((time.perf_counter() - begun) * 1e6 / (EAGER_ROUNDS * self._options.pairs))
        a2a.check()
        for name, mine in calls.items():
            point.phases[name] = Figure.of(self._slowest(mine, name))

    def _calls(self, a2a: AllToAll) -> tuple[float, float]:
        """Microseconds of a dispatch and of a combine until the calls are back, in the mean of all pairs."""
        now = time.perf_counter
        dispatch = combine = 0.0
        before = now()
        for i, (x, ids, weights) in enumerate(zip(self.x, self.ids, self.weights, strict=True)):
            d = a2a.dispatch(x, ids, weights)
            between = now()
            a2a.combine(self.answers(i), d)
            after = now()
            dispatch, combine, before = dispatch + between - before, combine + after - between, after
        return dispatch * 1e6 / len(self.x), combine * 1e6 / len(self.x)

    # ---- beside ------------------------------------------------------------------------------------------------------

    def _bytes_to(self, op: int) -> list[int]:
        """Bytes of a step to each other rank, as blocks have them, on average over the inputs."""
        me, pairs = self._world.rank, len(self._batches)
        rows = np.sum([batch.rows[me] if op == 0 else batch.rows[:, me] for batch in self._batches], axis=0) / pairs
        return [0 if peer == me else int(n * self._shape.config.row_bytes(op)) // 16 * 16 for peer, n in enumerate(rows)]

    def _floors(self, points: list[Point]) -> None:
        geometry = Geometry(self._shape)
        with self._device.sharing(self._world, geometry.area_bytes, "the floor of the benchmark") as area:
            for op, phase in enumerate(PHASES):
                for name in self._options.schedules:
                    order, way = name.split(":")
                    work = schedule(self._batches[0], geometry, area, op, order, way)
                    launch = self._device.composite(way, work, geometry)
                    for point in points:

                        def launches(launch: Launch = launch, num_sms: int | None = point.num_sms) -> None:
                            for _ in range(FLOOR_TURNS):
                                launch(num_sms)

                        figure = Figure.of(self._slowest(self._replay(launches, FLOOR_TURNS), "floor"))
                        point.schedules.setdefault(phase, {})[name] = figure
            for point in points:
                for phase, figures in point.schedules.items():
                    point.floor_copy[phase] = min(figures, key=lambda name: figures[name].p50)
                    point.floor[phase] = figures[point.floor_copy[phase]]
                point.floor["round trip"] = total([point.floor[phase] for phase in PHASES])

    def _composites(self, points: list[Point]) -> None:
        with self.composites(COMPOSITE_INPUTS) as bare:
            for point in points:
                for phase in PHASES:
                    launches, turns = bare.launches[phase], COMPOSITE_TURNS * len(bare.launches[phase])

                    def launch(launches: list[Launch] = launches, num_sms: int | None = point.num_sms) -> None:
                        for _ in range(COMPOSITE_TURNS):
                            for one in launches:
                                one(num_sms)

                    point.composite[phase] = Figure.of(self._slowest(self._replay(launch, turns), "composite floor"))
                    point.traffic[phase] = asdict(bare.traffic[phase])
                point.composite["round trip"] = total([point.composite[phase] for phase in PHASES])

    @contextlib.contextmanager
    def composites(self, inputs: int) -> Iterator[Bare]:
        """The bare kernels of the first inputs. Collective."""
        geometry, at = Geometry(self._shape), self._device.device
        batches = self._batches[:inputs]
        with self._device.sharing(self._world, geometry.area_bytes, "memory of the composite floor") as area:
            out = torch.empty(max(geometry.out_bytes(batch) for batch in batches), dtype=torch.uint8, device=at)
            y = torch.empty(self._shape.tokens * geometry.summed.bytes, dtype=torch.uint8, device=at)
            launches: dict[str, list[Launch]] = {phase: [] for phase in PHASES}
            traffic = {}
            for phase in PHASES:
                works = []
                for i, batch in enumerate(batches):
                    tensors = out, y, self.x[i], self.answers(i)
                    places = Places(tuple(area), *(tensor.data_ptr() for tensor in tensors))
                    works.append(Plan(batch, geometry, places).of(phase))
                    launches[phase].append(self._device.composite(phase, works[-1], geometry))
                traffic[phase] = mean_traffic(works)
            yield Bare(launches, traffic)

    def _peer(self, peer: GpuPeer, num_sms: int | None) -> dict[str, Figure]:
        """Times one call per input and returns a call's share on the slowest rank: in a graph where the peer allows it, else with
        whatever its host code waits for. Off where one fails."""
        patience = 2 * self._options.timeout  # ranks that wait in the peer for one that failed give up after one of it
        most = len(self.x) if len(self.x) <= PEER_INPUTS else PEER_INPUTS
        turns = [i % most for i in range(2 * -(-most // 2))]  # an even number: some libraries have two buffers that take turns
        inputs = Inputs(self.x[:most], self.ids[:most], self.weights[:most])

        def together(what: str, attempt: Callable[[], T]) -> T:
            return self._world.all_or_none(attempt, f"peer {peer.name}: {what}", patience)

        def dispatches() -> None:
            for i in turns:
                peer.dispatch(i)

        def combines() -> None:
            for i in turns:
                peer.combine(i)

        def round_trips() -> None:
            for i in turns:
                peer.dispatch(i)
                peer.combine(i)

        together("prepares", lambda: peer.prepare(self._shape, inputs, num_sms))
        together("first calls", round_trips)  # setup at a library's first call cannot be captured
        self._device.synchronize()
        mine: dict[str, list[float]] = {}
        for phase, calls in (("dispatch", dispatches), ("combine", combines), ("round trip", round_trips)):
            if phase == "combine" and peer.in_pairs:
                continue
            replay = together(f"{phase} in a graph", partial(self._device.capture, calls)) if peer.in_graphs else calls
            times = mine[phase] = []
            for turn in range(self._options.replays + WARMING):
                self._world.barrier()
                took = together(phase, partial(self._device.time, replay))
                if turn >= WARMING:
                    times.append(took / len(turns))
        slowest = {phase: self._slowest(times, f"{peer.name}: {phase}") for phase, times in mine.items()}
        if peer.in_pairs:
            slowest["combine"] = slowest["round trip"] - np.median(slowest["dispatch"])
        return {phase: Figure.of(slowest[phase]) for phase in FUSED}


def opened(local_rank: int) -> Any:
    """The GPU of this rank."""
    from bench.gpu.device import Cuda

    if not torch.cuda.is_available():
        raise Error("--device cuda: this process sees no GPU")
    return Cuda(local_rank)
