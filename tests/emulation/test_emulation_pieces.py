"""The emulated kernels with blocks in pieces, over every carrier."""

from __future__ import annotations

import functools
import random
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from cases import Case
from emulation_cases import CHAOS, ON_X86_64, module, numbers, piece_case
from harness import Crew, allowed, seed
from open_step_cases import small_case
from test_failure import check_survivors, reset_after_deaths

pytestmark = [ON_X86_64, pytest.mark.slow]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_pieces(world: int) -> None:
    with Crew(world) as crew:
        for number in numbers(8):
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", piece_case(number, world), timeout=120)


@pytest.mark.parametrize(
    ("world", "transport"), [(2, "proxy:tcp"), (3, "proxy:tcp"), (4, "mixed:tcp"), (4, "dealt:tcp"), (2, "proxy:shm")]
)
def test_pieces_between_nodes(world: int, transport: str) -> None:
    """Nodes of one rank, and of two: rounds of mapped and of remote peers pass each other."""
    with Crew(world) as crew:
        for number in numbers(4):
            case = replace(piece_case(300 + number, world), transport=transport)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=120)


@pytest.mark.parametrize(
    ("world", "transport", "near"),
    [
        (2, "nvshmem", "none"),
        (2, "nvshmem", "all"),
        (3, "nvshmem", "none"),
        (4, "nvshmem", "odd"),
        (4, "nvshmem-mixed", "none"),
        (4, "nvshmem", "one way"),
    ],
)
def test_pieces_by_kernels(world: int, transport: str, near: str) -> None:
    """Peers that are put to, mapped ones, and both in one job."""
    with Crew(world, {"PPLX_EMULATION_NEAR": near}) as crew:
        for number in numbers(4):
            case = replace(piece_case(350 + number, world), transport=transport)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=120)


@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_the_bits_of_mapped_memory_in_pieces(layout: str) -> None:
    wire = {"ragged": "fp8", "padded": "native", "compact": "mxfp8"}[layout]
    case = Case(seed(), 3, num_experts=9, top_k=3, hidden=96, max_tokens=40, wire=wire, layout=layout, transport="nvshmem")
    with Crew(3, {"PPLX_EMULATION_NEAR": "none"}) as crew:
        crew.run("emulated:in_pieces", module(), 4, "nvshmem_cases:against_mapped", case, 6, timeout=120)


def test_several_all_to_alls_in_pieces() -> None:
    """Several AllToAlls of one Communicator, in steps that interleave, over every carrier."""
    transports = ["nvshmem", "nvshmem-mixed", "nvshmem", "mapped", "proxy:tcp"]
    with Crew(3) as crew:
        cases = [replace(piece_case(370 + i, 3), in_flight=1, steps=4, transport=t) for i, t in enumerate(transports)]
        crew.run("emulated:all_in_pieces", module(), 4, "rank_cases:interleaved", cases, timeout=120)


@pytest.mark.parametrize("near", ["none", "odd"])
@pytest.mark.parametrize("late", [301, 330, 364])
def test_a_piece_that_lands_after_its_generation(near: str, late: int) -> None:
    """A piece, or a credit, comes later than the reset: it must not count in the new generation."""
    case = Case(seed(), 3, num_experts=9, top_k=3, hidden=64, max_tokens=30, in_flight=2, crowd="full", transport="nvshmem")
    timeout = allowed(3.0)
    with Crew(3, {"PPLX_EMULATION_NEAR": near, "PPLX_EMULATION_LATE": f"{2250 * timeout:.0f}@{late}"}) as crew:
        for r in crew.run("emulated:in_pieces", module(), 4, "chaos_cases:until_failure", case, timeout, again=True):
            assert r.get("is_peer") and r["is_timeout"], r


@pytest.mark.parametrize("context", [0, 1], ids=["dispatch", "combine"])
def test_a_piece_that_is_not_the_next(context: int) -> None:
    """A signal counts one too many: what lies there is an earlier piece of the same step, whose number says so."""
    case = Case(seed(), 2, num_experts=4, top_k=2, hidden=64, max_tokens=60, crowd="full", steps=3, transport="nvshmem")
    with Crew(2, {"PPLX_EMULATION_TWICE": f"{context}@18"}) as crew:
        results = crew.run("emulated:in_pieces", module(), 4, "chaos_cases:until_failure", case, 5.0, again=False, timeout=60)
    assert all(r.get("is_peer") and not r["is_timeout"] for r in results), results
    assert any("received an invalid message" in r["message"] for r in results), results


@pytest.mark.parametrize(("world", "transport"), [(3, "proxy:tcp"), (4, "mixed:tcp")])
def test_pieces_in_a_chaos(world: int, transport: str) -> None:
    with Crew(world, {"PPLX_COMM_CHAOS": f"seed={seed()},{CHAOS}"}) as crew:
        for number in numbers(4):
            case = replace(piece_case(400 + number, world), transport=transport)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=120)


