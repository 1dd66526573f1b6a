"""Hooks on the CPU device: d.planned and d.arrived beside a dispatch, and expert_groups=."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from cases import Case, in_pieces, random_case
from harness import Crew, Crews, seed


@pytest.fixture(scope="module", params=[1, 3], ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    with Crews(request.param) as crews:
        yield crews


def case_of(number: int, world: int, *transports: str) -> Case:
    return random_case(seed() * 100_000 + 60_000 + number, world, transports)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "mixed:shm"])
def test_random_shapes(crew: Crews, transport: str) -> None:
    for number in range(5):
        crew.run("hook_cases:hooked", case_of(number, crew.world_size, transport))


@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_the_same_bits(crew: Crews, layout: str) -> None:
    case = replace(case_of(100, crew.world_size, "mapped"), layout=layout, threads=2, max_tokens=60, in_flight=1)
    assert crew.run("hook_cases:hooked", case) == crew.run("hook_cases:plain", case)


@pytest.mark.parametrize(("align", "zero_pad"), [(1, True), (48, True), (128, False), (384, False)])
def test_alignments(crew: Crews, align: int, zero_pad: bool) -> None:
    """Blocks of several experts, of a part of one, and of nothing but padding."""
    case = Case(
        seed(), crew.world_size, num_experts=3 * crew.world_size, top_k=2, hidden=32, max_tokens=150, align=align, zero_pad=zero_pad,
        threads=2,
    )  # fmt: skip
    crew.run("hook_cases:hooked", case)


def test_an_output_that_is_too_small() -> None:
    with Crew(2) as crew:
        for layout, rows in (("ragged", 200), ("padded", 20)):
            case = Case(seed(), 2, num_experts=4, top_k=2, hidden=16, max_tokens=150, layout=layout, rows=rows)
            crew.run("hook_cases:overflowing", case)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
def test_blocks_in_pieces(transport: str) -> None:
    """A block of the output waits for pieces that come later."""
    with Crew(2) as crew:
        for number, layout in enumerate(("ragged", "padded", "compact")):
            case = Case(
                seed() + number, 2, num_experts=6, top_k=2, hidden=64, max_tokens=1500, layout=layout, transport=transport, steps=2,
                in_flight=1 + number % 2, threads=2,
            )  # fmt: skip
            crew.run("hook_cases:hooked", in_pieces(case), timeout=120)


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_groups(crew: Crews, layout: str) -> None:
    case = replace(case_of(200, crew.world_size, "mapped", "proxy:tcp"), layout=layout, in_flight=1, max_tokens=100, hidden=64)
    plain = crew.run("hook_cases:plain", case)
    for parts, how in ((1, "whole"), (2, "beside"), (5, "receives first"), (5, "alone")):
        assert crew.run("hook_cases:groups", case, parts, how) == plain


def test_no_consumer_spins_for_ever() -> None:
    with Crew(3) as crew:
        crew.start("hook_cases:rank_1_stays_away", Case(seed(), 3), 1.0)
        said = crew.collect(60, [0, 2])
        crew.tell(1)
        crew.collect(60, [1])
    assert all(s["raised"] and s["type"] == "StepTimeout" and s["peer"] == 1 for s in said), said


def test_mistakes(crew: Crews) -> None:
    case = Case(seed(), crew.world_size, num_experts=2 * crew.world_size)
    for said in crew.run("hook_cases:mistakes", case):
        wanted = ["expert_groups=0", "2 groups", "expert_groups=", "hooks=True", "hooks=True", "Compact"]
        assert len(said) == len(wanted) and all(part in text for part, text in zip(wanted, said, strict=True)), said
