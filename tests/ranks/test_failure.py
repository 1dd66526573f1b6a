"""Invariants 4 and 9 (docs/design.md): death, slowness, leaving and interruption, on every transport.

Where a rank dies, it says itself, so nothing here depends on timing; times are measured from the kill.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cases import Case
from failure_cases import LATE, PLACES
from harness import Crew, Crews, seed

import pplx_comm._core as _core

TRANSPORTS = ["mapped", "proxy:shm", "proxy:tcp"]
CARRIERS = ["mapped", "proxy:tcp"]
"""Carriers for tests in which the provider has no part: reports on a rank that is slow, or leaves."""
NOTICED = 10.0  # seconds from a death until every survivor has raised: one where cores are free, and less than any timeout here
CLOSED = 10.0  # two where cores are free


def left_in_shm(crew: Crew) -> list[str]:
    """Files whose name says that one of these processes made them; only that, since other programs run here too."""
    pids = [*crew.pids.values(), *crew.past_pids]
    return [
        name
        for name in os.listdir("/dev/shm")
        if any(f".{pid}." in name or re.search(rf"(?<![0-9A-Za-z]){pid}$", name) for pid in pids)
    ]


def check_survivors(results: list[dict[str, Any]], victim: int, died: float) -> None:
    for r in results:
        assert r.get("is_peer"), r
        assert not r["is_timeout"], r
        assert r["peer"] == victim, r
        assert f"rank {victim}" in r["message"], r
        assert r["at"] - died < NOTICED + r["starved"], (r["at"] - died, r)
        assert r["closing"] < CLOSED, r


def reset_after_deaths(crew: Crew, entry: list[Any], case: Case, folder: Path) -> list[dict[str, Any]]:
    """Rank 2 dies, then rank 0. Returns what the others say: "noticed" has the seconds from each death until they raised."""
    paths = [folder / f"died{i}" for i in range(2)]
    crew.start(*entry, "failure_cases:reset_after", case, [2, 0], [str(path) for path in paths])
    results = crew.collect(200, [rank for rank in range(case.world_size) if rank not in (0, 2)])
    crew.leave()
    for r in results:
        r["noticed"] = [at - float(path.read_text()) for at, path in zip(r["rounds"], paths, strict=True)]
    return results


def check_all_gone(crew: Crew, victim: int) -> None:
    codes = crew.leave()  # None: it does not end
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(crew.world_size)], crew.output(
        (victim + 1) % crew.world_size
    )
    assert left_in_shm(crew) == []


@pytest.mark.parametrize(
    ("place", "transport"),
    [(place, t) for place in PLACES for t in ["mapped", "relayed:tcp"]]
    + [(place, t) for place in ("in_dispatch_recv", "in_weights", "after_combine_send") for t in ("proxy:shm", "proxy:tcp")],
)
def test_death_in_a_phase(transport: str, place: str, tmp_path: Path) -> None:
    victim = PLACES.index(place) % 3
    others = [rank for rank in range(3) if rank != victim]
    case = Case(
        21, 3, transport=transport, max_tokens=16, hidden=256, crowd="uneven", wire=("native", "fp8")[PLACES.index(place) % 2]
    )
    with Crew(3) as crew:
        crew.start("failure_cases:survive", case, victim, place, str(tmp_path / "died"), close=PLACES.index(place) % 3 != 0)
        results = crew.collect(30, others)
        check_survivors(results, victim, float((tmp_path / "died").read_text()))
        check_all_gone(crew, victim)


@pytest.mark.slow
@pytest.mark.parametrize("transport", [*TRANSPORTS, "mixed:tcp"])
def test_death_at_any_time(transport: str) -> None:
    r = random.Random(f"{seed()} {transport}")
    for number in range(2):
        world_size = 4 if number == 0 or transport == "mixed:tcp" else 2
        victim = r.randrange(world_size)
        case = Case(31 + number, world_size, transport=transport, max_tokens=64, hidden=512, in_flight=1)
        with Crew(world_size) as crew:
            crew.start("failure_cases:endless", case)
            for rank in range(world_size):
                crew.heard(rank, "running")
            time.sleep(r.random() * 0.2)  # any point of a step
            died = crew.kill(victim)
            check_survivors(crew.collect(30, [rank for rank in range(world_size) if rank != victim]), victim, died)
            check_all_gone(crew, victim)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_die_at_once(transport: str) -> None:
    case = Case(41, 4, transport=transport, max_tokens=16)
    with Crew(4) as crew:
        crew.start("failure_cases:endless", case, doomed=(1, 2))
        for rank in range(4):
            crew.heard(rank, "running")
        died = time.monotonic()
        os.killpg(crew.pids[1], signal.SIGKILL)
        for r in crew.collect(30, [0, 3]):
            assert r.get("is_peer"), r
            assert r["peer"] in (1, 2), r
            assert r["at"] - died < NOTICED + r["starved"], r
            assert r["closing"] < CLOSED, r
        assert crew.leave() == [0, -9, -9, 0]
        assert left_in_shm(crew) == []


def test_a_death_of_which_a_barrier_tells_first(tmp_path: Path) -> None:
    with Crew(3) as crew:
        crew.start("failure_cases:heard_by_a_barrier_first", Case(41, 3), 1, str(tmp_path / "died"))
        for r in crew.collect(ranks=[0, 2]):
            assert r.get("is_peer") and r["peer"] == 1 and "rank 1" in r["message"], r


def test_of_two_causes_all_calls_name_one() -> None:
    with Crew(3) as crew:
        assert crew.run("failure_cases:two_causes", Case(42, 3))[0]["peer"] == 2
        assert crew.leave() == [0, 0, 0]


def _wake_when_stopped(crew: Crew, rank: int, after: float) -> float:
    """When it was seen to be stopped."""
    deadline = time.monotonic() + 20
    while Path(f"/proc/{crew.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, "the rank did not stop"
        time.sleep(0.001)
    stopped = time.monotonic()
    time.sleep(after)
    crew.signal(rank, signal.SIGCONT)
    return stopped


@pytest.mark.parametrize("transport", CARRIERS)
def test_a_slow_rank_is_waited_for(transport: str) -> None:
    case = Case(51, 3, transport=transport)
    with Crew(3) as crew:
        crew.start("failure_cases:slow_rank", case, 1, 4.0, "dispatch_send", 6)
        _wake_when_stopped(crew, 1, 1.5)
        for r in crew.collect(30):
            assert r["type"] == "", r


@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize("phase", [pytest.param("dispatch_send", marks=pytest.mark.slow), "combine_send"])
def test_a_rank_that_is_too_slow(transport: str, phase: str) -> None:
    case = Case(52, 3, transport=transport)
    with Crew(3) as crew:
        crew.start("failure_cases:slow_rank", case, 1, 2.0, phase, 6)
        stopped = _wake_when_stopped(crew, 1, 4.0)
        results = crew.collect(30)
        blocked = {"dispatch_send": "dispatch_recv", "combine_send": "combine_recv"}[phase]
        for rank in (0, 2):
            r = results[rank]
            assert r["type"] == "StepTimeout" and r["is_timeout"] and r["is_peer"], r
            assert r["peer"] == 1 and r["phase"] == blocked and r["step"] == 4, r
            assert r["at"] - stopped < NOTICED + r["starved"] and r["closing"] < CLOSED, r
            assert "gave up" in r["message"] and "rank 1" in r["message"], r
        # Awake again, it hears that it was given up.
        assert results[1].get("is_peer"), results[1]
        assert "rank 1" in results[1]["message"], results[1]


def test_blame_of_relays() -> None:
    """Every rank names the one that is late or stands still, whatever waits for it in turn."""
    with Crew(4) as crew:
        results = crew.run(
            "failure_cases:late_behind_relays", Case(54, 4, transport="relayed:tcp", steps=6, num_experts=8, top_k=4)
        )
    for number, (culprit, place) in enumerate(LATE):
        told = [by_incident[number] for by_incident in results]
        for r in told:
            assert r.get("is_peer") and r["peer"] == culprit, (place, r, told)
    said = [[by_incident[number]["message"] for by_incident in results] for number in range(len(LATE))]
    words = (
        "the dispatch block of rank 0 by way of rank 2",
        "the combine rows for rank 0 of rank 3",
        "the sums of the node of rank 2 over",
    )
    for number, part in enumerate(words):
        assert any(part in message for message in said[number]), (part, said[number])


@pytest.mark.parametrize("transport", ["proxy:shm", "proxy:tcp"])
def test_a_rank_whose_own_proxy_stands_still(transport: str) -> None:
    """It is said to all, since a peer that is waited for in vain may wait too; and closing leaves the thread behind, and no file."""
    stalls = ["stall=0@3"] * 8  # the first write of the second step
    with Crew(
        2, {"PPLX_COMM_CHAOS": f"seed={seed()},delay=0,shuffle=0,split=0,duplicate=0,replay=0,again=0,{','.join(stalls)}"}
    ) as crew:
        results = crew.run("failure_cases:own_proxy_stands_still", Case(53, 2, transport=transport, in_flight=1))
        for r in results:
            assert r["type"] == "StepTimeout" and r["peer"] == 1, r
            assert "rank 0 gave up" in r["message"] and "see to rank 0 first" in r["message"], r
            assert r["closing"] < CLOSED, r
        assert crew.leave() == [0, 0]
        assert "was left behind" in crew.output(0), crew.output(0)
        assert left_in_shm(crew) == []


@pytest.mark.parametrize(
    ("transport", "what"),
    [*((transport, what) for transport in CARRIERS for what in ("all_to_all", "communicator")), ("relayed:tcp", "communicator")],
)
def test_a_rank_that_leaves(transport: str, what: str) -> None:
    with Crew(3) as crew:
        results = crew.run("failure_cases:leaves", Case(61, 3, transport=transport), 2, what)
        for r in results[:2]:
            assert r.get("is_peer") and r["peer"] == 2, r
            assert "rank 2" in r["message"] and "closed" in r["message"], r
            assert r["at"] - results[2]["at"] < NOTICED and r["closing"] < CLOSED, r


@pytest.mark.parametrize("transport", [*TRANSPORTS, "relayed:tcp"])
def test_leaving_after_the_last_step_is_no_failure(transport: str) -> None:
    with Crew(3) as crew:
        crew.run("failure_cases:leave_at_once", Case(62, 3, transport=transport, max_tokens=32, hidden=1024), 4, timeout=200)


@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize("place", ["dispatch_recv", "combine_recv"])
def test_interrupt(transport: str, place: str) -> None:
    """Ctrl-C on a rank that waits: KeyboardInterrupt there, and the others hear its rank."""
    with Crew(3) as crew:
        crew.start("failure_cases:interrupted", Case(71, 3, transport=transport), 0, place)
        crew.heard(0, "inside")
        at = time.monotonic()
        crew.signal(0, signal.SIGINT)
        results = crew.collect(30)
        assert results[0]["type"] == "KeyboardInterrupt", results[0]
        for r in results:
            assert r["at"] - at < NOTICED + r["starved"] and r["closing"] < CLOSED, r
            assert r["later"].get("is_peer"), r
        for r in results[1:]:
            assert r.get("is_peer") and r["peer"] == 0 and "rank 0" in r["message"], r
            assert "interrupted" in r["message"], r


@pytest.mark.parametrize("with_another", [False, True], ids=["alone", "beside_another"])
def test_interrupt_in_the_constructor(with_another: bool) -> None:
    """Ctrl-C on a rank that waits for the others' constructors: they hear its rank, at once, and what helps. Then it works."""
    with Crew(3) as crew:
        crew.start("failure_cases:interrupted_in_the_constructor", Case(72, 3), 0, with_another)
        crew.heard(0, "inside")
        crew.signal(0, signal.SIGINT)
        results = crew.collect(30)
        assert results[0]["type"] == "KeyboardInterrupt", results[0]
        for r in results[1:]:
            assert r.get("is_peer") and r["peer"] == 0 and r["seconds"] < NOTICED + r["starved"], r
            assert "rank 0 was interrupted in AllToAll()" in r["message"], r
        for r in results:
            assert r["again"].get("is_peer") and "call reset() of this Communicator" in r["again"]["message"], r


