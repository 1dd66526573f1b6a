"""The ranks of the tests: a failed rank is named at once, and the next test has ranks that work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Crew, Crews, RankFailed


@pytest.fixture
def crews() -> Iterator[Crews]:
    with Crews(3, grace=0.5) as crews:
        yield crews


def test_the_rank_that_raised_is_named_first_without_waiting_for_the_rest(crews: Crews) -> None:
    crews.run("crew_cases:number")
    begun = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        crews.run("crew_cases:one_raises", 1, timeout=100)
    said = str(failed.value)
    assert time.monotonic() - begun < 50
    assert said.startswith("rank 1 raised") and "what went wrong" in said
    for rank in (0, 2):  # and where those are that it left alone
        assert f"rank {rank} is not back in time, 0.5 s after the first failure" in said
    assert "in one_raises" in said[said.index("rank 0 is not back") :]
    assert crews.run("crew_cases:number") == [0, 1, 2]


def test_after_a_hang_the_next_test_has_other_ranks(crews: Crews) -> None:
    crews.run("crew_cases:number")
    stuck = list(crews.now.pids.values())
    with pytest.raises(RankFailed, match="rank 2 is not back in time, "):
        crews.run("crew_cases:hangs", timeout=0.2)
    assert crews.run("crew_cases:number") == [0, 1, 2]
    for pid in stuck:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_test_that_is_stopped_leaves_none_of_its_answers(crews: Crews) -> None:
    """As pytest-timeout stops one: by an exception wherever it is."""

    class Stopped(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stopped

    crews.run("crew_cases:number")
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        with pytest.raises(Stopped):
            crews.run("crew_cases:stops_its_test", os.getpid())
    finally:
        signal.signal(signal.SIGVTALRM, before)
    assert crews.run("crew_cases:number") == [0, 1, 2]


def test_a_rank_that_dies_between_tests_is_replaced_and_told_of() -> None:
    crews = Crews(3)
    crews.run("crew_cases:dies_later", 1)
    assert crews.now.wait(1) == -signal.SIGKILL
    assert crews.run("crew_cases:number") == [0, 1, 2]
    with pytest.raises(RankFailed, match=r"before crew_cases:number, rank 1 is gone \(exit code -9\)"):
        crews.close()


def test_a_rank_that_is_gone_is_named_before_it_is_asked() -> None:
    with Crew(2) as crew:
        crew.kill(1)
        assert crew.wait(1) == -signal.SIGKILL
        with pytest.raises(RankFailed, match="rank 1 is gone"):
            crew.run("crew_cases:number")
        assert crew.broken
