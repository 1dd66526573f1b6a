"""Blocks in pieces (slot_bytes) on real ranks: the same bits as whole blocks, and what happens when a rank is late or dies.

The simulation draws pieces of a few rows by the thousand (proxy/sim), and tests/cpp/test_pieces.cpp looks into the memory of two ranks.
Here steps are as large as they must be to go in pieces: more than 256 rows from one rank to another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases import Case, in_pieces
from harness import Crew, Crews, seed
from test_chaos import HARD, chaos
from test_failure import check_all_gone, check_survivors, reset_after_deaths

TRANSPORTS = ("mapped", "proxy:shm", "proxy:tcp", "mixed:tcp", "dealt:tcp")


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    with Crews(request.param) as crews:
        yield crews


def large_case(number: int, world_size: int, transport: str) -> Case:
    r = random.Random(f"{seed()} {number} {world_size} {transport}")
    return in_pieces(
        Case(
            seed() * 100 + number, world_size, num_experts=r.choice([world_size, 3 * world_size]), top_k=r.choice([1, 2, 4]),
            hidden=r.choice([8, 24, 136]), max_tokens=r.randint(300, 1100), wire=r.choice(["native", "fp8", "mxfp8"]),
            layout=r.choice(["ragged", "padded", "compact"]), transport=transport, in_flight=r.choice([1, 2, 4]),
            threads=r.choice([1, 3]), crowd=r.choice(["full", "uneven", "uneven", "one_has_all", "one_has_none"]),
            routing=r.choice(["uniform", "uniform", "zipf", "to_one", "sparse"]), steps=4, first_step=2**32 - 3,
            replicas=r.choice([1, 1, 2] if world_size % 2 == 0 else [1]), proxy_threads=r.choice([1, 2]),
        )
    )  # fmt: skip


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_same_bits_as_whole_blocks(crew: Crews, transport: str) -> None:
    for number in range(2):
        case = large_case(number, crew.world_size, transport)
        digests = [crew.run("rank_cases:exchange", each) for each in (case, replace(case, slot_bytes=1 << 40))]
        assert digests[0] == digests[1], case


def test_chaos() -> None:
    """Pieces and credits late, apart, in any order, and twice."""
    with Crew(3, chaos(HARD)) as crew:
        for number, transport in enumerate(("proxy:shm", "proxy:tcp")):
            case = replace(large_case(90 + number, 3, transport), crowd="uneven", hidden=8)
            crew.run("chaos_cases:exchange", in_pieces(case))


@pytest.mark.parametrize("through", ["recipe", "autograd"])
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
def test_gradients(transport: str, through: str) -> None:
    """A step and its backward pass: two ranks send pieces, one has no token. To the last bit as in whole blocks."""
    with Crew(3) as crew:
        for layout in ("ragged", "padded", "compact"):
            case = Case(
                seed(), 3, num_experts=7, top_k=4, hidden=16, max_tokens=900, dtype="float32", layout=layout, align=4,
                transport=transport, threads=2,
            )  # fmt: skip
            for errors in crew.run("training_cases:gradients_in_pieces", in_pieces(case), through, timeout=120):
                assert all(error < 2e-6 for error in errors.values()), (layout, errors)


def test_order(crew: Crews) -> None:
    """A step is received after those before it; what was refused works in its turn."""
    case = in_pieces(Case(1, crew.world_size, max_tokens=400, in_flight=2))
    for first, second in crew.run("pieces_cases:out_of_order", case):
        assert "dispatch_recv: step 2 before step 1" in first and "received in order" in first, first
        assert "combine_recv: step 2 before step 1" in second and "slot_bytes" in second, second


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
@pytest.mark.parametrize("phase", ["dispatch_recv", "combine_recv"])
def test_a_rank_that_does_not_come(phase: str, transport: str) -> None:
    """It has sent, and does not receive. The other names the peer, the place, and the piece that it waits for; then both reset and
    go on."""
    case = in_pieces(Case(2, 2, max_tokens=1000, transport=transport, num_experts=2))
    with Crew(2) as crew:
        _, r = crew.run("pieces_cases:does_not_come", case, phase)
        assert r["type"] == "StepTimeout" and r["peer"] == 0 and r["phase"] == phase, r
        assert "waiting for piece 2 of the " in r["message"] and "of rank 0" in r["message"], r
        assert r["expected"] == "piece 2" and r["seen"] == "2 before it", r


@pytest.mark.parametrize(
    ("place", "transport"),
    [
        ("after_dispatch_send", "mapped"), ("in_dispatch_recv", "proxy:tcp"), ("after_dispatch", "mapped"), ("in_weights", "mapped"),
        ("after_combine_send", "proxy:shm"), ("in_combine_recv", "mapped"), ("in_combine_recv", "proxy:tcp"),
    ],
)  # fmt: skip
def test_death_in_a_phase(place: str, transport: str, tmp_path: Path) -> None:
    case = in_pieces(Case(21, 3, transport=transport, max_tokens=700, hidden=64, crowd="full"))
    with Crew(3) as crew:
        crew.start("failure_cases:survive", case, 1, place, str(tmp_path / "died"))
        check_survivors(crew.collect(30, [0, 2]), 1, float((tmp_path / "died").read_text()))
        check_all_gone(crew, 1)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
def test_reset(transport: str, tmp_path: Path) -> None:
    """Two of four die; the survivors go on in pieces, from the first step on, and no old piece or credit counts."""
    case = in_pieces(Case(91, 4, transport=transport, num_experts=10, top_k=4, max_tokens=500, crowd="uneven", in_flight=2))
    with Crew(4) as crew:
        reset_after_deaths(crew, [], case, tmp_path)
        assert crew.leave() == [-9, 0, -9, 0]
