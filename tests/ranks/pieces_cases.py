"""What ranks do with blocks in pieces; see harness and rank_cases.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cases import Case
from failure_cases import until_failure
from outcomes import mistake, raised
from rank_cases import Good, Runner, open_all_to_all


def out_of_order(me: Any, case: Case) -> tuple[str, str]:
    """Two steps in flight, the second one first: what that says. Then both in their turn."""
    with open_all_to_all(me, case) as a2a:
        runner = Runner(me, replace(case, steps=2), a2a)
        for step in runner.steps:
            step.released, step.late_weights, step.plan_of = False, None, None
        opened = [runner.dispatch_send(n) for n in (0, 1)]
        first = raised(lambda: a2a.dispatch_recv(opened[1]))["message"]
        for n in (0, 1):
            runner.dispatch_recv(n, opened[n])
        mistake(opened[1].release, "combine_recv: step 2 before step 1")  # and it can still be combined
        sent = [runner.combine_send(n, opened[n]) for n in (0, 1)]
        assert sent[0] is not None and sent[1] is not None
        again = sent[1]
        second = raised(lambda: a2a.combine_recv(again))["message"]
        runner.combine_recv(0, sent[0])
        runner.combine_recv(1, sent[1])
        return first, second


def does_not_come(me: Any, case: Case, phase: str) -> dict[str, Any] | None:
    """Rank 0 does the send half only, until rank 1 has given up on it."""
    with open_all_to_all(me, case, timeout=1.0) as a2a:
        good = Good(me, case, a2a)
        good.step()
        runner, n = good.runner, good.n
        runner.steps[n].released, runner.steps[n].late_weights, runner.steps[n].plan_of = False, None, None
        d = runner.dispatch_send(n)
        if phase == "combine_recv":
            runner.dispatch_recv(n, d)
        c = runner.combine_send(n, d) if phase == "combine_recv" else None
        result = None
        if me.rank == 1:
            result = raised(lambda: a2a.dispatch_recv(d) if c is None else a2a.combine_recv(c))
        else:
            until_failure(me)
        a2a.reset()
        Good(me, replace(case, seed=case.seed + 1), a2a).step()
        return result
