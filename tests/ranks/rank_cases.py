"""Cases of the tests' rank processes. A function takes `me`, its Member (see harness), and says what it saw."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import reference
import torch
from cases import DTYPES, Case, Step, make_steps
from harness import until
from outcomes import Failed, Starved, must
from reference import Tokens, same_bits

import pplx_comm as pc
from pplx_comm import accounts
from pplx_comm.device.arguments import ORDINARY


@contextlib.contextmanager
def environment(**variables: Any) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)  # other threads' ranks have the same
            else:
                os.environ[name] = value


@functools.cache
def begins_at(step: int) -> type[pc.AllToAll]:
    """An AllToAll whose first step has that number."""
    return type("AllToAll", (pc.AllToAll,), {"_first_step": step})


@contextlib.contextmanager
def _dealt(me: Any, case: Case) -> Iterator[None]:
    """The Communicator's nodes are the case's."""
    before, me.comm.control.node_of = me.comm.control.node_of, list(case.nodes)
    try:
        yield
    finally:
        me.comm.control.node_of = before


def open_all_to_all(me: Any, case: Case, **changes: Any) -> pc.AllToAll:
    kind, _, provider = case.transport.partition(":")
    where = {
        "mapped": {"transport": "mapped"},
        "auto": {"transport": "auto", "provider": provider},
        "proxy": {"transport": "proxy", "provider": provider},
        "copy": {"transport": "proxy", "provider": "copy", "placement": "device"},  # see copies.py
        "nvshmem": {"transport": "nvshmem"},
        "nvshmem-mixed": {"transport": "nvshmem"},
        "mixed": {"transport": "auto", "provider": provider},
        "dealt": {"transport": "auto", "provider": provider},
        "relayed": {"transport": "auto", "provider": provider, "dedup": "node"},
        "relayed-dealt": {"transport": "auto", "provider": provider, "dedup": "node"},
        "relayed-alone": {"transport": "auto", "provider": provider, "dedup": "node"},
        "relayed-copy": {"transport": "auto", "provider": "copy", "placement": "device", "dedup": "node"},
        "undecided": {"transport": "auto", "provider": provider, "dedup": "auto"},
    }[kind]
    arguments: dict[str, Any] = {
        "num_experts": case.num_experts, "top_k": case.top_k, "hidden": case.hidden, "max_tokens_per_rank": case.max_tokens,
        "dtype": DTYPES[case.dtype], "wire": case.wire, "layout": case.layout_object, "device": "cpu", "in_flight": case.in_flight,
        "scale_layout": case.scale_layout, "replicas": case.replicas, "slot_bytes": case.slot_bytes,
        "combine_wire": case.combine_wire, "dedup": "rank",
        "proxy_threads": case.proxy_threads, "node_size": case.node_size, "timeout": 10.0, **where, **changes,
    }  # fmt: skip
    arguments["timeout"] = float(os.environ.get("PPLX_TEST_STEP_TIMEOUT", arguments["timeout"]))
    dealt = _dealt(me, case) if "dealt" in kind or "alone" in kind else contextlib.nullcontext()
    with environment(PPLX_COMM_THREADS=case.threads), dealt:
        return begins_at(case.first_step)(me.comm, **arguments)


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


def check_dispatched(case: Case, step: Step, rank: int, d: pc.Dispatched) -> None:
    shape = case.shape
    found = reference.segments(shape, step.tokens, rank)
    counts = [len(s.token) for s in found]
    must(d.counts.dtype == torch.int32 and d.counts.tolist() == counts, "counts", d.counts, counts)
    sent = [reference.payload(shape, t) for t in step.tokens]
    if shape.quantised:
        must(d.scale is not None and d.scale.dtype == (torch.uint8 if case.wire == "mxfp8" else torch.float32), "scale")
        must(d.scale.shape == (*d.x.shape[:-1], -(-case.hidden // reference.BLOCK[case.wire])), "the shape of scale", d.scale.shape)
        if case.scale_layout == "tma" and d.scale.numel():
            column = d.scale.stride(-1) * d.scale.element_size()
            must(d.scale.stride(-2) == 1 and column % 16 == 0 and d.scale.data_ptr() % 16 == 0, "tma strides", d.scale.stride())
        elif d.scale.numel():
            must(d.scale.is_contiguous(), "scale is row-major")
    else:
        must(d.scale is None, "a scale with a native wire")
    must(d.x.dtype == (torch.float8_e4m3fn if shape.quantised else shape.dtype), "dtype of x", d.x.dtype)

    def same_rows(where: Any, source: torch.Tensor, token: torch.Tensor, what: str) -> None:
        if not len(token):
            return
        for s in source.unique().tolist():
            at = (source == s).nonzero().reshape(-1)
            rows, scales = sent[s]
            must(same_bits(d.x[where][at], rows[token[at]]), "rows", what, "from rank", s)
            if scales is not None:
                must(same_bits(d.scale[where][at], scales[token[at]]), "scales", what, "from rank", s)

    if case.layout == "compact":
        rows = reference.compact_rows(shape, step.tokens, rank)
        must(d.num_rows.tolist() == [len(rows)], "num_rows", d.num_rows, len(rows))
        n = len(rows)
        must(d.src_rank[:n].tolist() == [s for s, _ in rows] and d.src_token[:n].tolist() == [t for _, t in rows], "sources")
        first, stop = shape.experts_of(rank).start, shape.experts_of(rank).stop
        for i, (s, t) in enumerate(rows):
            ids = step.tokens[s].ids[t].long()
            here = (ids >= first) & (ids < stop)
            must(d.topk_ids[i].tolist() == torch.where(here, ids - first, -1).tolist(), "topk_ids of row", i)
            must(
                same_bits(d.topk_weights[i], torch.where(here, step.tokens[s].effective_weights[t], 0.0)), "topk_weights of row", i
            )
        source, token = (torch.tensor([row[i] for row in rows], dtype=torch.long) for i in (0, 1))
        same_rows(slice(0, n), source, token, "compact")
        return

    starts, fits = reference.places(shape, counts)
    if case.layout == "ragged":
        must(d.offsets.dtype == torch.int32 and d.offsets.tolist() == starts, "offsets", d.offsets, starts)
    for e, (segment, fit) in enumerate(zip(found, fits, strict=True)):
        where: Any = (e, slice(0, fit)) if case.layout == "padded" else slice(starts[e], starts[e] + fit)
        what = f"of local expert {e}"
        must(d.src_rank[where].tolist() == segment.source[:fit].tolist(), "src_rank", what)
        must(d.src_token[where].tolist() == segment.token[:fit].tolist(), "src_token", what)
        must(same_bits(d.weights[where], segment.weight[:fit]), "weights", what)
        same_rows(where, segment.source[:fit], segment.token[:fit], what)
        if case.layout == "ragged" and case.zero_pad:
            gap = slice(min(starts[e] + counts[e], d.x.shape[0]), min(starts[e + 1], d.x.shape[0]))
            must(not reference.as_bits(d.x[gap]).any(), "a row between segments", what)
            must(not d.weights[gap].any(), "a weight between segments", what)
            must(d.scale is None or not d.scale[gap].any(), "a scale between segments", what)


def run_experts(case: Case, rank: int, d: pc.Dispatched, weighted: bool) -> torch.Tensor:
    """Acts as a model would on d.x. Rows that hold nothing give NaN, which must go nowhere."""
    shape = case.shape

    def rows(where: Any) -> torch.Tensor:
        return reference.dequantise(d.x[where], d.scale[where], case.wire) if shape.quantised else d.x[where].float()

    out = torch.full(d.x.shape, torch.nan, dtype=shape.dtype)
    first = shape.experts_of(rank).start
    if case.layout == "compact":
        n = int(d.num_rows)
        received, total = rows(slice(0, n)), torch.zeros(n, case.hidden)
        for k in range(case.top_k):
            ids = d.topk_ids[:n, k].long()
            use = (ids >= 0).nonzero().reshape(-1)
            y = reference.expert(shape, first + ids[use], received[use]).float()
            total[use] = total[use] + (d.topk_weights[use, k][:, None] * y if weighted else y)
        out[:n] = total.to(shape.dtype)
        return out
    for e, count in enumerate(d.counts.tolist()):
        where: Any = (e, slice(0, count)) if case.layout == "padded" else slice(int(d.offsets[e]), int(d.offsets[e]) + count)
        part = rows(where)
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
        self.random = random.Random(f"{case.seed} rank {me.rank}")  # choices that ranks may make differently
        self.found: list[bytes] = []  # digests of all that came out, in the order of its calls
        self.outputs: dict[int, bytes] = {}  # step -> combine's result
        self.totals: dict[int, torch.Tensor] = {}  # step -> counts of the caller, to which it adds its own

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        return _spread(rows, self.random)

    def run_experts(self, d: pc.Dispatched, weighted: bool) -> torch.Tensor:
        return run_experts(self.case, self.rank, d, weighted)

    def spoil(self, expert_out: torch.Tensor, d: pc.Dispatched) -> None:
        expert_out.fill_(float("nan"))

    def run(self) -> str:
        case = self.case
        for begin in range(0, case.steps, case.in_flight):
            group = list(range(begin, min(begin + case.in_flight, case.steps)))
            if len(group) == 1:
                d = self.dispatch(group[0])
                self.combine(group[0], d)
                continue
            opened = {n: self.dispatch_send(n) for n in group}
            if case.slot_bytes is not None or case.relayed:
                self._run_in_order(group, opened)
                continue
            # Every rank in an order of its own: what is in flight is apart. Only the sends are one sequence.
            for n in self.random.sample(group, len(group)):
                self.dispatch_recv(n, opened[n])
            order = self.random.sample(group, len(group))
            if any(self.steps[n].late_weights for n in group):
                order = group  # with weights= a send waits for the others' weights of that step
            open_steps = {n: self.combine_send(n, opened[n]) for n in order if not self.steps[n].released}
            # Replicas finish rows for each other in combine_recv: there all take one order.
            alike = random.Random(f"{case.seed} {begin}") if case.replicas > 1 else self.random
            for n in alike.sample(sorted(open_steps), len(open_steps)):
                self.combine_recv(n, open_steps[n])
            for n in group:
                if self.steps[n].released:
                    opened[n].release()
        return self.digest()

    def digest(self) -> str:
        return hashlib.sha256(b"".join(sorted(self.found))).hexdigest()

    def _run_in_order(self, group: list[int], opened: dict[int, pc.Dispatched]) -> None:
        """In pieces, and with relays, a receive half waits for the same one of other ranks."""
        for n in group:
            self.dispatch_recv(n, opened[n])
        sent = {n: self.combine_send(n, opened[n]) for n in group if not self.steps[n].released}
        for n in group:
            c = sent.get(n)
            if c is None:
                opened[n].release()
            else:
                self.combine_recv(n, c)

    def _dispatch_arguments(self, n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        step, mine = self.steps[n], self.steps[n].tokens[self.rank]
        x = self.spread(mine.x) if step.strided[self.rank] else mine.x
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

    @contextlib.contextmanager
    def _counting(self, n: int) -> Iterator[None]:
        """Every other step has totals."""
        if n % 2 == 0:
            yield
            return
        calls: Any = self.a2a.calls
        totals = self.totals[n] = torch.arange(len(self.case.shape.experts_of(self.rank)), dtype=torch.int32).to(self.a2a.device)
        dispatch = calls.dispatch
        calls.dispatch = lambda halves, sent, how=ORDINARY: dispatch(halves, sent, how._replace(totals=totals))
        try:
            yield
        finally:
            del calls.dispatch

    def _check_dispatched(self, n: int, d: pc.Dispatched) -> None:
        check_dispatched(self.case, self.steps[n], self.rank, d)
        if n in self.totals:
            added = [total - at for at, total in enumerate(self.totals.pop(n).tolist())]
            must(added == d.counts.tolist(), "totals", added, d.counts)
        self._digest(d)

    def dispatch_send(self, n: int) -> pc.Dispatched:
        arguments, options = self._dispatch_arguments(n)
        with self._counting(n):
            d = self.a2a.dispatch_send(*arguments, **options)
        self.plans[n] = d.plan
        # Sent: the caller may do with it what he likes. In pieces the rest of it goes in the receive half.
        if self.steps[n].strided[self.rank] and self.case.slot_bytes is None:
            arguments[0].fill_(float("nan"))
        return d

    def dispatch_recv(self, n: int, d: pc.Dispatched) -> pc.Dispatched:
        how = self.steps[n].how[self.rank]
        d = _elsewhere(d.wait) if how == "other_thread" else d.wait() if how == "async" else self.a2a.dispatch_recv(d)
        self._check_dispatched(n, d)
        return d

    def dispatch(self, n: int) -> pc.Dispatched:
        how = self.steps[n].how[self.rank]
        if how == "halves":
            return self.dispatch_recv(n, self.dispatch_send(n))
        arguments, options = self._dispatch_arguments(n)
        with self._counting(n):
            d = self.a2a.dispatch(*arguments, **options, async_op=how != "whole")
        if how == "other_thread":
            _elsewhere(d.wait)
        d.wait()
        self.plans[n] = d.plan
        self._check_dispatched(n, d)
        return d

    def combine_send(self, n: int, d: pc.Dispatched) -> pc.Combining | None:
        if self.steps[n].released:
            d.release()
            return None
        apart = self.steps[n].how[self.rank] in ("halves", "whole") or self.case.in_flight > 1
        return self._combine(self.a2a.combine_send if apart else functools.partial(self.a2a.combine, async_op=True), n, d)

    def combine(self, n: int, d: pc.Dispatched) -> None:
        """The step's second part, in one call where the step is whole."""
        if self.steps[n].how[self.rank] == "whole" and not self.steps[n].released:
            self._check_combined(n, self._combine(self.a2a.combine, n, d))
        elif (c := self.combine_send(n, d)) is not None:
            self.combine_recv(n, c)

    def _combine(self, call: Callable[..., Any], n: int, d: pc.Dispatched) -> Any:
        step = self.steps[n]
        expert_out = self.run_experts(d, step.weighted)
        if step.strided[self.rank]:
            expert_out = self.spread(expert_out)
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
            options["out"] = self.spread(out) if step.strided[self.rank] else out
        result = call(expert_out, d, **options)
        if self.case.slot_bytes is None:
            self.spoil(expert_out, d)  # sent
            if step.tails is not None:
                options["tail"].fill_(77.0)
        return result

    def combine_recv(self, n: int, c: pc.Combining) -> None:
        how = self.steps[n].how[self.rank]
        y = _elsewhere(c.wait) if how == "other_thread" else c.wait() if how == "async" else self.a2a.combine_recv(c)
        self._check_combined(n, y)

    def _check_combined(self, n: int, y: Any) -> None:
        step = self.steps[n]
        if step.tails is not None:
            y, tail = y
            came = reference.tail(self.case.shape, step.tokens, self.rank, step.tails[self.rank])
            must(same_bits(tail, came), "the tail", tail, "must be", came)
            self._keep(tail)
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
        self._keep(y)
        self.outputs[n] = reference.as_bits(y).numpy().tobytes()

    def _digest(self, d: pc.Dispatched) -> None:
        rows = (
            [d.x[at : at + n] for at, n in zip(d.offsets.tolist(), d.counts.tolist(), strict=False)]
            if self.case.layout == "ragged"
            else []
        )
        self._keep(d.counts, *rows)

    def _keep(self, *tensors: torch.Tensor) -> None:
        self.found.append(hashlib.sha256(b"".join(reference.as_bits(t).numpy().tobytes() for t in tensors)).digest())