def test_pieces_that_leave_late() -> None:
    """A peer has read a piece, and given its credit, before the network says that it has left."""
    with Crew(2, {"PPLX_COMM_CHAOS": f"seed={seed()},delay=0.1,delay_us=1000000"}) as crew:
        case = Case(seed(), 2, num_experts=4, top_k=2, hidden=32, max_tokens=30, transport="proxy:tcp", steps=3)
        crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=120)


def test_pieces_in_gpu_memory() -> None:
    """Threads of one process, whose blocks a copy engine carries."""
    cases = [replace(piece_case(500 + number, 2), transport="copy") for number in numbers(4)]
    with Crew(1) as crew:
        crew.run("emulated:all_in_pieces", module(), 4, "placement_cases:random_shapes", cases, "", timeout=200)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("room", [1, 2])
def test_pieces_with_one_resident_thread_block(room: int, transport: str) -> None:
    """One block claims the rounds in their order, also those meant for others."""
    with Crew(2, {"PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "5"}) as crew:
        for number in numbers(3):
            case = replace(piece_case(100 + number, 2), transport=transport)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=120)


@pytest.mark.parametrize("layout", ["ragged", "compact"])
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "mixed:tcp", "nvshmem"])
def test_pieces_of_ranks_with_few(transport: str, layout: str) -> None:
    """Those have one round, or no rows, beside the rounds of others; steps of few alone come in between."""
    with Crew(3) as crew:
        for number, whole in {"ragged": [(200, 16), (201, 24)], "compact": [(202, 16), (203, 16), (204, 16)]}[layout]:
            case = replace(piece_case(number, 3), max_tokens=60, crowd="uneven", num_experts=6, routing="uniform", steps=6)
            case = replace(case, transport=transport, layout=layout, hidden=2048 if layout == "compact" else case.hidden)
            crew.run("emulated:in_pieces", module(), whole, "rank_cases:exchange", case, timeout=120)


@pytest.mark.parametrize(
    ("transport", "room", "share"), [("mapped", 7, 50), ("mapped", 1, 100), ("mixed:tcp", 3, 100), ("nvshmem", 7, 1)]
)
def test_pieces_of_several_chunks(transport: str, room: int, share: int) -> None:
    """Several thread blocks plan and send a round together: of seven, of which `room` run at a time and `share` percent send."""
    env = {"PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7", "PPLX_COMM_SENDING_SHARE": str(share)}
    with Crew(3, env) as crew:
        for number in numbers(3):
            case = replace(piece_case(800 + number, 3), max_tokens=170, crowd="uneven", routing="uniform", transport=transport)
            crew.run("emulated:in_pieces", module(), 64, "rank_cases:exchange", case, timeout=120)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_pieces_and_whole_steps_in_turn(layout: str, transport: str) -> None:
    """As on the CPU device, in the same memory."""
    with Crew(2) as crew:
        case = Case(seed(), 2, num_experts=8, top_k=3, hidden=144, max_tokens=80, wire="fp8", layout=layout, align=4)
        case = replace(case, transport=transport)
        tokens_of = [80, 3, 3, 41, 16, 17, 1, 1, *[40, 5] * 3]
        crew.run(
            "emulated:in_pieces", module(), 16, "gpu_cases:both_devices", case, len(tokens_of), tokens_of=tokens_of, timeout=120
        )


@pytest.mark.parametrize("room", [7, 1])
@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_pieces_of_few_beside_many(layout: str, room: int) -> None:
    """Each rank has few tokens in one step and many in the next, beside ranks that have many and few. Tails in every other step."""
    env = {"PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7"}
    with Crew(3, env) as crew:
        case = Case(seed(), 3, num_experts=7, top_k=3, hidden=144, max_tokens=80, wire="fp8", layout=layout, align=4)
        tokens_of = [80, 3, 0, 41, 16, 3, 17, *[40, 5] * 3]
        crew.run(
            "emulated:in_pieces",
            module(),
            16,
            "gpu_cases:both_devices",
            case,
            len(tokens_of),
            tokens_of=tokens_of,
            ahead=1,
            timeout=120,
        )


@pytest.mark.parametrize("crowd", ["full", "uneven"])
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
def test_pieces_among_replays(transport: str, crowd: str) -> None:
    """With one step open: those draw their order for each of several. uneven: graphs of few tokens on every other rank."""
    with Crew(2) as crew:
        case = replace(small_case(seed(), 2, 1), max_tokens=20, transport=transport, crowd=crowd)
        crew.run("emulated:in_pieces", module(), 4, "open_step_cases:interleaved", case, list(range(3)), 8, timeout=120)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("through", ["recipe", "autograd"])
def test_gradients_in_pieces(through: str, transport: str) -> None:
    """A step and its backward pass, of ranks with many tokens, none and half of them. To the last bit as in whole blocks."""
    with Crew(3) as crew:
        for layout in ("ragged", "padded", "compact"):
            case = Case(
                seed(), 3, num_experts=7, top_k=4, hidden=64, max_tokens=41, dtype="float32", layout=layout, align=4,
                transport=transport,
            )  # fmt: skip
            run = functools.partial(crew.run, "emulated:in_pieces", module(), 4, "training_cases:gradients_in_pieces", case)
            for errors in run(through, timeout=120):
                assert all(error < 2e-6 for error in errors.values()), (layout, errors)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
