"""Random shapes over the real efa provider on software NICs, which reorder all that goes out. Every row and output is compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from harness import Crews, seed
from rank_cases import random_case
from soft import EFA, MIXED, crews_on

CASES = {2: 8, 3: 6, 4: 6, 5: 2, 8: 2}
"""By number of ranks; the slow test takes five times as many."""


@pytest.fixture(scope="module", params=sorted(CASES), ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    with crews_on(request.param, nics=2, seed=seed()) as crews:
        yield crews


def test_random_shapes(crew: Crews) -> None:
    for number in range(CASES[crew.world_size]):
        case = random_case(seed() * 100_000 + 40_000 + number, crew.world_size, EFA)
        # Which of both is drawn should not decide whether one is tried at all.
        crew.run("rank_cases:exchange", replace(case, transport=EFA[number % 2]))


def test_mixed_nodes(crew: Crews) -> None:
    """Mapped memory inside a node of two, efa between."""
    for number, transport in enumerate(MIXED if crew.world_size > 2 else ()):
        crew.run("rank_cases:exchange", random_case(seed() * 100_000 + 41_000 + number, crew.world_size, (transport,)))
