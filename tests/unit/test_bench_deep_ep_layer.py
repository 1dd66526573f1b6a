"""DeepEP and DeepGEMM as a layer of bench/layer.py: in their place are stand-ins that do on a CPU what both say they do.

The rank is the first of two, so some choices are another rank's. What it adds to its own tokens is compared with the loop's, in
float64. Memory that nobody wrote holds NaN.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from test_deep_ep_peer import Config

from bench.gpu.deep_ep import MOST_LOW_LATENCY, SMS
from bench.harness.world import Off, World
from bench.moe import deep_ep, measure, theirs
from bench.moe.options import LayerOptions, from_arguments, parser_of
from pplx_comm.moe.quantise import quantise
from pplx_comm.moe.segments import Segments

WORLD, EXPERTS, HIDDEN, TOP_K = 2, 8, 256, 3
LOCAL = EXPERTS // WORLD
FEW, MANY = 5, MOST_LOW_LATENCY + 88
Codes = tuple[torch.Tensor, torch.Tensor]


def numbers(x: Codes) -> torch.Tensor:
    """Of codes with a scale for each 128."""
    return x[0].float() * x[1].float().repeat_interleave(128, -1)


def weights_of(w: Codes) -> torch.Tensor:
    codes, scale = w
    return codes.float() * scale.repeat_interleave(128, 1)[:, : codes.shape[1]].repeat_interleave(128, 2)[..., : codes.shape[2]]


class Buffer:
    made: list[Buffer]

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **options: Any) -> None:
        self.options, self.nvlink, self.cleaned, self.destroyed = options, num_nvl_bytes, list[int](), False
        self.last: Any = None
        Buffer.made.append(self)

    @staticmethod
    def get_low_latency_rdma_size_hint(rows: int, hidden: int, world: int, experts: int) -> int:
        return rows * hidden * world * experts

    @staticmethod
    def get_dispatch_config(world: int) -> Config:
        return Config(SMS, 6, 256)

    get_combine_config = get_dispatch_config

    @staticmethod
    def set_num_sms(sms: int) -> None:
        assert sms == SMS

    def clean_low_latency_buffer(self, rows: int, hidden: int, experts: int) -> None:
        self.cleaned.append(rows)

    def low_latency_dispatch(self, x: torch.Tensor, ids: torch.Tensor, rows: int, experts: int, use_fp8: bool) -> Any:
        assert ids.dtype == torch.int32 and len(x) <= rows == self.cleaned[-1] and use_fp8
        codes = torch.full((LOCAL, WORLD * rows, HIDDEN), 255, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scale, counts = torch.full((LOCAL, WORLD * rows, HIDDEN // 128), torch.nan), torch.zeros(LOCAL, dtype=torch.int32)
        handle = []
        all_codes, all_scales = quantise(x, Segments(torch.tensor([0, len(x)], dtype=torch.int32)))
        for token, choice in (ids < LOCAL).nonzero().tolist():
            expert = int(ids[token, choice])
            place = int(counts[expert])
            codes[expert, place], scale[expert, place] = all_codes[token], all_scales[token]
            handle.append((token, choice, expert, place))
            counts[expert] += 1
        return (codes, scale), counts, handle, None, None

    def low_latency_combine(self, out: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: Any) -> Any:
        y = torch.zeros(len(ids), HIDDEN)
        for token, choice, expert, place in handle:
            y[token] += weights[token, choice] * out[expert, place].float()
        return y.bfloat16(), None, None

    def get_dispatch_layout(self, ids: torch.Tensor, experts: int) -> Any:
        assert ids.dtype == torch.int32
        return None, None, None, None, None

    def dispatch(self, x: Codes, handle: Any = None, config: Any = None, expert_alignment: int = 1, **rest: Any) -> Any:
        self.last = config
        assert x[1].is_contiguous()
        if handle is not None:
            return None
        ids, weights = rest["topk_idx"], rest["topk_weights"]
        here = ids < LOCAL
        rows = here.any(1)
        counts = [int((ids == expert).sum()) for expert in range(LOCAL)]
        aligned = [-(-n // expert_alignment) * expert_alignment for n in counts]
        local = torch.where(here, ids, -1)[rows]
        return (x[0][rows], x[1][rows]), local, weights[rows], aligned, (rows, len(ids)), None

    def combine(self, sums: torch.Tensor, handle: Any, config: Any = None) -> Any:
        self.last = config
        rows, tokens = handle
        y = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)
        y[rows] = sums
        return y, None, None

    def destroy(self) -> None:
        self.destroyed = True


class DeepGemm:
    """What DeepGEMM says of its arguments, held."""

    def m_grouped_fp8_fp4_gemm_nt_masked(self, x: Codes, w: Codes, out: torch.Tensor, counts: torch.Tensor, expected: int) -> None:
        assert expected >= 1 and x[0].shape[1] % 128 == 0, "a tile would reach into the next expert's rows"
        x = x[0], x[1] if x[1].dim() == 3 else x[1].unflatten(0, (LOCAL, -1))  # the CPU's activation lays rows one under the other
        for expert, n in enumerate(counts.tolist()):
            out[expert, :n] = (numbers((x[0][expert, :n], x[1][expert, :n])) @ weights_of(w)[expert].T).bfloat16()

    def m_grouped_fp8_gemm_nt_contiguous(self, x: Codes, w: Codes, out: torch.Tensor, experts: torch.Tensor) -> None:
        assert len(experts) % 128 == 0 and bool((experts.view(-1, 128) == experts[::128, None]).all())
        assert x[0].shape[1] != HIDDEN or (
            x[1].stride(0) == 1 and x[1].stride(1) % 4 == 0
        )  # those of the CPU's activation lie by row
        by_row = numbers(x)
        for expert in range(LOCAL):
            rows = experts == expert
            out[rows] = (by_row[rows] @ weights_of(w)[expert].T).bfloat16()


def microseconds(call: Any) -> float:
    """16 tokens at once are the fastest."""
    call()
    return float(abs(Buffer.made[-1].last.send - 16))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    libraries = {"deep_ep": SimpleNamespace(Buffer=Buffer, Config=Config, topk_idx_t=torch.int32), "deep_gemm": DeepGemm()}
    monkeypatch.setattr(deep_ep, "found", lambda name, device: libraries[name])
    monkeypatch.setattr(theirs, "group_of", lambda *_: "group")
    monkeypatch.setattr(deep_ep, "microseconds", microseconds)
    monkeypatch.delenv("NVSHMEM_QP_DEPTH", raising=False)
    Buffer.made = []
    torch.use_deterministic_algorithms(True)  # which fills what torch.empty() makes
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("NVSHMEM_QP_DEPTH", None)


def made() -> tuple[deep_ep.DeepEp, LayerOptions]:
    arguments = ["--hidden", str(HIDDEN), "--intermediate", "128", "--experts", str(EXPERTS), "--top-k", str(TOP_K)]
    options = from_arguments(parser_of(None).parse_args([*arguments, "--tokens", f"{FEW},{FEW + 64},{MANY}"]))
    world: Any = SimpleNamespace(size=WORLD, rank=0, together=True, barrier=lambda: None, gather=lambda value, tag: [value] * WORLD)
    return deep_ep.DeepEp(world, options, torch.device("cpu")), options


def run(layer: deep_ep.DeepEp, options: LayerOptions, tokens: int, routing: str = "zipf") -> list[str]:
    """The stages, after what came out has been compared."""
    weights = measure.make_weights(options, 0, WORLD, torch.device("cpu"))
    problem = measure.Problem(options, tokens, routing, 0, WORLD, torch.device("cpu"), weights)
    layer.prepare(problem)
    stages: list[str] = []
    y = layer.forward(stages.append).double()
    wanted = measure._part(problem, problem.x.double(), problem.ids, problem.choice_weights.double())
    assert float((y - wanted).norm() / wanted.norm()) < measure.LIMITS_OF_OTHERS["fp8"]
    return stages


def test_few_tokens() -> None:
    """The low-latency mode, whose words lie elsewhere at each size, and whose queues have room for all sizes."""
    layer, options = made()
    for tokens in (FEW, FEW + 64, FEW + 64, FEW):
        assert run(layer, options, tokens) == ["dispatch", "up", "activation", "down", "combine"]
        assert layer.in_graphs and layer.notes()["product"] == "deepgemm, masked"
    [buffer] = Buffer.made
    assert buffer.cleaned == [64, 128, 64] and buffer.options["low_latency_mode"]
    assert int(os.environ["NVSHMEM_QP_DEPTH"]) >= 1024
    layer.close()
    assert buffer.destroyed


@pytest.mark.parametrize("routing", ["even", "zipf", "hot"])
def test_many_tokens(routing: str) -> None:
    """The normal mode, tuned, with the host waiting for counts; and both modes' buffers go."""
    layer, options = made()
    run(layer, options, FEW)
    assert run(layer, options, MANY, routing) == ["dispatch", "up", "activation", "down", "combine"]
    assert not layer.in_graphs and layer.notes()["product"] == "deepgemm, contiguous"
    few, many = Buffer.made
    assert many.last.send == 16 and many.nvlink == HIDDEN * 2 * 32 * SMS
    layer.close()
    assert few.destroyed and many.destroyed


