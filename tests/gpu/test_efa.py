"""device="cuda" across nodes over libfabric's own efa provider, on software NICs: kernels, proxy, provider, and back to kernels.

Where no wheel has a libfabric with efa, PPLX_LIBFABRIC names one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cases import Case, random_case
from gpus import GPUS
from harness import Crews, seed
from soft import EFA, crew_on, crews_on
from test_across_nodes import CHAOS, small
from test_failure import NOTICED, left_in_shm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU"), pytest.mark.timeout(300)]

RANKS = 2
PLACED: dict[str, str | None] = {"PPLX_COMM_PLACEMENT": "host"}
"""A software NIC does not reach a GPU's memory."""


@pytest.fixture(scope="module")
def crew() -> Iterator[Crews]:
    with crews_on(RANKS, PLACED, nics=2, seed=seed()) as crews:
        yield crews


@pytest.mark.parametrize("transport", EFA)
def test_random_shapes(crew: Crews, transport: str) -> None:
    begin = seed() * 100_000 + 65_000
    for number in range(20):
        crew.run("gpu_cases:exchange", random_case(begin + number, RANKS, (transport,)))


@pytest.mark.parametrize("transport", EFA)
def test_random_shapes_in_a_chaos(transport: str) -> None:
    begin = seed() * 100_000 + 75_000
    with crew_on(RANKS, {**PLACED, **CHAOS}, nics=2, seed=seed()) as (_, crew):
        for number in range(10):
            crew.run("gpu_cases:exchange", random_case(begin + number, RANKS, (transport,)), timeout=120)


@pytest.mark.parametrize("transport", EFA)
def test_full_shape_as_on_the_cpu(crew: Crews, transport: str) -> None:
    case = small(transport, num_experts=64, top_k=8, hidden=7168, max_tokens=64, wire="fp8", align=128, threads=4)
    crew.run("gpu_cases:both_devices", case, 2, timeout=200)


@pytest.mark.parametrize("transport", EFA)
def test_soak(crew: Crews, transport: str) -> None:
    case = small(transport, first_step=2**32 - 500)
    assert crew.run("gpu_cases:soak", case, 1000, timeout=200) == [0] * RANKS


@pytest.mark.parametrize("transport", EFA)
def test_graph_replay(crew: Crews, transport: str) -> None:
    assert crew.run("gpu_cases:replay", small(transport, wire="fp8", align=8), 300, timeout=200) == [0] * RANKS


@pytest.mark.parametrize("transport", EFA)
def test_streams(crew: Crews, transport: str) -> None:
    crew.run("gpu_cases:streams", small(transport, in_flight=2), 40, timeout=120)


@pytest.mark.parametrize("transport", EFA)
def test_a_silent_rank(transport: str) -> None:
    with crew_on(RANKS, PLACED, seed=seed()) as (_, crew):
        assert crew.run("gpu_cases:lost_peer", small(transport), 0.5, timeout=100) == [RANKS - 1] * (RANKS - 1) + ["silent"]


@pytest.mark.parametrize("transport", EFA)
@pytest.mark.alone
def test_killed(transport: str) -> None:
    case = Case(seed(), 3, num_experts=10, top_k=3, hidden=256, max_tokens=32, transport=transport)
    with crew_on(3, PLACED, seed=seed()) as (_, crew):
        crew.start("gpu_cases:killed", case, 1)
        crew.heard(1, "dying")
        died = crew.kill(1)
        for peer, at in crew.collect(100, [0, 2]):
            assert peer == 1 and at - died < NOTICED, (peer, at - died)
        crew.leave()
        assert left_in_shm(crew) == []