def error_of_sums(me: Any, case: Case, numbers: Any) -> float:
    """The error of a step whose experts change nothing, against fp64, as a share of the vector's length."""
    g = torch.Generator().manual_seed(case.seed + me.rank)
    x = torch.from_numpy(numbers).to(DTYPES[case.dtype])
    ids = torch.stack([torch.randperm(case.num_experts, generator=g)[: case.top_k] for _ in x])
    weights = torch.rand(ids.shape, generator=g) + 0.1
    with open_all_to_all(me, case) as a2a:
        d = a2a.dispatch(x, ids, weights)
        y = a2a.combine(d.x.clone(), d)
    wanted = weights.double().sum(1, keepdim=True) * x.double()
    return float((y.double() - wanted).norm() / wanted.norm())


def weights_at_combine(me: Any, case: Case) -> None:
    """The last rank has no token, so it waits for no row that would show that its weights came."""
    g = torch.Generator().manual_seed(case.seed + me.rank)
    tokens = 0 if me.rank == case.world_size - 1 else case.max_tokens
    with open_all_to_all(me, case) as a2a:
        for n in range(case.steps):
            x = torch.randn(tokens, case.hidden, generator=g).to(DTYPES[case.dtype])
            ids = torch.randint(0, case.num_experts, (tokens, case.top_k), generator=g)
            weights = torch.rand(tokens, case.top_k, generator=g)
            d = a2a.dispatch(x, ids)
            y = a2a.combine(d.x.clone(), d, weights=weights)
            must(torch.allclose(y.float(), weights.sum(1, keepdim=True) * x.float(), rtol=0.05, atol=0.05), case, "y of step", n)


