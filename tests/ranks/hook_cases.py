"""A thread that runs beside a dispatch looks at rows the moment their word says that they are there. On the CPU device, and under the
emulation of the kernels."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import rank_cases
import reference
import torch
from cases import DTYPES, Case, Step
from harness import allowed
from outcomes import Failed, must
from rank_cases import Runner
from reference import same_bits

import pplx_comm as pc

BETWEEN_LOOKS = 10e-6
LONGEST = 30.0
"""Seconds for a step's words."""


class Beside:
    """A thread, whose error is raised where it is joined."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


class Expected:
    """Rows that a rank receives in a step, by output row."""

    def __init__(self, case: Case, step: Step, rank: int, d: pc.Dispatched) -> None:
        shape, self.case, self.d = case.shape, case, d
        found: list[tuple[int, int, int, float]] = []  # place, source, token, weight
        self.offsets = None
        self.counts = [len(s.token) for s in reference.segments(shape, step.tokens, rank)]
        if case.layout == "compact":
            found = [(i, s, t, 0.0) for i, (s, t) in enumerate(reference.compact_rows(shape, step.tokens, rank))]
        else:
            starts, fits = reference.places(shape, self.counts)
            if case.layout == "ragged":
                self.offsets = starts
            for e, (segment, fit) in enumerate(zip(reference.segments(shape, step.tokens, rank), fits, strict=True)):
                start = e * d.x.shape[1] if case.layout == "padded" else starts[e]
                rows = zip(segment.source.tolist(), segment.token.tolist(), segment.weight.tolist(), strict=True)
                found += [(start + i, s, t, w) for i, (s, t, w) in enumerate(rows) if i < fit]
        self.place, self.source, self.token = (torch.tensor([f[i] for f in found], dtype=torch.long) for i in range(3))
        self.weight = torch.tensor([f[3] for f in found])
        self.sent = [reference.payload(shape, t) for t in step.tokens]
        self.rows_of_word = d.x.shape[1] if case.layout == "padded" else pc.HOOK_ROWS
        self.x = d.x.view(-1, case.hidden)
        self.words = d.arrived.shape[0]

    def check_plan(self) -> None:
        d = self.d
        must(d.counts.tolist() == self.counts, "counts beside the dispatch", d.counts.tolist(), self.counts)
        if self.offsets is not None:
            must(d.offsets.tolist() == self.offsets, "offsets beside the dispatch", d.offsets.tolist(), self.offsets)
        if d.num_rows is not None:
            must(int(d.num_rows) == len(self.place), "num_rows beside the dispatch", int(d.num_rows), len(self.place))

    def check_word(self, word: int) -> None:
        d = self.d
        mine = ((self.place // self.rows_of_word) == word).nonzero().reshape(-1)
        place = self.place[mine]
        what = f"of block {word} beside the dispatch"
        must(d.src_rank.view(-1)[place].tolist() == self.source[mine].tolist(), "src_rank", what)
        must(d.src_token.view(-1)[place].tolist() == self.token[mine].tolist(), "src_token", what)
        if d.weights is not None:
            must(same_bits(d.weights.view(-1)[place], self.weight[mine]), "weights", what)
        for at, s, t in zip(place.tolist(), self.source[mine].tolist(), self.token[mine].tolist(), strict=True):
            rows, scales = self.sent[s]
            must(same_bits(self.x[at], rows[t]), "row", at, what, "from rank", s)
            if scales is not None:
                scale = d.scale[divmod(at, self.rows_of_word)] if self.case.layout == "padded" else d.scale[at]
                must(same_bits(scale, scales[t]), "scales of row", at, what, "from rank", s)

    def watch(self, seen: list[int]) -> None:
        """Until all words are raised, in whatever order."""
        planned, arrived = self.d.planned.view(torch.int32).numpy(), self.d.arrived.view(torch.int32).numpy()
        left, planned_too = set(range(self.words)), False
        deadline = time.monotonic() + allowed(LONGEST)
        while left or not planned_too:
            must(time.monotonic() < deadline, "never raised:", sorted(left), "planned", planned, "arrived", arrived)
            if not planned_too and planned[0] < 0:
                planned_too = True
                self.check_plan()
            for word in [w for w in left if arrived[w] < 0]:
                left.remove(word)
                self.check_plan()
                self.check_word(word)
                seen.append(word)
            time.sleep(BETWEEN_LOOKS)


class HookedRunner(Runner):
    def dispatch_recv(self, n: int, d: pc.Dispatched) -> pc.Dispatched:
        must(self.case.layout == "compact" or not self.steps[n].tokens or d.planned.tolist() == [0], "planned before")
        seen: list[int] = []
        expected = Expected(self.case, self.steps[n], self.rank, d)
        d.watch()
        watcher = Beside(lambda: expected.watch(seen))
        try:
            super().dispatch_recv(n, d)
        finally:
            watcher.join()
        must(sorted(seen) == list(range(expected.words)), "every word is raised once", seen)
        must(all(w == pc.RAISED for w in [*d.planned.tolist(), *d.arrived.tolist()]), "raised words count on", d.arrived.tolist())
        return d

    def dispatch(self, n: int) -> pc.Dispatched:
        if self.steps[n].how[self.rank] != "whole":
            return self.dispatch_recv(n, self.dispatch_send(n))
        d = super().dispatch(n)
        must(all(w == pc.RAISED for w in [*d.planned.tolist(), *d.arrived.tolist()]), "words after a dispatch", d.arrived.tolist())
        return d


def hooked(me: Any, case: Case) -> str:
    """All of a case with threads beside it, every result compared: the same bits as without."""
    try:
        with rank_cases.open_all_to_all(me, case, hooks=True) as a2a:
            digest = HookedRunner(me, case, a2a).run()
        return digest
    except BaseException as error:
        raise Failed(f"{case}: {type(error).__name__}: {error}") from error


def plain(me: Any, case: Case) -> str:
    return rank_cases.exchange(me, case)


# ---- groups ------------------------------------------------------------------------------------------------------------------------


def groups(me: Any, case: Case, parts: int, how: str) -> str:
    """Experts begin with each group when that is there, in one thread while another receives, or in the one that does both."""
    try:
        with rank_cases.open_all_to_all(me, case, hooks=True) as a2a:
            runner = Runner(me, case, a2a)
            for n, step in enumerate(runner.steps):
                arguments, options = runner._dispatch_arguments(n)
                d = a2a.dispatch(*arguments, **options, expert_groups=parts, async_op=how != "whole")
                runner.plans[n] = d.plan
                expected = Expected(case, step, me.rank, d) if how != "whole" else None

                def consume(d: pc.Dispatched = d, expected: Any = expected) -> None:
                    for i in range(parts):
                        group = d.group(i)
                        group.wait()
                        if expected is None or len(group.experts) == 0:
                            continue
                        must(group.counts.tolist() == expected.counts[group.experts.start : group.experts.stop], "a group's counts")
                        begin, end = group.experts.start, group.experts.stop
                        if case.layout == "ragged":
                            must(group.offsets.tolist() == expected.offsets[begin : end + 1], "a group's offsets")
                            begin, end = expected.offsets[begin], expected.offsets[end - 1] + expected.counts[end - 1]
                            begin, end = begin // pc.HOOK_ROWS, -(-min(end, d.x.shape[0]) // pc.HOOK_ROWS)
                        else:
                            must(group.x.shape[0] == end - begin and group.x.data_ptr() == d.x[begin:end].data_ptr(), "a group's x")
                        for word in range(begin, end):
                            expected.check_word(word)

                if how == "beside":
                    consumer = Beside(consume)
                    d.wait()
                    consumer.join()
                elif how == "receives first":
                    d.wait()
                    consume()
                else:
                    consume()
                d.wait()
                rank_cases.check_dispatched(case, step, me.rank, d)
                runner._digest(d)
                runner.combine(n, d)
            return runner.digest()
    except BaseException as error:
        raise Failed(f"{case}: {type(error).__name__}: {error}") from error


# ---- what goes wrong ---------------------------------------------------------------------------------------------------------------


def rank_1_stays_away(me: Any, case: Case, timeout: float) -> dict[str, Any]:
    """Rank 1 does not dispatch: the words of the others are raised all the same, so that no consumer spins for ever."""
    with rank_cases.open_all_to_all(me, case, hooks=True, timeout=timeout) as a2a:
        x = torch.zeros(case.max_tokens, case.hidden, dtype=DTYPES[case.dtype])
        ids = torch.zeros(case.max_tokens, case.top_k, dtype=torch.int64)
        said: dict[str, Any] = {}
        try:
            if me.rank != 1:
                d = a2a.dispatch_send(x, ids)
                waits = Beside(lambda: spin(d))
                try:
                    a2a.dispatch_recv(d)
                finally:
                    waits.join()
                    said["raised"] = all(w >> 31 for w in [*d.planned.tolist(), *d.arrived.tolist()])
            else:
                me.hear()
                return said
            a2a.check()
        except pc.PeerError as error:
            said |= {"type": type(error).__name__, "peer": error.peer}
        return said


def spin(d: pc.Dispatched) -> None:
    words, deadline = d.planned.view(torch.int32).numpy(), time.monotonic() + allowed(LONGEST)
    while not words[0] < 0:
        must(time.monotonic() < deadline, "the words of a dispatch that failed are not raised")
        time.sleep(BETWEEN_LOOKS)


def overflowing(me: Any, case: Case) -> None:
    """Rows that have no place are not waited for."""

    def noticed(call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        try:
            call(*arguments, **options)
        except pc.Error as error:
            must("was too small" in str(error), str(error))

    with rank_cases.open_all_to_all(me, case, hooks=True) as a2a:
        runner = HookedRunner(me, case, a2a)
        for n in range(case.steps):
            noticed(a2a.check)
            d = runner.dispatch_send(n)
            seen: list[int] = []
            expected = Expected(case, runner.steps[n], me.rank, d)
            watcher = Beside(lambda expected=expected, seen=seen: expected.watch(seen))  # type: ignore[misc]
            noticed(a2a.dispatch_recv, d)
            watcher.join()
            noticed(a2a.combine, torch.zeros(d.x.shape, dtype=DTYPES[case.dtype]), d)


def mistakes(me: Any, case: Case) -> list[str]:
    """Each raises before anything is sent, and the next right call works."""
    said: list[str] = []

    def refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        try:
            call(*arguments, **options)
        except pc.Error as error:
            said.append(str(error))
        else:
            said.append("nothing")

    x = torch.zeros(case.max_tokens, case.hidden, dtype=DTYPES[case.dtype])
    ids = torch.zeros(case.max_tokens, case.top_k, dtype=torch.int64)
    with rank_cases.open_all_to_all(me, case, hooks=True) as a2a:
        refused(a2a.dispatch, x, ids, expert_groups=0)
        d = a2a.dispatch(x, ids, expert_groups=2)
        refused(d.group, 2)
        out = torch.zeros(d.x.shape, dtype=x.dtype)
        a2a.combine(out, d)
        grad = x.clone().requires_grad_()
        refused(a2a.dispatch, grad, ids, expert_groups=2)
    with rank_cases.open_all_to_all(me, case) as a2a:
        refused(a2a.dispatch, x, ids, expert_groups=2)
        d = a2a.dispatch(x, ids)
        refused(lambda: d.arrived)
        a2a.combine(out, d)
    with rank_cases.open_all_to_all(me, replace(case, layout="compact"), hooks=True) as a2a:
        refused(a2a.dispatch, x, ids, expert_groups=2)
        a2a.dispatch(x, ids).release()
    return said


# ---- graphs ------------------------------------------------------------------------------------------------------------------------


def replayed(me: Any, case: Case, parts: int, rounds: int) -> None:
    """A captured step, in which another stream takes each group's rows when they are there."""
    import open_step_cases as steps
    from gpu_cases import gpu_of

    device, s, r = gpu_of(me), steps.streams, random.Random(f"replayed {case.seed}")
    with rank_cases.open_all_to_all(me, case, device=str(device), hooks=True) as a2a:
        main, other = s.new(), s.new()
        x = torch.zeros(case.max_tokens, case.hidden, dtype=torch.float32, device=device)
        ids = torch.zeros(case.max_tokens, case.top_k, dtype=torch.int64, device=device)
        # An eager step tells how large everything is. What the other stream works on is not made in the capture.
        before = a2a.dispatch(x, ids, expert_groups=parts)
        seen = [torch.empty(before.group(i).x.shape, dtype=x.dtype, device=device) for i in range(parts)]
        counts = torch.empty(before.counts.shape, dtype=torch.int32, device=device)
        out = torch.empty(before.x.shape, device=device)
        before.release()
        s.settle()
        with s.capture(main) as captured:
            d = a2a.dispatch(x, ids, expert_groups=parts)
            groups = [d.group(i) for i in range(parts)]
            with s.on(other):
                for group, rows in zip(groups, seen, strict=True):
                    group.wait()
                    s.copy(rows, group.x)
                s.copy(counts, d.counts)
                s.copy(out, d.x)
            s.wait(main, other)
            y = a2a.combine(out, d)
            assert isinstance(y, torch.Tensor)
        for n in range(rounds):
            inputs = steps.draw_inputs(case, r)
            x.copy_(inputs.tokens[me.rank].x)
            ids.copy_(inputs.tokens[me.rank].ids)
            out.fill_(float("nan"))
            s.after_copies(main)
            s.replay(captured[0], main)
            s.settle()
            a2a.check()  # the failure says more than the rows that it left
            found = reference.segments(case.shape, inputs.tokens, me.rank)
            must(counts.tolist() == [len(segment.token) for segment in found], "counts of replay", n)
            rows = [row.cpu() for part in seen for row in part]
            for e, segment in enumerate(found):
                for i, (source, token) in enumerate(zip(segment.source.tolist(), segment.token.tolist(), strict=True)):
                    must(same_bits(rows[e][i], inputs.tokens[source].x[token]), "a row of replay", n, "expert", e)
            steps.check_combined(inputs, me.rank, y, f"replay {n}")
