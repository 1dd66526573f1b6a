"""Dispatches and combines of many tokens, by the large kernels: against the reference, the CPU device, and steps of few tokens in between.

python -m pytest tests/gpu/test_large.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cases import Case, random_case
from gpus import APART, ENDS, FROM_768, GPUS, fewest
from harness import Crew, Crews, seed
from open_step_cases import small_case
from size_cases import are_far, far_case

HAS_LARGE = GPUS > 0 and torch.cuda.get_device_capability()[0] >= 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_LARGE, reason="no GPU with large kernels")]
LARGE = {"PPLX_COMM_LARGE_TOKENS": "1"}


@pytest.fixture(scope="module", params=ENDS, ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    with Crews(request.param, FROM_768) as crews:
        yield crews


@pytest.fixture(scope="module", params=ENDS, ids=lambda n: f"ep{n}")
def few(request: pytest.FixtureRequest) -> Iterator[Crews]:
    """Also steps of few tokens go by the large kernels."""
    with Crews(request.param, LARGE) as crews:
        yield crews


def large(world: int, wire: str = "fp8", layout: str = "ragged", tokens: int = 4096) -> Case:
    return Case(
        seed(), world, num_experts=64, top_k=8, hidden=1024, max_tokens=tokens, wire=wire, layout=layout, align=128, threads=4
    )  # fmt: skip


def test_random_shapes(few: Crews) -> None:
    for number in range(40):
        few.run("gpu_cases:exchange", random_case(seed() * 100_000 + 70_000 + number, few.world_size, ("mapped",)))


def test_rows_that_are_not_read(few: Crews) -> None:
    for number in range(8):
        drawn = random_case(seed() * 100_000 + 90_000 + number, few.world_size, ("mapped",))
        few.run("gpu_cases:on_gpu", "rank_cases:opened_again", replace(drawn, hidden=1040 + 512 * number, in_flight=1))


@pytest.mark.parametrize("least", ["4", "40"])
def test_some_ranks_have_few(least: str) -> None:
    with Crew(max(APART), {"PPLX_COMM_LARGE_TOKENS": least}) as crew:
        for number in range(20):
            case = random_case(seed() * 100_000 + 80_000 + number, max(APART), ("mapped",))
            crew.run("gpu_cases:exchange", replace(case, max_tokens=max(case.max_tokens, 64)))


@pytest.mark.parametrize(
    ("wire", "layout"),
    [
        ("native", "ragged"), ("native", "compact"), ("fp8", "ragged"), ("fp8", "padded"), ("fp8", "compact"), ("fp8_ue8m0", "compact"),
        ("mxfp8", "padded"),
    ],
)  # fmt: skip
def test_as_on_the_cpu(crew: Crews, wire: str, layout: str) -> None:
    crew.run("gpu_cases:both_devices", large(crew.world_size, wire, layout, tokens=2048), 2, timeout=120)


@fewest
@pytest.mark.parametrize("sms", [4, 24])
def test_few_multiprocessors(crew: Crews, sms: int) -> None:
    crew.run("gpu_cases:both_devices", large(crew.world_size), 2, num_sms=sms, timeout=120)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_full_rows(crew: Crews, dtype: str) -> None:
    case = replace(large(crew.world_size, tokens=1500), hidden=7168, dtype=dtype)
    crew.run("gpu_cases:both_devices", case, 2, timeout=120)


def test_large_and_small_steps_in_turn(crew: Crews) -> None:
    """Places of rows that show by themselves are blank again after rows with arrival words."""
    tokens_of = [2000, 64, 64, 900, 3, 4096, 700, 767, 768, 383, 384, 128]
    crew.run("gpu_cases:both_devices", large(crew.world_size), len(tokens_of), tokens_of=tokens_of, timeout=120)


@pytest.mark.parametrize("wire", ["native", "fp8"])
def test_any_bits(few: Crews, wire: str) -> None:
    case = Case(seed(), few.world_size, num_experts=16, top_k=4, hidden=7168, max_tokens=64, wire=wire)
    few.run("gpu_cases:rows_that_look_blank", case, 10)


@pytest.mark.parametrize("wire", ["native", "fp8", "mxfp8"])
def test_soak(few: Crews, wire: str) -> None:
    case = Case(seed(), few.world_size, num_experts=16, top_k=4, hidden=512, max_tokens=48, wire=wire, first_step=2**32 - 500)
    assert few.run("gpu_cases:soak", case, 1000) == [0] * few.world_size


@pytest.mark.parametrize("in_flight", [1, 2])
def test_streams(crew: Crews, in_flight: int) -> None:
    crew.run("gpu_cases:streams", replace(large(crew.world_size, "native", tokens=1500), in_flight=in_flight), 20, timeout=120)


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_eager_steps_among_replays(few: Crews, in_flight: int) -> None:
    case = small_case(seed(), few.world_size, in_flight)
    few.run("open_step_cases:interleaved", case, list(range(6)), 40, timeout=120)


@fewest
@pytest.mark.parametrize(("layout", "wire"), [("ragged", "native"), ("padded", "fp8")])
def test_rows_beyond_32_bits(crew: Crews, layout: str, wire: str) -> None:
    """The most tokens that a step is made for, and few, whose rows begin beyond 2^31 elements and 2^32 bytes."""
    for number, tokens in enumerate((8192, 64)):
        case = far_case(10 + number, layout, wire, world=crew.world_size, max_tokens=tokens, steps=2)
        found = crew.run("far_cases:far_rows", case, timeout=300)
        are_far(case, found)
        assert all((rank["large"] > 0) == (tokens == 8192) for rank in found), found
