"""What the rank processes of the tests run. A function takes `me`, its Member (see crew.py), and says what it saw."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import reference
import torch
from reference import Shape, Tokens, same_bits

import pplx_comm as pc

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TRANSPORTS = ("mapped", "proxy:shm", "proxy:tcp", "mixed:shm", "mixed:tcp")
WIRES = ("native", "fp8", "fp8_ue8m0", "mxfp8")
ROUTINGS = ("uniform", "zipf", "to_one", "repeats", "sparse", "local")
CROWDS = ("full", "uneven", "one_has_none", "nobody", "one_has_all")


@dataclass(frozen=True)
class Case:
    """One AllToAll and a few steps on it. Everything follows from it, on every rank alike."""

    seed: int
    world_size: int
    num_experts: int = 8
    top_k: int = 2
    hidden: int = 64
    max_tokens: int = 8
    dtype: str = "bfloat16"
    wire: str = "native"
    layout: str = "ragged"
    align: int = 1
    zero_pad: bool = False
    rows: int | None = None  # a bound of the output, as Shape.rows
    transport: str = "mapped"
    in_flight: int = 1
    scale_layout: str = "row"
    threads: int = 1
    first_step: int = 1
    routing: str = "uniform"
    crowd: str = "full"
    steps: int = 3

    @property
    def shape(self) -> Shape:
        bound = self.rows
        if bound is None and self.layout == "padded":
            bound = self.world_size * self.max_tokens * self.top_k
        return Shape(
            self.world_size, self.num_experts, self.top_k, self.hidden, self.max_tokens, DTYPES[self.dtype],
            self.wire, self.layout, self.align if self.layout == "ragged" else 1, bound,
        )  # fmt: skip

    @property
    def layout_object(self) -> pc.Ragged | pc.Padded | pc.Compact:
        if self.layout == "ragged":
            return pc.Ragged(align=self.align, zero_pad=self.zero_pad, max_rows=self.rows)
        return pc.Padded(max_tokens_per_expert=self.shape.rows) if self.layout == "padded" else pc.Compact()

    def __str__(self) -> str:
        default = asdict(Case(0, 0))
        return f"Case({', '.join(f'{k}={v!r}' for k, v in asdict(self).items() if v != default[k])})"


def random_case(seed: int, world_size: int, transports: tuple[str, ...] = TRANSPORTS) -> Case:
    r = random.Random(f"{seed} {world_size}")
    dtype = r.choice(sorted(DTYPES))
    unit = 16 // DTYPES[dtype].itemsize
    hidden = unit * r.choice([1, 1, 2, 3, 5, 7, 15, 16, 17, 33, r.randint(1, 80)])
    experts = r.choice([1, world_size, r.randint(1, 3 * world_size + 1), r.randint(1, 40)])
    layout = r.choice(["ragged", "ragged", "padded", "compact"])
    transport = r.choice(transports)
    if world_size == 1:
        transport = "mapped"
    return Case(
        seed=seed, world_size=world_size, num_experts=experts, top_k=r.choice([1, 2, 3, 8, r.randint(1, 16)]), hidden=hidden,
        max_tokens=r.choice([1, 2, 5, 8, r.randint(1, 24)]), dtype=dtype, wire=r.choice(WIRES), layout=layout,
        align=r.choice([1, 8, 128]), zero_pad=r.random() < 0.5, transport=transport, in_flight=r.choice([1, 1, 2, 4]),
        scale_layout=r.choice(["row", "tma"]), threads=r.choice([1, 1, 2, 3]), first_step=r.choice([1, 1, 2**32 - 5, 2**32 - 1, 0]),
        routing=r.choice(ROUTINGS), crowd=r.choice(CROWDS[:1] * 3 + CROWDS), steps=r.choice([3, 6]),
    )  # fmt: skip


# ---- inputs ------------------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One step of a case, as all ranks know it."""

    tokens: list[Tokens]  # by rank
    late_weights: list[torch.Tensor] | None  # weights= at combine
    weighted: bool
    released: bool
    start: list[torch.Tensor] | None  # accumulate=True adds to it
    given_out: bool
    plan_of: int | None  # reuse that step's plan
    tails: list[torch.Tensor] | None = None  # by rank of the tokens: what each choice's expert attaches
    how: list[str] = field(default_factory=list)  # by rank: whole, halves, async, other_thread
    strided: list[bool] = field(default_factory=list)


def _ids(case: Case, rank: int, tokens: int, g: torch.Generator) -> torch.Tensor:
    shape, e = (tokens, case.top_k), case.num_experts
    ids = torch.randint(0, e, shape, generator=g)
    if case.routing == "zipf":
        p = 1.0 / torch.arange(1, e + 1)
        ids = torch.multinomial(p, tokens * case.top_k, replacement=True, generator=g).view(shape) if tokens else ids
    elif case.routing == "to_one":
        ids.fill_(e - 1)
    elif case.routing == "repeats":
        ids = ids[:, :1].expand(shape).clone()
    elif case.routing == "sparse":
        ids[torch.rand(shape, generator=g) < 0.7] = -1
    elif case.routing == "local":
        mine = case.shape.experts_of(rank)
        ids = ids % len(mine) + mine.start if len(mine) else ids
    ids[torch.rand(shape, generator=g) < 0.05] = -1
    return ids


def _count(case: Case, rank: int, chosen: int, r: random.Random) -> int:
    if (
        case.crowd == "nobody"
        or (case.crowd == "one_has_all" and rank != chosen)
        or (case.crowd == "one_has_none" and rank == chosen)
    ):
        return 0
    return case.max_tokens if case.crowd in ("full", "one_has_all") else r.randint(0, case.max_tokens)


def _values(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=g) * 2.0 ** torch.randint(-6, 7, (*shape[:-1], 1), generator=g)
    if shape[0] and torch.rand((), generator=g) < 0.3:
        x[torch.randint(0, shape[0], (), generator=g)] = 0.0
    return x.to(dtype)


def _bits(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=g).to(torch.int32).view(torch.float32)


def make_steps(case: Case) -> list[Step]:
    r = random.Random(f"steps {case.seed}")
    g = torch.Generator().manual_seed(case.seed)
    dtype = DTYPES[case.dtype]
    steps: list[Step] = []
    for number in range(case.steps):
        chosen = r.randrange(case.world_size)
        plan_of = r.randrange(number) if number and r.random() < 0.25 else None
        quantised = case.wire != "native" and r.random() < 0.4
        tokens = []
        for rank in range(case.world_size):
            n = _count(case, rank, chosen, r)
            wide = r.random() < 0.5
            ids = _ids(case, rank, n, g).to(torch.int64 if wide else torch.int32)
            # A plan keeps the weights that it was made with unless it is given others.
            weights = torch.rand(n, case.top_k, generator=g) if r.random() < 0.8 else None
            if plan_of is not None:
                before = steps[plan_of].tokens[rank]
                ids, n = before.ids, before.ids.shape[0]
                weights = torch.rand(n, case.top_k, generator=g) if r.random() < 0.5 else before.weights
            x = _values((n, case.hidden), dtype, g)
            entry = Tokens(x, ids, weights)
            if quantised:
                codes, scale = reference.quantise(x, case.wire)
                entry = Tokens(codes, ids, weights, scale)
            tokens.append(entry)
        counts = [t.ids.shape[0] for t in tokens]
        late = case.layout != "compact" and r.random() < 0.2
        accumulate = r.random() < 0.25
        step = Step(
            tokens=tokens,
            late_weights=[torch.rand(n, case.top_k, generator=g) for n in counts] if late else None,
            weighted=late or r.random() < 0.8,
            released=r.random() < 0.12,
            start=[_values((n, case.hidden), dtype, g) for n in counts] if accumulate else None,
            given_out=accumulate or r.random() < 0.5,
            plan_of=plan_of,
            # Every bit pattern: what rides is bits, not numbers.
            tails=[_bits((n, case.top_k), g) for n in counts] if r.random() < 0.3 else None,
        )
        step.how = [r.choice(["whole", "halves", "async", "other_thread"]) for _ in counts]
        step.strided = [r.random() < 0.4 for _ in counts]
        steps.append(step)
    return steps


