"""Steps taken by eager calls and by graph replays in any mix, with several open at once: each is right, or refused on every rank.

The same functions run on GPUs and under the emulation, which puts streams of its own in place of `streams`.
"""

from __future__ import annotations

import contextlib
import gc
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import rank_cases
import reference
import torch
from cases import Case
from gpu_cases import gpu_of
from outcomes import mistake
from reference import Tokens, same_bits

import pplx_comm as pc


class Streams:
    """Streams and graphs, as torch has them for a GPU."""

    def new(self) -> Any:
        return torch.cuda.Stream()

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def wait(self, stream: Any, other: Any) -> None:
        stream.wait_stream(other)

    def after_copies(self, stream: Any) -> None:
        """Work that torch was asked for so far comes before later work of this stream."""
        stream.wait_stream(torch.cuda.current_stream())

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """On the current stream."""
        to.copy_(source, non_blocking=True)

    @contextlib.contextmanager
    def capture(self, stream: Any) -> Iterator[list[Any]]:
        """Yields a list, to which the graph is added in the end."""
        graph, captured = torch.cuda.CUDAGraph(), list[Any]()
        gc.collect()  # an earlier graph that is deleted meanwhile would end the capture
        with torch.cuda.graph(graph, stream=stream):
            yield captured
        captured.append(graph)

    def replay(self, graph: Any, stream: Any) -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    def settle(self) -> None:
        torch.cuda.synchronize()


streams = Streams()

STILL_OPEN = (
    r"rank (\d) dispatched step (\d+) while step (\d+), whose memory it takes, is still open: combine or release it first, "
    r"or raise in_flight"
)
NOT_OPEN = r"rank (\d) combined step \d+, which is not open"


def small_case(seed: int, world_size: int, in_flight: int, **changes: Any) -> Case:
    case = Case(
        seed, world_size, num_experts=3 * world_size, top_k=3, hidden=16, max_tokens=6, dtype="float32", in_flight=in_flight
    )
    return replace(case, **changes)


# ---- inputs, and what must come of them -----------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """Inputs of one step, as all ranks know them. float32 integers and weights of one: every sum is exact."""

    tokens: list[Tokens]


def tokens_of_graph(case: Case, rank: int) -> int:
    return case.max_tokens if case.crowd == "full" or rank % 2 == 0 else 3


def draw_inputs(case: Case, r: random.Random, eager: bool = False) -> Inputs:
    """Eager steps have any number of tokens, unless all ranks have max_tokens."""
    g = torch.Generator().manual_seed(r.randrange(2**40))
    each = [tokens_of_graph(case, rank) for rank in range(case.world_size)]
    if eager and case.crowd != "full":
        each = [r.choice([0, 3, case.max_tokens]) for _ in each]
    ids = [torch.randint(-1, case.num_experts, (n, case.top_k), generator=g) for n in each]
    tokens = [Tokens(torch.randint(1, 2**16, (len(i), case.hidden), generator=g).float(), i, None) for i in ids]
    return Inputs([tokens[rank - rank % case.replicas] for rank in range(case.world_size)])


def check_received(case: Case, inputs: Inputs, rank: int, counts: torch.Tensor, x: torch.Tensor, what: str) -> None:
    found = reference.segments(case.shape, inputs.tokens, rank)
    wanted = [len(segment.token) for segment in found]
    assert counts.tolist() == wanted, f"{what}: counts {counts.tolist()}, not {wanted}"
    rows = [inputs.tokens[s].x[t] for segment in found for s, t in zip(segment.source, segment.token, strict=True)]
    assert not rows or same_bits(x[: len(rows)].cpu(), torch.stack(rows)), f"{what}: rows differ"


def check_combined(inputs: Inputs, rank: int, y: torch.Tensor, what: str) -> None:
    """Experts give back what they get."""
    mine = inputs.tokens[rank]
    wanted = mine.x * (mine.ids >= 0).sum(1, keepdim=True)
    assert same_bits(y.cpu(), wanted), f"{what}: outputs differ"


