"""A rank that says that it is busy is not blamed; one that only is late is."""

from __future__ import annotations

from typing import Any

import pytest
from busy_cases import TIMEOUT
from harness import Crew

from pplx_comm.control.callbacks import Busy
from pplx_comm.control.mesh import Mesh
from pplx_comm.errors import Error


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
@pytest.mark.parametrize("busy", [True, False])
def test_a_late_step(transport: str, busy: bool) -> None:
    with Crew(3) as crew:
        crew.start("busy_cases:late_step", transport, 1, busy)
        crew.heard(1, "busy")
        for rank in (0, 2):
            crew.heard(rank, "waits")
        crew.tell(1)
        results = crew.collect(30)
    if busy:
        assert all(result["worst"] == 0 for result in results), results
        assert results[0]["seconds"] > 2 * TIMEOUT, results
    else:
        assert all(results[rank]["type"] == "StepTimeout" and results[rank]["peer"] == 1 for rank in (0, 2)), results


def test_a_late_barrier() -> None:
    with Crew(2) as crew:
        crew.start("busy_cases:late_barrier", 1)
        crew.heard(1, "busy")
        crew.tell(0)
        crew.tell(1)
        assert crew.collect(30)[0] > 2 * TIMEOUT


def test_a_late_reset() -> None:
    """It is not left out."""
    with Crew(3) as crew:
        crew.start("busy_cases:late_reset", 1)
        crew.heard(1, "busy")
        for rank in range(3):
            crew.tell(rank)
        assert crew.collect(60) == [[0, 1, 2]] * 3


def test_a_rank_that_was_left_out_holds_up_no_other() -> None:
    mesh, told = Mesh(0, 3), list[Any]()
    mesh.on_busy(told.append)
    with mesh.condition:
        mesh._hear_busy(Busy(2, True))
        assert mesh.someone_is_busy()
        mesh.begin_generation(frozenset({0, 1}))
        assert not mesh.someone_is_busy()
        mesh._hear_busy(Busy(2, True))
        assert not mesh.someone_is_busy()
    mesh._busy_callbacks.tell()
    assert told == [Busy(2, True), Busy(2, False)]


def test_what_a_busy_rank_says() -> None:
    """Long words of any script are fine. A mistake is told at once, and leaves nothing behind."""
    mesh = Mesh(0, 1)
    for what in ("\u7f16" * 200, "\U0001f600" * 1000, "\ud800"):
        mesh.begin_busy(what)
        mesh.end_busy(what)
    with pytest.raises(Error, match="what=5 must be a string"):
        mesh.begin_busy(5)  # type: ignore[arg-type]
    assert mesh._busy_with == []


def test_a_death_is_noticed_all_the_same() -> None:
    with Crew(2) as crew:
        crew.start("busy_cases:dies_busy", 1)
        crew.heard(1, "busy")
        crew.heard(0, "waits")
        crew.tell(1)
        (result,) = crew.collect(30, ranks=[0])
    assert result["peer"] == 1 and "died" in result["message"] and result["seconds"] < 10, result


def test_blamed_when_it_is_busy_no_longer() -> None:
    with Crew(2) as crew:
        crew.start("busy_cases:stops_after", 1)
        crew.heard(1, "idle")
        (result,) = crew.collect(30, ranks=[0])
        crew.tell(1)
    assert result == {"peer": 1}
