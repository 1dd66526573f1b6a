"""Hooks on GPUs: a Triton kernel on a stream of its own spins on the words of a dispatch, and makes the rows that a combine waits for.

Ranks run at once: each on a GPU, or on its part of one (mps.py). In a captured graph the rows of a combine are made by another branch, which
CUDA runs beside it where it finds room. Under MPS it did not when the combine took all multiprocessors but four. So two ranks on one GPU run
those tests in turns:

PPLX_TEST_RANKS_PER_GPU=2 python -m pytest tests/gpu/test_hooks_gpu.py -k in_a_graph
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cases import in_pieces
from gpus import APART, AT_ONCE, FROM_768, UNDER_MPS
from harness import Crew, Crews, seed
from open_step_cases import small_case

CREWS = [n for n in APART if n > 1]
FEW = 8
"""Multiprocessors for a combine beside which there is room under MPS, too."""
not_under_mps = pytest.mark.skipif(
    UNDER_MPS,
    reason="under MPS a graph's other branch need not run beside a combine of this size; without it: "
    "PPLX_TEST_RANKS_PER_GPU=2 python -m pytest tests/gpu/test_hooks_gpu.py -k in_a_graph",
)
ALL = pytest.param(None, marks=not_under_mps, id="all")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(AT_ONCE < 2, reason="fewer than two GPUs"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=CREWS or [2], ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    pytest.importorskip("triton")
    crews = Crews(request.param, FROM_768)
    yield crews
    crews.close()


@pytest.fixture(params=CREWS or [2], ids=lambda n: f"ep{n}")
def failing(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """For one test: a step that fails ends its communicator, too."""
    pytest.importorskip("triton")
    with Crew(request.param) as crew:
        yield crew


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
@pytest.mark.parametrize(("hidden", "tokens"), [(1024, 32), (2048, 128), (4096, 512)])
def test_a_kernel_beside_a_step(crew: Crews, transport: str, layout: str, hidden: int, tokens: int) -> None:
    case = small_case(
        seed(), crew.world_size, 1, transport=transport, layout=layout, hidden=hidden, max_tokens=tokens, align=128,
        first_step=2**32 - 5,
    )  # fmt: skip
    crew.run("hook_kernels:beside", case, 50, timeout=200)


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_a_kernel_beside_a_step_of_many_tokens(crew: Crews, layout: str) -> None:
    case = small_case(seed(), crew.world_size, 1, layout=layout, hidden=2048, max_tokens=2048, align=128)
    for dispatches, combines in crew.run("hook_kernels:beside", case, 20, timeout=200):
        assert dispatches > 20 and combines >= 20


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_a_kernel_beside_a_step_in_pieces(crew: Crews, layout: str, transport: str) -> None:
    case = small_case(
        seed(), crew.world_size, 1, transport=transport, layout=layout, hidden=2048, max_tokens=2048, align=128,
        first_step=2**32 - 5,
    )  # fmt: skip
    for dispatches, combines in crew.run("hook_kernels:beside", in_pieces(case, on_gpu=True), 20, timeout=200):
        assert dispatches > 20 and combines >= 20


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_a_kernel_beside_a_step_of_replicas_in_pieces(crew: Crews, layout: str) -> None:
    case = small_case(seed(), crew.world_size, 1, layout=layout, hidden=2048, max_tokens=2049, align=128, replicas=2)
    for dispatches, combines in crew.run("hook_kernels:beside", in_pieces(case, on_gpu=True), 20, timeout=200):
        assert dispatches > 20 and combines >= 20


@pytest.mark.parametrize("num_sms", [ALL, FEW])
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
def test_hooks_of_pieces_in_a_graph(crew: Crews, transport: str, num_sms: int | None) -> None:
    case = small_case(seed(), crew.world_size, 1, layout="padded", hidden=1024, max_tokens=1024, transport=transport)
    crew.run("hook_cases:replayed", in_pieces(case, on_gpu=True), 2, 30, num_sms, timeout=200)


@pytest.mark.parametrize("num_sms", [ALL, FEW])
@pytest.mark.parametrize("tokens", [32, 1024])
def test_hooks_in_a_graph(crew: Crews, tokens: int, num_sms: int | None) -> None:
    case = small_case(seed(), crew.world_size, 1, layout="padded", hidden=1024, max_tokens=tokens)
    crew.run("hook_cases:replayed", case, 2, 50, num_sms, timeout=200)


@pytest.mark.parametrize("tokens", [32, 1024])
def test_hooks_in_a_graph_of_steps_in_flight(crew: Crews, tokens: int) -> None:
    """Each takes half of the multiprocessors."""
    case = small_case(seed(), crew.world_size, 2, layout="padded", hidden=1024, max_tokens=tokens)
    crew.run("hook_cases:replayed", case, 2, 50, timeout=200)


def test_a_kernel_that_never_comes(failing: Crew) -> None:
    case = small_case(seed(), failing.world_size, 1, hidden=1024, max_tokens=32)
    results = failing.run("hook_kernels:never_ready", case, 1, 2.0, timeout=100)
    assert all(said["type"] == "StepTimeout" and said["peer"] == 1 for said in results), results
    assert "never written" in results[1]["message"], results


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
def test_a_kernel_that_never_comes_in_pieces(failing: Crew, transport: str) -> None:
    case = small_case(seed(), failing.world_size, 1, hidden=1024, max_tokens=1500, transport=transport)
    results = failing.run("hook_kernels:never_ready", in_pieces(case, on_gpu=True), 1, 2.0, timeout=100)
    assert all(said["type"] == "StepTimeout" and said["peer"] == 1 for said in results), results
    assert "never written" in results[1]["message"], results
