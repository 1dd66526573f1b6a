"""Random shapes over the real efa provider on software NICs, which reorder all that goes out. Every row and output is compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from cases import Case, random_case
from harness import Crews, seed
from soft import EFA, MIXED, crew_on, crews_on
from test_chaos import HARD, KINDS, chaos

CASES = {2: 4, 3: 4, 4: 4, 5: 2, 8: 2}
"""Number of ranks -> cases; test_more_shapes takes at least four times the number."""


@pytest.fixture(scope="module", params=sorted(CASES), ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    with crews_on(request.param, nics=2, seed=seed()) as crews:
        yield crews


def cases(world_size: int, begin: int, count: int) -> list[Case]:
    """The providers in turn: which one is drawn should not decide whether it is tried at all."""
    drawn = [random_case(seed() * 100_000 + begin + number, world_size, EFA) for number in range(count)]
    return [replace(case, transport=EFA[number % 2]) for number, case in enumerate(drawn)]


def test_random_shapes(crew: Crews) -> None:
    crew.run("rank_cases:exchange_each", cases(crew.world_size, 40_000, CASES[crew.world_size]))


@pytest.mark.slow
def test_more_shapes(crew: Crews) -> None:
    for begin in range(50_000, 50_000 + 4 * CASES[crew.world_size], 8):
        crew.run("rank_cases:exchange_each", cases(crew.world_size, begin, 8), timeout=120)


def test_mixed_nodes(crew: Crews) -> None:
    """Mapped memory inside a node of two, efa between: rows go to each rank, or once to each node."""
    for number, transport in enumerate((*MIXED, "relayed:efa") if crew.world_size > 2 else ()):
        crew.run("rank_cases:exchange", random_case(seed() * 100_000 + 41_000 + number, crew.world_size, (transport,)))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_chaos_on_top(world_size: int) -> None:
    """Adds faults that the NICs do not make: shards that split, duplicates, immediates of old steps."""
    happened: Counter[str] = Counter()
    with crew_on(world_size, chaos(HARD), seed=seed()) as (_, crew):
        for case in cases(world_size, 42_000, 12 // world_size):
            for _, counts in crew.run("chaos_cases:exchange", case):
                happened += counts
    assert set(happened) == KINDS, happened


@pytest.mark.parametrize("transport", EFA)
def test_replicas(transport: str) -> None:
    with crew_on(4, seed=seed()) as (_, crew):
        for number, max_tokens in enumerate([1, 8]):
            case = Case(
                seed() + number, 4, replicas=2, transport=transport, max_tokens=max_tokens, crowd="uneven", steps=6, top_k=3,
                in_flight=(4, 2)[number], wire=("fp8", "mxfp8")[number], first_step=2**32 - 3,
            )  # fmt: skip
            crew.run("rank_cases:as_without_replicas", case)


@pytest.mark.parametrize("transport", EFA)
def test_the_same_bits_in_any_order(transport: str) -> None:
    """NICs that keep the order, and NICs that do their worst, give the same bits as mapped memory."""
    case = replace(random_case(seed() * 100_000 + 43_000, 3), crowd="uneven", max_tokens=24)
    with crew_on(3, seed=seed()) as (_, crew):
        wanted = crew.run("rank_cases:exchange", replace(case, transport="mapped"))
    for window in (1, 256):
        with crew_on(3, seed=seed(), window=window) as (efa, crew):
            assert crew.run("rank_cases:exchange", replace(case, transport=transport)) == wanted
            crew.leave()
            picked = sum(nic["out_of_order"] for nic in efa.counters().values())
            assert (picked > 0) == (window > 1), efa.counters()


FIRST_CONTACT = {"PPLX_COMM_SHARD_BYTES": "512"}


def first_contact(world_size: int, rounds: int, transport: str, number: int) -> None:
    """Every rank's first writes to all others, at once, over four NICs and two proxies: the provider's handshakes come in any order."""
    with crew_on(
        world_size, {**FIRST_CONTACT, "PPLX_COMM_NICS": "rdmap16s27,rdmap17s27,rdmap18s27,rdmap19s27"}, nics=4, seed=number
    ) as (efa, crew):
        case = Case(number, world_size, transport=transport, proxy_threads=2, hidden=256, max_tokens=16, crowd="uneven")
        crew.run("failure_cases:leave_at_once", case, rounds, timeout=120)
        crew.leave()
        counts = efa.counters()
        assert len(counts) == 4 and all(nic["bytes"] > 0 for nic in counts.values()), counts
        assert sum(nic["posted_without_doorbell"] for nic in counts.values()) == 0, counts


@pytest.mark.parametrize("transport", EFA)
def test_first_contact(transport: str) -> None:
    first_contact(4, 2, transport, seed())


@pytest.mark.parametrize("times", [pytest.param(5, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("transport", EFA)
def test_first_contact_of_eight_ranks(transport: str, times: int) -> None:
    """With FI_MORE on efa it hung in most: a write that waits for its peer's handshake kept the flag (libfabric to 2.6.0)."""
    for number in range(times // 5):
        first_contact(8, 5, transport, seed() + number)


@pytest.mark.slow
@pytest.mark.parametrize("transport", EFA)
def test_soak(transport: str) -> None:
    """Two thousand steps each, over all numbers that an immediate has for them, and over the largest."""
    case = Case(seed(), 2, max_tokens=3, hidden=32, transport=transport, in_flight=4, first_step=2**32 - 1000, crowd="uneven")
    with crew_on(2, nics=2, seed=seed()) as (_, crew):
        crew.run("rank_cases:many_steps", case, 2000, timeout=800)