# ---- steps ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Captured:
    """A graph whose steps have inputs and outputs of their own, in memory that stays."""

    graph: Any
    inputs: list[tuple[torch.Tensor, torch.Tensor]]  # x, ids
    outputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # counts, x, y
    order: tuple[int, ...]
    """Order of its dispatches, each the step's number from 0, and combines, each ~number."""
    kept: list[Any]


@dataclass
class Eager:
    inputs: Inputs
    number: int
    stream: Any
    d: Any
    received: bool
    y: torch.Tensor
    c: Any = None


@dataclass
class World:
    """An AllToAll, streams, and all that kernels may still work on."""

    me: Any
    case: Case
    a2a: pc.AllToAll
    streams: list[Any] = field(default_factory=lambda: [streams.new() for _ in range(3)])
    kept: list[Any] = field(default_factory=list)
    checks: list[Any] = field(default_factory=list)

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.to(self.a2a.device)
        self.kept.append(there)
        return there

    def poison(self, tokens: int) -> torch.Tensor:
        return self.on_device(torch.full((tokens, self.case.hidden), float("nan")))

    def settle(self) -> None:
        """All that was launched has ended, and is right."""
        streams.settle()
        self.a2a.check()
        for check in self.checks:
            check()
        self.checks.clear()
        self.kept.clear()

    # ---- eager

    def open(self, inputs: Inputs, number: int, stream: Any, whole: bool) -> Eager:
        mine = inputs.tokens[self.me.rank]
        x, ids = self.on_device(mine.x), self.on_device(mine.ids)
        y = self.poison(len(mine.x))
        streams.after_copies(stream)
        with streams.on(stream):
            d = (self.a2a.dispatch if whole else self.a2a.dispatch_send)(x, ids)
        self.kept.append(d)
        return Eager(inputs, number, stream, d, whole, y)

    def receive(self, step: Eager) -> None:
        with streams.on(step.stream):
            self.a2a.dispatch_recv(step.d)
        step.received = True

    def close(self, step: Eager, how: str) -> None:
        if not step.received:
            self.receive(step)
        with streams.on(step.stream):
            if how == "release":
                step.d.release()
            elif how == "halves":
                step.c = self.a2a.combine_send(step.d.x, step.d, out=step.y)
            else:
                self.a2a.combine(step.d.x, step.d, out=step.y)
        self.kept.append(step.c)
        rank, case = self.me.rank, self.case

        def check() -> None:
            what = f"eager step {step.number}"
            check_received(case, step.inputs, rank, step.d.counts, step.d.x, what)
            if how != "release":
                check_combined(step.inputs, rank, step.y, what)

        self.checks.append(check)

    def finish(self, step: Eager, stream: Any) -> None:
        """The receive half of its combine, on any stream."""
        with streams.on(stream):
            self.a2a.combine_recv(step.c)
        step.c = None

    # ---- graphs

    def capture(self, order: tuple[int, ...], lanes: int) -> Captured:
        """`order`: n dispatches, ~n combines. lanes=2: two batches overlap, each on a stream of its own, their halves apart."""
        a2a, case, steps = self.a2a, self.case, [n for n in order if n >= 0]
        tokens = tokens_of_graph(case, self.me.rank)
        inputs = [
            (
                torch.zeros(tokens, case.hidden, device=a2a.device),
                torch.zeros(tokens, case.top_k, dtype=torch.int64, device=a2a.device),
            )
            for _ in steps
        ]
        origin, other = streams.new(), streams.new()
        opened: dict[int, Any] = {}
        outputs: dict[int, Any] = {}
        kept: list[Any] = []
        streams.settle()
        with streams.capture(origin) as captured:
            if lanes == 2:
                streams.wait(other, origin)
            of = {n: other if lanes == 2 and n % 2 else origin for n in steps}
            for n in order:
                step = n if n >= 0 else ~n
                with streams.on(of[step]):
                    if n >= 0 and lanes == 1:
                        opened[n] = a2a.dispatch(*inputs[n])
                    elif n >= 0:
                        opened[n] = a2a.dispatch_send(*inputs[n])
                    elif lanes == 1:
                        outputs[step] = a2a.combine(opened[step].x, opened[step])
                    else:
                        a2a.dispatch_recv(opened[step])
                        c = a2a.combine_send(opened[step].x, opened[step])
                        outputs[step] = a2a.combine_recv(c)
                        kept.append(c)
            if lanes == 2:
                streams.wait(origin, other)
        assert {d.step for d in opened.values()} == {-1}, "a capture took a step"
        found = [(opened[n].counts, opened[n].x, outputs[n]) for n in sorted(steps) if n in outputs]
        return Captured(captured[0], inputs, found, order, [kept, opened])

    def replay(self, captured: Captured, inputs: list[Inputs], number: int, stream: Any, after: list[Any] | None = None) -> None:
        """Replays in the order of the caller's streams, as any launcher of a graph must. `after`: only those come before."""
        rank, case = self.me.rank, self.case
        mine = [(self.on_device(i.tokens[rank].x), self.on_device(i.tokens[rank].ids)) for i in inputs]
        found = [tuple(self.on_device(torch.zeros_like(t)) for t in outputs) for outputs in captured.outputs]
        poison = self.poison(tokens_of_graph(case, rank))
        self.kept.append(captured)
        streams.after_copies(stream)
        for other in self.streams if after is None else after:
            if other is not stream:
                streams.wait(stream, other)
        with streams.on(stream):
            for (x, ids), (new_x, new_ids) in zip(captured.inputs, mine, strict=True):
                streams.copy(x, new_x)
                streams.copy(ids, new_ids)
            for _, _, y in captured.outputs:
                streams.copy(y, poison)
        streams.replay(captured.graph, stream)
        with streams.on(stream):
            for to, outputs in zip(found, captured.outputs, strict=True):
                for t, output in zip(to, outputs, strict=True):
                    streams.copy(t, output)
        for other in self.streams if after is None else ():
            if other is not stream:
                streams.wait(other, stream)

        def check() -> None:
            for n, ((counts, x, y), i) in enumerate(zip(found, inputs, strict=False)):
                what = f"replayed step {number + n}"
                check_received(case, i, rank, counts, x, what)
                check_combined(i, rank, y, what)

        self.checks.append(check)


