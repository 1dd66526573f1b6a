"""The MoE layer on GPUs beside the same layer in one process, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gpus import APART, AT_ONCE, GPUS
from harness import Crew, Crews, run_ranks, seed
from moe_overlap_cases import OverlapCase
from moe_reference import MoECase
from test_fuzz import module  # noqa: F401
from test_moe import BF16, FP8, FP8_WIRE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU")]
LIMIT = 250
"""Seconds: kernels are compiled at first use."""
SIZES = {"hidden": 512, "intermediate": 384, "num_experts": 8, "top_k": 4, "tokens": (64, 7, 0, 40), "shared": 0}


@pytest.fixture(scope="module", params=[n for n in APART if n < 8] or [1], ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    crews = Crews(request.param)
    yield crews
    crews.close()


def case_of(crew: Crews, spread: str, precision: str, compute: str | None = None, **more: object) -> MoECase:
    fields = {**SIZES, "losses": (0.0, 0.0), "device": "cuda", **more}
    return MoECase(seed(), crew.world_size, spread, precision, compute, "bfloat16", **fields)


@pytest.mark.parametrize("spread", ["even", "zipf", "hot", "few"])
@pytest.mark.parametrize(
    ("precision", "compute", "limit"),
    [("bf16", None, BF16), ("fp8", "bf16", FP8_WIRE), ("fp8", None, FP8), ("mxfp8", None, FP8)],
)
def test_as_in_one_process(crew: Crews, spread: str, precision: str, compute: str | None, limit: float) -> None:
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
def test_decoding(crew: Crews, precision: str, limit: float) -> None:
    """Few tokens take Padded and masked products."""
    case = case_of(crew, "zipf", precision, tokens=(16, 7, 0, 5))
    for found in run_ranks(crew.world_size, "moe_cases:decoding", case, 16, timeout=LIMIT):
        assert max(found["errors"].values()) < limit, found


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_slices_and_microbatches(crew: Crews, precision: str) -> None:
    """Tensor parallelism inside of experts; and one microbatch's forward pass between the parts of another's backward pass."""
    case = case_of(crew, "zipf", precision, in_flight=2)
    for found in run_ranks(crew.world_size, "moe_cases:scheduled", case, timeout=LIMIT):
        assert found["losses"] and found["most_open"] == 2 and found["open"] == 0, found
    if crew.world_size > 1:
        case = case_of(crew, "zipf", precision, expert_tp=2)
        for found in run_ranks(crew.world_size, "moe_cases:whole_step", case, timeout=LIMIT):
            del found["loss"]
            assert max(found.values()) < 2 * (BF16 if precision == "bf16" else FP8), found


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_in_a_graph(crew: Crews, precision: str) -> None:
    for found in crew.run("moe_gpu_cases:in_a_graph", case_of(crew, "even", precision), timeout=LIMIT):
        assert max(found) < FP8, found


@pytest.mark.parametrize("overlap", ["none", "groups", "signals"])
@pytest.mark.parametrize(("precision", "limit"), [("bf16", BF16), ("fp8", FP8), ("mxfp8", FP8)])
def test_one_compilation_serves_all_routings(crew: Crews, precision: str, limit: float, overlap: str) -> None:
    """Nothing is compiled anew for other counts of rows."""
    pytest.importorskip("triton")
    case = case_of(crew, "even", precision, gemm="triton", scaled_gemm="triton", overlap=overlap)
    for found in run_ranks(crew.world_size, "moe_gpu_cases:compiled_once", case, timeout=LIMIT):
        assert found["before"] == found["after"] and sum(found["before"].values()) >= 5, found
        assert max(found["errors"]) < limit, found


# ---- beside its step -------------------------------------------------------------------------------------------------------

overlaps = pytest.mark.parametrize("overlap", ["groups", "signals"])
FORMATS = pytest.mark.parametrize(("precision", "compute"), [("bf16", "bf16"), ("fp8", "fp8"), ("fp8", "bf16"), ("mxfp8", "fp8")])


def overlap_case(world_size: int, overlap: str, precision: str = "bf16", compute: str = "bf16", **more: object) -> OverlapCase:
    """By our kernels, which have the same tiles beside a step and by themselves."""
    fields = {
        "dtype": "bfloat16", "hidden": 512, "intermediate": 384, "experts": 8, "top_k": 4, "most": 500, "align": 128, "spread": "zipf",
        "gemm": "triton", "device": "cuda", "steps": 4, **more,
    }  # fmt: skip
    return OverlapCase(seed(), world_size, overlap, precision=precision, compute=compute, **fields)


def same(crew: Crew | Crews, case: OverlapCase) -> None:
    for rank, found in enumerate(crew.run("moe_gpu_cases:same_bits", case, timeout=LIMIT)):
        assert len(found) == case.steps * (5 if case.train else 1) and all(found), (rank, case, found)


@overlaps
@FORMATS
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_overlap_has_the_same_bits(crew: Crews, layout: str, precision: str, compute: str, overlap: str) -> None:
    pytest.importorskip("triton")
    for spread in ("even", "hot", "few"):
        same(
            crew, overlap_case(crew.world_size, overlap, precision, compute, layout=layout, spread=spread, train=layout == "ragged")
        )


@overlaps
def test_overlap_of_many_tokens(crew: Crews, overlap: str) -> None:
    """Which go by bulk copies, and are read by descriptors."""
    pytest.importorskip("triton")
    for precision in ("bf16", "fp8"):
        case = overlap_case(crew.world_size, overlap, precision, precision, hidden=2048, intermediate=1024, most=2048, train=False)
        same(crew, case)


@overlaps
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_overlap_through_the_proxy(crew: Crews, layout: str, overlap: str) -> None:
    pytest.importorskip("triton")
    same(crew, overlap_case(crew.world_size, overlap, "fp8", "fp8", layout=layout, transport="proxy:tcp", train=False))
    nodes = case_of(crew, "zipf", "fp8", overlap=overlap, all_to_all={"node_size": 1, "provider": "tcp"})
    for found in run_ranks(crew.world_size, "moe_cases:whole_step", nodes, timeout=LIMIT):
        del found["loss"]
        assert max(found.values()) < 2 * FP8, found


@overlaps
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_overlap_in_a_layer(crew: Crews, precision: str, overlap: str) -> None:
    """Beside one process in float64; with nothing that the host waits for; and in a graph."""
    pytest.importorskip("triton")
    limit = BF16 if precision == "bf16" else FP8
    case = case_of(crew, "zipf", precision, overlap=overlap)
    with Crew(crew.world_size) as fresh:  # a Communicator carries eight AllToAlls, and other cases' live as long as it does
        for found in fresh.run("moe_cases:whole_step", case, timeout=LIMIT):
            del found["loss"]
            assert found["y"] < limit and max(found.values()) < 2 * limit, found
        for found in fresh.run("moe_gpu_cases:host_waits_for_nothing", case, timeout=LIMIT):
            assert found["y"] < limit, found
        for found in fresh.run("moe_gpu_cases:in_a_graph", case, timeout=LIMIT):
            assert max(found) < limit, found


@overlaps
def test_overlap_of_decoding(crew: Crews, overlap: str) -> None:
    pytest.importorskip("triton")
    case = case_of(crew, "zipf", "fp8", tokens=(16, 7, 0, 5), overlap=overlap)
    for found in run_ranks(crew.world_size, "moe_cases:decoding", case, 16, timeout=LIMIT):
        assert max(found["errors"].values()) < FP8, found


@overlaps
def test_overlap_of_microbatches(crew: Crews, overlap: str) -> None:
    pytest.importorskip("triton")
    case = overlap_case(crew.world_size, overlap, "fp8", "fp8", in_flight=2, train=False)
    assert all(crew.run("moe_gpu_cases:microbatches", case, timeout=LIMIT))
    layers = case_of(crew, "zipf", "fp8", in_flight=2, overlap=overlap)
    for found in run_ranks(crew.world_size, "moe_cases:scheduled", layers, timeout=LIMIT):
        assert found["losses"] and found["open"] == 0, found


@overlaps
def test_overlap_with_delays(module: str, overlap: str) -> None:  # noqa: F811
    """Before every publish and after every acquire, by a fuzz build."""
    pytest.importorskip("triton")
    ranks = max(n for n in APART if n < 8)
    with Crew(ranks, {"PPLX_TEST_CUDA": module, "PPLX_COMM_CUDA_FUZZ": str(seed())}) as crew:
        for layout in ("ragged", "padded"):
            same(crew, overlap_case(ranks, overlap, "fp8", "fp8", layout=layout, train=False, steps=20))


@overlaps
@pytest.mark.skipif(AT_ONCE < 2, reason="fewer than two GPUs")
def test_overlap_with_a_rank_that_does_not_come(overlap: str) -> None:
    """Products that wait for its rows end, and so does the host."""
    pytest.importorskip("triton")
    with Crew(2) as crew:
        crew.start("moe_gpu_cases:nobody_comes", overlap_case(2, overlap, train=False))
        (said,) = crew.collect(LIMIT, [0])
        crew.tell(1)
        crew.collect(60, [1])
    assert said["type"] == "StepTimeout" and said["peer"] == 1, said


def of_one_rank(case: str) -> Any:
    """What the case found."""
    pytest.importorskip("triton")
    crews = Crews(1)
    try:
        (found,) = crews.run(f"moe_gpu_cases:{case}", seed(), timeout=LIMIT)
        return found
    finally:
        crews.close()


def test_products() -> None:
    found = of_one_rank("products")
    assert max(found.values()) < 0.004, found


def test_both_products_in_one_launch() -> None:
    found = of_one_rank("both_products")
    assert all(found.values()), found


def test_formats() -> None:
    found = of_one_rank("formats")
    assert all(found.values()), found
