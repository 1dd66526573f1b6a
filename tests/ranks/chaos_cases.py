"""Cases in a chaos (PPLX_COMM_CHAOS, proxy/chaos.h); see harness and rank_cases.py."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import rank_cases
from cases import Case
from outcomes import Failed, Starved, raised
from rank_cases import Good, Runner, end_of, open_all_to_all

import pplx_comm as pc


def counted(a2a: pc.AllToAll) -> Counter[str]:
    """How often each kind of chaos happened on this rank's fabric."""
    return Counter(a2a.stats().get("proxy", {}).get("chaos", {}))


def exchange(me: Any, case: Case) -> tuple[str, Counter[str]]:
    """As rank_cases.exchange, with what happened meanwhile."""
    try:
        with open_all_to_all(me, case) as a2a:
            before = counted(a2a)
            return Runner(me, case, a2a).run(), counted(a2a) - before
    except BaseException as error:
        raise Failed(f"{case}: {type(error).__name__}: {error}") from error


def many_steps(me: Any, case: Case, steps: int) -> Counter[str]:
    rank_cases.many_steps(me, case, steps)
    with open_all_to_all(me, case) as a2a:
        return counted(a2a)


def until_failure(me: Any, case: Case, timeout: float, again: bool) -> dict[str, Any]:
    """Steps until the link is cut. What this rank saw, and how long after its last good step; `again`: reset, and a few steps."""
    a2a = open_all_to_all(me, case, timeout=timeout)
    good = Good(me, case, a2a)
    good.step()  # it has three times the timeout
    last = time.monotonic()

    def on() -> None:
        nonlocal last
        while True:
            if good.n == 60:
                good.n = 0
            starved.again()
            good.step()
            last = time.monotonic()

    starved = Starved()
    result = raised(on, starved)
    result["waited"] = result["at"] - last
    result["chaos"] = counted(a2a)
    if again:
        a2a.reset()
        good = Good(me, replace(case, seed=case.seed + 1), a2a)
        for _ in range(3):
            good.step()
        a2a.check()
    result["closing"] = end_of(me, a2a, True)
    return result


def refused(me: Any, case: Case) -> dict[str, Any]:
    return raised(lambda: open_all_to_all(me, case))