def open_world(me: Any, case: Case, **options: Any) -> World:
    a2a = rank_cases.open_all_to_all(me, case, **{"device": str(gpu_of(me)), "timeout": 20.0, **options})
    a2a.warmup()
    world = World(me, case, a2a)
    streams.settle()
    return world


PAIR, TWO_PAIRS, NESTED, OVERLAPPED = (0, ~0), (0, ~0, 1, ~1), (0, 1, ~1, ~0), (0, 1, ~0, ~1)


class Sets:
    """The open steps by the rule: the memory of step n is free when step n - in_flight is closed."""

    def __init__(self, in_flight: int, next_step: int) -> None:
        self.in_flight, self.next = in_flight, next_step
        self.open: set[int] = set()

    def take(self) -> bool:
        step, self.next = self.next, self.next + 1
        free = step - self.in_flight not in self.open
        self.open.add(step)
        return free

    def allows(self, order: tuple[int, ...]) -> bool:
        tried = Sets(self.in_flight, self.next)
        tried.open = set(self.open)
        numbers = {}
        for n in order:
            if n >= 0:
                numbers[n] = tried.next
                if not tried.take():
                    return False
            elif n < 0:
                tried.open.discard(numbers[~n])
        return True


def interleaved(me: Any, case: Case, seeds: list[int], operations: int) -> None:
    """Eager steps, open for a while, and replays of several graphs, drawn from the seeds: every result is right."""
    world = open_world(me, case)
    with world.a2a:
        graphs = [world.capture(PAIR, 1), world.capture(PAIR, 1), world.capture(TWO_PAIRS, 1)]
        if case.in_flight > 1:
            graphs += [world.capture(NESTED, 1), world.capture(OVERLAPPED, 2), world.capture(NESTED, 2)]
        sets = Sets(case.in_flight, 1)  # after the warmup
        for seed in seeds:
            r = random.Random(f"{case.seed} {seed}")  # the same on all ranks
            own = random.Random(f"{case.seed} {seed} {me.rank}")
            opened: list[Eager] = []
            unfinished: list[Eager] = []
            for _ in range(operations):
                kind = r.choice(["open", "open", "receive", "close", "close", "finish", "replay", "replay"])
                stream = own.choice(world.streams)
                if kind == "open" and len(opened) + len(unfinished) < case.in_flight and sets.allows((0,)):
                    whole, number = r.random() < 0.5, sets.next
                    sets.take()
                    opened.append(world.open(draw_inputs(case, r, eager=True), number, stream, whole))
                elif kind == "receive" and opened:
                    step = r.choice(opened)
                    if not step.received:
                        world.receive(step)
                elif kind == "close" and opened:
                    step = opened.pop(r.randrange(len(opened)))
                    how = r.choice(["whole", "whole", "halves", "release"])
                    world.close(step, how)
                    if how == "halves":
                        unfinished.append(step)
                    else:
                        sets.open.discard(step.number)
                elif kind == "finish" and unfinished:
                    step = unfinished.pop(r.randrange(len(unfinished)))
                    world.finish(step, stream)
                    sets.open.discard(step.number)
                elif kind == "replay":
                    captured = r.choice(graphs)
                    if not sets.allows(captured.order):
                        continue
                    number = sets.next
                    steps = sum(n >= 0 for n in captured.order)
                    sets.next += steps
                    world.replay(captured, [draw_inputs(case, r) for _ in range(steps)], number, stream)
            for step in opened:
                world.close(step, "whole")
                sets.open.discard(step.number)
            for step in unfinished:
                world.finish(step, own.choice(world.streams))
                sets.open.discard(step.number)
            try:
                world.settle()
            except BaseException as problem:
                raise AssertionError(f"seed {seed} of {case}: {problem}") from problem
            assert world.a2a.stats()["open_steps"] == 0 and not sets.open