# ---- one step ------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def environment(**variables: Any) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def open_all_to_all(me: Any, case: Case, **changes: Any) -> pc.AllToAll:
    kind, _, provider = case.transport.partition(":")
    where = {
        "mapped": {"transport": "mapped"},
        "proxy": {"transport": "proxy", "provider": provider},
        "mixed": {"transport": "auto", "provider": provider, "node_size": min(2, case.world_size)},
    }[kind]
    arguments: dict[str, Any] = {
        "num_experts": case.num_experts, "top_k": case.top_k, "hidden": case.hidden, "max_tokens_per_rank": case.max_tokens,
        "dtype": DTYPES[case.dtype], "wire": case.wire, "layout": case.layout_object, "device": "cpu", "in_flight": case.in_flight,
        "scale_layout": case.scale_layout, "timeout": 10.0, **where, **changes,
    }  # fmt: skip
    with environment(PPLX_COMM_THREADS=case.threads, PPLX_COMM_FIRST_STEP=case.first_step):
        return pc.AllToAll(me.comm, **arguments)


def _spread(rows: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The same rows, apart from each other in memory, with something between them that must not travel."""
    if rows.dim() == 3:
        wide = torch.full((*rows.shape[:2], rows.shape[2] + 16), 77.0).to(rows.dtype)
        wide[:, :, : rows.shape[2]] = rows
        return wide[:, :, : rows.shape[2]]
    wide = torch.full((rows.shape[0], rows.shape[1] + rng.choice([1, 8, 16])), 77.0).to(rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def _columns(scale: torch.Tensor) -> torch.Tensor:
    """The same scales, column by column in memory."""
    return scale.t().contiguous().t()


class Failed(AssertionError):
    pass


def _must(condition: bool, what: str, *details: Any) -> None:
    if not condition:
        raise Failed(" ".join([what, *map(str, details)]))


def check_dispatched(case: Case, step: Step, rank: int, d: pc.Dispatched) -> None:
    shape = case.shape
    found = reference.segments(shape, step.tokens, rank)
    counts = [len(s.token) for s in found]
    _must(d.counts.dtype == torch.int32 and d.counts.tolist() == counts, "counts", d.counts, counts)
    sent = [reference.payload(shape, t) for t in step.tokens]
    if shape.quantised:
        _must(d.scale is not None and d.scale.dtype == (torch.uint8 if case.wire == "mxfp8" else torch.float32), "scale")
        _must(
            d.scale.shape == (*d.x.shape[:-1], -(-case.hidden // reference.BLOCK[case.wire])), "the shape of scale", d.scale.shape
        )
        if case.scale_layout == "tma" and d.scale.numel():
            column = d.scale.stride(-1) * d.scale.element_size()
            _must(d.scale.stride(-2) == 1 and column % 16 == 0 and d.scale.data_ptr() % 16 == 0, "tma strides", d.scale.stride())
        elif d.scale.numel():
            _must(d.scale.is_contiguous(), "scale is row-major")
    else:
        _must(d.scale is None, "a scale with a native wire")
    _must(d.x.dtype == (torch.float8_e4m3fn if shape.quantised else shape.dtype), "dtype of x", d.x.dtype)

    def same_rows(where: Any, source: torch.Tensor, token: torch.Tensor, what: str) -> None:
        if not len(token):
            return
        for s in source.unique().tolist():
            at = (source == s).nonzero().reshape(-1)
            rows, scales = sent[s]
            _must(same_bits(d.x[where][at], rows[token[at]]), "rows", what, "from rank", s)
            if scales is not None:
                _must(same_bits(d.scale[where][at], scales[token[at]]), "scales", what, "from rank", s)

    if case.layout == "compact":
        rows = reference.compact_rows(shape, step.tokens, rank)
        _must(d.num_rows.tolist() == [len(rows)], "num_rows", d.num_rows, len(rows))
        n = len(rows)
        _must(d.src_rank[:n].tolist() == [s for s, _ in rows] and d.src_token[:n].tolist() == [t for _, t in rows], "sources")
        first, stop = shape.experts_of(rank).start, shape.experts_of(rank).stop
        for i, (s, t) in enumerate(rows):
            ids = step.tokens[s].ids[t].long()
            here = (ids >= first) & (ids < stop)
            _must(d.topk_ids[i].tolist() == torch.where(here, ids - first, -1).tolist(), "topk_ids of row", i)
            _must(
                same_bits(d.topk_weights[i], torch.where(here, step.tokens[s].effective_weights[t], 0.0)), "topk_weights of row", i
            )
        source, token = (torch.tensor([row[i] for row in rows], dtype=torch.long) for i in (0, 1))
        same_rows(slice(0, n), source, token, "compact")
        return

    starts, fits = reference.places(shape, counts)
    if case.layout == "ragged":
        _must(d.offsets.dtype == torch.int32 and d.offsets.tolist() == starts, "offsets", d.offsets, starts)
    for e, (segment, fit) in enumerate(zip(found, fits, strict=True)):
        where: Any = (e, slice(0, fit)) if case.layout == "padded" else slice(starts[e], starts[e] + fit)
        what = f"of local expert {e}"
        _must(d.src_rank[where].tolist() == segment.source[:fit].tolist(), "src_rank", what)
        _must(d.src_token[where].tolist() == segment.token[:fit].tolist(), "src_token", what)
        _must(same_bits(d.weights[where], segment.weight[:fit]), "weights", what)
        same_rows(where, segment.source[:fit], segment.token[:fit], what)
        if case.layout == "ragged" and case.zero_pad:
            gap = slice(min(starts[e] + counts[e], d.x.shape[0]), min(starts[e + 1], d.x.shape[0]))
            _must(not reference.as_bits(d.x[gap]).any(), "a row between segments", what)
            _must(not d.weights[gap].any(), "a weight between segments", what)
            _must(d.scale is None or not d.scale[gap].any(), "a scale between segments", what)


def run_experts(case: Case, rank: int, d: pc.Dispatched, weighted: bool) -> torch.Tensor:
    """What a model would do with d.x. Rows that hold nothing give NaN, which must go nowhere."""
    shape = case.shape
    rows = reference.dequantise(d.x, d.scale, case.wire) if shape.quantised else d.x.float()
    out = torch.full(d.x.shape, torch.nan).to(shape.dtype)
    first = shape.experts_of(rank).start
    if case.layout == "compact":
        n = int(d.num_rows)
        total = torch.zeros(n, case.hidden)
        for k in range(case.top_k):
            ids = d.topk_ids[:n, k].long()
            use = (ids >= 0).nonzero().reshape(-1)
            y = reference.expert(shape, first + ids[use], rows[use]).float()
            total[use] = total[use] + (d.topk_weights[use, k][:, None] * y if weighted else y)
        out[:n] = total.to(shape.dtype)
        return out
    for e, count in enumerate(d.counts.tolist()):
        where: Any = (e, slice(0, count)) if case.layout == "padded" else slice(int(d.offsets[e]), int(d.offsets[e]) + count)
        part = rows[where]
        out[where] = reference.expert(shape, torch.full((part.shape[0],), first + e), part)
    return out


def attach_tails(case: Case, step: Step, rank: int, d: pc.Dispatched) -> torch.Tensor:
    """A number behind each row received. What must not travel is NaN. Moved as integers: torch may quieten a NaN."""
    assert step.tails is not None
    shape, tails = case.shape, [reference.as_bits(t) for t in step.tails]
    nothing = int(reference.as_bits(torch.tensor([torch.nan])))
    if case.layout == "compact":
        tail = torch.full(d.topk_weights.shape, nothing, dtype=torch.int32)
        for i, (s, t) in enumerate(reference.compact_rows(shape, step.tokens, rank)):
            here = d.topk_ids[i] >= 0
            tail[i, here] = tails[s][t, here]
        return tail.view(torch.float32)
    tail = torch.full(d.weights.shape, nothing, dtype=torch.int32)
    found = reference.segments(shape, step.tokens, rank)
    starts, fits = reference.places(shape, [len(s.token) for s in found])
    for e, (segment, fit) in enumerate(zip(found, fits, strict=True)):
        values = [tails[s][t, k] for s, t, k in zip(segment.source, segment.token, segment.choice, strict=True)][:fit]
        where: Any = (e, slice(0, fit)) if case.layout == "padded" else slice(starts[e], starts[e] + fit)
        tail[where] = torch.stack(values) if values else torch.empty(0, dtype=torch.int32)
    return tail.view(torch.float32)


def _elsewhere(f: Any) -> Any:
    """The result of f, called in another thread."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append((f(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    value, error = result[0]
    if error is not None:
        raise error
    return value


class Runner:
    """A rank's way through the steps of a case, up to in_flight of them open at once."""

    def __init__(self, me: Any, case: Case, a2a: pc.AllToAll) -> None:
        self.rank, self.case, self.a2a = me.rank, case, a2a
        self.steps = make_steps(case)
        self.plans: dict[int, pc.Plan] = {}
        self.random = random.Random(f"{case.seed} rank {me.rank}")  # what ranks may do differently
        self.digest = hashlib.sha256()

    def run(self) -> str:
        case = self.case
        for begin in range(0, case.steps, case.in_flight):
            group = list(range(begin, min(begin + case.in_flight, case.steps)))
            if len(group) == 1:
                d = self.dispatch(group[0])
                combined = self.combine_send(group[0], d)
                if combined is not None:
                    self.combine_recv(group[0], combined)
                continue
            # Every rank in an order of its own: what is in flight is apart. Only the sends are one sequence.
            opened = {n: self.dispatch_send(n) for n in group}
            for n in self.random.sample(group, len(group)):
                self.dispatch_recv(n, opened[n])
            order = self.random.sample(group, len(group))
            if any(self.steps[n].late_weights for n in group):
                order = group  # with weights= a send waits for the others' weights of that step
            open_steps = {n: self.combine_send(n, opened[n]) for n in order if not self.steps[n].released}
            for n in self.random.sample(sorted(open_steps), len(open_steps)):
                self.combine_recv(n, open_steps[n])
            for n in group:
                if self.steps[n].released:
                    opened[n].release()
        return self.digest.hexdigest()

    def _dispatch_arguments(self, n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        step, mine = self.steps[n], self.steps[n].tokens[self.rank]
        x = _spread(mine.x, self.random) if step.strided[self.rank] else mine.x
        options: dict[str, Any] = {}
        if mine.x_scale is not None:
            options["x_scale"] = mine.x_scale
            if step.strided[self.rank]:
                options["x_scale"] = _columns(mine.x_scale)
                if self.case.wire == "mxfp8":
                    options["x_scale"] = options["x_scale"].view(torch.float8_e8m0fnu)
        if step.plan_of is not None:
            options["plan"] = self.plans[step.plan_of]
            weights = None if mine.weights is self.steps[step.plan_of].tokens[self.rank].weights else mine.weights
            return (x, None, weights), options
        return (x, mine.ids, mine.weights), options

    def dispatch_send(self, n: int) -> pc.Dispatched:
        arguments, options = self._dispatch_arguments(n)
        d = self.a2a.dispatch_send(*arguments, **options)
        self.plans[n] = d.plan
        # Sent: the caller may do with it what he likes.
        if self.steps[n].strided[self.rank]:
            arguments[0].fill_(float("nan"))
        return d

    def dispatch_recv(self, n: int, d: pc.Dispatched) -> pc.Dispatched:
        how = self.steps[n].how[self.rank]
        d = _elsewhere(d.wait) if how == "other_thread" else d.wait() if how == "async" else self.a2a.dispatch_recv(d)
        check_dispatched(self.case, self.steps[n], self.rank, d)
        self._digest(d)
        return d

    def dispatch(self, n: int) -> pc.Dispatched:
        how = self.steps[n].how[self.rank]
        if how == "halves":
            return self.dispatch_recv(n, self.dispatch_send(n))
        arguments, options = self._dispatch_arguments(n)
        d = self.a2a.dispatch(*arguments, **options, async_op=how != "whole")
        if how == "other_thread":
            _elsewhere(d.wait)
        d.wait()
        self.plans[n] = d.plan
        check_dispatched(self.case, self.steps[n], self.rank, d)
        self._digest(d)
        return d

    def combine_send(self, n: int, d: pc.Dispatched) -> pc.Combining | None:
        step = self.steps[n]
        if step.released:
            d.release()
            return None
        expert_out = run_experts(self.case, self.rank, d, step.weighted)
        if step.strided[self.rank]:
            expert_out = _spread(expert_out, self.random)
        options: dict[str, Any] = {"weighted": step.weighted}
        if step.late_weights is not None:
            options["weights"] = step.late_weights[self.rank]
        if step.tails is not None:
            options["tail"] = attach_tails(self.case, step, self.rank, d)
            if step.strided[self.rank]:
                bits = reference.as_bits(options["tail"])
                options["tail"] = torch.stack([bits, torch.full_like(bits, 77)], dim=-1)[..., 0].view(torch.float32)
        if step.given_out:
            tokens = step.tokens[self.rank].ids.shape[0]
            out = torch.full((tokens, self.case.hidden), torch.nan).to(DTYPES[self.case.dtype])
            if step.start is not None:
                out, options["accumulate"] = step.start[self.rank].clone(), True
            options["out"] = _spread(out, self.random) if step.strided[self.rank] else out
        how = step.how[self.rank]
        if how == "halves" or self.case.in_flight > 1:
            c = self.a2a.combine_send(expert_out, d, **options)
        else:
            c = self.a2a.combine(expert_out, d, **options, async_op=True)
        expert_out.fill_(float("nan"))  # sent
        if step.tails is not None:
            options["tail"].fill_(77.0)
        return c

    def combine_recv(self, n: int, c: pc.Combining) -> None:
        step, how = self.steps[n], self.steps[n].how[self.rank]
        y = _elsewhere(c.wait) if how == "other_thread" else c.wait() if how == "async" else self.a2a.combine_recv(c)
        if step.tails is not None:
            y, tail = y
            came = reference.tail(self.case.shape, step.tokens, self.rank, step.tails[self.rank])
            _must(same_bits(tail, came), "the tail", tail, "must be", came)
            self.digest.update(reference.as_bits(tail).numpy().tobytes())
        wanted = reference.combine(
            self.case.shape, step.tokens, self.rank, weighted=step.weighted,
            weights=None if step.late_weights is None else step.late_weights[self.rank],
            start=None if step.start is None else step.start[self.rank],
        )  # fmt: skip
        if not same_bits(y, wanted):
            wrong = (reference.as_bits(y) != reference.as_bits(wanted)).nonzero()
            t, h = wrong[0].tolist()
            raise Failed(
                f"y differs in {len(wrong)} of {y.numel()}, first [{t}, {h}]: {y[t, h]!r}, must be {wanted[t, h]!r}; {y.shape}"
            )
        self.digest.update(reference.as_bits(y).numpy().tobytes())

    def _digest(self, d: pc.Dispatched) -> None:
        self.digest.update(d.counts.numpy().tobytes())
        rows = reference.as_bits(d.x)
        if self.case.layout == "ragged":
            for e, count in enumerate(d.counts.tolist()):
                self.digest.update(rows[int(d.offsets[e]) : int(d.offsets[e]) + count].numpy().tobytes())


def exchange(me: Any, case: Case) -> str:
    """All of a case, every result compared. Returns a digest of what came out."""
    try:
        with open_all_to_all(me, case) as a2a:
            return Runner(me, case, a2a).run()
    except BaseException as error:
        raise Failed(f"{case}: {type(error).__name__}: {error}") from error


def exchange_each(me: Any, cases: list[Case]) -> list[str]:
    return [exchange(me, case) for case in cases]


def variants(case: Case, **changes: list[Any]) -> list[Case]:
    """The case with each value of each change, one at a time."""
    return [replace(case, **{name: value}) for name, values in changes.items() for value in values]


def many_steps(me: Any, case: Case, steps: int) -> None:
    """The steps of a short case over and over, as fast as they go: compared each time, with little Python in between."""
    prepared = make_steps(replace(case, steps=8))
    shape = case.shape
    with open_all_to_all(me, case) as a2a:
        wanted = [reference.combine(shape, s.tokens, me.rank) for s in prepared]
        rows = [[len(g.token) for g in reference.segments(shape, s.tokens, me.rank)] for s in prepared]
        opened: list[tuple[int, pc.Dispatched]] = []

        def finish() -> None:
            n, d = opened.pop(0)
            c = a2a.combine_send(run_experts(case, me.rank, d, True), d)
            y = a2a.combine_recv(c)
            _must(same_bits(y, wanted[n % 8]), "y of step", n)

        for n in range(steps):
            mine = prepared[n % 8].tokens[me.rank]
            d = a2a.dispatch(mine.x, mine.ids, mine.weights)
            _must(d.counts.tolist() == rows[n % 8], "counts of step", n)
            opened.append((n, d))
            if len(opened) == case.in_flight:
                finish()
        while opened:
            finish()
        _must(a2a.stats()["steps"] == steps and a2a.stats()["open_steps"] == 0, "stats", a2a.stats())


def interleaved(me: Any, cases: list[Case]) -> None:
    with contextlib.ExitStack() as stack:
        runners = [Runner(me, case, stack.enter_context(open_all_to_all(me, case))) for case in cases]
        for n in range(cases[0].steps):
            opened = [(runner, runner.dispatch(n)) for runner in runners]
            sent = [(runner, runner.combine_send(n, d)) for runner, d in reversed(opened)]
            for runner, c in sent:
                if c is not None:
                    runner.combine_recv(n, c)


def shard_statistics(me: Any) -> dict[str, int]:
    """Writes that one large step takes."""
    with open_all_to_all(me, Case(1, me.world_size, transport="proxy:tcp", hidden=1024, max_tokens=16)) as a2a:
        before = a2a.stats()["proxy"]["writes"]
        runner = Runner(me, Case(1, me.world_size, hidden=1024, max_tokens=16, steps=1), a2a)
        runner.steps[0].released = False
        runner.steps[0].late_weights = None
        runner.run()
        return {"writes": a2a.stats()["proxy"]["writes"] - before, "blocks": 2 * (me.world_size - 1)}


def overflow(me: Any, case: Case) -> int:
    """Steps that overflow somewhere, each followed by one that says so and sends nothing. How many did."""
    happened = 0
    with open_all_to_all(me, case) as a2a:
        runner = Runner(me, case, a2a)
        for n in range(case.steps):
            d = runner.dispatch(n)
            c = runner.combine_send(n, d)
            if c is not None:
                runner.combine_recv(n, c)
            small = [rank for rank in range(me.world_size) if reference.overflows(case.shape, runner.steps[n].tokens, rank)]
            if not small:
                a2a.check()
                continue
            happened += 1
            try:
                runner.dispatch(n) if n % 2 else a2a.check()
            except pc.PeerError as error:
                raise Failed("an overflow is no peer's failure") from error
            except pc.Error as error:
                _must(any(f"rank {rank}" in str(error) for rank in small), "names a rank:", error)
            else:
                raise Failed(f"step {n} overflowed on ranks {small}, and nothing was said")
            a2a.check()  # said once
    return happened


# ---- bad input -----------------------------------------------------------------------------------------------------------------


class Starved:
    """How long this process was ready to run and had no core, by its hungriest thread: on a busy machine that is no fault of the library."""

    def __init__(self) -> None:
        self.again()

    def again(self) -> None:
        self.begin = self._waited()

    def seconds(self) -> float:
        return max(waited - self.begin.get(thread, 0) for thread, waited in self._waited().items()) * 1e-9

    @staticmethod
    def _waited() -> dict[str, int]:
        waited = {}
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, IndexError):  # it ended just now; or a kernel that does not count
                waited[thread] = int(open(f"/proc/self/task/{thread}/schedstat").read().split()[1])
        return waited or {"": 0}


def raised(call: Any, starved: Starved | None = None) -> dict[str, Any]:
    """What the call raises, or that it returned."""
    starved = starved or Starved()
    begin = time.monotonic()
    try:
        value = call()
    except BaseException as error:
        return {
            "type": type(error).__name__,
            "is_error": isinstance(error, pc.Error),
            "is_peer": isinstance(error, pc.PeerError),
            "is_timeout": isinstance(error, TimeoutError),
            "message": str(error),
            "peer": getattr(error, "peer", None),
            "phase": getattr(error, "phase", None),
            "step": getattr(error, "step", None),
            "expected": getattr(error, "expected", None),
            "seen": getattr(error, "seen", None),
            "seconds": time.monotonic() - begin,
            "at": time.monotonic(),
            "starved": starved.seconds(),
        }
    return {
        "type": "", "message": f"returned {value!r}", "at": time.monotonic(), "seconds": time.monotonic() - begin, "starved": starved.seconds(),
    }  # fmt: skip


def _mistake(call: Any, pattern: str) -> None:
    """The call is refused: the caller's own mistake, with a message that says which."""
    r = raised(call)
    _must(bool(r.get("is_error")) and not r.get("is_peer"), f"for {pattern!r}:", r["type"], r["message"])
    _must(re.search(pattern, r["message"]) is not None, f"the message must have {pattern!r}:", r["message"])


class Good:
    """A case's steps, one after the other, each compared: what works must go on working."""

    def __init__(self, me: Any, case: Case, a2a: pc.AllToAll) -> None:
        self.runner = Runner(me, replace(case, steps=64), a2a)
        for step in self.runner.steps:
            step.plan_of, step.released = None, False
        self.n = 0
        self.last_step: int | None = None

    def dispatch(self) -> pc.Dispatched:
        d = self.runner.dispatch(self.n)
        _must(self.last_step is None or d.step == self.last_step + 1, "a step was lost:", self.last_step, d.step)
        self.last_step = d.step
        return d

    def combine(self, d: pc.Dispatched) -> None:
        c = self.runner.combine_send(self.n, d)
        assert c is not None
        self.runner.combine_recv(self.n, c)
        self.n += 1

    def step(self) -> None:
        self.combine(self.dispatch())

    @property
    def mine(self) -> Tokens:
        return self.runner.steps[self.n].tokens[self.runner.rank]


def bad_dispatches(me: Any, case: Case, clumsy: int) -> None:
    """One rank makes every mistake that dispatch can see; the others know nothing of it."""
    with open_all_to_all(me, case) as a2a, open_all_to_all(me, case) as other:
        good = Good(me, case, a2a)
        good.step()
        hidden, k, experts, most = case.hidden, case.top_k, case.num_experts, case.max_tokens
        dtype = DTYPES[case.dtype]
        x, ids, w = torch.zeros(2, hidden, dtype=dtype), torch.zeros(2, k, dtype=torch.int64), torch.ones(2, k)
        fp8 = torch.zeros(2, hidden).to(torch.float8_e4m3fn)
        blocks = -(-hidden // reference.BLOCK.get(case.wire, 128))
        mx = case.wire == "mxfp8"
        scale = torch.full((2, blocks), 127, dtype=torch.uint8) if mx else torch.ones(2, blocks)
        far = ids.clone()
        far[1, k - 1] = experts
        below = ids.clone()
        below[0, 0] = -2
        huge = ids.clone()
        huge[1, 0] = 2**40
        mistakes: list[tuple[Any, str]] = [
            (lambda: a2a.dispatch(None, ids), "x must be a tensor"),
            (lambda: a2a.dispatch([[0.0] * hidden], ids), "x must be a tensor"),
            (lambda: a2a.dispatch(x.double(), ids), "float64"),
            (lambda: a2a.dispatch(x.to(torch.float32 if dtype != torch.float32 else torch.float16), ids), "x is torch.float"),
            (lambda: a2a.dispatch(x[:, :-1], ids), rf"shape \(2, {hidden - 1}\)"),
            (lambda: a2a.dispatch(x[0], ids), "shape"),
            (lambda: a2a.dispatch(x[None], ids), "shape"),
            (lambda: a2a.dispatch(x.t().contiguous().t(), ids), "contiguous"),
            (lambda: a2a.dispatch(x.to("meta"), ids), "meta"),
            (lambda: a2a.dispatch(x, ids.to("meta")), "meta"),
            (lambda: a2a.dispatch(x, ids, w.to("meta")), "meta"),
            (
                lambda: a2a.dispatch(torch.zeros(most + 1, hidden, dtype=dtype), torch.zeros(most + 1, k, dtype=torch.int64)),
                f"{most + 1} tokens.*max_tokens_per_rank={most}",
            ),
            (lambda: a2a.dispatch(x), "topk_ids"),
            (lambda: a2a.dispatch(x, ids.float()), "int32 or int64"),
            (lambda: a2a.dispatch(x, ids.to(torch.int16)), "int32 or int64"),
            (lambda: a2a.dispatch(x, ids[:1]), "topk_ids"),
            (lambda: a2a.dispatch(x, ids[0]), "topk_ids"),
            (lambda: a2a.dispatch(x, torch.zeros(2, k + 1, dtype=torch.int32)), "topk_ids"),
            (lambda: a2a.dispatch(x, ids.tolist()), "topk_ids"),
            # Which one, and what is allowed.
            (lambda: a2a.dispatch(x, far), rf"\[1, {k - 1}\] is {experts}.*{experts - 1}"),
            (lambda: a2a.dispatch(x, far.int()), rf"\[1, {k - 1}\] is {experts}"),
            (lambda: a2a.dispatch(x, below), r"\[0, 0\] is -2"),
            (lambda: a2a.dispatch(x, huge), r"\[1, 0\] is 1099511627776"),
            (lambda: a2a.dispatch(x, ids, w.double()), "topk_weights.*float32"),
            (lambda: a2a.dispatch(x, ids, w[:1]), "topk_weights"),
            (lambda: a2a.dispatch(x, ids, w.tolist()), "topk_weights"),
            (lambda: a2a.dispatch(fp8, ids), "float8"),
            (lambda: a2a.dispatch(x, ids, plan=7), "plan="),
            (lambda: a2a.dispatch(x, None, plan=ids), "plan="),
        ]
        if case.wire != "native":
            good_dtype, other_dtype = ("uint8", scale.float()) if mx else ("float32", scale.to(torch.uint8))
            wide = torch.ones(2, scale.shape[1] + 1).to(scale.dtype)
            mistakes += [
                (lambda: a2a.dispatch(x, ids, x_scale=scale), "x is"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=other_dtype), rf"x_scale is.*{good_dtype} \[2, {blocks}\].*{case.wire}"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=scale.double()), f"x_scale.*{good_dtype}"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=scale[:1]), rf"x_scale.*\(1, {blocks}\).*\[2, {blocks}\]"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=wide), rf"x_scale.*\(2, {blocks + 1}\).*\[2, {blocks}\]"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=wide.t()), "x_scale.*shape"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=scale[0]), "x_scale.*shape"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=scale.to("meta")), "meta"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=1.0), "x_scale"),
            ]
            if not mx:
                mistakes.append((lambda: a2a.dispatch(fp8, ids, x_scale=scale.to(torch.float16)), "x_scale.*float32"))
            if case.wire == "fp8_ue8m0":
                for value in (3.0, -1.0, math.inf, 2.0**-128, 1 + 2.0**-23, 1 - 2.0**-24):
                    odd = scale.clone()
                    odd[1, blocks - 1] = value
                    mistakes.append(
                        (lambda odd=odd: a2a.dispatch(fp8, ids, x_scale=odd), rf"x_scale\[1, {blocks - 1}\].*powers of two")
                    )
        else:
            mistakes.append((lambda: a2a.dispatch(fp8, ids, x_scale=scale), "x_scale= needs wire="))
        if me.rank == clumsy:
            for call, pattern in mistakes:
                _mistake(call, pattern)
        good.step()

        d = good.dispatch()
        plan = d.plan
        if me.rank == clumsy:
            # The step is open, and in_flight allows no second.
            mine = good.mine
            _mistake(lambda: a2a.dispatch(mine.x, mine.ids, mine.weights, x_scale=mine.x_scale), "in_flight=1.*combine it")
            _mistake(lambda: other.dispatch(torch.zeros(plan.tokens, hidden, dtype=dtype), plan=plan), "another AllToAll")
            _mistake(lambda: a2a.dispatch(torch.zeros(plan.tokens + 1, hidden, dtype=dtype), plan=plan), "tokens")
            _mistake(
                lambda: a2a.dispatch(
                    torch.zeros(plan.tokens, hidden, dtype=dtype), torch.zeros(plan.tokens, k, dtype=torch.int64), plan=plan
                ),
                "plan=",
            )
        good.combine(d)
        good.step()
        Good(me, case, other).step()


