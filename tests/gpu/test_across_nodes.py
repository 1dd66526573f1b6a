"""device="cuda" where peers are reached through the proxy: on one host, over shm and tcp, with the same cases as inside a node.

Ranks have a GPU each if there are enough, else they share one. "mixed": two ranks a node, so a step uses NVLink and the proxy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases import WIRES, Case, random_case
from gpus import AT_ONCE, GPUS
from harness import Crew, Crews, seed
from test_failure import CLOSED, NOTICED, left_in_shm, reset_after_deaths

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU"), pytest.mark.timeout(300)]

RANKS = 4 if AT_ONCE >= 4 else 2
CARRIERS = ["proxy:shm", "proxy:tcp", *(["mixed:tcp", "dealt:tcp"] if RANKS == 4 else [])]
RELAYED = ["relayed:tcp", "relayed-dealt:shm"] if RANKS == 4 else []
CHAOS = {
    "PPLX_COMM_CHAOS": f"seed={seed()},delay=0.3,delay_us=400,shuffle=0.7,split=0.5,duplicate=0.3,replay=0.2,again=0.3",
    "PPLX_COMM_ENDPOINTS": "2",
    "PPLX_COMM_SHARD_BYTES": "300",
    "PPLX_COMM_PART_BYTES": "300",
}


@pytest.fixture(scope="module")
def crew() -> Iterator[Crews]:
    with Crews(RANKS, {"PPLX_COMM_PART_BYTES": "2000"}) as crews:  # small steps' blocks go in parts, too
        yield crews


@pytest.fixture(scope="module")
def unruly() -> Iterator[Crews]:
    with Crews(RANKS, CHAOS) as crews:
        yield crews


def small(transport: str, **changes: object) -> Case:
    case = Case(seed(), RANKS, num_experts=16, top_k=4, hidden=512, max_tokens=32, transport=transport)
    return replace(case, **changes)  # type: ignore[arg-type]


def drawn(number: int, transport: str) -> Case:
    return random_case(seed() * 100_000 + number, RANKS, (transport,))


@pytest.mark.parametrize("transport", [*CARRIERS, *RELAYED])
def test_random_shapes(crew: Crews, transport: str) -> None:
    for number in range(20):
        case = drawn(60_000 + number, transport)
        if transport in RELAYED and number % 4 == 3:
            case = replace(case, combine_wire="fp8", hidden=case.hidden + 264)
        crew.run("gpu_cases:exchange", case)


@pytest.mark.parametrize("transport", [*CARRIERS, *RELAYED])
def test_random_shapes_in_a_chaos(unruly: Crews, transport: str) -> None:
    for number in range(10):
        unruly.run("gpu_cases:exchange", drawn(70_000 + number, transport), timeout=120)


@pytest.mark.parametrize(("wire", "transport"), [(wire, CARRIERS[n % len(CARRIERS)]) for n, wire in enumerate(WIRES)])
def test_full_shape_as_on_the_cpu(crew: Crews, wire: str, transport: str) -> None:
    case = small(transport, num_experts=64, top_k=8, hidden=7168, max_tokens=64, wire=wire, align=128, threads=4)
    crew.run("gpu_cases:both_devices", case, 2, timeout=200)


@pytest.mark.parametrize("transport", [*CARRIERS, *RELAYED])
def test_soak(crew: Crews, transport: str) -> None:
    case = small(transport, first_step=2**32 - 500)
    assert crew.run("gpu_cases:soak", case, 1000, timeout=200) == [0] * RANKS
    assert crew.run("gpu_cases:soak", replace(case, max_tokens=1, hidden=7168), 300, timeout=200) == [0] * RANKS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_six_minutes(crew: Crews) -> None:
    """python -m pytest tests/gpu/test_across_nodes.py -m slow -s: random sizes and routing; says how many steps and bytes."""
    results = crew.run("gpu_cases:soak_for", small(""), CARRIERS, 360.0, timeout=550)
    print(f"{results[0]['steps']} steps of {RANKS} ranks over {CARRIERS}, {sum(r['bytes'] for r in results)} bytes by proxy")
    assert [r["wrong"] for r in results] == [0] * RANKS


@pytest.mark.parametrize("transport", CARRIERS)
def test_soak_in_a_chaos(unruly: Crews, transport: str) -> None:
    assert unruly.run("gpu_cases:soak", small(transport, wire="fp8"), 150, timeout=200) == [0] * RANKS


@pytest.mark.parametrize("transport", [*CARRIERS, *RELAYED])
def test_graph_replay(crew: Crews, transport: str) -> None:
    """No host call of ours: the proxy follows the mailbox."""
    case = small(transport, wire="fp8", align=8)
    assert crew.run("gpu_cases:replay", case, 300, timeout=200) == [0] * RANKS


@pytest.mark.parametrize("transport", CARRIERS)
def test_streams(crew: Crews, transport: str) -> None:
    crew.run("gpu_cases:streams", small(transport), 40, timeout=120)
    crew.run("gpu_cases:streams", small(transport, in_flight=2), 40, timeout=120)


@pytest.mark.parametrize("transport", [*CARRIERS[1:], *RELAYED])
def test_a_silent_rank(transport: str) -> None:
    with Crew(RANKS) as crew:
        found = crew.run("gpu_cases:lost_peer", small(transport), 0.5, timeout=100)
        assert found == [RANKS - 1] * (RANKS - 1) + ["silent"]


# libfabric 1.17's shm may hang a survivor's poll when a busy peer is killed.
@pytest.mark.parametrize("transport", [carrier for carrier in CARRIERS if not carrier.endswith("shm")])
@pytest.mark.alone
def test_killed(transport: str) -> None:
    ranks = max(RANKS, 3)
    case = Case(seed(), ranks, num_experts=3 * ranks + 1, top_k=3, hidden=256, max_tokens=32, transport=transport)
    with Crew(ranks) as crew:
        crew.start("gpu_cases:killed", case, 1)
        crew.heard(1, "dying")
        died = crew.kill(1)
        for peer, at in crew.collect(100, [rank for rank in range(ranks) if rank != 1]):
            assert peer == 1 and at - died < NOTICED, (peer, at - died)
        crew.leave()
        assert left_in_shm(crew) == []


@pytest.mark.parametrize("transport", [carrier for carrier in [*CARRIERS, *RELAYED] if not carrier.endswith("shm")])
@pytest.mark.alone
def test_reset(transport: str, tmp_path: Path) -> None:
    case = Case(seed(), 4, num_experts=10, top_k=4, crowd="uneven", in_flight=2, transport=transport)
    with Crew(4) as crew:
        for r in reset_after_deaths(crew, ["gpu_cases:on_gpu"], case, tmp_path):
            assert max(r["noticed"]) < NOTICED and r["closing"] < CLOSED, r
        assert left_in_shm(crew) == []


@pytest.mark.parametrize(("how", "transport"), [("kill", "proxy:tcp"), ("mute", "proxy:shm"), ("mute", CARRIERS[-1])])
def test_cut_link(transport: str, how: str) -> None:
    """A write fails, or is never heard of again: every rank names an end of the link in time, and all go on after reset()."""
    a, b = (1, 2) if RANKS == 4 else (0, 1)  # On two nodes, dealt in turn or not.
    case = small(transport, max_tokens=16, hidden=256, in_flight=1)
    with Crew(RANKS, {"PPLX_COMM_CHAOS": f"seed={seed()},delay=0.1,{how}={a}-{b}@40"}) as crew:
        results = crew.run("gpu_cases:on_gpu", "chaos_cases:until_failure", case, 3.0, again=True, timeout=100)
        for r in results:
            assert r.get("is_peer") and r["peer"] in (a, b) and r["closing"] < CLOSED, r
            assert r["waited"] < (2.0 if how == "kill" else 5.0), r
            assert not transport.startswith("proxy") or (" on " if how == "kill" else " over ") in r["message"], r


@pytest.mark.skipif(GPUS < AT_ONCE < 4, reason="four ranks, and parts of a GPU for fewer: mps.py 4, or two GPUs")
def test_gpus_that_do_not_reach_each_other() -> None:
    """They are remote to each other, also where only one of the two cannot; the others of the node map each other's memory."""
    with Crew(4) as crew:
        for number in range(3):
            case = random_case(seed() * 100_000 + 40_000 + number, 4, ("auto:tcp",))
            remote = crew.run("gpu_cases:exchange_apart", replace(case, replicas=1), [(0, 2), (3, 1), (1, 3)], timeout=100)
            assert remote == [[2], [3], [0], [1]]
        # Relays were not insisted on: none where GPUs of a node do not reach each other.
        undecided = random_case(seed() * 100_000 + 40_003, 4, ("undecided:tcp",))
        case = replace(undecided, replicas=1, in_flight=1)
        assert crew.run("gpu_cases:exchange_apart", case, [(0, 1)], timeout=100) == [[1, 2, 3], [0, 2, 3], [0, 1], [0, 1]]
        assert crew.run("gpu_cases:on_gpu", "rank_cases:goes_by_node", case, timeout=100) == [True] * 4
        told = crew.run("gpu_cases:refused_apart", Case(seed(), 4), [(0, 2)])
        assert all("transport='mapped'" in text and "rank 0" in text and "rank 2" in text and "'auto'" in text for text in told), (
            told
        )
        told = crew.run("gpu_cases:refused_apart", Case(seed(), 4, transport="auto:tcp", replicas=2), [(2, 3)])
        assert all("replicas=2" in text and "a test says so" in text for text in told), told