def around_a_replay(me: Any, case: Case, first: int) -> None:
    """Two eager steps, opened before and after a replay; received and combined in either order."""
    world = open_world(me, case)
    r = random.Random(case.seed)
    with world.a2a:
        pair = world.capture(PAIR, 1)
        stream = world.streams[0]
        for turn in range(2):
            steps = [world.open(draw_inputs(case, r), 3 * turn, stream, False)]
            world.replay(pair, [draw_inputs(case, r)], 3 * turn + 1, stream)
            steps.append(world.open(draw_inputs(case, r), 3 * turn + 2, stream, False))
            assert world.a2a.stats()["open_steps"] == 2
            for step in (steps[first], steps[1 - first]):
                world.receive(step)
            for step in (steps[first], steps[1 - first]):
                world.close(step, "whole")
            world.settle()
            assert world.a2a.stats()["open_steps"] == 0


def a_capture_between(me: Any, case: Case) -> None:
    """A capture runs nothing: it takes no step, and loses no eager handle, also where it keeps steps open."""
    world = open_world(me, case)
    r = random.Random(case.seed)
    with world.a2a:
        streams.settle()  # a kernel counts
        before = world.a2a.stats()["steps"]
        step = world.open(draw_inputs(case, r), 0, world.streams[0], True)
        streams.settle()
        pair = world.capture(PAIR, 1)
        assert [world.a2a.stats()[name] for name in ("open_steps", "steps")] == [1, before]
        world.close(step, "halves")
        overlapped = world.capture(OVERLAPPED, 2) if case.in_flight > 1 else pair
        world.finish(step, world.streams[1])
        world.settle()
        assert [world.a2a.stats()[name] for name in ("open_steps", "steps")] == [0, before + 1]
        world.replay(pair, [draw_inputs(case, r)], 1, world.streams[2])
        world.replay(overlapped, [draw_inputs(case, r) for _ in overlapped.inputs], 2, world.streams[0])
        world.settle()