def bad_combines(me: Any, case: Case, clumsy: int) -> None:
    """The same for combine and what belongs to it: handles used twice, too early, or elsewhere."""
    with open_all_to_all(me, case) as a2a, open_all_to_all(me, case) as other:
        good = Good(me, case, a2a)
        dtype = DTYPES[case.dtype]
        tokens = good.mine
        sent = a2a.dispatch_send(tokens.x, tokens.ids, tokens.weights, x_scale=tokens.x_scale)
        if me.rank == clumsy:
            _mistake(lambda: a2a.combine(torch.zeros(1, case.hidden, dtype=dtype), sent), "wait")
            _mistake(lambda: other.dispatch_recv(sent), "another AllToAll")
            _mistake(lambda: a2a.dispatch_recv(tokens.x), "dispatch")
            _mistake(lambda: a2a.combine_recv(sent), "combine_send")
        d = a2a.dispatch_recv(sent)
        good.last_step = d.step
        _must(a2a.dispatch_recv(sent) is d and d.wait() is d, "received again is the same")
        check_dispatched(case, good.runner.steps[0], me.rank, d)
        n = d.plan.tokens
        rows = d.x.shape
        out = torch.zeros(rows, dtype=dtype)
        needed = int(d.num_rows) if case.layout == "compact" else int(d.offsets[-1]) if case.layout == "ragged" else 0
        tail_shape = (rows[0], case.top_k) if case.layout == "compact" else rows[:-1]
        mistakes: list[tuple[Any, str]] = [
            (lambda: a2a.combine(None, d), "expert_out"),
            (lambda: a2a.combine(out, None), "dispatch"),
            (lambda: a2a.combine(out, d.plan), "dispatch"),
            (lambda: a2a.combine(out.double(), d), "float64"),
            (lambda: a2a.combine(out.to("meta"), d), "meta"),
            (lambda: a2a.combine(out[..., :-1], d), "shape"),
            (lambda: a2a.combine(out[None], d), "shape"),
            (lambda: a2a.combine(torch.zeros(*rows[:-1], 2 * case.hidden, dtype=dtype)[..., ::2], d), "contiguous"),
            (lambda: a2a.combine(out, d, out=torch.zeros(n + 1, case.hidden, dtype=dtype)), "out"),
            (lambda: a2a.combine(out, d, out=torch.zeros(n, case.hidden, dtype=torch.float64)), "out"),
            (lambda: a2a.combine(out, d, out=torch.zeros(n, case.hidden, dtype=dtype, device="meta")), "meta"),
            (lambda: a2a.combine(out, d, out=[1]), "out"),
            (lambda: a2a.combine(out, d, accumulate=True), "out="),
            (lambda: a2a.combine(out, d, weights=torch.ones(n, case.top_k), weighted=False), "weights"),
            (lambda: a2a.combine(out, d, weights=torch.ones(n + 1, case.top_k)), "weights"),
            (lambda: a2a.combine(out, d, weights=torch.ones(n, case.top_k, dtype=torch.float64)), "weights"),
            (lambda: a2a.combine(out, d, tail=1.0), "tail must be"),
            (lambda: a2a.combine(out, d, tail=torch.zeros(tail_shape, dtype=torch.float64)), "tail must be a float32.*float64"),
            (lambda: a2a.combine(out, d, tail=torch.zeros(tail_shape, device="meta")), "tail.*meta"),
            (lambda: a2a.combine(out, d, tail=torch.zeros(*tail_shape, 1)), "tail.*shape"),
            (lambda: a2a.combine(out, d, tail=torch.zeros(())), "tail.*shape"),
            (lambda: other.combine(out, d), "another AllToAll"),
        ]
        if n > 1:
            mistakes.append((lambda: a2a.combine(out, d, out=torch.zeros(case.hidden, n, dtype=dtype).t()), "contiguous"))
            # Rows that are one row cannot hold what is written to each.
            mistakes.append((lambda: a2a.combine(out, d, out=torch.zeros(1, case.hidden, dtype=dtype).expand(n, -1)), "out"))
        if case.layout == "compact":
            mistakes.append((lambda: a2a.combine(out, d, tail=torch.zeros(rows[0], case.top_k + 1)), "tail.*shape"))
        if case.layout != "padded" and needed:
            mistakes.append((lambda: a2a.combine(out[: needed - 1], d), f"{needed - 1} rows.*{needed}"))
            mistakes.append(
                (lambda: a2a.combine(out, d, tail=torch.zeros(needed - 1, *tail_shape[1:])), f"tail.*{needed - 1} rows.*{needed}")
            )
        if case.layout == "padded" and len(case.shape.experts_of(me.rank)):
            mistakes.append((lambda: a2a.combine(out[:, :-1], d), "shape"))
            mistakes.append((lambda: a2a.combine(out, d, tail=torch.zeros(rows[0], rows[1] - 1)), "tail.*shape"))
        if me.rank == clumsy:
            for call, pattern in mistakes:
                _mistake(call, pattern)
        c = good.runner.combine_send(0, d)
        if me.rank == clumsy:
            _mistake(lambda: a2a.combine(out, d), "already|once")
            _mistake(d.release, "already")
            _mistake(lambda: other.combine_recv(c), "another AllToAll")
        good.runner.combine_recv(0, c)
        first = c.wait()
        _must(a2a.combine_recv(c) is first and c.wait() is first, "waited again is the same")
        if me.rank == clumsy:
            _mistake(lambda: a2a.combine(out, d), "already|once")
            _mistake(d.release, "already")
        good.n = 1
        good.step()
        d = good.dispatch()
        d.release()
        if me.rank == clumsy:
            _mistake(d.release, "already")
            _mistake(lambda: a2a.combine(out, d), "already|once")
        good.n += 1
        good.step()


