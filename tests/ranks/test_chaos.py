"""Invariants 2 and 4 (docs/design.md) on real ranks, real threads and real transports, under a fabric that misbehaves (PPLX_COMM_CHAOS).

What chaos is made of is in proxy/chaos.h; that it does what it says, and no more, is tests/cpp/test_chaos.cpp.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from cases import Case, random_case
from harness import Crew, seed

from pplx_comm.control import deadlines

KINDS = {"delayed", "shuffled", "split", "duplicated", "replayed", "refused"}
TRANSPORTS = ("proxy:shm", "proxy:tcp", "mixed:shm", "mixed:tcp", "relayed:tcp")
# Two endpoints and small shards, so that blocks have shards of their own, which chaos splits further.
HARD = "delay=0.3,delay_us=400,shuffle=0.7,split=0.5,duplicate=0.3,replay=0.2,again=0.3"
NOTICED = 10.0  # seconds from the first rank that raises until every rank has: one where cores are free
ENDED = 30.0  # the end of interpreters with torch in them, on a busy machine


def chaos(options: str, **more: str) -> dict[str, str]:
    return {"PPLX_COMM_CHAOS": f"seed={seed()},{options}", "PPLX_COMM_ENDPOINTS": "2", "PPLX_COMM_SHARD_BYTES": "300", **more}


@pytest.mark.parametrize("world_size", [2, 4])
def test_random_shapes(world_size: int) -> None:
    """The cases of test_invariants.py: every row once, bit for bit, and the same bits as without chaos."""
    begin = seed() * 100_000 + 200_000
    happened: Counter[str] = Counter()
    with Crew(world_size, chaos(HARD, PPLX_TEST_STEP_TIMEOUT="100")) as crew:
        for number in range(32 // world_size):
            case = random_case(begin + number, world_size, TRANSPORTS)
            for _, counts in crew.run("chaos_cases:exchange", case):
                happened += counts
            if number < 2:
                bits = {
                    tuple(crew.run("rank_cases:exchange", replace(case, transport=t))) for t in ("mapped", "proxy:shm", "proxy:tcp")
                }
                assert len(bits) == 1, case
    print(dict(happened))
    assert set(happened) == KINDS, happened
    assert min(happened.values()) >= 20, happened


@pytest.mark.long
def test_soak_of_relays() -> None:
    """Six minutes of random shapes, on four nodes of two and on two nodes to which ranks are dealt."""
    begin, number, end = seed() * 100_000 + 400_000, 0, time.monotonic() + 360
    with Crew(8, chaos(HARD, PPLX_TEST_STEP_TIMEOUT="100")) as crew:
        while time.monotonic() < end:
            crew.run("rank_cases:exchange", random_case(begin + number, 8, ("relayed:tcp", "relayed:shm", "relayed-dealt:tcp")))
            number += 1
    print(f"{number} cases from seed {begin} on")


@pytest.mark.parametrize(("transport", "in_flight"), [("proxy:shm", 4), ("proxy:tcp", 1)])
def test_many_steps(transport: str, in_flight: int) -> None:
    """More than the 32 steps that an immediate can tell apart, over the largest step number."""
    case = Case(
        seed() + in_flight, 3, max_tokens=3, hidden=32, transport=transport, in_flight=in_flight, first_step=2**32 - 150,
        crowd="uneven",
    )  # fmt: skip
    with Crew(3, chaos("delay=0.1,delay_us=100,duplicate=0.3,replay=0.3")) as crew:
        for counts in crew.run("chaos_cases:many_steps", case, 300, timeout=120):
            assert all(counts[kind] >= 100 for kind in KINDS), counts


def test_a_proxy_that_stands_still() -> None:
    """A proxy stands still for a second, in the middle of steps: they wait for it, and nothing is lost."""
    case = Case(seed(), 3, max_tokens=3, hidden=32, transport="proxy:tcp")
    with Crew(3, chaos("delay=0,stall=1@40,stall=2@200")) as crew:
        begun = time.monotonic()
        assert [counts["stalled"] for counts in crew.run("chaos_cases:many_steps", case, 200, timeout=60)] == [0, 1, 1]
        assert time.monotonic() - begun > 2.0


def test_several_all_to_alls() -> None:
    """Eight on one fabric, in steps that interleave; then eight others, which take their numbers."""
    begin = seed() * 100_000 + 295_000
    with Crew(3, chaos(HARD, PPLX_TEST_STEP_TIMEOUT="100")) as crew:  # nothing waits for it
        for turn in range(2):
            cases = [replace(random_case(begin + 8 * turn + i, 3, TRANSPORTS), in_flight=1, steps=2) for i in range(8)]
            crew.run("rank_cases:interleaved", cases)


@pytest.mark.parametrize(
    ("transport", "how"),
    [
        ("proxy:shm", "kill"),
        ("proxy:tcp", "kill"),
        ("relayed:tcp", "kill"),
        ("proxy:tcp", "mute"),
        ("mixed:tcp", "mute"),
        ("relayed:tcp", "mute"),
    ],
)
def test_cut_link(transport: str, how: str) -> None:
    """A link fails, or goes silent, while the control connections live: every rank names an end of it, in time."""
    timeout = 2.0
    case = Case(301, 4, transport=transport, max_tokens=16, hidden=256, crowd="uneven", in_flight=1)
    with Crew(4, chaos(f"delay=0.1,{how}=1-3@40")) as crew:
        results = crew.run("chaos_cases:until_failure", case, timeout, again=False)
        assert crew.leave(ENDED) == [0, 0, 0, 0]

    def fired(r: dict[str, Any]) -> int:
        return r["chaos"]["failed"] if how == "kill" else r["chaos"]["swallowed"] + r["chaos"]["lost"]

    inside = not transport.startswith("proxy")  # a node, where an abort is a word, without a text
    first = min(r["at"] for r in results)
    # A write that failed counts only after that grace.
    most = (deadlines.DEATH_GRACE if how == "kill" else timeout) + NOTICED
    for rank, r in enumerate(results):
        assert r.get("is_peer") and r["peer"] in (1, 3), r
        assert r["at"] - first < NOTICED + r["starved"] and r["closing"] < NOTICED, r
        assert r["waited"] < most + r["starved"], r
        if how == "kill":
            assert not r["is_timeout"] and f"rank {r['peer']}" in r["message"], r
            assert inside or " on " in r["message"], r  # the NIC
        else:
            assert r["is_timeout"] or "gave up" in r["message"], r
            assert inside or " over " in r["message"], r
        if rank in (0, 2):
            assert fired(r) == 0, r
    # On which side the cut is felt first is chance; the other hears of it.
    assert sum(map(fired, results)) > 0, results


@pytest.mark.parametrize("transport", ["proxy:shm", "proxy:tcp"])
def test_reset_after_a_cut(transport: str) -> None:
    """No rank died: all reset, and go on over fresh endpoints."""
    with Crew(3, chaos("delay=0.1,kill=0-2@60")) as crew:
        for r in crew.run("chaos_cases:until_failure", Case(302, 3, transport=transport, hidden=16), 10.0, again=True):
            assert r.get("is_peer") and r["peer"] in (0, 2), r
        assert crew.leave(ENDED) == [0, 0, 0]


def test_wrong_options() -> None:
    """One rank's mistake is told to all, in words that help."""
    with Crew(2, {"PPLX_COMM_CHAOS": "seed=1,dely=0.5"}) as crew:
        for r in crew.run("chaos_cases:refused", Case(1, 2, transport="proxy:tcp")):
            assert r.get("is_error"), r
            assert "PPLX_COMM_CHAOS" in r["message"] and "'dely=0.5'" in r["message"] and "delay_us" in r["message"], r
