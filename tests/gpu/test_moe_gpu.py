"""The MoE layer on GPUs beside the same layer in one process, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpus import APART, GPUS
from harness import Crews, run_ranks, seed
from moe_reference import MoECase
from test_moe import BF16, FP8, FP8_WIRE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU")]
LIMIT = 250
"""Seconds: kernels are compiled at first use."""
SIZES = {"hidden": 512, "intermediate": 384, "num_experts": 8, "top_k": 4, "tokens": (64, 7, 0, 40), "shared": 0}


@pytest.fixture(scope="module", params=[max((n for n in APART if n < 8), default=1)], ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    with Crews(request.param) as crews:
        yield crews


@pytest.fixture(scope="module")
def decoders(crew: Crews) -> Iterator[Crews]:
    """Ranks of their own: a Communicator has at most eight AllToAlls, and each shape of a layer that decodes takes two."""
    with Crews(crew.world_size) as crews:
        yield crews


def case_of(crew: Crews, spread: str, precision: str, compute: str | None = None, **more: object) -> MoECase:
    fields = {**SIZES, "losses": (0.0, 0.0), "device": "cuda", **more}
    return MoECase(seed(), crew.world_size, spread, precision, compute, "bfloat16", **fields)


@pytest.mark.parametrize(
    ("precision", "compute", "limit", "spread"),
    [
        ("bf16", None, BF16, "even"), ("bf16", None, BF16, "hot"), ("fp8", "bf16", FP8_WIRE, "zipf"), ("fp8", "bf16", FP8_WIRE, "few"),
        ("fp8", None, FP8, "hot"), ("fp8", None, FP8, "few"), ("mxfp8", None, FP8, "zipf"), ("mxfp8", None, FP8, "hot"),
    ],
)  # fmt: skip
def test_as_in_one_process(crew: Crews, precision: str, compute: str | None, limit: float, spread: str) -> None:
    for rank, found in enumerate(crew.run("moe_cases:whole_step", case_of(crew, spread, precision, compute), timeout=LIMIT)):
        del found["loss"]
        assert found["y"] < limit and max(found.values()) < 2 * limit, (rank, found)


@pytest.mark.parametrize("recompute", ["activations", "dispatch"])
def test_recomputing(crew: Crews, recompute: str) -> None:
    for found in crew.run("moe_cases:whole_step", case_of(crew, "zipf", "fp8", recompute=recompute), timeout=LIMIT):
        del found["loss"]
        assert max(found.values()) < 2 * FP8, found


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8"])
def test_the_host_waits_for_nothing(crew: Crews, precision: str) -> None:
    for found in crew.run("moe_gpu_cases:host_waits_for_nothing", case_of(crew, "zipf", precision), timeout=LIMIT):
        assert found["y"] < FP8, found


@pytest.mark.parametrize(("precision", "limit"), [("bf16", BF16), ("fp8", FP8), ("mxfp8", FP8)])
def test_decoding(decoders: Crews, precision: str, limit: float) -> None:
    """Few tokens take Padded and masked products."""
    case = case_of(decoders, "zipf", precision, tokens=(16, 7, 0, 5))
    for found in decoders.run("moe_cases:decoding", case, 16, timeout=LIMIT):
        assert max(found["errors"].values()) < limit, found


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_slices_and_microbatches(crew: Crews, precision: str) -> None:
    """Tensor parallelism inside of experts; and one microbatch's forward pass between the parts of another's backward pass."""
    case = case_of(crew, "zipf", precision, in_flight=2)
    for found in crew.run("moe_cases:scheduled", case, timeout=LIMIT):
        assert found["losses"] and found["most_open"] == 2 and found["open"] == 0, found
    if crew.world_size > 1:
        case = case_of(crew, "zipf", precision, expert_tp=2)
        for found in crew.run("moe_cases:whole_step", case, timeout=LIMIT):
            del found["loss"]
            assert max(found.values()) < 2 * (BF16 if precision == "bf16" else FP8), found


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_in_a_graph(crew: Crews, precision: str) -> None:
    """In processes of their own, which have AllToAlls left."""
    for found in run_ranks(crew.world_size, "moe_gpu_cases:in_a_graph", case_of(crew, "even", precision), timeout=LIMIT):
        assert max(found) < FP8, found


@pytest.mark.parametrize(("precision", "limit"), [("bf16", BF16), ("fp8", FP8), ("mxfp8", FP8)])
def test_one_compilation_serves_all_routings(crew: Crews, precision: str, limit: float) -> None:
    """Nothing is compiled anew for other counts of rows. In processes that have compiled nothing yet."""
    pytest.importorskip("triton")
    case = case_of(crew, "even", precision, gemm="triton", scaled_gemm="triton")
    for found in run_ranks(crew.world_size, "moe_gpu_cases:compiled_once", case, timeout=LIMIT):
        assert found["before"] == found["after"] and sum(found["before"].values()) >= 5, found
        assert max(found["errors"]) < limit, found


@pytest.fixture(scope="module")
def one() -> Iterator[Crews]:
    pytest.importorskip("triton")
    with Crews(1) as crews:
        yield crews


def test_products(one: Crews) -> None:
    (found,) = one.run("moe_gpu_cases:products", seed(), timeout=LIMIT)
    assert max(found.values()) < 0.004, found


def test_both_products_in_one_launch(one: Crews) -> None:
    (found,) = one.run("moe_gpu_cases:both_products", seed(), timeout=LIMIT)
    assert all(found.values()), found


def test_formats(one: Crews) -> None:
    (found,) = one.run("moe_gpu_cases:formats", seed(), timeout=LIMIT)
    assert all(found.values()), found
