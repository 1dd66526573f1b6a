"""Several steps open, in graphs and beside them, and steps that a rank refuses, or ends in another way than its peers."""

from __future__ import annotations

import pytest
from cases import Case
from emulation_cases import ON_X86_64, module, run_refused
from harness import Crew, Crews, seed
from open_step_cases import NOT_OPEN, small_case

pytestmark = [ON_X86_64, pytest.mark.slow]


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
def test_eager_steps_among_replays(crew: Crews, transport: str, in_flight: int) -> None:
    case = small_case(seed(), crew.world_size, in_flight, transport=transport)
    crew.run("emulated:call", module(), "open_step_cases:interleaved", case, list(range(3)), 12, timeout=120)


@pytest.mark.parametrize("first", [0, 1])
def test_a_replay_between_eager_steps(crew: Crews, first: int) -> None:
    case = small_case(seed(), crew.world_size, 4)
    crew.run("emulated:call", module(), "open_step_cases:around_a_replay", case, first)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_capture_takes_no_step(crew: Crews, in_flight: int) -> None:
    case = small_case(seed(), crew.world_size, in_flight)
    crew.run("emulated:call", module(), "open_step_cases:a_capture_between", case)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize(
    ("kind", "in_flight", "alone"),
    [("eager", 2, None), ("replay", 1, None), ("replay", 2, None), ("replay", 1, 1), ("replay", 2, 1), ("dispatch only", 2, None)],
)
def test_a_step_whose_memory_is_taken(crew: Crews, kind: str, in_flight: int, alone: int | None, transport: str) -> None:
    case = small_case(seed(), crew.world_size, in_flight, transport=transport)
    for match in run_refused(crew, "refused", case, kind, alone):
        assert int(match[2]) - int(match[3]) == in_flight
        assert alone is None or int(match[1]) == alone


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_step_that_is_combined_again(crew: Crews, in_flight: int) -> None:
    case = small_case(seed(), crew.world_size, in_flight)
    run_refused(crew, "combined_again", case, sentence=NOT_OPEN)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_replay_beside_the_combine_whose_memory_it_takes(crew: Crews, in_flight: int) -> None:
    case = small_case(seed(), crew.world_size, in_flight)
    outcomes = crew.run("emulated:call", module(), "open_step_cases:beside_a_combine", case, 8)
    assert outcomes == [outcomes[0]] * crew.world_size, outcomes


def test_the_end_beside_a_replay() -> None:
    with Crew(2) as crew:
        crew.run("emulated:call", module(), "open_step_cases:closed_beside_a_replay", small_case(seed(), 2, 1), timeout=60)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
def test_ids_that_only_the_device_sees(crew: Crews, transport: str) -> None:
    crew.run("emulated:call", module(), "open_step_cases:bad_ids", small_case(seed(), crew.world_size, 2, transport=transport), 1)


@pytest.mark.parametrize("transport", ["mapped", "nvshmem"])
@pytest.mark.parametrize("kind", ["release", "weights", "no_tail"])
def test_ranks_that_end_a_step_differently(kind: str, transport: str) -> None:
    with Crew(3) as crew:
        results = crew.run("emulated:call", module(), "failure_cases:mismatch", Case(81, 3, transport=transport), kind)
        for r in results:
            assert r.get("is_peer") and not r["is_timeout"], r
        assert any(kind.removeprefix("no_") in r["message"] for r in results), results