def after_close(me: Any, case: Case) -> None:
    """Every call on what is closed says so; what it returned stays good."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    d = good.dispatch()
    tokens = good.mine
    good.combine(d)
    before = d.x.clone()
    y = torch.zeros(d.x.shape, dtype=DTYPES[case.dtype])
    me.comm.barrier()
    a2a.close()
    a2a.close()
    for call in (
        lambda: a2a.dispatch(tokens.x, tokens.ids), lambda: a2a.combine(y, d), a2a.check, a2a.warmup, a2a.reset, a2a.stats, d.release,
        lambda: a2a.dispatch_send(tokens.x, tokens.ids), lambda: a2a.combine_send(y, d),
    ):  # fmt: skip
        _mistake(call, "closed|already")
    with open_all_to_all(me, case) as again:
        Good(me, case, again).step()
    _must(same_bits(before, d.x), "what dispatch returned belongs to the caller")


def numbers_of_tokens(me: Any) -> None:
    """Shapes that are easy to get wrong: one token, one choice, views with odd strides, tensors that need no storage."""
    case = Case(1, me.world_size, top_k=1, hidden=8, max_tokens=4)
    with open_all_to_all(me, case) as a2a:
        x = torch.arange(8, dtype=torch.bfloat16)[None]
        ids = torch.tensor([[1, 2, 3, 4]])[:, ::4]
        weights = torch.tensor([[0.5, 1.0, 1.0]])[:, ::3]
        d = a2a.dispatch(x, ids, weights)
        y = a2a.combine(d.x.clone(), d)
        _must(same_bits(y, x * 0.5), "one token through strided views", y)
        d = a2a.dispatch(x.expand(4, 8), ids.expand(4, 1), weights.expand(4, 1))
        y = a2a.combine(d.x.clone(), d)
        _must(same_bits(y, (x * 0.5).expand(4, 8)), "rows that are one row", y)
        d = a2a.dispatch(torch.empty(0, 8, dtype=torch.bfloat16), torch.empty(0, 1, dtype=torch.int32))
        y = a2a.combine(d.x.clone(), d)
        _must(tuple(y.shape) == (0, 8), "no tokens", y.shape)
        t = torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
        d = a2a.dispatch(t, ids.expand(4, 1))
        y = a2a.combine(d.x.clone(), d)
        _must(not y.requires_grad, "no graph is built")


def construct(
    me: Any, arguments: dict[str, Any], per_rank: dict[int, dict[str, Any]], env: dict[int, dict[str, str]]
) -> dict[str, Any]:
    """Makes an AllToAll, on some ranks otherwise than on the rest; says what was raised, then makes a good one."""
    usual: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 8, "device": "cpu"}
    with environment(**env.get(me.rank, {})):
        result = raised(lambda: pc.AllToAll(me.comm, **{**usual, **arguments, **per_rank.get(me.rank, {})}).close())
    case = Case(1, me.world_size)
    with open_all_to_all(me, case) as a2a:
        Good(me, case, a2a).step()
    return result


def ninth(me: Any) -> dict[str, Any]:
    case = Case(1, me.world_size)
    all_eight = [open_all_to_all(me, case) for _ in range(8)]
    result = raised(lambda: open_all_to_all(me, case))
    for a2a in all_eight:
        Good(me, case, a2a).step()
    me.comm.barrier()
    all_eight.pop(3).close()
    me.comm.barrier()
    all_eight.append(open_all_to_all(me, case))
    Good(me, case, all_eight[-1]).step()
    for a2a in all_eight:
        a2a.close()
    return result


def other_version(me: Any, who: int) -> dict[str, Any]:
    """One rank runs another version."""
    from pplx_comm import _setup

    before = _setup.__version__
    if me.rank == who:
        _setup.__version__ = "0.0.1+other"
    try:
        return raised(lambda: open_all_to_all(me, Case(1, me.world_size)))
    finally:
        _setup.__version__ = before


# ---- failure -------------------------------------------------------------------------------------------------------------------

PLACES = (
    "before_dispatch", "after_dispatch_send", "in_dispatch_recv", "after_dispatch", "in_weights", "after_combine_send", "in_combine_recv",
    "after_combine",
)  # fmt: skip


def _die(path: str) -> None:
    with open(path, "w") as file:
        file.write(repr(time.monotonic()))
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def _when_inside(function: str, then: Any) -> None:
    """Once the main thread is in that call of the library for good, in C++ without the GIL."""
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        seen = 0
        while seen < 30:
            seen = seen + 1 if sys._current_frames()[main].f_code.co_name == function else 0
            time.sleep(0.001)
        then()

    threading.Thread(target=watch, daemon=True).start()


def _until_failure(me: Any, timeout: float = 20.0) -> None:
    """For a rank that is in no call: until it knows."""
    deadline = time.monotonic() + timeout
    while me.comm.failure is None:
        _must(time.monotonic() < deadline, "this rank was told nothing")
        time.sleep(0.001)


def _latched(me: Any, a2a: pc.AllToAll, first: dict[str, Any], good: Good) -> None:
    """Every later call raises the first cause, at once."""
    mine = good.mine
    calls = [
        a2a.check, lambda: a2a.dispatch(mine.x, mine.ids, mine.weights), me.comm.barrier, lambda: open_all_to_all(me, good.runner.case),
        a2a.check, lambda: a2a.dispatch_send(mine.x, mine.ids, mine.weights),
    ]  # fmt: skip
    for call in calls:
        r = raised(call)
        _must(bool(r.get("is_peer")), "a later call must raise PeerError, not", r["type"], r["message"])
        _must(r["peer"] == first["peer"] and r["seconds"] < 0.3, "the first cause, at once:", r, first)


def end_of(me: Any, a2a: pc.AllToAll, close: bool) -> float:
    begin = time.monotonic()
    if close:
        a2a.close()
        me.close()
    return time.monotonic() - begin


def survive(me: Any, case: Case, victim: int, place: str, path: str, close: bool = True) -> dict[str, Any]:
    """Two good steps; in the third the victim kills itself at that place. What the others saw."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    good.step()
    me.comm.barrier()
    dying, runner, n = me.rank == victim, good.runner, good.n
    # Where the victim is to be inside a call, one rank holds back what that call waits for.
    holding = me.rank == (victim + 1) % me.world_size

    def hold(here: str) -> None:
        if not holding or place != here:
            return
        _until_failure(me)

    def at(here: str) -> None:
        if dying and place == here:
            _die(path)

    def inside(here: str, function: str) -> None:
        if dying and place == here:
            _when_inside(function, lambda: _die(path))

    def step() -> None:
        at("before_dispatch")
        hold("in_dispatch_recv")
        sent = runner.dispatch_send(n)
        at("after_dispatch_send")
        inside("in_dispatch_recv", "dispatch_recv")
        d = runner.dispatch_recv(n, sent)
        at("after_dispatch")
        runner.steps[n].late_weights = None
        if place == "in_weights":
            runner.steps[n].weighted = True
            runner.steps[n].late_weights = [t.effective_weights for t in runner.steps[n].tokens]
        hold("in_weights")
        hold("in_combine_recv")
        inside("in_weights", "combine_send")
        c = runner.combine_send(n, d)
        at("after_combine_send")
        inside("in_combine_recv", "combine_recv")
        assert c is not None
        runner.combine_recv(n, c)
        at("after_combine")
        runner.dispatch(n + 1)
        raise Failed("the next step worked without the victim")

    runner.steps[n].how = ["halves"] * me.world_size
    result = raised(step)
    if result.get("is_peer"):
        _latched(me, a2a, result, good)
        result["failure_kind"] = me.comm.failure.kind
    result["closing"] = end_of(me, a2a, close)
    return result


