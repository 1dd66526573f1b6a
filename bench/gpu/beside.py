"""Two steps in flight on two streams beside GEMMs on a third: what the GEMMs lose by them, and by the bare bytes alone.

In a round everything is queued behind a gate, which then opens for all three streams. The steps are one AllToAll's, with
in_flight=2; their launches take `num_sms` multiprocessors each and have the higher priority, and the GEMMs leave twice that number
to them where torch can tell them to. A round's GEMMs last longer than the steps, and are timed in each of these ways:

alone           on the whole GPU
fewer SMs       on the multiprocessors that they leave, with nothing beside them
bytes           beside the composite floor of both steps (composite.py), on the multiprocessors of the steps
steps           beside the two steps
delayed steps   the same with random delays before each phase, different on each rank and stream

After each round every error of the steps is asked for, and their results must keep the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from bench.gpu.gemm import NAMES, Gemm, Gemms, gemm
from bench.gpu.measure import Bare, Launch, Size
from bench.harness.clock import Figure
from bench.harness.options import Options
from bench.harness.progress import Progress
from bench.harness.reference import Wrong
from bench.harness.results import PHASES
from bench.harness.world import World
from pplx_comm.all_to_all import AllToAll
from pplx_comm.errors import Error

STREAMS = 2
WAYS = ("alone", "fewer SMs", "bytes", "steps", "delayed steps")
WITH_STEPS = WAYS[3:]
LEFT = 4
"""Multiprocessors that steps in flight leave in any case."""
COVER = 1.25
"""GEMMs of a round last COVER times as long as the work beside them."""
WARMING = 3
GATE_US = 1000.0
"""Time allowed for queueing a round."""
PHASES_OF_STEP = 4


@dataclass(frozen=True)
class Asked:
    rounds: int = 1000
    """With delays."""
    calm: int = 50
    """Rounds of each other way."""
    delay_us: float = 50.0
    """The longest delay before a phase."""
    gemms: tuple[str, ...] = NAMES
    shapes: Gemms = field(default_factory=Gemms)


@dataclass
class Beside:
    """One GEMM beside steps of one number of tokens and of multiprocessors."""

    gemm: str
    about: str
    tokens: int
    num_sms: int
    gemms: int
    """The number of GEMMs in a round."""
    rounds: dict[str, int] = field(default_factory=dict)
    times: dict[str, Figure] = field(default_factory=dict)
    """Way -> microseconds of a round's GEMMs, on the slowest rank."""
    beside: dict[str, Figure] = field(default_factory=dict)
    """Way -> microseconds until the work beside them had ended."""
    traffic: dict[str, int] = field(default_factory=dict)
    """Bytes that the bare kernels of a round read, write, and of those push to other ranks."""

    def slowdown(self, way: str) -> float:
        return self.times[way].p50 / self.times["alone"].p50

    def lost(self, way: str) -> float:
        """Microseconds a round."""
        return self.times[way].p50 - self.times["alone"].p50


class Delays:
    """Before each phase of each step, drawn anew for each rank."""

    def __init__(self, seed: int, rank: int, longest_us: float) -> None:
        self._rng, self._longest = np.random.default_rng((seed, rank, 4711)), longest_us

    def __call__(self) -> float:
        return float(self._rng.uniform(0, self._longest))


def nothing() -> float:
    return 0.0


class Steps:
    """Two of them, a stream each. The calls are made phase by phase, in the same order on all ranks."""

    def __init__(self, size: Size, a2a: AllToAll, device: Any, streams: list[Any]) -> None:
        self._size, self._a2a, self._device, self._streams = size, a2a, device, streams
        self._first: list[torch.Tensor] = []
        self._last: list[torch.Tensor] = []
        self.wrong: list[str] = []
        """Said when all ranks are there: one that left in the middle would let the others wait."""

    def launch(self, delay: Callable[[], float]) -> None:
        a2a, state = self._a2a, dict[int, Any]()

        def phase(call: Callable[[int], Any]) -> None:
            for i, stream in enumerate(self._streams):
                with self._device.on(stream):
                    if us := delay():
                        self._device.delay(us)
                    state[i] = call(i)

        size = self._size
        phase(lambda i: a2a.dispatch_send(size.x[i], size.ids[i], size.weights[i]))
        phase(lambda i: a2a.dispatch_recv(state[i]))
        phase(lambda i: a2a.combine_send(size.answers(i), state[i]))
        phase(lambda i: a2a.combine_recv(state[i]))
        self._last = [state[i] for i in range(len(self._streams))]

    def check(self, what: str) -> None:
        """After everything has ended."""
        self._a2a.check()
        self._first = self._first or [y.clone() for y in self._last]
        for i, (first, last) in enumerate(zip(self._first, self._last, strict=True)):
            if not torch.equal(first.view(torch.uint8), last.view(torch.uint8)):
                self.wrong.append(f"{what}: the result on stream {i} is not the one of the first round")


