"""Times of layers, of the slowest rank: calls as they come, stages, a graph of forward passes, and forward with backward.

On CPUs a time is from the first rank's begin to the last one's end, a call at a time. On GPUs --calls calls, one after the other,
are between two events. Some outputs of each layer are compared with those of the textbook's loop over experts, and must be as near
as the format allows.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from bench.harness.clock import Figure
from bench.harness.reference import Wrong
from bench.harness.world import Off, World
from bench.moe.layers import Layer, Ours, makers
from bench.moe.options import LayerOptions
from bench.moe.problem import Problem, make_weights

WARMING = 3
LIMITS = {"bf16": 0.006, "fp8-dispatch": 0.045, "fp8": 0.08, "mxfp8": 0.08}
"""Relative errors of our layer that formats explain."""
LIMITS_OF_OTHERS = {"bf16": 0.012, "fp8": 0.08}
"""Layers in bfloat16 throughout round between all operations."""
CHECKED = 4
"""Tokens of each rank whose outputs are compared."""


@dataclass
class Point:
    """One layer at one size."""

    layer: str
    precision: str
    tokens: int
    routing: str
    error: float = 0.0
    forward: Figure | None = None
    graph: Figure | None = None
    both: Figure | None = None
    """Forward and backward."""
    stages: dict[str, float] = field(default_factory=dict)
    """Microseconds of a forward pass, by stage: the median of the slowest rank's."""
    alone: dict[str, Figure] = field(default_factory=dict)
    """Our layer's parts one after the other: "compute" and "step" (dispatch and combine) by themselves. In graphs on a GPU."""
    notes: dict[str, Any] = field(default_factory=dict)
    off: str | None = None

    @property
    def what(self) -> str:
        return f"{self.layer}, {self.precision}, {self.tokens} tokens"

    @property
    def best(self) -> Figure | None:
        """The forward pass's time: in a graph, where it can be in one."""
        return self.graph or self.forward

    def described(self) -> dict[str, Any]:
        """As the JSON has it."""
        return asdict(self)


class Timer:
    """Microseconds of calls."""

    def __init__(self, world: World, device: Any, options: LayerOptions) -> None:
        self._world, self._device, self._o = world, device, options
        self._cpu = device.device.type == "cpu"

    def figure(self, call: Callable[[], object]) -> Figure:
        """Collective."""
        for _ in range(WARMING):
            call()
        mine = [self._cpu_round(call) if self._cpu else self._gpu_round(call) for _ in range(self._o.rounds)]
        spans = np.array(self._world.gather(mine, "times"))
        if self._cpu and self._world.together:
            took = spans[:, :, 1].max(axis=0) - spans[:, :, 0].min(axis=0)
        else:
            took = (spans[:, :, 1] - spans[:, :, 0]).max(axis=0)
        return Figure.of(took)

    def _cpu_round(self, call: Callable[[], object]) -> tuple[float, float]:
        _, (begin, end) = self._world.timed(call)
        return begin / 1000, end / 1000

    def _gpu_round(self, call: Callable[[], object]) -> tuple[float, float]:
        def calls() -> None:
            for _ in range(self._o.calls):
                call()

        self._device.synchronize()
        self._world.barrier()
        return 0.0, self._device.time(calls) / self._o.calls

    def stages(self, forward: Callable[[Callable[[str], None]], object]) -> dict[str, float]:
        """Collective. The GPU's stages are between events, which nothing waits for."""
        rounds: dict[str, list[float]] = {}
        for turn in range(WARMING + self._o.rounds):
            self._device.synchronize()
            self._world.barrier()
            seen: list[tuple[str, Any]] = [("", self._now())]
            forward(lambda name, seen=seen: seen.append((name, self._now())))  # type: ignore[misc]
            self._device.synchronize()
            if turn >= WARMING:
                for (_, begin), (name, end) in itertools.pairwise(seen):
                    rounds.setdefault(name, []).append(self._between(begin, end))
        of_ranks = self._world.gather(rounds, "stages")
        return {name: float(np.median(np.max([times[name] for times in of_ranks], axis=0))) for name in rounds}

    def _now(self) -> Any:
        if self._cpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(end - begin) * 1e6 if self._cpu else 1000 * float(begin.elapsed_time(end))


def run(options: LayerOptions, world: World, device: Any) -> list[Point]:
    if options.experts % world.size:
        raise Off(f"--experts {options.experts} must divide by the {world.size} ranks: other libraries want that")
    weights, timer = make_weights(options, world.rank, world.size, device.device), Timer(world, device, options)
    points: list[Point] = []
    for precision in options.precisions:
        for name, make in makers(options, precision).items():
            layer: Layer | None = None
            why = ""
            try:
                layer = world.all_or_none(lambda make=make: make(world, device.device), f"layer {name}")  # type: ignore[misc]
            except Off as off:
                why = str(off)
            for routing in options.routings:
                for tokens in options.tokens:
                    problem = Problem(options, tokens, routing, world.rank, world.size, device.device, weights)
                    point = Point(name, precision, tokens, routing, off=why or None)
                    if layer is not None:
                        _measure(layer, problem, point, world, device, timer)
                    if world.rank == 0:
                        _tell(point)
                    points.append(point)
            if layer is not None:
                layer.close()
            layer = None
            if device.device.type == "cuda":  # other layers cannot have memory that torch keeps
                torch.cuda.empty_cache()
    return points