def endless(me: Any, case: Case, close: bool = True) -> dict[str, Any]:
    """Steps until something goes wrong, which is said."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    me.say("running")

    def on() -> None:
        while True:
            if good.n == 60:
                good.n = 0
            starved.again()
            good.step()

    starved = Starved()
    result = raised(on, starved)
    if result.get("is_peer"):
        _latched(me, a2a, result, good)
    result["closing"] = end_of(me, a2a, close)
    return result


def slow_rank(me: Any, case: Case, slow: int, timeout: float, phase: str, steps: int) -> dict[str, Any]:
    """In the fourth step one rank stops itself before that phase; the test wakes it up."""
    a2a = open_all_to_all(me, case, timeout=timeout)
    good = Good(me, case, a2a)

    def run() -> None:
        for step in good.runner.steps:
            step.late_weights, step.how = None, ["whole"] * me.world_size
        for n in range(steps):
            stopping = n == 3 and me.rank == slow
            if n == 3:
                me.comm.barrier()  # what the slow rank sent before has arrived
            if stopping and phase == "dispatch_send":
                os.kill(os.getpid(), signal.SIGSTOP)
            d = good.dispatch()
            if n == 3 and phase == "combine_send":
                me.comm.barrier()
            if stopping and phase == "combine_send":
                os.kill(os.getpid(), signal.SIGSTOP)
            good.combine(d)

    result = raised(run)
    result["last_step"] = good.last_step
    if result.get("is_peer"):
        _latched(me, a2a, result, good)
    result["closing"] = end_of(me, a2a, True)
    return result


def leaves(me: Any, case: Case, who: int, what: str) -> dict[str, Any]:
    """One rank closes while the others wait for its next step."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    me.comm.barrier()
    if me.rank == who:
        at = time.monotonic()
        if what == "all_to_all":
            a2a.close()
        me.close() if what != "nothing" else None
        return {"at": at}
    result = raised(good.step)
    _latched(me, a2a, result, good)
    result["closing"] = end_of(me, a2a, True)
    return result


