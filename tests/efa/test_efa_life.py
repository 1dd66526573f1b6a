"""From open to close over software NICs: nothing leaks, everything may be closed in any order or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cases import Case
from harness import Crews
from soft import EFA, crew_on, crews_on
from test_life import check_no_growth


@pytest.fixture(scope="module")
def crew() -> Iterator[Crews]:
    with crews_on(2) as crews:
        yield crews


@pytest.mark.parametrize("transport", EFA)
def test_open_and_close(crew: Crews, transport: str) -> None:
    case = Case(1, 2, transport=transport, max_tokens=32, hidden=1024, threads=2)
    check_no_growth(crew.run("life_cases:cycles", case, 40, "all_to_all", timeout=100))


@pytest.mark.slow
@pytest.mark.parametrize("transport", EFA)
@pytest.mark.parametrize("what", ["communicator", "drop"])
def test_cycles(crew: Crews, transport: str, what: str) -> None:
    case = Case(1, 2, transport=transport, max_tokens=32, hidden=1024, threads=2)
    check_no_growth(crew.run("life_cases:cycles", case, 16, what, timeout=200))


@pytest.mark.parametrize("transport", EFA)
def test_closing(crew: Crews, transport: str) -> None:
    crew.run("life_cases:several_closes", Case(4, 2, transport=transport))
    for seconds in crew.run("life_cases:stops_promptly", Case(5, 2, transport=transport)):
        assert seconds < 1.0
    crew.run("life_cases:opposite_orders", Case(8, 2, transport=transport, in_flight=2))


@pytest.mark.slow
@pytest.mark.parametrize("transport", EFA)
def test_fork(crew: Crews, transport: str) -> None:
    for r in crew.run("life_cases:fork_in_the_parent", Case(6, 2, transport=transport, threads=3)):
        assert r["codes"] == [0, 0], r


@pytest.mark.slow
@pytest.mark.parametrize("transport", EFA)
@pytest.mark.parametrize("how", ["step_open", "dropped"])
def test_the_interpreter_ends_without_close(transport: str, how: str) -> None:
    with crew_on(2) as (_, crew):
        crew.run("life_cases:leave_open", Case(3, 2, transport=transport), how)
        assert crew.leave() == [0, 0], crew.output()
        assert crew.output() == ""


@pytest.mark.parametrize("transport", EFA)
def test_leaving_after_the_last_step_is_no_failure(transport: str) -> None:
    with crew_on(3) as (_, crew):
        crew.run("failure_cases:leave_at_once", Case(62, 3, transport=transport, max_tokens=32, hidden=1024), 3, timeout=100)
