"""`python -m pplx_comm top` names a rank, a NIC and a link that are late by known amounts, in the simulation's clock."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from harness import seed
from test_cpp import build, run

from pplx_comm import top

SEEDS = 20
STEPS = 10_000
"""Steady ones, in which nothing may stand out."""
WORLDS = 100


@pytest.fixture(scope="module")
def sim() -> Path:
    return build("pplx_sim", "-DPPLX_PYTHON=OFF").parent / "sim"


def simulated(sim: Path, number: int, steps: int, *late: str) -> list[top.Rank]:
    told = json.loads(run(sim, "--seed", str(number), "--steady", str(steps), *late, timeout=300))
    return [top.Rank(**{**of, "waits": {int(peer): ms for peer, ms in of["waits"].items()}}) for of in told]


def said(ranks: list[top.Rank]) -> list[str]:
    return top.verdicts(ranks, len(ranks))


def test_nothing_is_late(sim: Path) -> None:
    """Each world has few steps, so that chance has not evened out."""
    first = seed() * 1000
    for number in range(first, first + WORLDS):
        ranks = simulated(sim, number, STEPS // WORLDS)
        assert said(ranks) == [], (number, ranks)
        assert all(r.steps == STEPS // WORLDS and min(r.waits.values()) > 0 for r in ranks), ranks


@pytest.mark.parametrize("number", range(SEEDS))
@pytest.mark.parametrize("what", ["rank", "nic", "link"])
def test_it_is_named(sim: Path, what: str, number: int) -> None:
    """It alone, as late as it was made: by half a millisecond up to five in each dispatch, and where links are late in each combine."""
    of = seed() * 1000 + number
    r = random.Random(of)
    node = {rank.rank: rank.node for rank in simulated(sim, of, 1)}
    one = r.choice(sorted(node))
    other = r.choice([rank for rank in node if node[rank] != node[one]])
    us = r.randint(500, 5000)
    late, wanted, times = {
        "rank": (f"rank:{one}:{us}", f"rank {one} is late: ", 1),
        "nic": (f"nic:{node[one]}:{us}", f"NIC of node {node[one]} is slow: ", 2),
        "link": (f"link:{one}:{other}:{us}", f"link {one} -> {other} is slow: ", 1),
    }[what]
    ranks = simulated(sim, of, 50, "--late", late)
    sentences = said(ranks)
    assert len(sentences) == 1 and sentences[0].startswith(wanted), (late, sentences, ranks)
    longest = max(ms for rank in ranks for ms in rank.waits.values())
    assert 0.9 * times < longest / (us / 1000) < 1.25 * times, (late, longest)