def test_pieces_in_order(transport: str) -> None:
    with Crew(2) as crew:
        case = Case(1, 2, max_tokens=30, in_flight=2, transport=transport)
        for first, second in crew.run("emulated:in_pieces", module(), 4, "pieces_cases:out_of_order", case):
            assert "dispatch_recv: step 2 before step 1" in first and "received in order" in first, first
            assert "combine_recv: step 2 before step 1" in second and "slot_bytes" in second, second


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("phase", ["dispatch_recv", "combine_recv"])
def test_a_rank_that_does_not_come_for_its_pieces(phase: str, transport: str) -> None:
    """The waiting rank names the peer, the place, and the piece that it waits for; then both reset and go on. Where the
    machine holds the receive half up, the send half gives up first: it waits for the peer to read."""
    case = Case(2, 2, max_tokens=30, num_experts=2, transport=transport)
    with Crew(2, {"PPLX_TEST_STEP_TIMEOUT": "5"}) as crew:
        _, r = crew.run("emulated:in_pieces", module(), 4, "pieces_cases:does_not_come", case, phase)
        half = phase.split("_")[0]
        asked = {
            phase: f"waited for (piece [2-9]) of the {half} block of rank 0",
            f"{half}_send": f"waited for rank 0 to read (piece [2-9]) of the {half} block",
        }
        assert r["type"] == "StepTimeout" and r["peer"] == 0 and r["phase"] in asked, r
        found = re.search(asked[r["phase"]], r["message"])
        assert found and r["expected"] == found[1], (r["message"], r)


@pytest.mark.parametrize("half", ["dispatch", "combine"])
@pytest.mark.parametrize("how", ["kill", "mute"])
def test_a_cut_link_between_pieces(how: str, half: str) -> None:
    """The link breaks in the middle of a dispatch or a combine, whose rows are all for the last rank, or from it: pieces go one way and
    credits the other."""
    timeout = 10.0 if how == "kill" else 4.0
    case = Case(
        seed(), 3, transport="proxy:tcp", num_experts=3, max_tokens=40, hidden=64, routing="to_one", crowd="full", dtype="float32"
    )
    with Crew(3) as crew:
        writes = set(crew.run("emulated:in_pieces", module(), 4, "pieces_cases:writes_of_a_dispatch", case))
    assert len(writes) == 1, writes  # to two peers; a combine takes the same number
    of_half = writes.pop() // 2
    after = random.Random(f"cut {seed()} {how} {half}").randint(2, of_half - 4) + (of_half if half == "combine" else 0)
    print(f"{how}=0-2@{after} of {2 * of_half}")
    with Crew(3, {"PPLX_COMM_CHAOS": f"seed={seed()},delay=0.1,{how}=0-2@{after}"}) as crew:
        results = crew.run("emulated:in_pieces", module(), 4, "pieces_cases:until_cut", case, timeout)
    for r in results:
        assert r.get("is_peer") and r["peer"] in (0, 2), r
        assert r["closing"] < 5, r
        assert (" on " if how == "kill" else " over ") in r["message"], r
        # A first step has three times the timeout.
        assert r["seconds"] < (timeout if how == "kill" else 3 * timeout + 10) + r["starved"], r
        assert not r["is_timeout"] if how == "kill" else r["is_timeout"] or "gave up" in r["message"], r
    assert [results[rank]["half"] for rank in (0, 2)] == [f"{half} 0"] * 2, results
    assert results[1]["chaos"]["failed"] + results[1]["chaos"]["swallowed"] + results[1]["chaos"]["lost"] == 0, results


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("place", ["in_dispatch_recv", "amid_dispatch_recv", "in_combine_recv", "amid_combine_recv"])
def test_death_in_a_receive_half(place: str, transport: str, tmp_path: Path) -> None:
    """in: while it waits for a peer's first piece. amid: for later ones, which wait for a rank that reads nothing."""
    case = Case(21, 3, transport=transport, max_tokens=40, hidden=64, crowd="full")
    with Crew(3, {"PPLX_TEST_STEP_TIMEOUT": "30"}) as crew:
        crew.start("emulated:in_pieces", module(), 4, "failure_cases:survive", case, 1, place, str(tmp_path / "died"))
        check_survivors(crew.collect(60, [0, 2]), 1, float((tmp_path / "died").read_text()))
        assert crew.leave() == [0, -signal.SIGKILL, 0]


@pytest.mark.parametrize(
    ("transport", "near"),
    [("mapped", ""), ("proxy:tcp", ""), ("mixed:tcp", ""), ("nvshmem", "none"), ("nvshmem", "odd"), ("nvshmem-mixed", "none")],
)
def test_pieces_after_a_reset(tmp_path: Path, transport: str, near: str) -> None:
    case = Case(seed(), 4, num_experts=10, top_k=4, max_tokens=24, crowd="uneven", in_flight=2, transport=transport)
    with Crew(4, {"PPLX_EMULATION_NEAR": near} if near else {}) as crew:
        reset_after_deaths(crew, ["emulated:in_pieces", module(), 4], case, tmp_path)
