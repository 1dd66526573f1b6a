"""How a backend of the grouped product is chosen, and what DeepGEMM is given: without a GPU, beside stand-ins."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from harness import seed

import pplx_comm as pc
from pplx_comm.moe import functional as F
from pplx_comm.moe.grouped import choose, tiles
from pplx_comm.moe.grouped.deepgemm import DeepGemm
from pplx_comm.moe.grouped.loop import ScaledLoop
from pplx_comm.moe.grouped.torch_mm import TorchGroupedMm

GPU = torch.device("cuda")


class Stand:
    def __init__(self, name: str, takes: float, waits: bool = False) -> None:
        self.name, self.time, self.waits, self.runs = name, takes, waits, 0

    def run(self) -> float:
        self.runs += 1
        return self.time


@pytest.fixture
def stands(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(choose, "_chosen", {})
    monkeypatch.setattr(choose, "_microseconds", lambda call: call())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return [Stand("first", 5), Stand("fast", 3), Stand("loop", 1, waits=True)]


def test_the_fastest_is_measured_once(stands: list[Any]) -> None:
    for _ in range(3):
        assert choose.pick(stands, ("forward", 8), GPU, Stand.run).name == "fast"
    assert [stand.runs for stand in stands] == [1, 1, 0]  # nothing that makes the host wait
    stands[1].time = 7
    assert choose.pick(stands, ("forward", 8), GPU, Stand.run).name == "fast"
    assert choose.pick(stands, ("forward", 16), GPU, Stand.run).name == "first"
    assert list(F.choices().values()) == ["fast", "first"]


def test_where_nothing_is_measured(stands: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose.pick(stands, ("forward", 8), torch.device("cpu"), Stand.run).name == "loop"
    assert choose.pick([stands[1], stands[2]], ("forward", 8), GPU, Stand.run).name == "fast"  # alone
    assert choose.pick([stands[2]], ("forward", 8), GPU, Stand.run).name == "loop"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose.pick(stands, ("forward", 8), GPU, Stand.run).name == "first"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose.pick(stands, ("forward", 8), GPU, Stand.run).name == "first"
    assert not any(stand.runs for stand in stands) and not F.choices()
    with pytest.raises(pc.Error, match="'abacus'"):
        choose.named(stands, "abacus")


def test_row_counts_with_the_same_answer() -> None:
    assert [choose.rows_class(n) for n in (0, 1, 2, 3, 4, 5, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 2048]


def contiguous(a: Any, b: Any, out: torch.Tensor, ends: torch.Tensor, use_psum_layout: bool) -> None:
    """As DeepGEMM's documentation has it: a segment begins where the last one ended, rounded up to 128."""
    (x, x_scale), (w, w_scale), begin = a, b, 0
    assert use_psum_layout and w.is_contiguous() and w_scale.is_contiguous() and ends.dtype == torch.int32
    assert w_scale.shape == (len(w), w.shape[1] // 128, w.shape[2] // 128)
    for e, end in enumerate(ends.tolist()):
        rows = slice(begin, end)
        out[rows] = (F.dequantise(x[rows], x_scale[rows]) @ F.dequantise_weights(w[e : e + 1], w_scale[e : e + 1])[0].mT).to(
            out.dtype
        )
        begin = -(-end // 128) * 128


@pytest.mark.parametrize("transposed", [False, True])
def test_arguments_of_deepgemm(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", types.SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=contiguous))
    g = torch.Generator().manual_seed(seed())
    where = F.Segments(torch.tensor([0, 128, 128, 384], dtype=torch.int32))
    x = F.quantise(torch.randn(512, 256 if transposed else 128, generator=g))
    w = F.quantise_weights(torch.randn(3, 256, 128, generator=g))
    seen, wanted = (each.product(x, w, where, transposed, torch.bfloat16) for each in (DeepGemm(), ScaledLoop()))
    assert (seen[:384].float() - wanted[:384].float()).norm() < 1e-3 * wanted[:384].float().norm()
    assert not DeepGemm().takes(w[0], where)  # on a CPU


def masked(a: Any, b: Any, out: torch.Tensor, counts: torch.Tensor, expected: int) -> None:
    """As DeepGEMM's documentation has it: [experts, rows, k], of which each expert's first rows are there."""
    (x, x_scale), (w, w_scale) = a, b
    assert x.shape[:2] == out.shape[:2] == x_scale.shape[:2] and x.shape[1] % 128 == 0 and isinstance(expected, int)
    for e, n in enumerate(counts.tolist()):
        weights = F.dequantise_weights(w[e : e + 1], w_scale[e : e + 1])[0]
        out[e, :n] = (F.dequantise(x[e, :n], x_scale[e, :n]) @ weights.mT).to(out.dtype)


def test_arguments_of_deepgemm_for_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", types.SimpleNamespace(m_grouped_fp8_fp4_gemm_nt_masked=masked))
    g = torch.Generator().manual_seed(seed())
    where = F.Segments(torch.tensor([5, 0, 128], dtype=torch.int32), 128, 40)
    codes, scale = F.quantise(torch.randn(384, 256, generator=g))
    x, w = (codes, scale.unflatten(0, (3, 128))), F.quantise_weights(torch.randn(3, 128, 256, generator=g))
    seen, wanted = (each.product(x, w, where, False, torch.bfloat16) for each in (DeepGemm(), ScaledLoop()))
    for rows in (slice(0, 5), slice(256, 384)):
        assert (seen[rows].float() - wanted[rows].float()).norm() < 1e-3 * wanted[rows].float().norm()


@pytest.mark.parametrize("percentage", [None, "100", "16"])
def test_torch_under_mps(monkeypatch: pytest.MonkeyPatch, percentage: str | None) -> None:
    """With a part of a GPU its batched products are wrong."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    if percentage is not None:
        monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage)
    backend = TorchGroupedMm()
    assert backend.takes(GPU, torch.bfloat16) == (percentage != "16")
    assert backend.takes(torch.device("cpu"), torch.bfloat16)


def test_tiles_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows have small tiles, and all tiles fit the memory that there is."""
    for memory, tile in ((227 << 10, (128, 256)), (163 << 10, (128, 256)), (99 << 10, (128, 128))):
        monkeypatch.setattr(tiles, "shared_memory", lambda device, memory=memory: memory)
        few, many = (tiles.shape_of_rows(average, GPU) for average in (tiles.FEW, tiles.FEW + 1))
        assert (few.rows, few.programs) == (64, 2) and (many.rows, many.side) == tile
        assert 2 * (many.rows + many.side) * many.inner * many.stages <= memory