@pytest.mark.parametrize("transport", ["mapped", "relayed:tcp"])
@pytest.mark.parametrize("kind", ["release", "weights", "no_weights", "tail", "no_tail"])
def test_ranks_that_end_a_step_differently(transport: str, kind: str) -> None:
    with Crew(3) as crew:
        results = crew.run("failure_cases:mismatch", Case(81, 3, transport=transport), kind)
        for r in results:
            assert r.get("is_peer") and not r["is_timeout"], r
            assert r["closing"] < CLOSED, r
        word = kind.removeprefix("no_")
        assert any(word in r["message"] for r in results), results


@pytest.mark.parametrize("transport", [*TRANSPORTS, "mixed:shm", "relayed:tcp"])
def test_reset(transport: str, tmp_path: Path) -> None:
    """Two of four die, one after the other. The dead ranks' experts answer nothing; everything else is as before."""
    wire = "native" if transport == "mapped" else "mxfp8"
    case = Case(91, 4, transport=transport, num_experts=10, top_k=4, crowd="uneven", wire=wire, in_flight=2)
    with Crew(4) as crew:
        for r in reset_after_deaths(crew, [], case, tmp_path):
            assert max(r["noticed"]) < NOTICED and r["closing"] < CLOSED, r
        assert crew.leave() == [-9, 0, -9, 0]
        assert left_in_shm(crew) == []


