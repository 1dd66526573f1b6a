"""Hooks on GPUs: a Triton kernel on a stream of its own spins on the words of a dispatch. Ranks run at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cases import in_pieces
from gpus import AT_ONCE, ENDS, FROM_768
from harness import Crews, seed
from open_step_cases import small_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(AT_ONCE < 2, reason="fewer than two GPUs"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=ENDS, ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    pytest.importorskip("triton")
    with Crews(request.param, FROM_768) as crews:
        yield crews


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
@pytest.mark.parametrize(("hidden", "tokens"), [(1024, 32), (4096, 256)])
def test_a_kernel_beside_a_step(crew: Crews, transport: str, layout: str, hidden: int, tokens: int) -> None:
    case = small_case(
        seed(), crew.world_size, 1, transport=transport, layout=layout, hidden=hidden, max_tokens=tokens, align=128,
        first_step=2**32 - 5,
    )  # fmt: skip
    crew.run("hook_kernels:beside", case, 20, timeout=200)


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_a_kernel_beside_a_step_of_many_tokens(crew: Crews, layout: str) -> None:
    case = small_case(seed(), crew.world_size, 1, layout=layout, hidden=2048, max_tokens=1024, align=128)
    for dispatches, combines in crew.run("hook_kernels:beside", case, 10, timeout=200):
        assert dispatches > 10 and combines >= 10


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_a_kernel_beside_a_step_in_pieces(crew: Crews, layout: str, transport: str) -> None:
    case = small_case(
        seed(), crew.world_size, 1, transport=transport, layout=layout, hidden=2048, max_tokens=1024, align=128,
        first_step=2**32 - 5,
    )  # fmt: skip
    for dispatches, combines in crew.run("hook_kernels:beside", in_pieces(case, on_gpu=True), 10, timeout=200):
        assert dispatches > 10 and combines >= 10


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
def test_hooks_of_pieces_in_a_graph(crew: Crews, transport: str) -> None:
    case = small_case(seed(), crew.world_size, 1, layout="padded", hidden=1024, max_tokens=1024, transport=transport)
    crew.run("hook_cases:replayed", in_pieces(case, on_gpu=True), 2, 20, timeout=200)


@pytest.mark.parametrize("tokens", [32, 1024])
def test_hooks_in_a_graph(crew: Crews, tokens: int) -> None:
    case = small_case(seed(), crew.world_size, 1, layout="padded", hidden=1024, max_tokens=tokens)
    crew.run("hook_cases:replayed", case, 2, 20, timeout=200)


@pytest.mark.parametrize("tokens", [32, 1024])
def test_hooks_in_a_graph_of_steps_in_flight(crew: Crews, tokens: int) -> None:
    """Each takes half of the multiprocessors."""
    case = small_case(seed(), crew.world_size, 2, layout="padded", hidden=1024, max_tokens=tokens)
    crew.run("hook_cases:replayed", case, 2, 20, timeout=200)