def test_a_proxy_that_stands_still() -> None:
    """A proxy stands still for a second, in the middle of steps: they wait for it, and nothing is lost."""
    with Crew(RANKS, {"PPLX_COMM_CHAOS": f"seed={seed()},stall=1@60,stall=0@200"}) as crew:
        assert crew.run("gpu_cases:soak", small("proxy:tcp"), 300, timeout=100) == [0] * RANKS


def test_a_proxy_that_stands_still_for_too_long() -> None:
    """A step that has less patience names a rank and what leads there, and all go on after reset(). Either side waits for the other."""
    with Crew(RANKS, {"PPLX_COMM_CHAOS": f"seed={seed()},stall=1@60"}) as crew:
        results = crew.run("gpu_cases:on_gpu", "chaos_cases:until_failure", small("proxy:tcp"), 0.4, again=True, timeout=100)
        for r in results:
            assert r.get("is_peer") and r["closing"] < CLOSED, r
            assert r["is_timeout"] and " over " in r["message"], r


def test_leaving_after_the_last_step_is_no_failure() -> None:
    with Crew(RANKS) as crew:
        case = Case(seed(), RANKS, max_tokens=32, hidden=1024, transport="proxy:tcp")
        crew.run("gpu_cases:on_gpu", "failure_cases:leave_at_once", case, 12, timeout=200)


@pytest.mark.parametrize("kind", ["release", "no_tail"])
def test_ranks_that_end_a_step_differently(kind: str) -> None:
    with Crew(RANKS) as crew:
        results = crew.run(
            "gpu_cases:on_gpu", "failure_cases:mismatch", Case(seed(), RANKS, transport="proxy:tcp"), kind, timeout=120
        )
        for r in results:
            assert r.get("is_peer") and r["closing"] < CLOSED, r