def test_a_relay_of_more_sources(tmp_path: Path) -> None:
    """Rank 3 relays for rank 1; after the death of its mate, 2, for all ranks of other nodes. Ranks connect to their rails alone."""
    case = Case(95, 5, transport="relayed:tcp", num_experts=12, top_k=5, crowd="uneven", in_flight=2, max_tokens=16)
    with Crew(5) as crew:
        crew.start("failure_cases:reset_after", case, [2], [str(tmp_path / "died")])
        rails = [r["connected"] for r in crew.collect(60, [0, 1, 3, 4])]
        assert crew.leave() == [0, 0, -9, 0, 0]
        assert left_in_shm(crew) == []
    assert rails == [[[2, 4], [3, 4]], [[3, 4], [3, 4]], [[1, 4], [0, 1, 4]], [[0, 1, 2, 3], [0, 1, 3]]]


def test_reset_after_a_death_inside_of_shm(tmp_path: Path) -> None:
    """The dead hold a lock of the provider, so the survivors' proxies hang in it for ever: they are left behind, and leave no file."""
    version = str(_core.libfabric_status()["version"])
    if tuple(int(number) for number in version.split(".")[:2]) >= (1, 18):
        pytest.skip(f"shm of libfabric {version} has no such lock any more")
    paths = [str(tmp_path / f"died{i}") for i in range(2)]
    with Crew(4) as crew:
        crew.start(
            "failure_cases:reset_after", Case(92, 4, transport="proxy:shm", num_experts=10, top_k=4), [2, 0], paths, held_shm=True
        )
        for r in crew.collect(60, [1, 3]):
            assert r["closing"] < CLOSED, r
        assert crew.leave() == [-9, 0, -9, 0]
        for rank in (1, 3):
            assert crew.output(rank).count("was left behind") == 2, crew.output(rank)
        assert left_in_shm(crew) == []


