"""The parts of the plug-ins for vLLM and SGLang that need neither: versions, settings, where experts are."""

from __future__ import annotations

import itertools

import pytest
import torch

from pplx_comm.errors import Error
from pplx_comm.serving.sglang import versions as sglang_versions
from pplx_comm.serving.vllm import versions
from pplx_comm.serving.vllm.placement import Placement
from pplx_comm.settings import Serving, Sglang, read


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.7", "0.32.0+cpu", "0.32.1rc1", "0.33.0"])
def test_versions_that_were_tested(version: str) -> None:
    assert versions.problem(version) is None


@pytest.mark.parametrize("version", ["0.25.1", "0.31.0", "0.34.0", "1.32.0", "dev", ""])
def test_other_versions_are_refused_with_a_sentence(version: str) -> None:
    problem = versions.problem(version)
    assert (
        problem is not None and version in problem and "0.26, 0.32 and 0.33" in problem and "PPLX_COMM_VLLM_UNTESTED=1" in problem
    )


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23rc1"])
def test_versions_of_sglang_that_were_tested(version: str) -> None:
    assert sglang_versions.problem(version) is None


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.230", "0.5", "1.5.23", "dev"])
def test_other_versions_of_sglang_are_refused(version: str) -> None:
    problem = sglang_versions.problem(version)
    assert problem is not None and version in problem and "0.5.23" in problem and "PPLX_COMM_SGLANG_UNTESTED=1" in problem


def test_settings() -> None:
    assert read(Serving, {}) == Serving(format="standard", tensor_parallel="sequence", transport="auto", timeout=100.0, alias=None)
    given = {"PPLX_COMM_VLLM_TIMEOUT": "2.5", "PPLX_COMM_VLLM_FORMAT": "batched", "PPLX_COMM_VLLM_ALIAS": "deepep_low_latency"}
    assert read(Serving, given) == Serving(timeout=2.5, format="batched", alias="deepep_low_latency")
    for wrong in ({"PPLX_COMM_VLLM_TIMEOUT": "0"}, {"PPLX_COMM_VLLM_TIMEOUT": "soon"}, {"PPLX_COMM_VLLM_TP": "both"}):
        with pytest.raises(Error, match="must be"):
            read(Serving, wrong)


def test_settings_of_sglang() -> None:
    assert read(Sglang, {}) == Sglang(max_tokens=None, num_sms=20, transport="auto", timeout=100.0, untested=False)
    given = {"PPLX_COMM_SGLANG_MAX_TOKENS": "4096", "PPLX_COMM_SGLANG_NUM_SMS": "24", "PPLX_COMM_SGLANG_UNTESTED": "1"}
    assert read(Sglang, given) == Sglang(max_tokens=4096, num_sms=24, untested=True)
    for wrong in ({"PPLX_COMM_SGLANG_MAX_TOKENS": "0"}, {"PPLX_COMM_SGLANG_TIMEOUT": "soon"}, {"PPLX_COMM_SGLANG_NUM_SMS": "all"}):
        with pytest.raises(Error, match="must be"):
            read(Sglang, wrong)


def of_vllm(experts: int, ranks: int, round_robin: bool) -> list[list[int]]:
    """Each rank's experts, as vLLM's determine_expert_map has them."""
    if round_robin:
        return [list(range(rank, experts, ranks)) for rank in range(ranks)]
    base, more = divmod(experts, ranks)
    starts = [rank * base + min(rank, more) for rank in range(ranks + 1)]
    return [list(range(a, b)) for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("round_robin", [False, True])
@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (7, 2), (10, 4), (9, 4), (3, 4), (256, 8)])
def test_placement(experts: int, ranks: int, round_robin: bool) -> None:
    cpu = torch.device("cpu")
    per_rank = -(-experts // ranks)
    for rank, mine in enumerate(of_vllm(experts, ranks, round_robin)):
        placement = Placement(experts, ranks, rank, round_robin)
        assert placement.num_physical == per_rank * ranks
        assert placement.global_of_local(cpu).tolist() == mine
        assert placement.elsewhere not in mine
        table = placement.physical(cpu)
        numbers = list(range(experts)) if table is None else table.tolist()
        assert [numbers[expert] for expert in mine] == [rank * per_rank + local for local in range(len(mine))]
        assert table is None or numbers[-1] == -1


def test_numbers_that_are_alike_need_no_table() -> None:
    assert Placement(8, 2, 0).physical(torch.device("cpu")) is None
    assert Placement(8, 2, 0, round_robin=True).physical(torch.device("cpu")) is not None
