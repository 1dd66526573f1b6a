"""dedup="node" by the emulated kernels: rows that cross the network once per node, and sums that relays add up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import Case
from emulation_cases import CHAOS, ON_X86_64, PARTS, case_of, module, numbers, run_refused
from failure_cases import LATE
from harness import Crew, Crews, seed
from open_step_cases import small_case
from relay_cases import damages
from test_dump import awaited, late_for, rows, shows_ranks_between_halves, started, when
from test_failure import left_in_shm, reset_after_deaths

pytestmark = ON_X86_64


@pytest.fixture(scope="module")
def four() -> Iterator[Crews]:
    with Crews(4, PARTS) as crews:
        yield crews


@pytest.mark.parametrize("transport", ["relayed:tcp", "relayed-dealt:shm"])
def test_random_shapes(four: Crews, transport: str) -> None:
    for number in numbers(5):
        four.run("emulated:call", module(), "rank_cases:exchange", case_of(70_000, number, 4, transport))


def test_sums_as_codes(four: Crews) -> None:
    """Rows have several strips, whose lanes have several vectors."""
    case = Case(seed(), 4, num_experts=8, top_k=3, hidden=1160, max_tokens=9, transport="relayed:tcp", combine_wire="fp8", steps=2)
    for dtype in ("bfloat16", "float32"):
        four.run("emulated:call", module(), "rank_cases:exchange", replace(case, dtype=dtype))
    for number in numbers(4):
        case = case_of(76_000, number, 4, ("relayed:tcp", "relayed-dealt:shm")[number % 2])
        four.run("emulated:call", module(), "rank_cases:exchange", replace(case, combine_wire="fp8", hidden=case.hidden + 264))


def test_slots_of_rails(four: Crews) -> None:
    """Relays and their sources have memory for each other, and no other ranks of two nodes."""
    for in_flight in (1, 2):
        case = Case(1, 4, num_experts=16, top_k=4, hidden=1024, max_tokens=64, in_flight=in_flight, transport="relayed:tcp")
        for taken, required in four.run("emulated:call", module(), "relay_cases:memory", case):
            assert taken == required, (in_flight, taken, required)


def test_an_old_graph(four: Crews) -> None:
    """Refused beside an open step, and after the reset, when the memory of its proxy is gone, it does nothing."""
    run_refused(four, "refused", small_case(seed(), 4, 1, transport="relayed:tcp"), "replay")


@pytest.mark.parametrize(("world", "transport"), [(5, "relayed:tcp"), (5, "relayed-alone:tcp"), (7, "relayed-dealt:tcp")])
def test_nodes_of_other_sizes(world: int, transport: str) -> None:
    """2, 2 and 1 ranks; 1, 2 and 2; 4 and 3."""
    with Crew(world) as crew:
        for number in numbers(2):
            crew.run("emulated:call", module(), "rank_cases:exchange", case_of(71_000, number, world, transport), timeout=100)


def test_replicas(tmp_path: Path) -> None:
    """Two groups on one node, one on another. Then ranks of two groups die, one of which relayed for the other node."""
    case = Case(
        seed(), 6, num_experts=11, top_k=4, max_tokens=48, crowd="uneven", in_flight=2, replicas=2, transport="relayed-dealt:tcp"
    )
    with Crew(6) as crew:
        for number in numbers(3):
            drawn = replace(case_of(77_000, number, 6, "relayed-dealt:tcp"), replicas=2)
            crew.run("emulated:call", module(), "rank_cases:exchange", drawn, timeout=100)
        reset_after_deaths(crew, ["emulated:call", module()], case, tmp_path)


def test_in_a_chaos() -> None:
    with Crew(4, {**PARTS, "PPLX_COMM_CHAOS": f"seed={seed()},{CHAOS}"}) as crew:
        for number in numbers(3):
            crew.run("emulated:call", module(), "rank_cases:exchange", case_of(72_000, number, 4, "relayed:tcp"))


def test_one_resident_thread_block_suffices() -> None:
    with Crew(4, {"PPLX_EMULATION_ROOM": "1", "PPLX_EMULATION_SMS": "5"}) as crew:
        for number in numbers(3):
            crew.run("emulated:call", module(), "rank_cases:exchange", case_of(73_000, number, 4, "relayed:tcp"))


def test_more_rows_than_a_warp_has_lanes(four: Crews) -> None:
    """Relays number rows in groups of 128. Tokens have several rows of each node, with tails, and weights of combine's own."""
    for layout in ("ragged", "compact"):
        case = Case(
            seed(),
            4,
            num_experts=16,
            top_k=8,
            hidden=512,
            max_tokens=150,
            layout=layout,
            transport="relayed:tcp",
            wire="fp8",
            steps=3,
        )
        four.run("emulated:call", module(), "rank_cases:exchange", case)