def closed_beside_a_replay(me: Any, case: Case) -> None:
    """Rank 0 closes while a graph on its current stream waits for the others, which do not replay theirs."""
    s, a2a = streams, rank_cases.open_all_to_all(me, case, device=str(gpu_of(me)))
    x = torch.zeros(case.max_tokens, case.hidden, device=a2a.device)
    ids = torch.zeros(case.max_tokens, case.top_k, dtype=torch.int64, device=a2a.device)
    main, other = s.new(), s.new()
    d = a2a.dispatch(x, ids)
    a2a.combine(d.x, d)
    s.settle()
    with s.capture(main) as captured:
        d = a2a.dispatch(x, ids)
        a2a.combine(d.x, d)
    me.comm.barrier()
    if me.rank == 0:
        s.replay(captured[0], other)
        with s.on(other):
            a2a.close()
        del a2a, d
        s.settle()  # its kernels were told to end before their memory went
    else:
        a2a.close()
    me.comm.barrier()


def beside_a_combine(me: Any, case: Case, trials: int) -> list[str]:
    """Replays that nothing orders behind the receive half of the combine whose memory they take: right, or refused on all ranks."""
    world = open_world(me, case)
    a2a, outcomes = world.a2a, list[str]()
    pair, behind = None, streams.new()
    with a2a:
        for trial in range(trials):
            r, own = random.Random(f"{case.seed} {trial}"), random.Random(f"{case.seed} {trial} {me.rank}")
            pair = pair or world.capture(PAIR, 1)
            first, second, _ = world.streams
            steps = [world.open(draw_inputs(case, r), n, first, True) for n in range(case.in_flight)]
            for step in steps:
                world.close(step, "halves")
            streams.wait(behind, first)
            for step in steps:
                world.finish(step, first)
            until = time.monotonic() + own.choice([0.0, 0.01, 0.05])
            while time.monotonic() < until:  # makes what comes next likely to find the combine begun, or ended
                pass
            world.replay(pair, [draw_inputs(case, r)], case.in_flight, second, after=[behind])
            try:
                world.settle()
                me.comm.barrier()
                outcomes.append("right")
            except pc.PeerError as error:
                if re.search(STILL_OPEN, str(error)) is None:
                    raise
                world.checks.clear()
                assert a2a.reset() == list(range(me.world_size))
                world.kept.clear()
                outcomes.append("refused")
                pair = None
    return outcomes


# ---- refusals -------------------------------------------------------------------------------------------------------------------


def _refused(world: World) -> dict[str, Any]:
    """Returns what this rank hears at its next calls."""
    try:
        streams.settle()
        until = time.monotonic() + 10
        while time.monotonic() < until:
            world.a2a.check()
            time.sleep(0.01)
    except pc.Error as error:
        timeout = isinstance(error, pc.StepTimeout)
        return {"message": str(error), "timeout": timeout, "peer": getattr(error, "peer", None)}
    return {"message": "nothing"}


