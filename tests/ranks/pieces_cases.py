"""Cases of blocks in pieces; see harness and rank_cases.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cases import Case
from chaos_cases import counted
from failure_cases import until_failure
from outcomes import mistake, raised
from rank_cases import Good, Runner, end_of, open_all_to_all


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
    """Rank 0 does the send half only, until the others have given up on it. What they heard."""
    with open_all_to_all(me, case, timeout=3.0) as a2a:
        good = Good(me, case, a2a)
        good.step()
        runner, n = good.runner, good.n
        runner.steps[n].released, runner.steps[n].late_weights, runner.steps[n].plan_of = False, None, None
        d = runner.dispatch_send(n)
        if phase == "combine_recv":
            runner.dispatch_recv(n, d)
        c = runner.combine_send(n, d) if phase == "combine_recv" else None
        result = None
        if me.rank == 0:
            until_failure(me)
        else:
            result = raised(lambda: a2a.dispatch_recv(d) if c is None else a2a.combine_recv(c))
        a2a.reset()
        Good(me, replace(case, seed=case.seed + 1), a2a).step()
        return result


def _first_in_halves(me: Any, case: Case, a2a: Any) -> Runner:
    runner = Good(me, case, a2a).runner
    first = runner.steps[0]
    first.late_weights, first.how = None, ["halves"] * me.world_size
    return runner


def writes_of_a_dispatch(me: Any, case: Case) -> int:
    """How many this rank's proxy posts for the first dispatch."""
    with open_all_to_all(me, case) as a2a:
        runner = _first_in_halves(me, case, a2a)
        d = runner.dispatch_recv(0, runner.dispatch_send(0))
        me.comm.barrier()  # the others have all of it
        writes = int(a2a.stats()["proxy"]["writes"])
        runner.combine(0, d)
        return writes


def until_cut(me: Any, case: Case, timeout: float) -> dict[str, Any]:
    """Steps, the first in halves, until the link is cut. What this rank saw, and in which half."""
    a2a = open_all_to_all(me, case, timeout=timeout)
    runner = _first_in_halves(me, case, a2a)
    half = ""

    def on() -> None:
        nonlocal half
        for n in range(8):
            half = f"dispatch {n}"
            d = runner.dispatch(n)
            half = f"combine {n}"
            runner.combine(n, d)

    result = raised(on)
    return {**result, "half": half, "chaos": counted(a2a), "closing": end_of(me, a2a, True)}
