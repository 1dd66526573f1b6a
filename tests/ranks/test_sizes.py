"""Steps of few tokens whose rows lie beyond 2^31 elements, and beyond 2^32 bytes, in memory of which little is touched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cases import Case
from harness import Crew
from size_cases import are_far, far_case


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as two:
        yield two


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
@pytest.mark.parametrize("wire", ["native", "fp8"])
@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_rows_beyond_32_bits(crew: Crew, layout: str, wire: str, transport: str) -> None:
    case = far_case(1, layout, wire, transport=transport)
    are_far(case, crew.run("size_cases:far_rows", case))


def test_pages_that_a_rank_maps() -> None:
    """Its own heap, and of a peer's heap what it writes there. Start-up would else take time with the cube of the ranks."""
    case = Case(1, 8, hidden=2048, max_tokens=64, replicas=2, in_flight=2)
    with Crew(8) as crew:
        for rank in crew.run("size_cases:mapped_pages", case):
            assert rank["heap"] < rank["opened"] < 3 * rank["heap"], rank
            assert rank["stepped"] == rank["opened"], f"a step paid for the first use of a page: {rank}"