def crossing(me: Any, case: Case) -> tuple[int, int]:
    """Bytes that this rank's proxy wrote for a step, and those that the ids ask for."""
    g = torch.Generator().manual_seed(case.seed)
    ids = [torch.rand(case.max_tokens, case.num_experts, generator=g).topk(case.top_k).indices for _ in range(case.world_size)]
    with open_all_to_all(me, case) as a2a:
        config, before = a2a._steps.device._config, int(a2a.stats()["proxy"]["bytes"])
        d = a2a.dispatch(torch.zeros(case.max_tokens, case.hidden, dtype=DTYPES[case.dtype]), ids[me.rank])
        a2a.combine(d.x, d)
        me.comm.barrier()
        wrote = int(a2a.stats()["proxy"]["bytes"]) - before
    nodes = [[rank for rank in range(case.world_size) if case.nodes[rank] == node] for node in sorted(set(case.nodes))]

    def rows(source: int, there: list[int]) -> int:
        return int(torch.isin(ids[source] // config.experts_per_rank, torch.tensor(there)).any(1).sum())

    asked = 0
    for source in range(case.world_size):
        home = nodes[case.nodes[source]]
        for node in nodes:
            if node is home:
                continue
            targets = {node[home.index(source) % len(node)]: node} if case.relayed else {rank: [rank] for rank in node}
            for target, there in targets.items():
                if me.rank in (source, target):
                    op = 0 if me.rank == source else 1
                    asked += config.header_bytes(op) + rows(source, there) * config.row_bytes(op)
    return wrote, asked


def check_counters(runner: Runner) -> None:
    """Compares stats() after a case's steps, taken once, with them. Relays and replicas send other rows."""
    case, rank = runner.case, runner.rank
    if case.relayed or case.replicas > 1:
        return
    sent, received, tokens = [0] * case.world_size, [0] * case.world_size, 0
    expert_rows = [0] * len(reference.segments(case.shape, runner.steps[0].tokens, rank))
    for step in runner.steps:
        rows = [
            Counter(source for source, _ in reference.compact_rows(case.shape, step.tokens, to)) for to in range(case.world_size)
        ]
        for peer in set(range(case.world_size)) - {rank}:
            there, here = rows[peer][rank], rows[rank][peer]
            sent[peer] += there if step.released else there + here
            received[peer] += here if step.released else here + there
        tokens += len(step.tokens[rank].ids)
        for expert, segment in enumerate(reference.segments(case.shape, step.tokens, rank)):
            expert_rows[expert] += len(segment.token)
    until("all steps are counted", lambda: runner.a2a.stats()["steps"] == len(runner.steps))
    stats = runner.a2a.stats()
    must(stats["counted"], "counted", stats)
    wanted = {"rows_sent": sent, "rows_received": received, "tokens": tokens, "expert_rows": expert_rows, "open_steps": 0}
    must({name: stats[name] for name in wanted} == wanted, "counters", stats, "must be", wanted)
    for way in ("sent", "received"):
        for peer, nbytes in enumerate(stats[f"bytes_{way}"]):
            must((nbytes > 0) == (peer != rank), f"bytes_{way} of rank {peer}", stats)
    for half in ("dispatch", "combine"):
        must(stats[f"{half}_wait_seconds"][rank] == 0, "waits for oneself", stats)
    timed = {phase: sum(times["buckets"]) for phase, times in stats["phases"].items()}
    for half in timed.keys() - {"dispatch", "combine"}:
        # On GPUs a launch does both halves; in pieces, what a send half has left.
        if not (case.slot_bytes and "large_tokens" in stats):
            must(timed[half] + timed[half.split("_")[0]] == len(runner.steps), half, timed)


def exchange(me: Any, case: Case) -> str:
    """All of a case, every result compared. Returns a digest of what came out."""
    try:
        with open_all_to_all(me, case) as a2a:
            runner = Runner(me, case, a2a)
            digest = runner.run()
            check_counters(runner)
            return digest
    except BaseException as error:
        raise Failed(f"{case}: {type(error).__name__}: {error}") from error


def a_late_rank(me: Any, case: Case, late: int) -> None:
    """A rank comes to a dispatch, then to a combine, when all others have waited for it alone for a while: they have waited for it longer
    than for each other. A busy machine may keep the warp that counts from its turn for that while; then it comes later."""
    with open_all_to_all(me, case) as a2a:
        runner = Runner(me, case, a2a)
        runner.run()

        def they_wait(came: str, step: int) -> bool:
            told = me.comm.control.ask(others, "account", 10.0)
            ranks = accounts.jobs(told.values()).get(me.comm.control.job, {})
            here = (of[came][other] == step for rank in ranks.values() for of in rank.all_to_alls for other in others)
            return all(rank.waits_for == {late} for rank in ranks.values()) and len(ranks) == len(others) and all(here)

        def come(half: str, step: int, seconds: float) -> None:
            if me.rank == late:
                until("all others wait for this rank", lambda: they_wait(half, step), 100)
                time.sleep(seconds)

        def waited(half: str) -> list[float]:
            until("all steps are counted", lambda: a2a.stats()["steps"] == steps)
            return list(a2a.stats()[f"{half}_wait_seconds"])

        done: set[str] = set()
        steps, others = case.steps, [rank for rank in range(me.world_size) if rank != late]
        for half, seconds in itertools.product(("dispatch", "combine"), (0.2, 0.8, 3.2, 12.8)):
            if half in done:
                continue
            before, number = waited(half), case.first_step + steps
            me.comm.barrier()
            if half == "dispatch":
                come("dispatched", number, seconds)
            d = runner.dispatch(0)
            me.comm.barrier()
            if half == "combine":
                come("combined", number, seconds)
            runner.combine(0, d)
            steps += 1
            more = [after - was for after, was in zip(waited(half), before, strict=True)]
            most = max(wait for rank, wait in enumerate(more) if rank != late)
            if me.comm.agree(me.rank == late or more[late] > max(seconds / 2, 2 * most)):
                done.add(half)
            elif seconds == 12.8:
                raise Failed(f"{case}: waits of a {half} in which rank {late} came {seconds} s late: {more}")


def as_without_replicas(me: Any, case: Case) -> None:
    """The same tokens with replicas, and with every rank sending all of its own: combine returns the same bits."""
    outputs = []
    for variant in (case, replace(case, replicas=1, slot_bytes=None)):
        with open_all_to_all(me, variant) as a2a:
            runner = Runner(me, variant, a2a)
            runner.steps = make_steps(case)
            runner.run()
            outputs.append(runner.outputs)
    must(outputs[0] == outputs[1], f"{case}: outputs with replicas and without")


def exchange_each(me: Any, cases: list[Case]) -> list[str]:
    return [exchange(me, case) for case in cases]


def opened_again(me: Any, case: Case) -> None:
    """Each step, then one of the same ids whose rows are not read: its combine has the same bits."""
    with open_all_to_all(me, case) as a2a:
        runner = Runner(me, case, a2a)
        for n, step in enumerate(runner.steps):
            d = runner.dispatch(n)
            rows = runner.run_experts(d, False).clone()
            counts = d.counts.clone()
            wanted = reference.combine(case.shape, step.tokens, me.rank, weighted=False)
            must(same_bits(a2a.combine(rows, d, weighted=False), wanted), "step", n)
            opened = a2a.open_for_combine(step.tokens[me.rank].ids)
            must(torch.equal(opened.counts, counts), "counts", opened.counts, "must be", counts)
            must(same_bits(a2a.combine(rows, opened, weighted=False), wanted), "the step after", n)


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
            must(same_bits(y, wanted[n % 8]), "y of step", n)

        for n in range(steps):
            mine = prepared[n % 8].tokens[me.rank]
            d = a2a.dispatch(mine.x, mine.ids, mine.weights)
            must(d.counts.tolist() == rows[n % 8], "counts of step", n)
            opened.append((n, d))
            if len(opened) == case.in_flight:
                finish()
        while opened:
            finish()
        stats = a2a.stats()
        must(stats["steps"] == steps and stats["open_steps"] == 0, "stats", stats)
    must({**a2a.stats(), "proxy": None} == {**stats, "proxy": None, "closed": True}, "stats after close", a2a.stats())


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
        me.comm.barrier()  # the others have this rank's last block, so all of it was posted
        return {"writes": a2a.stats()["proxy"]["writes"] - before, "blocks": 2 * (me.world_size - 1)}


def two_proxies(me: Any, case: Case) -> None:
    """The same bits as with one."""
    digests = [exchange(me, replace(case, proxy_threads=n)) for n in (1, 2)]
    must(digests[0] == digests[1], f"{case}: what two proxies bring and what one does")


def mapped_bytes(me: Any, case: Case) -> tuple[int, int]:
    """Bytes of the memory that this rank made for an AllToAll, and those that required_bytes says."""
    with open_all_to_all(me, case):
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if f" of an AllToAll on rank {me.rank} " in line]
    ends = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    dedup = "node" if case.relayed else "auto" if "undecided" in case.transport else "rank"
    required = pc.AllToAll.required_bytes(
        world_size=case.world_size, num_experts=case.num_experts, top_k=case.top_k, hidden=case.hidden,
        max_tokens_per_rank=case.max_tokens, dtype=DTYPES[case.dtype], wire=case.wire, layout=case.layout_object,
        in_flight=case.in_flight, replicas=case.replicas, dedup=dedup,
        remote_peers=sum(node != case.nodes[me.rank] for node in case.nodes),
    )  # fmt: skip
    return sum(end - begin for begin, end in ends), required


def goes_by_node(me: Any, case: Case) -> bool:
    with open_all_to_all(me, case) as a2a:
        Runner(me, case, a2a).run()
        return a2a._steps.session.config.node_ranks > 0


def both_proxies_carry(me: Any, case: Case) -> None:
    with open_all_to_all(me, case) as one, open_all_to_all(me, replace(case, proxy_threads=2)) as two:
        for a2a in (one, two):
            Runner(me, case, a2a).run()
        # Each other rank, or rail, is a peer of one of them; a step is two blocks for each, and a block is a write.
        apart = (case.relayed and case.node_size) or 1
        sums = [me.rank + peer for peer in range(me.rank % apart, case.world_size, apart) if peer != me.rank]
        peers = [sum(bin(each).count("1") % 2 == n for each in sums) for n in (0, 1)]
        must(abs(peers[0] - peers[1]) <= 1, "each carries to half of the peers", peers)
        blocks = [2 * case.steps * n for n in peers]

        def writes() -> list[int]:
            return [each["writes"] for each in two.stats()["proxy"]["proxies"]]

        # A rank may have its last rows before its own last blocks are posted, and a block may be there before it is counted.
        me.comm.barrier()
        until("all writes are counted", lambda: sum(writes()) >= sum(blocks) <= one.stats()["proxy"]["writes"])
        stats = two.stats()["proxy"]
        must(writes() == blocks, "writes of the proxies", writes(), "to peers", peers)
        must(stats["writes"] == sum(blocks) == one.stats()["proxy"]["writes"], "the same number of writes as with one proxy", stats)
        for name, total in (("bytes", stats["bytes"]), ("dropped", 0), ("duplicates", 0)):
            must(sum(each[name] for each in stats["proxies"]) == total, name, stats)
        must(sum(nic["bytes"] for nic in stats["nics"]) == stats["bytes"], "bytes of the NICs", stats)


def nics(me: Any, case: Case) -> list[str]:
    """The endpoints that this rank's proxy posts on."""
    with open_all_to_all(me, case) as a2a:
        Runner(me, case, a2a).run()
        return [nic["nic"] for nic in a2a.stats()["proxy"]["nics"]]


def overflow(me: Any, case: Case) -> int:
    """Steps that overflow somewhere, each followed by one that says so and sends nothing. How many did."""
    happened = 0
    with open_all_to_all(me, case) as a2a:
        runner = Runner(me, case, a2a)
        for n in range(case.steps):
            runner.combine(n, runner.dispatch(n))
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
                must(any(f"rank {rank}" in str(error) for rank in small), "names a rank:", error)
            else:
                raise Failed(f"step {n} overflowed on ranks {small}, and nothing was said")
            a2a.check()  # said once
    return happened


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
        must(self.last_step is None or d.step == self.last_step + 1, "a step was lost:", self.last_step, d.step)
        self.last_step = d.step
        return d

    def combine(self, d: pc.Dispatched) -> None:
        assert not self.runner.steps[self.n].released
        self.runner.combine(self.n, d)
        self.n += 1

    def step(self) -> None:
        self.combine(self.dispatch())

    @property
    def mine(self) -> Tokens:
        return self.runner.steps[self.n].tokens[self.runner.rank]


def end_of(me: Any, a2a: pc.AllToAll, close: bool) -> float:
    """Seconds that closing took, without those for which this process had no core."""
    starved = Starved()
    me.whole_end = me.whole_end or not close
    if close:
        a2a.close()
        me.close()
    return starved.seconds_with_a_core()