def leave_at_once(me: Any, case: Case, rounds: int) -> None:
    """A rank that is done goes, while others still receive what it sent. Nothing is wrong with that."""
    for n in range(rounds):
        a2a = open_all_to_all(me, replace(case, seed=case.seed + n))
        Good(me, replace(case, seed=case.seed + n), a2a).step()
        if n % 2:
            a2a.close()
        me.close()


def interrupted(me: Any, case: Case, who: int, place: str) -> dict[str, Any]:
    """The test sends SIGINT to a rank that waits."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    me.comm.barrier()
    runner, n = good.runner, good.n
    runner.steps[n].how = ["halves"] * me.world_size
    runner.steps[n].late_weights = None
    holding = me.rank == (who + 1) % me.world_size
    if me.rank == who:
        _when_inside(place, lambda: me.say("inside"))

    def step() -> None:
        if holding and place == "dispatch_recv":
            _until_failure(me)
        d = runner.dispatch_recv(n, runner.dispatch_send(n))
        if holding and place == "combine_recv":
            _until_failure(me)
        c = runner.combine_send(n, d)
        assert c is not None
        runner.combine_recv(n, c)

    result = raised(step)
    later = raised(a2a.check)
    result["later"] = later
    result["closing"] = end_of(me, a2a, True)
    return result


def mismatch(me: Any, case: Case, kind: str) -> dict[str, Any]:
    """Rank 1 does something else than the others with the same step."""
    a2a = open_all_to_all(me, case, timeout=3.0)
    good = Good(me, case, a2a)
    good.step()
    d = good.dispatch()
    me.comm.barrier()
    n = good.n
    other = me.rank == 1
    runner = good.runner
    runner.steps[n].late_weights = None
    runner.steps[n].weighted = True
    tails, runner.steps[n].tails = [torch.ones(t.ids.shape) for t in runner.steps[n].tokens], None

    def act() -> None:
        if kind == "release" and other:
            d.release()
        else:
            if kind in ("tail", "no_tail") and other == (kind == "tail"):
                runner.steps[n].tails = tails
            if kind == "weights" and other:
                runner.steps[n].late_weights = [t.effective_weights for t in runner.steps[n].tokens]
            if kind == "no_weights" and not other:
                runner.steps[n].late_weights = [t.effective_weights for t in runner.steps[n].tokens]
            c = runner.combine_send(n, d)
            assert c is not None
            runner.combine_recv(n, c)
        # Whoever saw nothing yet does now.
        good.n += 1
        good.last_step = None
        good.step()

    result = raised(act)
    result["closing"] = end_of(me, a2a, True)
    return result


class Survivor:
    """Steps of the living, compared with a reference in which the dead have no tokens and their experts answer nothing."""

    def __init__(self, me: Any, case: Case, a2a: pc.AllToAll, alive: list[bool]) -> None:
        self.me, self.case, self.a2a, self.alive = me, case, a2a, alive
        self.steps = make_steps(replace(case, steps=12))
        self.n = 0

    def send(self) -> pc.Dispatched:
        given = self.steps[self.n].tokens[self.me.rank]
        return self.a2a.dispatch_send(given.x, given.ids, given.weights, x_scale=given.x_scale)

    def step(self) -> pc.Dispatched:
        d = self.send()
        step = self.steps[self.n]
        self.n += 1
        per_rank = self.case.shape.experts_per_rank
        step.tokens = [only_living(t, self.alive, per_rank, self.alive[rank]) for rank, t in enumerate(step.tokens)]
        d.wait()
        check_dispatched(self.case, step, self.me.rank, d)
        tails = step.tails or [torch.zeros(t.ids.shape) for t in step.tokens]
        step.tails = tails
        attached = attach_tails(self.case, step, self.me.rank, d)
        y, tail = self.a2a.combine(run_experts(self.case, self.me.rank, d, True), d, tail=attached)
        _must(same_bits(y, reference.combine(self.case.shape, step.tokens, self.me.rank)), "y after reset")
        _must(
            same_bits(tail, reference.tail(self.case.shape, step.tokens, self.me.rank, tails[self.me.rank])), "the tail after reset"
        )
        return d


def only_living(tokens: Tokens, alive: list[bool], per_rank: int, living: bool) -> Tokens:
    owner = tokens.ids.long() // per_rank
    lives = torch.tensor(alive)[owner.clamp(min=0)] & (tokens.ids >= 0)
    return replace(tokens, ids=torch.where(lives & living, tokens.ids, -1))


def reset_after(me: Any, case: Case, victims: list[int], paths: list[str]) -> dict[str, Any]:
    """Ranks die one after the other; the others reset each time and go on."""
    a2a = open_all_to_all(me, case)
    alive = [True] * me.world_size
    survivor = Survivor(me, case, a2a, alive)
    old = survivor.step()
    result: dict[str, Any] = {"rounds": []}
    for victim, path in zip(victims, paths, strict=True):
        me.comm.barrier()
        if me.rank == victim:
            survivor.send()
            _die(path)
        r = raised(survivor.step)
        _must(r.get("peer") == victim, "the victim is named:", r)
        result["rounds"].append(r["at"] - r["starved"])
        a2a.reset()
        alive[victim] = False
        survivor = Survivor(me, replace(case, seed=case.seed + victim + 1), a2a, alive)
        _mistake(lambda: a2a.combine(torch.zeros(old.x.shape, dtype=DTYPES[case.dtype]), old), "reset|already")
        if case.wire == "native":
            _mistake(
                lambda: a2a.dispatch(torch.zeros(old.plan.tokens, case.hidden, dtype=DTYPES[case.dtype]), plan=old.plan), "reset"
            )
        for _ in range(5):
            old = survivor.step()
        a2a.check()
    result["steps"] = a2a.stats()["steps"]
    me.comm.barrier()
    result["closing"] = end_of(me, a2a, True)
    return result


def reset_after_timeout(me: Any, case: Case) -> None:
    """Nobody died: after a timeout all reset and go on together."""
    with open_all_to_all(me, case, timeout=1.0) as a2a:
        good = Good(me, case, a2a)
        good.step()
        if me.rank == 0:
            _until_failure(me)
        else:
            r = raised(good.step)
            _must(bool(r.get("is_peer")), "a timeout:", r)
        a2a.reset()
        good = Good(me, replace(case, seed=case.seed + 1), a2a)
        for _ in range(5):
            good.step()
        a2a.check()


# ---- life ----------------------------------------------------------------------------------------------------------------------


def held(pid: str = "self") -> dict[str, int]:
    """What a process holds: descriptors, threads, mapped regions, resident KiB."""
    status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status").read().splitlines())
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "maps": len(open(f"/proc/{pid}/maps").read().splitlines()),
        "rss": int(status["VmRSS"].split()[0]),
    }


def cycles(me: Any, case: Case, times: int, what: str) -> dict[str, list[int]]:
    """Open, step, and close an AllToAll, or its Communicator too, or close nothing and drop it. What is held after each."""
    after: dict[str, list[int]] = {"fds": [], "threads": [], "maps": [], "rss": []}
    for n in range(times):
        a2a = open_all_to_all(me, case)
        if n % 5 == 0:
            Good(me, case, a2a).step()
        me.comm.barrier()
        if what != "drop":
            a2a.close()
        del a2a
        if what == "communicator":
            me.close()
        gc.collect()
        for name, value in held().items():
            after[name].append(value)
    return after


def leave_open(me: Any, case: Case, how: str) -> None:
    """What the interpreter's end closes. The test looks at the exit code and at how long it takes."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    if how == "step_open":
        d = good.dispatch()
        me.kept["d"] = d
    me.comm.barrier()
    me.kept["a2a"] = a2a
    if how == "cycle":
        me.kept["self"] = me.kept
    me._comm, me.kept["comm"] = None, me._comm
    if how != "dropped":
        sys.modules["__main__"].kept = me.kept  # type: ignore[attr-defined]
        me.kept = {}