def refused(me: Any, case: Case, kind: str, alone: int | None = None) -> dict[str, Any]:
    """A replay or an eager step that would take the memory of an open step. `alone`: the only rank on which it is open.

    Returns what the rank heard; all of them go on after reset(), where the old graph does nothing.
    """
    world = open_world(me, case)
    a2a, stream = world.a2a, world.streams[0]
    r = random.Random(case.seed)
    with a2a:
        pair, two = world.capture(PAIR, 1), world.capture(TWO_PAIRS, 1)
        half = world.capture((0,), 1)
        for _ in range(2):
            world.replay(pair, [draw_inputs(case, r)], 0, stream)
        world.settle()
        heard: dict[str, Any] = {}
        try:
            if kind == "dispatch only":
                world.replay(half, [draw_inputs(case, r)], 0, stream)
                for _ in range(case.in_flight):
                    world.replay(half, [draw_inputs(case, r)], 0, stream)
            else:
                step = world.open(draw_inputs(case, r), 0, stream, True)
                if alone is not None:
                    world.close(step, "halves")
                    streams.settle()
                    if me.rank != alone:
                        world.finish(step, stream)
                for _ in range(case.in_flight - 1):
                    world.replay(pair, [draw_inputs(case, r)], 0, stream)
                if kind == "eager":
                    world.open(draw_inputs(case, r), 0, stream, False)
                else:
                    world.replay(two, [draw_inputs(case, r) for _ in range(2)], 0, stream)
        except pc.Error as error:
            heard = {"message": str(error), "timeout": isinstance(error, pc.StepTimeout), "peer": getattr(error, "peer", None)}
        if not heard:
            heard = _refused(world)
        streams.settle()
        world.checks.clear()
        for call in (lambda: a2a.check(), lambda: a2a.dispatch(*pair.inputs[0])):  # failed until reset()
            try:
                call()
            except pc.Error:
                continue
            raise AssertionError("a failed AllToAll goes on")
        assert a2a.reset() == list(range(me.world_size))
        world.kept.clear()
        streams.replay(pair.graph, stream)
        streams.settle()
        step = world.open(draw_inputs(case, r), 1, stream, True)
        world.close(step, "whole")
        world.replay(world.capture(PAIR, 1), [draw_inputs(case, r)], 2, stream)
        world.settle()
        return heard


def combined_again(me: Any, case: Case) -> dict[str, Any]:
    """A graph of a combine alone: its second replay finds its step closed."""
    world = open_world(me, case)
    a2a, stream = world.a2a, world.streams[0]
    r = random.Random(case.seed)
    with a2a:
        step = world.open(draw_inputs(case, r), 0, stream, True)
        streams.settle()
        with streams.capture(streams.new()) as captured:
            y = a2a.combine(step.d.x, step.d, out=step.y)
        world.kept.append(y)
        streams.replay(captured[0], stream)
        streams.settle()
        a2a.check()
        check_combined(step.inputs, me.rank, step.y, "the combine")
        with contextlib.suppress(pc.PeerError):  # a rank that is further on raises it
            me.comm.barrier()
        streams.replay(captured[0], stream)
        heard = _refused(world)
        assert a2a.reset() == list(range(me.world_size))
        return heard


def bad_ids(me: Any, case: Case, clumsy: int) -> None:
    """Ids that only the device sees count as -1: the step completes, and the next call of the host says so, once."""
    world = open_world(me, case)
    a2a, stream = world.a2a, world.streams[0]
    r = random.Random(case.seed)
    with a2a:
        inputs = draw_inputs(case, r)
        x, ids = inputs.tokens[clumsy].x, inputs.tokens[clumsy].ids
        meant = ids.clone()
        meant[0, 0] = meant[-1, -1] = -1
        ids[0, 0], ids[-1, -1] = case.num_experts, -2
        step = world.open(inputs, 0, stream, True)
        inputs.tokens[clumsy] = Tokens(x, meant, None)
        world.close(step, "whole")
        streams.settle()
        if me.rank == clumsy:
            mistake(a2a.check, f"ids outside 0 to {case.num_experts - 1} other than -1: they counted as -1")
        world.settle()
        world.close(world.open(draw_inputs(case, r), 1, stream, True), "whole")
        world.settle()