@pytest.mark.parametrize("transport", [*TRANSPORTS, "mixed:shm", "relayed:tcp"])
def test_another_all_to_all_of_the_survivors(transport: str, tmp_path: Path) -> None:
    with Crew(3) as crew:
        case = Case(93, 3, transport=transport, num_experts=8, top_k=3)
        crew.start("failure_cases:anew_after_death", case, 1, str(tmp_path / "died"))
        crew.collect(60, [0, 2])
        assert crew.leave() == [0, -9, 0]


def test_another_all_to_all_of_one_node(tmp_path: Path) -> None:
    with Crew(4) as crew:
        crew.start("failure_cases:anew_on_one_node", Case(94, 4, transport="relayed:tcp"), [2, 3], str(tmp_path / "died"))
        crew.collect(60, [0, 1])
        assert crew.leave() == [0, 0, -9, -9]


@pytest.mark.parametrize("transport", ["mapped", "mixed:tcp"])
def test_reset_with_replicas(transport: str, tmp_path: Path) -> None:
    """A replica dies: those that are left of its group send its tokens too."""
    case = Case(93, 4, transport=transport, num_experts=10, top_k=4, crowd="uneven", replicas=2, in_flight=2, max_tokens=7)
    with Crew(4) as crew:
        for r in reset_after_deaths(crew, [], case, tmp_path):
            assert r["closing"] < CLOSED, r
        assert crew.leave() == [-9, 0, -9, 0]
        assert left_in_shm(crew) == []


@pytest.mark.parametrize("kind", ["ids", "tokens", "accumulate"])
def test_replicas_with_different_tokens(kind: str) -> None:
    with Crew(4) as crew:
        results = crew.run("failure_cases:replicas_apart", Case(94, 4, replicas=2, transport="mixed:shm"), kind)
        for r in results:
            assert r.get("is_peer") and not r["is_timeout"], r
            assert r["closing"] < CLOSED, r
        word = {"ids": "passed different topk_ids", "tokens": "rank 3 passed 7 ", "accumulate": "accumulate="}[kind]
        assert any(word in r["message"] for r in results), results


@pytest.mark.parametrize("transport", CARRIERS)
def test_reset_without_a_death(crew: Crews, transport: str) -> None:
    crew.run("failure_cases:reset_after_timeout", Case(95, 3, transport=transport))