class Rounds:
    def __init__(self, world: World, device: Any, gemm: Gemm) -> None:
        self._world, self._device, self._gemm = world, device, gemm
        self.streams = device.streams(STREAMS, first=True)
        [self._own] = device.streams(1, first=False)
        self.gemms = 0

    def round(self, beside: Callable[[], None] | None, leave: int) -> tuple[float, float]:
        """Microseconds of the GEMMs, and of what runs beside them."""
        device = self._device
        self._world.barrier()
        gate = device.gate(GATE_US)
        for stream in (*self.streams, self._own):
            gate.hold(stream)
        watches = [device.stopwatch(stream) for stream in (*self.streams, self._own)]
        if beside is not None:
            beside()
        with device.on(self._own), device.leaving(leave):
            for _ in range(self.gemms):
                self._gemm.run()
        for watch in watches:
            watch.stop()
        device.synchronize()
        *others, own = (watch.microseconds() for watch in watches)
        return own, max(others)


def composites(bare: Bare, device: Any, streams: list[Any], num_sms: int) -> Callable[[], None]:
    """Those of both steps, a stream each."""

    def launch() -> None:
        for phase in PHASES:
            of_steps: list[Launch] = bare.launches[phase]
            for stream, one in zip(streams, of_steps, strict=True):
                with device.on(stream):
                    one(num_sms)

    return launch


class Measurement:
    def __init__(self, options: Options, asked: Asked, world: World, device: Any) -> None:
        # An input for each of the steps.
        self._options, self._asked = replace(options, pairs=STREAMS), asked
        self._world, self._device = world, device
        for num_sms in options.num_sms:
            if num_sms is None or STREAMS * num_sms + LEFT > device.multiprocessors:
                raise Error(f"--num-sms: {STREAMS} steps must leave {LEFT} of {device.multiprocessors} multiprocessors to the GEMM")

    def run(self) -> list[Beside]:
        points = []
        progress = Progress(self._options.tokens, quiet=self._world.rank != 0)
        try:
            with torch.no_grad():
                for tokens in self._options.tokens:
                    size = Size(self._options, self._world, self._device, tokens, [])
                    with size.composites(STREAMS) as bare:
                        for name in self._asked.gemms:
                            one = gemm(name, self._asked.shapes, self._options.hidden, self._device.device)
                            rounds = Rounds(self._world, self._device, one)
                            for num_sms in self._options.num_sms:
                                assert num_sms is not None
                                progress.show(tokens, f"{name}, {num_sms} SMs", 0.0)
                                points.append(self._point(size, bare, rounds, Beside(name, one.about, tokens, num_sms, 0)))
        finally:
            progress.close()
        return points

    def _point(self, size: Size, bare: Bare, rounds: Rounds, point: Beside) -> Beside:
        world, num_sms, asked = self._world, point.num_sms, self._asked
        point.traffic = {
            name: sum(getattr(bare.traffic[phase], name) for phase in PHASES) * STREAMS for name in ("read", "written", "pushed")
        }
        transport = self._options.transports[0]
        what = f"{point.gemm}, {point.tokens} tokens, {num_sms} SMs, rank {world.rank}"
        with ExitStack() as stack:
            a2a = stack.enter_context(self._opened(size, transport, num_sms))
            steps = Steps(size, a2a, self._device, rounds.streams)
            copies = composites(bare, self._device, rounds.streams, num_sms)
            delays = Delays(self._options.seed, world.rank, asked.delay_us)

            def beside(way: str) -> Callable[[], None] | None:
                if way in WITH_STEPS:
                    return lambda: steps.launch(delays if way == "delayed steps" else nothing)
                return copies if way == "bytes" else None

            rounds.gemms = point.gemms = self._gemms(rounds, [beside("bytes"), beside("steps")])
            for way in WAYS:
                leave = 0 if way == "alone" else STREAMS * num_sms
                n = asked.rounds if way == "delayed steps" else asked.calm
                gemms, others = [], []
                for number in range(n + WARMING):
                    own, other = rounds.round(beside(way), leave)
                    if way in WITH_STEPS:
                        steps.check(f"{what}, {way}, round {number}")
                    if number >= WARMING:
                        gemms.append(own)
                        others.append(other)
                if said := [note for of_rank in world.gather(steps.wrong, "wrong results") for note in of_rank]:
                    raise Wrong("\n  ".join(["wrong results:", *said[:8]]))
                point.rounds[way] = n
                point.times[way] = self._slowest(gemms, way)
                if beside(way) is not None:
                    point.beside[way] = self._slowest(others, f"beside, {way}")
        return point

    @contextmanager
    def _opened(self, size: Size, transport: Any, num_sms: int) -> Iterator[AllToAll]:
        world = self._world
        with world.all_or_none(lambda: size.open(world.comm, transport, num_sms, STREAMS), "opening") as a2a:
            yield a2a

    def _gemms(self, rounds: Rounds, beside: list[Callable[[], None] | None]) -> int:
        """Returns the number of GEMMs that last longer than the work beside them, delays included: the same on all ranks."""
        rounds.gemms = 0
        others = max(min(rounds.round(one, 0)[1] for _ in range(WARMING)) for one in beside)
        rounds.gemms = 1
        own = min(rounds.round(None, 0)[0] for _ in range(WARMING))
        seen = self._world.gather([others, own], "how long it takes")
        longest, fastest = max(one[0] for one in seen), min(one[1] for one in seen)
        return enough(longest + PHASES_OF_STEP * self._asked.delay_us, fastest)

    def _slowest(self, mine: list[float], what: str) -> Figure:
        return Figure.of(np.array(self._world.gather(mine, what), dtype=np.float64).max(axis=0))


def enough(beside_us: float, gemm_us: float) -> int:
    return max(1, math.ceil(COVER * beside_us / max(gemm_us, 1.0)))
