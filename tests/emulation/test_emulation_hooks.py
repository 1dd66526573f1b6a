"""Hooks: threads beside the emulated kernels look at their words. Whole blocks, and blocks in pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import Case
from emulation_cases import CHAOS, LARGE, ON_X86_64, case_of, module, numbers, piece_case
from harness import Crew, Crews, seed
from open_step_cases import small_case

pytestmark = [ON_X86_64, pytest.mark.slow]


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "mixed:tcp", "nvshmem", "nvshmem-mixed"])
def test_hooks(crew: Crews, transport: str) -> None:
    for number in numbers(8):
        crew.run("emulated:call", module(), "hook_cases:hooked", case_of(40_000, number, crew.world_size, transport))


@pytest.mark.parametrize("least", [1, 4])
def test_hooks_of_large_steps(least: int) -> None:
    with Crew(2, {"PPLX_COMM_LARGE_TOKENS": str(least)}) as crew:
        for number in numbers(8):
            crew.run("emulated:call", module(), "hook_cases:hooked", case_of(41_000 + 1000 * least, number, 2, "mapped"))


@pytest.mark.parametrize(("wire", "hidden", "tokens"), [("native", 8192, 30), ("mxfp8", 64, 300)])
def test_hooks_of_long_rows_and_many(wire: str, hidden: int, tokens: int) -> None:
    case = Case(seed(), 2, num_experts=10, top_k=3, hidden=hidden, max_tokens=tokens, wire=wire, steps=3)
    with Crew(2, LARGE) as crew:
        crew.run("emulated:call", module(), "hook_cases:hooked", case, timeout=200)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("align", "zero_pad"), [(1, True), (48, True), (128, False), (256, True)])
def test_hooks_of_alignments(align: int, zero_pad: bool, large: bool) -> None:
    case = Case(seed(), 2, num_experts=6, top_k=2, hidden=32, max_tokens=150, align=align, zero_pad=zero_pad)
    with Crew(2, LARGE if large else {}) as crew:
        crew.run("emulated:call", module(), "hook_cases:hooked", case, timeout=120)
        assert crew.run("emulated:call", module(), "hook_cases:plain", case) == crew.run("hook_cases:plain", case)


@pytest.mark.parametrize("large", [False, True])
def test_hooks_with_one_resident_thread_block(large: bool) -> None:
    with Crew(2, {**(LARGE if large else {}), "PPLX_EMULATION_ROOM": "1", "PPLX_EMULATION_SMS": "7"}) as crew:
        for number in numbers(4):
            crew.run("emulated:call", module(), "hook_cases:hooked", case_of(43_000, number, 2, "mapped"))


def test_hooks_of_an_output_that_is_too_small() -> None:
    with Crew(2) as crew:
        for layout, rows in (("ragged", 200), ("padded", 20)):
            case = Case(seed(), 2, num_experts=4, top_k=2, hidden=16, max_tokens=150, layout=layout, rows=rows)
            crew.run("emulated:call", module(), "hook_cases:overflowing", case)


@pytest.mark.parametrize("how", ["whole", "receives first"])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_groups(crew: Crews, layout: str, how: str) -> None:
    case = replace(case_of(44_000, 0, crew.world_size, "mapped"), layout=layout, in_flight=1, max_tokens=20)
    plain = crew.run("hook_cases:plain", case)
    for parts in (1, 3):
        assert crew.run("emulated:call", module(), "hook_cases:groups", case, parts, how) == plain


def test_no_consumer_spins_for_ever() -> None:
    with Crew(3) as crew:
        crew.start("emulated:call", module(), "hook_cases:rank_1_stays_away", Case(seed(), 3), 1.0)
        said = crew.collect(60, [0, 2])
        crew.tell(1)
        crew.collect(60, [1])
    assert all(s["raised"] and s["type"] == "StepTimeout" and s["peer"] == 1 for s in said), said


def test_mistakes_with_hooks(crew: Crews) -> None:
    case = Case(seed(), crew.world_size, num_experts=2 * crew.world_size)
    for said in crew.run("emulated:call", module(), "hook_cases:mistakes", case):
        assert len(said) == 6 and "nothing" not in said, said


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_hooks_in_a_graph(in_flight: int, large: bool) -> None:
    case = small_case(seed(), 2, in_flight, layout="padded")
    with Crew(2, LARGE if large else {}) as crew:
        crew.run("emulated:call", module(), "hook_cases:replayed", case, 2, 10, timeout=120)


# ---- of blocks in pieces


@pytest.mark.parametrize(
    ("world", "transport"),
    [
        (1, "mapped"),
        (2, "mapped"),
        (4, "mapped"),
        (2, "proxy:tcp"),
        (3, "proxy:tcp"),
        (4, "mixed:tcp"),
        (2, "nvshmem"),
        (3, "nvshmem"),
    ],
)
def test_hooks_of_pieces(world: int, transport: str) -> None:
    """Ranks with few tokens, and with many."""
    with Crew(world) as crew:
        for number in numbers(5):
            case = replace(piece_case(600 + number, world), transport=transport)
            crew.run("emulated:in_pieces", module(), 4, "hook_cases:hooked", case, timeout=120)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "mixed:tcp", "nvshmem"])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_hooks_of_pieces_of_many_blocks(layout: str, transport: str) -> None:
    """Rounds whose rows lie in several blocks of the output, of ranks with few tokens and with many. Rows of two parts."""
    with Crew(3) as crew:
        for number, whole in enumerate((12, 24)):
            case = Case(
                seed() + number, 3, num_experts=9, top_k=4, hidden=[1040, 144][number], max_tokens=90, layout=layout, steps=4,
                crowd="uneven", wire=["native", "fp8"][number], align=32, zero_pad=True, transport=transport,
            )  # fmt: skip
            crew.run("emulated:in_pieces", module(), whole, "hook_cases:hooked", case, timeout=200)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("room", [1, 2])
def test_hooks_of_pieces_with_one_resident_thread_block(room: int, transport: str) -> None:
    with Crew(2, {"PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7"}) as crew:
        for number in numbers(3):
            case = replace(piece_case(700 + number, 2), transport=transport)
            crew.run("emulated:in_pieces", module(), 4, "hook_cases:hooked", case, timeout=120)


def test_hooks_of_pieces_in_a_chaos() -> None:
    with Crew(3, {"PPLX_COMM_CHAOS": f"seed={seed()},{CHAOS}"}) as crew:
        for number in numbers(3):
            case = replace(piece_case(800 + number, 3), transport="proxy:tcp")
            crew.run("emulated:in_pieces", module(), 4, "hook_cases:hooked", case, timeout=120)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("how", ["whole", "receives first"])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_groups_of_pieces(layout: str, how: str, transport: str) -> None:
    case = replace(piece_case(900, 2), layout=layout, in_flight=1, num_experts=7, max_tokens=33)
    with Crew(2) as crew:
        plain = crew.run("hook_cases:plain", case)
        case = replace(case, transport=transport)
        for parts in (1, 3):
            assert crew.run("emulated:in_pieces", module(), 4, "hook_cases:groups", case, parts, how, timeout=120) == plain


@pytest.mark.parametrize("transport", ["mapped", "nvshmem"])
def test_no_consumer_spins_for_ever_in_pieces(transport: str) -> None:
    with Crew(3) as crew:
        case = Case(seed(), 3, max_tokens=30, transport=transport)
        crew.start("emulated:in_pieces", module(), 4, "hook_cases:rank_1_stays_away", case, 1.0)
        said = crew.collect(60, [0, 2])
        crew.tell(1)
        crew.collect(60, [1])
    assert all(s["raised"] and s["type"] == "StepTimeout" and s["peer"] == 1 for s in said), said


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
def test_hooks_of_pieces_in_a_graph(transport: str) -> None:
    case = small_case(seed(), 2, 1, layout="padded", max_tokens=20, transport=transport)
    with Crew(2) as crew:
        crew.run("emulated:in_pieces", module(), 4, "hook_cases:replayed", case, 2, 10, timeout=120)
