"""Invariants 1 to 3 and 8 (docs/design.md) on real ranks: every routed choice arrives once, bit-exact, and sums are the reference's bits.

The simulation (proxy/sim) and the emulation (tests/emulation) draw shapes by the thousand. What only real processes show is here:
memory that they share, a provider's wire, threads, and the Python surface. What a case is, and how its results are compared, is in
rank_cases.py and reference.py. A failure prints its case and seed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
from cases import CROWDS, ROUTINGS, TRANSPORTS, WIRES, Case, random_case, variants
from harness import Crew, Crews, seed

LAYOUTS = ("ragged", "padded", "compact")
CASES = {1: 5, 2: 16, 3: 16, 4: 14, 5: 5, 8: 4}
"""Number of ranks -> cases."""
DRAWN = {
    "transport": TRANSPORTS, "wire": WIRES, "layout": LAYOUTS, "routing": ROUTINGS, "crowd": CROWDS, "in_flight": (1, 2, 4),
    "dtype": ("bfloat16", "float16", "float32"), "scale_layout": ("row", "tma"), "proxy_threads": (1, 2), "replicas": (1, 2),
    "first_step": (0, 1, 2**32 - 5, 2**32 - 1),
}  # fmt: skip
"""The cases of all numbers of ranks together must have had each of these at least once."""


@pytest.fixture(scope="module", params=sorted(CASES), ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    with Crews(request.param) as crews:
        yield crews


def random_cases(world_size: int) -> list[Case]:
    return [random_case(seed() * 100_000 + number, world_size) for number in range(CASES[world_size])]


def few(*world_sizes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("crew", world_sizes, indirect=True, ids=lambda n: f"ep{n}")


def test_random_shapes(crew: Crews) -> None:
    for case in random_cases(crew.world_size):
        crew.run("rank_cases:exchange", case)


def test_random_shapes_have_everything() -> None:
    drawn = [asdict(case) for world_size in CASES for case in random_cases(world_size)]
    for name, values in DRAWN.items():
        had = Counter(case[name] for case in drawn)
        assert all(had[value] for value in values), (name, had)


@few(1, 3, 8)
def test_ranks_may_be_of_one_mind(crew: Crews) -> None:
    """The edges, each for itself: no rank has tokens, everything goes to one expert, most ranks own none, one token of 16 bytes."""
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
        for transport in TRANSPORTS if crew.world_size == 3 else ("mapped",):
            crew.run("rank_cases:exchange", replace(case, transport=transport))


@few(3)
def test_opened_for_combine(crew: Crews) -> None:
    for case in (Case(13, 3, wire="fp8", top_k=2), Case(14, 3, transport="mixed:tcp", layout="compact")):
        crew.run("rank_cases:opened_again", case)


@few(4)
def test_same_bits_everywhere(crew: Crews) -> None:
    """On every transport and number of threads, and a second time. Only the nodes of ranks change bits."""
    begin = seed() * 100_000 + 90_000
    for number in range(3):
        case = replace(random_case(begin + number, crew.world_size), transport="mapped", threads=1, crowd="uneven", max_tokens=24)
        digests: dict[tuple[int, ...], set[tuple[str, ...]]] = defaultdict(set)
        for variant in [case, *variants(case, transport=list(TRANSPORTS), threads=[2, 3])]:
            digests[variant.nodes].add(tuple(crew.run("rank_cases:exchange", variant)))
        assert all(len(d) == 1 for d in digests.values()), digests


@pytest.mark.parametrize(
    ("crew", "transport"),
    [(n, "mapped") for n in (2, 3, 4, 8)] + [(4, transport) for transport in TRANSPORTS[1:] if "dealt" not in transport],
    indirect=["crew"],
    ids=lambda value: f"ep{value}" if isinstance(value, int) else value,
)
def test_replicas(crew: Crews, transport: str) -> None:
    """Groups that hold the same tokens: combine returns the bits of a world without them. Fewer tokens than replicas, too."""
    world_size = crew.world_size
    for replicas in (2, 3, 4, 8):
        if world_size % replicas or (transport != "mapped" and replicas != 2) or (world_size == 8 and replicas < 8):
            continue
        for number, max_tokens in enumerate([1, 5, 8] if transport == "mapped" else [1, 5]):
            case = Case(
                seed() * 100 + number, world_size, replicas=replicas, transport=transport, max_tokens=max_tokens, crowd="uneven",
                layout=LAYOUTS[(number + TRANSPORTS.index(transport)) % 3], in_flight=(1, 4, 2)[number], steps=6, top_k=3,
                wire=("native", "fp8", "mxfp8")[number], threads=1 + number, first_step=2**32 - 3,
                routing=("uniform", "sparse", "zipf")[number],
            )  # fmt: skip
            crew.run("rank_cases:as_without_replicas", case)


@few(1, 2, 3)
def test_many_steps(crew: Crews) -> None:
    for transport, steps in [("mapped", 400), ("proxy:shm", 200), ("proxy:tcp", 200)]:
        if crew.world_size == 1 and transport != "mapped":
            continue
        steps = steps * 2 // max(2, crew.world_size)
        for in_flight in (1, 4):
            case = Case(
                seed() + in_flight, crew.world_size, max_tokens=3, hidden=32, transport=transport, in_flight=in_flight,
                first_step=2**32 - steps // 2, crowd="uneven", replicas=2 - crew.world_size % 2,
            )  # fmt: skip
            crew.run("rank_cases:many_steps", case, steps, timeout=120)


@few(3)
def test_around_the_largest_step_number(crew: Crews) -> None:
    for transport in TRANSPORTS:
        for first in (2**32 - 5, 2**31 - 5):
            case = Case(seed(), crew.world_size, first_step=first, in_flight=4, steps=16, crowd="uneven", transport=transport)
            crew.run("rank_cases:exchange", case)


@few(1, 3)
def test_several_all_to_alls(crew: Crews) -> None:
    """Eight of one Communicator, in steps that interleave, each of its own shape and transport."""
    begin = seed() * 100_000 + 95_000
    cases = [replace(random_case(begin + i, crew.world_size), in_flight=1, steps=4) for i in range(8)]
    crew.run("rank_cases:interleaved", cases)


def test_shards() -> None:
    """Blocks that travel in pieces over several endpoints."""
    begin = seed() * 100_000 + 97_000
    with Crew(3, {"PPLX_COMM_ENDPOINTS": "3", "PPLX_COMM_SHARD_BYTES": "300"}) as crew:
        for number in range(10):
            case = random_case(begin + number, 3, ("proxy:shm", "proxy:tcp", "mixed:tcp"))
            crew.run("rank_cases:exchange", case)
        for stats in crew.run("rank_cases:shard_statistics"):
            assert stats["writes"] > 2 * stats["blocks"], stats


@few(4)
def test_rows_cross_once_per_node(crew: Crews) -> None:
    """To the byte. At two nodes of two, eight of 256 experts, that is 0.55 of the rows that go to each rank."""
    case = Case(seed(), 4, num_experts=256, top_k=8, hidden=2048, max_tokens=128, transport="relayed:tcp")
    crossed = {}
    for transport in ("relayed:tcp", "mixed:tcp"):
        told = crew.run("rank_cases:crossing", replace(case, transport=transport))
        assert all(wrote == asked for wrote, asked in told), (transport, told)
        crossed[transport] = sum(wrote for wrote, _ in told)
    assert 0.53 < crossed["relayed:tcp"] / crossed["mixed:tcp"] < 0.58, crossed


@few(8)
@pytest.mark.parametrize("transport", ["relayed:tcp", "relayed:shm"])
def test_four_nodes(crew: Crews, transport: str) -> None:
    for number, wire in enumerate(("native", "fp8")):
        crew.run(
            "rank_cases:exchange",
            Case(seed() + number, 8, num_experts=20, top_k=6, transport=transport, wire=wire, crowd="uneven", in_flight=2, steps=4),
        )


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("transport", ["mapped", "relayed:tcp"])
def test_too_small_a_buffer(layout: str, transport: str) -> None:
    """Rows that do not fit count as zero; the step completes; every rank hears of it once, and the next step works."""
    begin = seed() * 100_000 + 98_000
    with Crew(3) as crew:
        overflowed = 0
        for number in range(4):
            case = replace(
                random_case(begin + number, 3, (transport,)), layout=layout, rows=1 + 2 * number, in_flight=1, max_tokens=8,
                routing=("uniform", "to_one", "zipf")[number % 3], crowd="full",
            )  # fmt: skip
            overflowed += crew.run("rank_cases:overflow", case)[0]
        assert overflowed >= 2
