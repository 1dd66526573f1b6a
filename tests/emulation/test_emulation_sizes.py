"""Steps whose rows lie beyond 2^31 elements, and beyond 2^32 bytes, by the kernels of few tokens and of many; and where many begin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cases import Case
from emulation_cases import LARGE, ON_X86_64, PARTS, module, numbers
from harness import Crew, Crews, seed
from size_cases import are_far, far_case

pytestmark = ON_X86_64


@pytest.fixture(scope="module")
def few() -> Iterator[Crews]:
    with Crews(2, PARTS) as crews:
        yield crews


@pytest.fixture(scope="module")
def many() -> Iterator[Crews]:
    with Crews(2, LARGE) as crews:
        yield crews


@pytest.mark.timeout(600)
@pytest.mark.parametrize("wire", ["native", "fp8"])
@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_far_rows_of_few(few: Crews, layout: str, wire: str) -> None:
    case = far_case(2, layout, wire)
    found = few.run("emulated:call", module(), "size_cases:far_rows", case, timeout=200)
    are_far(case, found)
    assert all(rank["large"] == 0 for rank in found), found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("wire", ["native", "fp8"])
@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_far_rows_of_many(many: Crews, layout: str, wire: str) -> None:
    case = far_case(3, layout, wire)
    found = many.run("emulated:call", module(), "size_cases:far_rows", case, timeout=200)
    are_far(case, found)
    assert all(rank["large"] > 0 for rank in found), found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["nvshmem", "proxy:tcp"])
def test_far_rows_between_nodes(few: Crews, transport: str) -> None:
    case = far_case(4, "ragged", "native", transport=transport)
    are_far(case, few.run("emulated:call", module(), "size_cases:far_rows", case, timeout=200))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["mapped", "nvshmem", "proxy:tcp"])
def test_far_rows_in_pieces(few: Crews, transport: str) -> None:
    """Ranks with at most 16 tokens have one round, the others several."""
    case = far_case(5, "padded", "fp8", transport=transport, max_tokens=40, crowd="uneven", steps=8)
    found = few.run("emulated:in_pieces", module(), 16, "size_cases:far_rows", case, timeout=200)
    are_far(case, found)
    assert sum(rank["large"] for rank in found) > 0, found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["mapped", "nvshmem", "proxy:tcp"])
def test_far_rows_of_many_in_pieces(many: Crews, transport: str) -> None:
    case = far_case(6, "padded", "fp8", transport=transport, max_tokens=40)
    found = many.run("emulated:in_pieces", module(), 16, "size_cases:far_rows", case, timeout=200)
    are_far(case, found)
    assert all(rank["large"] > 0 for rank in found), found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tuned", [[5, 14], [14, 5]], ids=str)
def test_ranks_agree_where_many_begin(few: Crews, tuned: list[int]) -> None:
    """Rows of combine would look different at either end."""
    for number in numbers(3):
        case = Case(seed() * 10 + number, 2, num_experts=8, top_k=3, max_tokens=20, crowd="uneven", steps=6)
        for stats in few.run("emulated:call", module(), "size_cases:agreed", case, tuned, timeout=60):
            assert stats["large_tokens"] == 14, stats


@pytest.mark.parametrize(("own", "counted"), [("", "1"), ("7", "1"), ("7", "0")], ids=["", "7", "7-by-host"])
def test_where_many_begin(own: str, counted: str) -> None:
    """As the GPUs would have it, or as the variable says. Where kernels count nothing, the host counts launches."""
    with Crew(2, {"PPLX_COMM_LARGE_TOKENS": own, "PPLX_COMM_STATS": counted}) as crew:
        case = Case(seed(), 2, num_experts=8, top_k=3, max_tokens=20, crowd="full", steps=4)
        for stats in crew.run("emulated:call", module(), "size_cases:agreed", case, [9, 30], timeout=60):
            assert stats["large_tokens"] == (7 if own else 30) and (stats["large_combines"] > 0) == bool(own), stats
