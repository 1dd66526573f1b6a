"""DESIGN.md 5.1 to 5.3 and 5.8 on real ranks: every routed choice arrives once, bit-exact, and sums are the reference's bits.

What a case is, and how its results are compared, is in rank_cases.py and reference.py. A failure prints its case and seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from crew import Crew, Crews, seed
from rank_cases import TRANSPORTS, Case, random_case, variants

LAYOUTS = ("ragged", "padded", "compact")
CASES = {1: 80, 2: 80, 3: 60, 4: 60, 5: 40, 8: 40}
MORE_CASES = {1: 320, 2: 320, 3: 240, 4: 240, 5: 200, 8: 120}
MANY_STEPS = {1: 10_000, 2: 10_000, 3: 6_000, 4: 5_000, 5: 3_000, 8: 2_000}
"""By number of ranks; the simulation draws thousands more, and faster."""


@pytest.fixture(scope="module", params=sorted(CASES), ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    crews = Crews(request.param)
    yield crews
    crews.close()


def test_random_shapes(crew: Crews) -> None:
    begin = seed() * 100_000
    for number in range(CASES[crew.world_size]):
        crew.run("rank_cases:exchange", random_case(begin + number, crew.world_size))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_more_random_shapes(crew: Crews) -> None:
    begin = seed() * 100_000 + 50_000
    for number in range(MORE_CASES[crew.world_size]):
        crew.run("rank_cases:exchange", random_case(begin + number, crew.world_size))


def test_ranks_may_be_of_one_mind(crew: Crews) -> None:
    """The edges, each for itself: nobody has tokens, everything goes to one expert, most ranks own none, one token of 16 bytes."""
    edges = [
        Case(1, crew.world_size, crowd="nobody"),
        Case(2, crew.world_size, crowd="one_has_all", in_flight=2, steps=4),
        Case(3, crew.world_size, crowd="one_has_none", routing="zipf"),
        Case(4, crew.world_size, routing="to_one", max_tokens=16, top_k=8),
        Case(5, crew.world_size, num_experts=1, layout="padded"),
        Case(6, crew.world_size, num_experts=crew.world_size + 1, top_k=16, layout="compact"),
        Case(7, crew.world_size, hidden=8, max_tokens=1, top_k=1),
        Case(8, crew.world_size, hidden=4, dtype="float32", wire="fp8", max_tokens=1, top_k=1),
        Case(9, crew.world_size, hidden=128 * 3 + 8, wire="fp8", scale_layout="tma"),
        Case(10, crew.world_size, hidden=128 * 3 + 8, wire="fp8", layout="padded", scale_layout="tma", max_tokens=3),
        Case(11, crew.world_size, routing="repeats", top_k=16, align=128, zero_pad=True),
        Case(12, crew.world_size, routing="sparse", top_k=4, dtype="float16", in_flight=4, steps=12),
    ]
    for case in edges:
        for transport in TRANSPORTS if crew.world_size in (2, 3) else ("mapped",):
            crew.run("rank_cases:exchange", replace(case, transport=transport))


def test_same_bits_everywhere(crew: Crews) -> None:
    """On every transport and number of threads, and a second time."""
    begin = seed() * 100_000 + 90_000
    for number in range(3):
        case = replace(random_case(begin + number, crew.world_size), transport="mapped", threads=1, crowd="uneven", max_tokens=24)
        digests = {}
        transports = TRANSPORTS if crew.world_size > 1 else ("mapped",)
        for variant in [case, *variants(case, transport=list(transports), threads=[2, 3])]:
            digests[str(variant)] = crew.run("rank_cases:exchange", variant)
        assert len({tuple(d) for d in digests.values()}) == 1, digests


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_replicas(crew: Crews, transport: str) -> None:
    """Groups that hold the same tokens: combine returns the bits of a world without them. Fewer tokens than replicas, too."""
    world_size = crew.world_size
    for replicas in (2, 3, 4, 8):
        if world_size % replicas or (transport != "mapped" and world_size != 2 * replicas):
            continue
        for number, max_tokens in enumerate([1, 5, 8]):
            case = Case(
                seed() * 100 + number, world_size, replicas=replicas, transport=transport, max_tokens=max_tokens, crowd="uneven",
                layout=LAYOUTS[(number + TRANSPORTS.index(transport)) % 3], in_flight=(1, 4, 2)[number], steps=6, top_k=3,
                wire=("native", "fp8", "mxfp8")[number], threads=1 + number, first_step=2**32 - 3,
                routing=("uniform", "sparse", "zipf")[number],
            )  # fmt: skip
            crew.run("rank_cases:as_without_replicas", case)


def test_many_steps(crew: Crews) -> None:
    for transport, steps in [("mapped", 1500), ("proxy:shm", 600), ("proxy:tcp", 400)]:
        if crew.world_size == 1 and transport != "mapped":
            continue
        steps = steps * 2 // max(2, crew.world_size)
        for in_flight in (1, 4):
            case = Case(
                seed() + in_flight, crew.world_size, max_tokens=3, hidden=32, transport=transport, in_flight=in_flight,
                first_step=2**32 - steps // 2, crowd="uneven", replicas=2 - crew.world_size % 2,
            )  # fmt: skip
            crew.run("rank_cases:many_steps", case, steps, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thousands_of_steps(crew: Crews) -> None:
    steps = MANY_STEPS[crew.world_size]
    for transport in TRANSPORTS if crew.world_size > 1 else ("mapped",):
        case = Case(
            seed(), crew.world_size, max_tokens=3, hidden=32, transport=transport, first_step=2**32 - steps // 2, crowd="uneven"
        )  # fmt: skip
        crew.run("rank_cases:many_steps", case, steps, timeout=900)


def test_around_the_largest_step_number(crew: Crews) -> None:
    for transport in TRANSPORTS if crew.world_size > 1 else ("mapped",):
        for first in (2**32 - 5, 2**31 - 5):
            case = Case(seed(), crew.world_size, first_step=first, in_flight=4, steps=16, crowd="uneven", transport=transport)
            crew.run("rank_cases:exchange", case)


def test_several_all_to_alls(crew: Crews) -> None:
    """Eight of one Communicator, in steps that interleave, each of its own shape and transport."""
    begin = seed() * 100_000 + 95_000
    cases = [replace(random_case(begin + i, crew.world_size), in_flight=1, steps=4) for i in range(8)]
    crew.run("rank_cases:interleaved", cases)


@pytest.mark.parametrize("world_size", [2, 3])
def test_shards(world_size: int) -> None:
    """Blocks that travel in pieces over several endpoints."""
    begin = seed() * 100_000 + 97_000
    with Crew(world_size, {"PPLX_COMM_ENDPOINTS": "3", "PPLX_COMM_SHARD_BYTES": "300"}) as crew:
        for number in range(30):
            case = random_case(begin + number, world_size, ("proxy:shm", "proxy:tcp", "mixed:tcp"))
            crew.run("rank_cases:exchange", case)
        for stats in crew.run("rank_cases:shard_statistics"):
            assert stats["writes"] > 2 * stats["blocks"], stats


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
def test_too_small_a_buffer(layout: str, transport: str) -> None:
    """Rows that do not fit count as zero; the step completes; every rank hears of it once, and the next step works."""
    begin = seed() * 100_000 + 98_000
    with Crew(3) as crew:
        overflowed = 0
        for number in range(12):
            case = replace(
                random_case(begin + number, 3, (transport,)), layout=layout, rows=1 + number, in_flight=1, max_tokens=8,
                routing=("uniform", "to_one", "zipf")[number % 3], crowd="full",
            )  # fmt: skip
            overflowed += crew.run("rank_cases:overflow", case)[0]
        assert overflowed >= 6