def test_hooks(four: Crews) -> None:
    for number in numbers(2):
        four.run("emulated:call", module(), "hook_cases:hooked", case_of(74_000, number, 4, "relayed:tcp"))


def test_steps_among_replays(four: Crews) -> None:
    case = small_case(seed(), 4, 1, transport="relayed:tcp")
    four.run("emulated:call", module(), "open_step_cases:interleaved", case, [0], 8, timeout=120)


def test_receive_halves_out_of_order(four: Crews) -> None:
    for first, second in four.run(
        "emulated:call", module(), "pieces_cases:out_of_order", Case(1, 4, transport="relayed:tcp", in_flight=2)
    ):
        assert "dispatch_recv: step 2 before step 1" in first and "dedup='node'" in first, first
        assert "combine_recv: step 2 before step 1" in second, second


def test_refusals(four: Crews) -> None:
    case = Case(seed(), 4, transport="relayed:tcp")
    four.run("emulated:call", module(), "relay_cases:refused", case)
    for said in four.run("emulated:call", module(), "gpu_cases:refused_apart", case, [(2, 3)]):
        assert "dedup='node'" in said and "rank 2" in said and "rank 3" in said, said


def test_blocks_in_gpu_memory() -> None:
    cases = [case_of(75_000, number, 4, "relayed-copy") for number in numbers(3)]
    with Crew(1) as crew:
        crew.run("emulated:call", module(), "placement_cases:random_shapes", cases, timeout=200)


def test_reset(tmp_path: Path) -> None:
    """Rank 2 dies, which relays for rank 0, then rank 0."""
    case = Case(seed(), 5, num_experts=11, top_k=4, crowd="uneven", in_flight=2, transport="relayed:tcp")
    with Crew(5) as crew:
        reset_after_deaths(crew, ["emulated:call", module()], case, tmp_path)
        assert left_in_shm(crew) == []


def test_another_all_to_all_of_one_node(tmp_path: Path) -> None:
    case = Case(seed(), 4, transport="relayed:tcp")
    with Crew(4) as crew:
        crew.start("emulated:call", module(), "failure_cases:anew_on_one_node", case, [2, 3], str(tmp_path / "died"))
        crew.collect(120, [0, 1])
        crew.leave()


def test_damaged_node_blocks() -> None:
    case = Case(seed(), 4, num_experts=8, top_k=2, hidden=64, max_tokens=3, transport="relayed:tcp")
    with Crew(4) as crew:
        told: list[dict[str, Any]] = crew.run("emulated:call", module(), "relay_cases:damaged", case, timeout=100)
    for name in damages(case):
        for r in told:
            assert r[name].get("is_peer") and not r[name]["is_timeout"] and r[name]["peer"] == 0, (name, r[name])


def check_blame(world: int, transport: str, incidents: Sequence[tuple[int, str]]) -> None:
    """Every rank names the one that is late or stands still, whatever waits for it in turn."""
    with Crew(world) as crew:
        case = Case(54, world, transport=transport, steps=6, num_experts=8, top_k=4)
        results = crew.run("emulated:call", module(), "failure_cases:late_behind_relays", case, incidents, timeout=120)
    for number, (culprit, place) in enumerate(incidents):
        for r in results:
            assert r[number].get("is_peer") and r[number]["peer"] == culprit, (place, r[number])


def test_blame() -> None:
    check_blame(4, "relayed:tcp", LATE)


@pytest.mark.parametrize("transport", ["mixed:tcp", "relayed:tcp"])
def test_dump(transport: str) -> None:
    """Words in the memory of the GPU and of the proxy tell for which rank kernels wait."""
    with Crew(4) as crew:
        crew.start("emulated:call", module(), "dump_cases:hangs", Case(16, 4, transport=transport, max_tokens=8), 2, None)
        pids, job = started(crew)
        said = when(rows(pids, awaited(transport), " for [0-9.]+ m?s"), "--job", job)
        assert f"{late_for(transport)}, which waits for none: it is in no step" in said, said
        crew.tell(2)
        crew.collect()


@pytest.mark.parametrize("transport", ["mapped", "mixed:tcp"])
def test_dump_between_halves(transport: str) -> None:
    with Crew(3) as crew:
        shows_ranks_between_halves(crew, ["emulated:call", module()], Case(23, 3, transport=transport, max_tokens=8))


def test_blame_of_a_rank_that_relays_for_nobody() -> None:
    """Rank 0 waits for rank 1 alone, which waits for rank 2."""
    check_blame(3, "relayed-alone:tcp", [(2, "combine_send")])