def _measure(layer: Layer, problem: Problem, point: Point, world: World, device: Any, timer: Timer) -> None:
    try:
        world.all_or_none(lambda: layer.prepare(problem), point.what)
        with torch.no_grad():
            _check(layer, problem, point, world)
    except Off as off:
        point.off = str(off)
        return
    with torch.no_grad():
        point.forward = timer.figure(lambda: layer.forward(_nothing))
        point.stages = timer.stages(layer.forward)
        if layer.in_graphs and device.device.type == "cuda":
            point.graph = timer.figure(device.capture(lambda: layer.forward(_nothing)))
        if isinstance(layer, Ours):
            point.alone = _alone(layer, device, timer)
    if layer.trains and problem.options.backward:
        point.both = timer.figure(_training(layer, problem))


def _check(layer: Layer, problem: Problem, point: Point, world: World) -> None:
    """Calls it, and compares what came out. A layer of others that raises, or is wrong, is off, and the rest is still measured."""
    ours = isinstance(layer, Ours)
    y = layer.forward(_nothing) if ours else world.all_or_none(lambda: layer.forward(_nothing), point.what)
    point.notes = layer.notes()
    for note, over_ranks in (("dropped", np.mean), ("rows", np.max)):
        if note in point.notes:
            point.notes[note] = float(over_ranks(world.gather(point.notes[note], note)))
    point.error = max(world.gather(_error(problem, y, world), "errors"))
    limit = (LIMITS if ours else LIMITS_OF_OTHERS)[point.precision]
    if not point.notes.get("dropped") and not point.error < limit:
        raise (Wrong if ours else Off)(f"{point.what}: off by {point.error:.3g}")


def _tell(point: Point) -> None:
    """As it is measured: a run that is cut off has said something."""
    said = f"off: {point.off}" if point.best is None else f"{point.best.p50:.1f} us{', in a graph' if point.graph else ''}"
    print(f"{point.what}: {said}", file=sys.stderr, flush=True)


def _alone(layer: Ours, device: Any, timer: Timer) -> dict[str, Figure]:
    """Collective."""
    found = {}
    for what, opened in (("compute", layer.computing), ("step", layer.stepping)):
        with opened() as call:
            found[what] = timer.figure(device.capture(call) if device.device.type == "cuda" else call)
    return found


def _nothing(stage: str) -> None: ...


def _training(layer: Layer, problem: Problem) -> Callable[[], None]:
    """A call forward and backward, with gradients for tokens, weights of choices, and experts, which replace those from before."""
    w = problem.weights
    leaves = [t.detach().requires_grad_() for t in (problem.x, problem.choice_weights, w.gate_up, w.down)]

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        layer.train(*leaves).backward(problem.dy)

    return both


def _error(problem: Problem, y: torch.Tensor, world: World) -> float:
    """Relative error of some tokens' outputs. Each rank computes what its experts add to them; the sums are made here."""
    few = min(CHECKED, problem.tokens)
    mine = [problem.x[:few].double().cpu(), problem.ids[:few].cpu(), problem.choice_weights[:few].double().cpu()]
    asked = world.gather([t.tolist() for t in mine], "tokens to check")
    parts = [_part(problem, *_tensors(*of_rank)).tolist() for of_rank in asked]
    answers = world.gather(parts, "checked tokens")
    wanted = sum(torch.tensor(answer[world.rank], dtype=torch.float64) for answer in answers)
    assert isinstance(wanted, torch.Tensor)
    seen = y[:few].double().cpu()
    return float((seen - wanted).norm() / wanted.norm()) if bool(seen.isfinite().all()) else float("inf")


def _tensors(x: list[Any], ids: list[Any], weights: list[Any]) -> tuple[torch.Tensor, ...]:
    return torch.tensor(x, dtype=torch.float64), torch.tensor(ids), torch.tensor(weights, dtype=torch.float64)


def _part(problem: Problem, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The textbook, in float64: an expert and a token at a time."""
    sums = torch.zeros(x.shape, dtype=torch.float64, device=problem.device)
    x, first = x.to(problem.device), problem.rank * problem.local_experts
    for place in range(problem.local_experts):
        for token, choice in (ids == first + place).nonzero().tolist():
            gate, up = (problem.weights.gate_up[place].double() @ x[token]).chunk(2)
            a = torch.nn.functional.silu(gate) * up
            sums[token] += float(weights[token, choice]) * (problem.weights.down[place].double() @ a)
    return sums.cpu()
