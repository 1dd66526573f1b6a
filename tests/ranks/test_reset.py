"""Several AllToAlls on one Communicator, and several threads of a rank: a failure is of all of them, and so is reset()."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from cases import Case
from harness import Crew, Crews, seed
from test_failure import left_in_shm

CARRIERS = ["mapped", "proxy:tcp"]


def case_of(transport: str, ranks: int = 3) -> Case:
    return Case(seed(), ranks, transport=transport, num_experts=8, top_k=3, max_tokens=16, hidden=128)


@pytest.mark.parametrize("transport", [*CARRIERS, "relayed:tcp"])
def test_each_is_reset_as_its_own_call_raises(transport: str, tmp_path: Path) -> None:
    """The failure that the other AllToAll would still tell is of an old generation. One reset is enough."""
    with Crew(3) as crew:
        crew.start("reset_cases:each_as_its_call_raises", case_of(transport), 1, str(tmp_path / "died"))
        assert crew.collect(60, [0, 2]) == [1, 1]
        assert crew.leave() == [0, -signal.SIGKILL, 0]
        assert left_in_shm(crew) == []


@pytest.mark.parametrize("transport", CARRIERS)
def test_in_opposite_orders(crew: Crews, transport: str) -> None:
    crew.run("reset_cases:in_opposite_orders", case_of(transport))


@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize("how", ["of one", "each its own", "of the communicator"])
def test_threads(crew: Crews, transport: str, how: str) -> None:
    crew.run("reset_cases:threads_reset", case_of(transport), how)


@pytest.mark.parametrize("transport", ["mapped", "relayed:tcp"])
def test_lanes(transport: str, tmp_path: Path) -> None:
    """A thread that is in a step while another resets ends it, and finds the new generation."""
    with Crew(3) as crew:
        crew.start("reset_cases:lanes", case_of(transport), 2, str(tmp_path / "died"))
        crew.collect(60, [0, 1])
        assert crew.leave() == [0, 0, -signal.SIGKILL]


@pytest.mark.parametrize("transport", CARRIERS)
def test_between_calls_of_another_thread(crew: Crews, transport: str) -> None:
    crew.run("reset_cases:between_calls", case_of(transport))


def test_before_a_first_step(crew: Crews) -> None:
    crew.run("reset_cases:before_its_first_step", case_of("mapped"))


@pytest.mark.parametrize("transport", CARRIERS)
def test_open_on_some_ranks(crew: Crews, transport: str) -> None:
    for told, later, latched in crew.run("reset_cases:open_on_some", case_of(transport)):
        assert told.get("is_error") and not told["is_peer"], told
        assert "AllToAll 1" in told["message"] and "open on ranks [0, 2] and not on ranks [1]" in told["message"], told
        assert "Close it on ranks [0, 2]" in told["message"], told
        assert later.get("is_peer") and "reset() failed on rank" in latched, (later, latched)


@pytest.mark.parametrize("before", ["stop", "drain", "renew"])
def test_closed_meanwhile(crew: Crews, before: str) -> None:
    crew.run("reset_cases:closed_meanwhile", case_of("proxy:tcp"), before)


def test_closed_while_it_is_rewired(crew: Crews) -> None:
    for told, later in crew.run("reset_cases:closed_while_it_is_rewired", case_of("proxy:tcp")):
        assert told.get("is_error") and "this AllToAll is closed" in told["message"], told
        assert later.get("is_peer"), later


def test_nothing_failed(crew: Crews) -> None:
    crew.run("reset_cases:nothing_failed", case_of("mapped"))


def test_a_thread_that_comes_late(crew: Crews) -> None:
    crew.run("reset_cases:late_thread", case_of("mapped"))


def test_a_callback_that_comes_late(crew: Crews) -> None:
    crew.run("reset_cases:late_callback", case_of("mapped"))


@pytest.mark.parametrize("transport", CARRIERS)
def test_open_steps_of_a_rank_whose_own_code_raised(crew: Crews, transport: str) -> None:
    for told in crew.run("reset_cases:own_error", case_of(transport))[::2]:
        assert told.get("is_peer") and told["peer"] == 1 and not told["is_timeout"], told


def test_a_notice_that_no_call_has_said(crew: Crews) -> None:
    for told in crew.run("reset_cases:with_a_notice", case_of("mapped"))[::2]:
        assert told.get("is_peer") and told["peer"] == 1, told


def test_a_failure_that_no_call_has_said(crew: Crews) -> None:
    for told in crew.run("reset_cases:after_an_unsaid_failure", case_of("mapped"))[::2]:
        assert told.get("is_peer") and told["peer"] == 1 and not told["is_timeout"], told


@pytest.mark.parametrize(
    ("transport", "place"),
    [
        ("mapped", "second"),
        ("relayed:tcp", "second"),
        ("relayed:tcp", "AllToAll: memory of relays"),
        ("proxy:tcp", "reset: AllToAlls"),
    ],
)
def test_another_death(transport: str, place: str, tmp_path: Path) -> None:
    with Crew(4) as crew:
        crew.start("reset_cases:one_more_dies", case_of(transport, 4), 1, place, str(tmp_path / "died"))
        for told in crew.collect(60, [0, 2]):
            for each in (told, *told["later"]):
                assert each.get("is_peer") and each["peer"] == 1 and "rank 1" in each["message"], told
        assert crew.leave() == [0, -signal.SIGKILL, 0, -signal.SIGKILL]
        assert left_in_shm(crew) == []


def test_a_closed_one_does_not_count(crew: Crews) -> None:
    for told in crew.run("reset_cases:closed_and_kept", case_of("mapped")):
        assert "8 AllToAlls live on this Communicator already" in told, told