def test_rows_that_nobody_here_wants() -> None:
    """All of a rank's experts may be without rows, and a row has one choice at least."""
    begins = torch.tensor([0, 0, 128], dtype=torch.int32)
    ids = torch.tensor([[-1, 1], [1, -1], [-1, -1]], dtype=torch.int32)
    places = deep_ep.places_of(ids, begins)
    assert places.tolist() == [[128, 0], [1, 128], [128, 128]]
    out, weights = torch.full((128, 4), torch.nan).bfloat16(), torch.full((3, 2), torch.nan)
    out[0], out[1], weights[0, 1], weights[1, 0] = 2, 3, 0.5, 1.0
    assert deep_ep.added_up(out, places, weights)[:, 0].tolist() == [1, 3, 0]
    assert deep_ep.experts_of_rows([0, 128], begins.device).tolist() == [1] * 128


def test_what_is_wrong_or_raises_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer of others: a line of the table, and not the run's end."""
    problem: Any = None
    notes = SimpleNamespace(notes=dict[str, Any], forward=lambda mark: torch.zeros(1))
    point = measure.Point("theirs", "fp8", 8, "even")
    with monkeypatch.context() as patch:
        patch.setattr(measure, "_error", lambda *_: 0.5)
        with pytest.raises(Off, match=r"theirs, fp8, 8 tokens: off by 0\.5"):
            measure._check(cast(Any, notes), problem, point, alone())
        patch.setattr(measure, "_error", lambda *_: 0.01)
        measure._check(cast(Any, notes), problem, point, alone())
    assert point.error == 0.01
    raises = SimpleNamespace(prepare=lambda _: None, forward=lambda mark: 1 / 0)
    measure._measure(cast(Any, raises), problem, point, alone(), None, cast(Any, None))
    assert point.off == "division by zero"


def alone() -> World:
    """A world of one rank that says what it gathers."""
    world = World.__new__(World)
    world.gather = lambda value, tag, patience=None: [value]  # type: ignore[method-assign]
    return world