def several_closes(me: Any, case: Case) -> None:
    """In every order, and as context managers."""
    with me.comm as comm:
        with open_all_to_all(me, case) as a2a:
            Good(me, case, a2a).step()
            me.comm.barrier()
            a2a.close()
        other = open_all_to_all(me, case)
        Good(me, case, other).step()
        comm.barrier()
    other.close()
    comm.close()
    r = raised(comm.barrier)
    _must(bool(r.get("is_error")) and "close" in r["message"], "a closed Communicator says so:", r)
    r = raised(lambda: pc.AllToAll(comm, num_experts=1, top_k=1, hidden=8, max_tokens_per_rank=1))
    _must(bool(r.get("is_error")) and "close" in r["message"], "a closed Communicator says so:", r)
    me._comm = None
    with open_all_to_all(me, case) as again:
        Good(me, case, again).step()


def fork_in_the_parent(me: Any, case: Case) -> dict[str, Any]:
    """A child that forks off in the middle of things is told so, disturbs nothing, and may end as it likes."""
    with open_all_to_all(me, case) as a2a:
        good = Good(me, case, a2a)
        good.step()
        d = good.dispatch()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            mine = good.mine
            told = [
                raised(call)["message"]
                for call in (
                    lambda: a2a.dispatch(mine.x, mine.ids),
                    lambda: a2a.combine(d.x, d),
                    a2a.check,
                    me.comm.barrier,
                    lambda: open_all_to_all(me, case),
                )  # fmt: skip
            ]
            a2a.close()
            me.comm.close()
            os.write(write, repr(told).encode())
            os.close(write)
            if me.rank == 0:
                os._exit(0)
            sys.exit(0)  # with everything that happens at an interpreter's end
        os.close(write)
        text = b""
        while chunk := os.read(read, 1 << 16):
            text += chunk
        os.close(read)
        _, status = os.waitpid(pid, 0)
        good.combine(d)
        for _ in range(3):
            good.step()
        a2a.check()
        return {"told": text.decode(), "code": os.waitstatus_to_exitcode(status)}


