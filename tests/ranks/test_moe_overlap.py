"""A MoE layer's products beside its step: the same bits as without, on CPUs by groups of experts, and in Triton's interpreter by words."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
from harness import Crew, Crews, run_ranks, seed
from moe_overlap_cases import OverlapCase, random_case
from moe_reference import MoECase

interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="needs triton, whose interpreter needs numpy < 2.4",
)


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n} ranks")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    crews = Crews(request.param)
    yield crews
    crews.close()


COMBINES = ("combine", "combine_send")
PLAIN = [f"{call} on current" for call in ("dispatch", "dispatch_send", "dispatch_recv", *COMBINES)]
"""What a pass without overlap does, too."""
two_ranks = pytest.mark.parametrize("crew", [2], indirect=True, ids=["2 ranks"])


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Crew]:
    """Fresh interpreters: Triton reads the variable when it is imported."""
    with Crew(2, {"TRITON_INTERPRET": "1"}, spawn=True) as crew:
        yield crew


def same(crew: Crew | Crews, case: OverlapCase, how: str = "same_bits") -> None:
    for rank, found in enumerate(crew.run(f"moe_overlap_cases:{how}", case, timeout=120)):
        assert len(found) == case.steps * (5 if case.train else 1) and all(found), (rank, case, found)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
def test_groups_have_the_same_bits(crew: Crews, transport: str) -> None:
    for number in range(4):
        same(crew, random_case(seed() * 1000 + number, crew.world_size, transport=transport))


@pytest.mark.parametrize("spread", ["zipf", "few"])
def test_late_products(crew: Crews, spread: str) -> None:
    """Combine waits for each block, and reads nothing that is not written."""
    for number, (transport, layout) in enumerate((("mapped", "ragged"), ("proxy:tcp", "ragged"), ("mapped", "padded"))):
        case = OverlapCase(
            seed() + number, crew.world_size, spread=spread, experts=12, transport=transport, layout=layout, train=number == 0
        )
        same(crew, case, "late_and_poisoned")


@two_ranks
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_microbatches(crew: Crews, layout: str) -> None:
    case = OverlapCase(seed(), crew.world_size, layout=layout, in_flight=2, train=False)
    assert all(crew.run("moe_overlap_cases:microbatches", case, timeout=60))


@pytest.mark.parametrize("spread", ["even", "hot"])
def test_a_layer(crew: Crews, spread: str) -> None:
    """Beside one process in float64, forward and backward; with a shared expert between the halves, and without."""
    for shared in (32, 0):
        case = MoECase(seed(), crew.world_size, spread, overlap="groups", expert_groups=2, shared=shared)
        for found in crew.run("moe_cases:whole_step", case, timeout=120):
            assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize(("in_flight", "recompute"), [(2, "nothing"), (4, "dispatch")])
def test_one_forward_one_backward(in_flight: int, recompute: str) -> None:
    case = MoECase(
        seed(), 2, "zipf", "fp8", dtype="bfloat16", hidden=128, in_flight=in_flight, recompute=recompute, overlap="groups"
    )
    for found in run_ranks(2, "moe_cases:scheduled", case):
        assert found == {"same": True, "losses": True, "most_open": 2, "open": 0}


@two_ranks
def test_passes_end_with_their_backward_pass(crew: Crews) -> None:
    assert crew.run("moe_cases:passes_left", MoECase(seed(), crew.world_size, overlap="groups")) == [0] * crew.world_size


def test_decoding() -> None:
    sizes = {"hidden": 256, "intermediate": 192, "num_experts": 7, "top_k": 3, "shared": 0}
    case = MoECase(seed(), 2, "zipf", "fp8", None, "bfloat16", overlap="groups", **sizes)
    for found in run_ranks(2, "moe_cases:decoding", case, 24):
        assert max(found["errors"].values()) < 0.08 and found["steps"] == [2, 2], found


@pytest.mark.parametrize("overlap", ["groups", pytest.param("signals", marks=interpreted)])
def test_a_rank_that_does_not_come(overlap: str) -> None:
    environment = {"TRITON_INTERPRET": "1"} if overlap == "signals" else {}
    case = OverlapCase(seed(), 3, overlap, align=128, most=20, train=False, dtype="float16", transport="mapped")
    with Crew(3, environment, spawn=overlap == "signals") as crew:
        crew.start("moe_overlap_cases:nobody_comes", case)
        said = crew.collect(120, [0, 2])
        crew.tell(1)
        crew.collect(60, [1])
    assert all(s["type"] == "StepTimeout" and s["peer"] == 1 for s in said), said


def test_a_product_that_fails() -> None:
    case = OverlapCase(seed(), 2, experts=6, train=False)
    first, second = run_ranks(2, "moe_overlap_cases:a_product_that_fails", case, timeout=60)
    assert second == {"type": "ValueError", "peer": None, "after": True}
    assert first["peer"] == 1 and first["after"], first


@pytest.mark.parametrize("overlap", ["groups", pytest.param("signals", marks=interpreted)])
def test_products_before_the_network_has_finished(overlap: str) -> None:
    """Rows are multiplied while others have not been sent yet, over TCP."""
    case = OverlapCase(
        seed(), 2, overlap, 4, dtype="float16", align=128, hidden=64, intermediate=32, experts=8, top_k=1, most=1024, train=False,
        transport="proxy:tcp", gemm="triton" if overlap == "signals" else "auto",
    )  # fmt: skip
    environment = {"TRITON_INTERPRET": "1"} if overlap == "signals" else {}
    with Crew(2, environment, spawn=overlap == "signals") as crew:
        crew.start("moe_overlap_cases:before_the_network", case)
        assert crew.heard(0, "multiplied") == [True, False]
        crew.tell(1)
        for rank, found in enumerate(crew.collect(120)):
            assert found == {"same": True, "rows": 2048 if rank == 0 else 0}


@two_ranks
def test_mistakes(crew: Crews) -> None:
    case = OverlapCase(seed(), crew.world_size, train=False)
    for said in crew.run("moe_overlap_cases:mistakes", case):
        wanted = ["overlap='some'", "expert_groups=0", "our Triton kernels", "hooks=True", "on a GPU", "tell send() as well"]
        assert len(said) == len(wanted) and all(part in text for part, text in zip(wanted, said, strict=True)), said


# ---- signals ---------------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize(("precision", "compute"), [("bf16", "bf16"), ("fp8", "fp8"), ("fp8", "bf16"), ("mxfp8", "fp8")])
def test_signals_have_the_same_bits(interpreter: Crew, precision: str, compute: str) -> None:
    """Rows come, are multiplied and go at a time. Where products take another format than travels, their first one waits for all."""
    for layout, train in (("ragged", compute == "bf16"), ("padded", False)):
        case = OverlapCase(
            seed(), 2, "signals", spread="zipf", precision=precision, compute=compute, dtype="float16", layout=layout, align=128,
            experts=4, top_k=2, train=train, gemm="triton", transport="proxy:tcp" if train else "mapped",
        )  # fmt: skip
        same(interpreter, case)


@interpreted
@pytest.mark.parametrize("overlap", ["groups", "signals"])
def test_what_the_host_tells_a_gpu(interpreter: Crew, overlap: str) -> None:
    """The first step in halves, the second one in whole calls: what is on which stream, behind what."""
    steps = {
        "groups": ["current notes", "beside waits for note"],
        "signals": ["up on current", "current notes", "down on current", "beside waits for note", "gate on beside"],
    }[overlap]
    steps = ["beside waits for current", "dispatch on beside", "dispatch_recv on beside", *steps]
    for layout in ("ragged", "padded"):
        for precision in ("bf16", "fp8"):
            case = OverlapCase(
                seed(), 2, overlap, 2, spread="zipf", precision=precision, compute=precision, dtype="float16", layout=layout, align=128,
                experts=5, top_k=2, train=False, gemm="triton",
            )  # fmt: skip
            for found in interpreter.run("moe_overlap_cases:as_on_a_gpu", case, timeout=120):
                assert len(found["same"]) == 2 and all(found["same"]), (layout, precision, found)
                whole, halves = ([*steps, f"{combine} on beside", "current waits for beside"] for combine in COMBINES)
                halves[1] = "dispatch_send on beside"
                told = [each for each in found["told"] if each not in PLAIN]
                assert told == halves + whole, (layout, precision, told)


@interpreted
@pytest.mark.parametrize("codes", [False, True], ids=["numbers", "codes"])
@pytest.mark.parametrize("name", ["ragged", "ragged, few", "padded", "few", "nothing"])
def test_rows_that_come_late(interpreter: Crew, name: str, codes: bool) -> None:
    """Nothing is read before its word is raised, and what is there is multiplied first."""
    for beforehand in (0, 50):
        for found in interpreter.run("moe_overlap_cases:rows_come", name, codes, beforehand, seed(), timeout=300, ranks=[0]):
            assert all(found.values()), (beforehand, found)


@interpreted
@pytest.mark.parametrize("codes", [False, True], ids=["numbers", "codes"])
@pytest.mark.parametrize("name", ["ragged", "ragged, few", "padded", "few", "nothing"])
def test_rows_that_go_early(interpreter: Crew, name: str, codes: bool) -> None:
    """A word says that all of its rows are written, and not before."""
    for ordered in (False, True):
        for found in interpreter.run("moe_overlap_cases:rows_go", name, codes, ordered, seed(), timeout=300, ranks=[0]):
            assert all(found.values()), (ordered, found)
