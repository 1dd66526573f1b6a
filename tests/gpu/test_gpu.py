"""device="cuda" against the reference and the CPU device, to the last bit. Skips what the machine has too few GPUs for.

python -m pytest tests/gpu          # everything that this machine can run
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from crew import Crew, Crews, seed
from rank_cases import Case, random_case

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU")]

# Ranks that have a GPU each run thousands of steps; ranks that share one take turns of milliseconds.
APART = [n for n in (1, 2, 4, 8) if n <= GPUS]


@pytest.fixture(scope="module", params=APART or [1], ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    crews = Crews(request.param)
    yield crews
    crews.close()


@pytest.fixture(scope="module")
def sharing() -> Iterator[Crews]:
    crews = Crews(2, {"CUDA_VISIBLE_DEVICES": "0"})
    yield crews
    crews.close()


def test_random_shapes(crew: Crews) -> None:
    begin = seed() * 100_000
    for number in range(60):
        crew.run("gpu_cases:exchange", random_case(begin + number, crew.world_size, ("mapped",)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_more_random_shapes(crew: Crews) -> None:
    begin = seed() * 100_000 + 50_000
    for number in range(1000):
        crew.run("gpu_cases:exchange", random_case(begin + number, crew.world_size, ("mapped",)))


@pytest.mark.parametrize("wire", ["native", "fp8", "fp8_ue8m0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_full_shape_as_on_the_cpu(crew: Crews, wire: str, dtype: str) -> None:
    case = Case(
        seed(), crew.world_size, num_experts=64, top_k=8, hidden=7168, max_tokens=64, wire=wire, dtype=dtype, align=128, threads=4
    )
    crew.run("gpu_cases:both_devices", case, 2, timeout=200)


def test_many_tokens(crew: Crews) -> None:
    """More tokens than thread blocks: units are runs of tokens."""
    case = Case(seed(), crew.world_size, num_experts=32, top_k=4, hidden=256, max_tokens=4096, wire="fp8", align=8, threads=4)
    crew.run("gpu_cases:both_devices", case, 3, timeout=200)


@pytest.mark.parametrize("wire", ["native", "fp8"])
def test_soak(crew: Crews, wire: str) -> None:
    case = Case(seed(), crew.world_size, num_experts=16, top_k=4, hidden=512, max_tokens=32, wire=wire, first_step=2**32 - 500)
    assert crew.run("gpu_cases:soak", case, 2000, timeout=120) == [0] * crew.world_size


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_long_soak(crew: Crews) -> None:
    case = Case(seed(), crew.world_size, num_experts=16, top_k=4, hidden=512, max_tokens=32, first_step=2**32 - 5000)
    assert crew.run("gpu_cases:soak", case, 100_000, timeout=1000) == [0] * crew.world_size


def test_graph_replay(crew: Crews) -> None:
    case = Case(seed(), crew.world_size, num_experts=16, top_k=4, hidden=512, max_tokens=32, wire="fp8", align=8)
    assert crew.run("gpu_cases:replay", case, 1000, timeout=120) == [0] * crew.world_size


@pytest.mark.skipif(GPUS < 2, reason="nobody to lose")
def test_lost_peer() -> None:
    ranks = APART[-1]
    with Crew(ranks) as crew:
        assert crew.run("gpu_cases:lost_peer", Case(seed(), ranks), 0.5, timeout=60) == [ranks - 1] * (ranks - 1) + ["silent"]


def test_ranks_that_share_a_gpu(sharing: Crews) -> None:
    begin = seed() * 100_000 + 20_000
    for number in range(10):
        sharing.run("gpu_cases:exchange", random_case(begin + number, 2, ("mapped",)), timeout=120)
