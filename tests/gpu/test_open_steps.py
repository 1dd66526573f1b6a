"""Eager steps among graph replays, several open at once: open_step_cases.py on GPUs. A GPU for each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from cases import Case
from gpus import APART, AT_ONCE
from harness import Crews, seed
from open_step_cases import NOT_OPEN, STILL_OPEN, small_case

CREWS = [n for n in APART if 1 < n < 8]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(AT_ONCE < 2, reason="fewer than two GPUs")]


@pytest.fixture(scope="module", params=CREWS or [2], ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    with Crews(request.param) as crews:
        yield crews


def case_of(crew: Crews, in_flight: int, **changes: Any) -> Case:
    return small_case(seed(), crew.world_size, in_flight, **changes)


@pytest.mark.parametrize("in_flight", [1, 2, 4, 8])
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
def test_eager_steps_among_replays(crew: Crews, transport: str, in_flight: int) -> None:
    case = case_of(crew, in_flight, transport=transport, hidden=1024, max_tokens=32, first_step=2**32 - 40)
    crew.run("open_step_cases:interleaved", case, list(range(20)), 40, timeout=200)


@pytest.mark.parametrize("first", [0, 1])
def test_a_replay_between_eager_steps(crew: Crews, first: int) -> None:
    crew.run("open_step_cases:around_a_replay", case_of(crew, 4), first)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_capture_takes_no_step(crew: Crews, in_flight: int) -> None:
    crew.run("open_step_cases:a_capture_between", case_of(crew, in_flight))


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
@pytest.mark.parametrize(
    ("kind", "in_flight", "alone"),
    [("eager", 2, None), ("replay", 1, None), ("replay", 2, None), ("replay", 1, 1), ("replay", 2, 1), ("dispatch only", 2, None)],
)
def test_a_step_whose_memory_is_taken(crew: Crews, kind: str, in_flight: int, alone: int | None, transport: str) -> None:
    for heard in crew.run("open_step_cases:refused", case_of(crew, in_flight, transport=transport), kind, alone):
        match = re.search(STILL_OPEN, heard["message"])
        assert match and not heard["timeout"] and str(heard["peer"]) == match[1], heard
        assert int(match[2]) - int(match[3]) == in_flight and (alone is None or int(match[1]) == alone), heard


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_step_that_is_combined_again(crew: Crews, in_flight: int) -> None:
    for heard in crew.run("open_step_cases:combined_again", case_of(crew, in_flight)):
        assert re.search(NOT_OPEN, heard["message"]) and not heard["timeout"], heard


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_replay_beside_the_combine_whose_memory_it_takes(crew: Crews, in_flight: int) -> None:
    outcomes = crew.run("open_step_cases:beside_a_combine", case_of(crew, in_flight), 30)
    assert outcomes == [outcomes[0]] * crew.world_size, outcomes


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
def test_ids_that_only_the_device_sees(crew: Crews, transport: str) -> None:
    crew.run("open_step_cases:bad_ids", case_of(crew, 2, transport=transport), 1)


def test_the_end_beside_a_replay(crew: Crews) -> None:
    crew.run("open_step_cases:closed_beside_a_replay", case_of(crew, 1))