def cpu_of_threads(seconds: float) -> dict[str, float]:
    """Share of a core that each thread of this process took meanwhile."""

    def ticks() -> dict[str, int]:
        taken = {}
        for task in os.listdir("/proc/self/task"):
            fields = open(f"/proc/self/task/{task}/stat").read()
            name, rest = fields[fields.index("(") + 1 : fields.rindex(")")], fields[fields.rindex(")") + 2 :].split()
            taken[f"{name} {task}"] = int(rest[11]) + int(rest[12])
        return taken

    before, begin = ticks(), time.monotonic()
    time.sleep(seconds)
    after, span = ticks(), time.monotonic() - begin
    return {name: (after[name] - before.get(name, 0)) / os.sysconf("SC_CLK_TCK") / span for name in after}


def idle(me: Any, case: Case, tries: int) -> list[dict[str, float]]:
    """After a step: what the threads take while nothing is open."""
    with open_all_to_all(me, case) as a2a:
        good = Good(me, case, a2a)
        good.step()
        shares = []
        for _ in range(tries):
            time.sleep(1.2)  # the second after which the proxy sleeps more
            shares.append(cpu_of_threads(2.0))
        me.comm.barrier()
        good.step()  # and it is awake again
        return shares


def stops_promptly(me: Any, case: Case) -> float:
    """Seconds that close() takes when nothing is wrong."""
    a2a = open_all_to_all(me, case)
    Good(me, case, a2a).step()
    me.comm.barrier()
    return end_of(me, a2a, True)


def big_step(me: Any, case: Case) -> None:
    """More memory between ranks than 64 MiB."""
    with open_all_to_all(me, case, max_tokens_per_rank=4096) as a2a:
        _must(a2a._config.heap_bytes > 128 << 20, "this test wants a large heap", a2a._config.heap_bytes)
        Good(me, case, a2a).step()
