"""Ranks that die or stop, ports that go down and writes that fail, over the real efa provider: errors name the rank at fault, and
the NIC."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from cases import Case
from harness import seed
from soft import EFA, MIXED, crew_on, software
from test_failure import CLOSED, left_in_shm, reset_after_deaths
from test_faults import PHASES, RANKS, TIMEOUT, Story, tell

NIC = "rdmap16s27"


def told(folder: Path, transports: Sequence[str], incidents: Sequence[tuple[int, str, str]], timeout: float) -> None:
    with software(nics=2, seed=seed()) as efa:
        stories: list[Story] = []
        try:
            stories += [Story(transport, folder, timeout, efa.environment) for transport in transports]
            tell(stories, incidents, random.Random(f"{seed()} {incidents}"))
        finally:
            for story in stories:
                story.crew.close()


def test_killed(tmp_path: Path) -> None:
    """Two ranks fall to kill -9 in a phase, at once. The others name them, go on without them, and take them back."""
    told(tmp_path, EFA, [(1, "dispatch_recv", "kill")], 10.0)


@pytest.mark.slow
def test_killed_or_stopped_anywhere(tmp_path: Path) -> None:
    """Writes to a rank that SIGSTOP has stopped land all the same."""
    told(tmp_path, EFA, [(number % RANKS, phase, "kill") for number, phase in enumerate(PHASES) if phase != "dispatch_recv"], 10.0)
    told(tmp_path, EFA, [(2, "dispatch_recv", "stop"), (0, "combine_send", "left out")], TIMEOUT)


@pytest.mark.parametrize("transport", ["proxy:efa-direct", pytest.param("mixed:efa", marks=pytest.mark.slow)])
def test_reset(transport: str, tmp_path: Path) -> None:
    case = Case(91, 4, transport=transport, num_experts=10, top_k=4, crowd="uneven", wire="mxfp8", in_flight=2)
    with crew_on(4) as (_, crew):
        for r in reset_after_deaths(crew, [], case, tmp_path):
            assert r["closing"] < CLOSED, r
        assert crew.leave() == [-9, 0, -9, 0]
        assert left_in_shm(crew) == []


@pytest.mark.parametrize("transport", EFA)
def test_a_port_goes_down(transport: str) -> None:
    """All name a rank on the other side of it and the NIC, in time; when it is up again they join, on the same machine."""
    case = Case(7, 3, transport=transport, max_tokens=16, hidden=256)
    with crew_on(3) as (efa, crew):
        crew.run("fault_cases:join", case, 10.0)
        crew.start("fault_cases:until_failure", case)
        crew.all_heard("running")
        down = time.monotonic()
        efa.set_port(0, False)
        for rank, r in enumerate(crew.collect(30)):
            assert (r.get("is_peer") and r["peer"] != rank) or "lost the network" in r["message"], r
            assert f"rank {r['peer']}" in r["message"] and NIC in r["message"], r
            assert r["at"] - down < 4.0 + r["starved"], r
        efa.set_port(0, True)
        for r in crew.run("fault_cases:join", case, 10.0):
            assert r["closing"] < CLOSED, r


CODES = {7: "registration", 13: "nresponsive", 14: "peer"}
"""Vendor codes, and a word of what the provider says of each."""


@pytest.mark.parametrize("transport", EFA)
@pytest.mark.parametrize("code", [pytest.param(7, marks=pytest.mark.slow), 13, pytest.param(14, marks=pytest.mark.slow)])
def test_a_write_that_fails(transport: str, code: int) -> None:
    """On one rank's NIC, with that code: the error names the peer, the NIC and what the provider says; all hear of it."""
    case = Case(8, 3, transport=transport, max_tokens=16, hidden=256)
    with crew_on(3, crew={"rank_env": {1: {"EFA_SOFT_FAIL": f"error={code},after=60"}}}) as (efa, crew):
        crew.run("fault_cases:join", case, 10.0)
        crew.start("fault_cases:until_failure", case)
        crew.all_heard("running")
        results = crew.collect(30)
        for r in results:
            assert r.get("is_peer") and not r["is_timeout"], r
            assert "rank 1 lost the network to rank" in r["message"], r
        own = results[1]["message"]
        assert NIC in own and CODES[code] in own, own
        assert sum(nic[f"error_{code}"] for nic in efa.counters().values()) > 0, efa.counters()


@pytest.mark.parametrize("transport", EFA)
def test_full_queues_and_missing_receives(transport: str) -> None:
    """Small queues, doorbells that are refused and messages that find no receive: slower, and right."""
    fail = "full,every=5;rnr,every=7"
    with crew_on(2, fail=fail, more={"EFA_SOFT_SQ_DEPTH": 8, "EFA_SOFT_REUSE_KEYS": 1}) as (efa, crew):
        case = Case(9, 2, transport=transport, max_tokens=16, hidden=64, in_flight=4, crowd="uneven")
        crew.run("rank_cases:many_steps", case, 60, timeout=100)
        counts = list(efa.counters().values())
        assert sum(nic["refused_posts"] for nic in counts) > 10 and sum(nic["rnr_tries"] for nic in counts) > 10, counts


def test_without_unsolicited_writes() -> None:
    """Immediates use up receives, which are posted again: more of them than were posted at first."""
    with crew_on(2, more={"EFA_SOFT_UNSOLICITED": 0}) as (efa, crew):
        for transport in EFA:
            case = Case(10, 2, transport=transport, max_tokens=2, hidden=16, in_flight=4)
            crew.run("rank_cases:many_steps", case, 300, timeout=100)
        counts = list(efa.counters().values())
        assert sum(nic["receives_used"] for nic in counts) > 2 * 512 and sum(nic["unsolicited_arrivals"] for nic in counts) == 0, (
            counts
        )


@pytest.mark.slow
def test_mixed_deaths(tmp_path: Path) -> None:
    told(tmp_path, MIXED[1:], [(2, "combine_recv", "kill")], 10.0)
