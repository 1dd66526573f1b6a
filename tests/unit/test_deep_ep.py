"""DeepEP as a peer of bench/latency.py and, with DeepGEMM, as a layer of bench/layer.py.

In their place are stand-ins that do on a CPU what both say they do, for the first of two ranks. What a layer adds to this rank's tokens
is compared with the loop's, in float64. Memory that nobody wrote holds NaN.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu.deep_ep import DeepEp
from bench.gpu.deep_ep_buffers import MOST_LOW_LATENCY, SMS, rows_of_a_rank
from bench.gpu.inputs import Inputs
from bench.harness.batch import Shape
from bench.harness.options import Options
from bench.harness.options import from_arguments as options_from
from bench.harness.options import parser_of as parser_of_options
from bench.harness.world import Off, World
from bench.moe import deep_ep, measure, theirs
from bench.moe.options import LayerOptions, from_arguments, parser_of
from pplx_comm.moe.quantise import quantise
from pplx_comm.moe.segments import Segments

WORLD, EXPERTS, HIDDEN, TOP_K = 2, 8, 256, 3
LOCAL = EXPERTS // WORLD
SHAPE = ["--hidden", str(HIDDEN), "--experts", str(EXPERTS), "--top-k", str(TOP_K)]
FEW, MANY = 5, MOST_LOW_LATENCY + 88
Codes = tuple[torch.Tensor, torch.Tensor]


def numbers(x: Codes) -> torch.Tensor:
    """Of codes with a scale for each 128."""
    return x[0].float() * x[1].float().repeat_interleave(128, -1)


def weights_of(w: Codes) -> torch.Tensor:
    codes, scale = w
    return codes.float() * scale.repeat_interleave(128, 1)[:, : codes.shape[1]].repeat_interleave(128, 2)[..., : codes.shape[2]]


class Config:
    def __init__(self, sms: int, send: int, under_way: int) -> None:
        self.sms, self.send = sms, send

    def get_nvl_buffer_size_hint(self, row: int, world: int) -> int:
        return row * self.send * self.sms

    def get_rdma_buffer_size_hint(self, row: int, world: int) -> int:
        return row


class Buffer:
    made: list[Buffer]
    sms = 0

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **options: Any) -> None:
        self.options, self.nvlink, self.rdma, self.destroyed = options, num_nvl_bytes, num_rdma_bytes, False
        self.cleaned, self.configs = list[int](), list[Config]()
        Buffer.made.append(self)

    @staticmethod
    def get_low_latency_rdma_size_hint(rows: int, hidden: int, world: int, experts: int) -> int:
        return rows * hidden * world * experts

    @staticmethod
    def get_dispatch_config(world: int) -> Config:
        return Config(Buffer.sms, 6, 256)

    get_combine_config = get_dispatch_config

    @staticmethod
    def set_num_sms(sms: int) -> None:
        Buffer.sms = sms

    def clean_low_latency_buffer(self, rows: int, hidden: int, experts: int) -> None:
        self.cleaned.append(rows)

    def low_latency_dispatch(self, x: torch.Tensor, ids: torch.Tensor, rows: int, experts: int, use_fp8: bool) -> Any:
        assert ids.dtype == torch.int32 and len(x) <= rows == self.cleaned[-1] and rows * WORLD % 4 == 0 and use_fp8
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
        assert out.shape[:2] == (LOCAL, WORLD * self.cleaned[-1])
        y = torch.zeros(len(ids), HIDDEN)
        for token, choice, expert, place in handle:
            y[token] += weights[token, choice] * out[expert, place].float()
        return y.bfloat16(), None, None

    def get_dispatch_layout(self, ids: torch.Tensor, experts: int) -> Any:
        assert ids.dtype == torch.int32
        return None, None, None, None, None

    def dispatch(
        self, x: Codes, handle: Any = None, config: Any = None, num_worst_tokens: int = 0, expert_alignment: int = 1, **rest: Any
    ) -> Any:
        self.configs.append(config)
        assert x[1].is_contiguous()
        if handle is not None:
            return None
        ids, weights = rest["topk_idx"], rest["topk_weights"]
        here = ids < LOCAL
        rows = here.any(1)
        counts = [-(-int((ids == expert).sum()) // expert_alignment) * expert_alignment for expert in range(LOCAL)]
        codes, scale = (
            torch.cat([part[rows], part.new_zeros(max(0, num_worst_tokens - int(rows.sum())), part.shape[1])]) for part in x
        )
        return (codes, scale), torch.where(here, ids, -1)[rows], weights[rows], counts, (rows, len(ids)), None

    def combine(self, sums: torch.Tensor, handle: Any, config: Any = None, topk_weights: Any = None) -> Any:
        self.configs.append(config)
        rows, tokens = handle
        y = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)
        y[rows] = sums[: int(rows.sum())]
        return y, None, None

    def destroy(self) -> None:
        self.destroyed = True


class DeepGemm:
    """What DeepGEMM says of its arguments, held."""

    def m_grouped_fp8_fp4_gemm_nt_masked(self, x: Codes, w: Codes, out: torch.Tensor, counts: torch.Tensor, expected: int) -> None:
        assert expected >= 1 and x[0].shape[1] % 128 == 0, "a tile would reach into the next expert's rows"
        x = x[0], x[1] if x[1].dim() == 3 else x[1].unflatten(0, (LOCAL, -1))  # the CPU's activation lays rows one under the other
        weights = weights_of(w)
        for expert, n in enumerate(counts.tolist()):
            out[expert, :n] = (numbers((x[0][expert, :n], x[1][expert, :n])) @ weights[expert].T).bfloat16()

    def m_grouped_fp8_gemm_nt_contiguous(self, x: Codes, w: Codes, out: torch.Tensor, experts: torch.Tensor) -> None:
        assert len(experts) % 128 == 0 and bool((experts.view(-1, 128) == experts[::128, None]).all())
        by_column = x[1].stride(0) == 1 and x[1].stride(1) % 4 == 0
        assert x[0].shape[1] != HIDDEN or by_column  # those of the CPU's activation lie by row
        by_row, weights = numbers(x), weights_of(w)
        for expert in range(LOCAL):
            rows = experts == expert
            out[rows] = (by_row[rows] @ weights[expert].T).bfloat16()


def microseconds(call: Any) -> float:
    """Chunks of 16 tokens are the fastest."""
    call()
    return float(abs(Buffer.made[-1].configs[-1].send - 16))


LIBRARY = SimpleNamespace(Buffer=Buffer, Config=Config, topk_idx_t=torch.int32)


def world_of(together: bool = True) -> Any:
    return SimpleNamespace(size=WORLD, rank=0, together=together, barrier=lambda: None, gather=lambda value, tag: [value] * WORLD)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    libraries = {"deep_ep": LIBRARY, "deep_gemm": DeepGemm()}
    monkeypatch.setattr(deep_ep, "found", lambda name, device: libraries[name])
    monkeypatch.setattr(theirs, "group_of", lambda *_: "group")
    monkeypatch.setattr(deep_ep, "microseconds", microseconds)
    monkeypatch.delenv("NVSHMEM_QP_DEPTH", raising=False)
    Buffer.made = []
    torch.use_deterministic_algorithms(True)  # which fills what torch.empty() makes
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("NVSHMEM_QP_DEPTH", None)


def layer_of() -> tuple[deep_ep.DeepEp, LayerOptions]:
    options = from_arguments(parser_of(None).parse_args([*SHAPE, "--intermediate", "128", "--tokens", f"{FEW},{FEW + 64},{MANY}"]))
    return deep_ep.DeepEp(world_of(), options, torch.device("cpu")), options


def run_layer(layer: deep_ep.DeepEp, options: LayerOptions, tokens: int, routing: str = "zipf") -> None:
    weights = measure.make_weights(options, 0, WORLD, torch.device("cpu"))
    problem = measure.Problem(options, tokens, routing, 0, WORLD, torch.device("cpu"), weights)
    layer.prepare(problem)
    stages: list[str] = []
    y = layer.forward(stages.append).double()
    wanted = measure._part(problem, problem.x.double(), problem.ids, problem.choice_weights.double())
    assert float((y - wanted).norm() / wanted.norm()) < measure.LIMITS_OF_OTHERS["fp8"]
    assert stages == ["dispatch", "up", "activation", "down", "combine"]


@pytest.mark.parametrize("routing", ["zipf", "hot"])
def test_a_layer(routing: str) -> None:
    """The low-latency mode, whose words lie elsewhere at each size; then the normal mode, tuned, with the host waiting for counts."""
    layer, options = layer_of()
    for tokens in (FEW, FEW + 64, FEW):
        run_layer(layer, options, tokens, routing)
        assert layer.in_graphs and layer.notes()["product"] == "deepgemm, masked"
    assert Buffer.made[0].cleaned == [64, 128, 64]
    run_layer(layer, options, MANY, routing)
    assert not layer.in_graphs and layer.notes()["product"] == "deepgemm, contiguous" and Buffer.made[1].configs[-1].send == 16
    layer.close()
    assert all(buffer.destroyed for buffer in Buffer.made)


def test_rows_that_no_expert_here_wants() -> None:
    """All of a rank's experts may be without rows, and a row has one choice at least."""
    begins = torch.tensor([0, 0, 128], dtype=torch.int32)
    ids = torch.tensor([[-1, 1], [1, -1], [-1, -1]], dtype=torch.int32)
    places = deep_ep.places_of(ids, begins)
    assert places.tolist() == [[128, 0], [1, 128], [128, 128]]
    out, weights = torch.full((128, 4), torch.nan).bfloat16(), torch.full((3, 2), torch.nan)
    out[0], out[1], weights[0, 1], weights[1, 0] = 2, 3, 0.5, 1.0
    assert deep_ep.added_up(out, places, weights)[:, 0].tolist() == [1, 3, 0]


def test_a_layer_that_is_wrong_or_raises_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the table, and not the run's end."""
    world = World.__new__(World)
    world.gather = lambda value, tag, patience=None: [value]  # type: ignore[method-assign]
    point = measure.Point("theirs", "fp8", 8, "even")
    layer: Any = SimpleNamespace(notes=dict[str, Any], forward=lambda mark: torch.zeros(1))
    problem: Any = None
    monkeypatch.setattr(measure, "_error", lambda *_: 0.5)
    with pytest.raises(Off, match=r"theirs, fp8, 8 tokens: off by 0\.5"):
        measure._check(layer, problem, point, world)
    raises: Any = SimpleNamespace(prepare=lambda _: None, forward=lambda mark: 1 / 0)
    measure._measure(raises, problem, point, world, None, problem)
    assert point.off == "division by zero"


def peer_of(*arguments: str, together: bool = True, library: Any = LIBRARY) -> tuple[DeepEp, Options]:
    o = options_from(parser_of_options("test", None).parse_args([*SHAPE, "--device", "cuda", "--wire", "fp8", *arguments]))
    device: Any = SimpleNamespace(device=torch.device("cpu"), time=microseconds)
    return DeepEp(library, "group", world_of(together), o, device), o


def run_peer(peer: DeepEp, o: Options, tokens: int, num_sms: int | None = None) -> None:
    x = [torch.randn(tokens, HIDDEN).to(torch.bfloat16) for _ in range(2)]
    ids = [torch.randint(0, EXPERTS, (tokens, TOP_K)) for _ in range(2)]
    peer.prepare(Shape(o, tokens, 0, WORLD), Inputs(x, ids, [torch.rand(tokens, TOP_K) for _ in range(2)]), num_sms)
    for i in (0, 1):
        peer.dispatch(i)
        peer.combine(i)


def test_a_peer() -> None:
    """The low-latency mode at decode sizes; beyond them the normal mode, tuned, on the multiprocessors that were asked for."""
    peer, o = peer_of("--tokens", f"1,8,{MANY}", "--num-sms", "32,all,9")
    for tokens in (1, 8):
        run_peer(peer, o, tokens)
        assert peer.in_graphs and peer.how == "low-latency mode" and not peer.has_num_sms(Shape(o, tokens, 0, WORLD))
    assert Buffer.made[0].cleaned == [2, 8] and int(os.environ["NVSHMEM_QP_DEPTH"]) >= 1024
    for num_sms, sms in ((9, 8), (32, 32), (None, SMS)):
        run_peer(peer, o, MANY, num_sms)
        assert peer.in_graphs and peer.how == f"normal mode, {sms} SMs, tuned" and Buffer.made[1].configs[-1].sms == sms
    assert Buffer.made[1].configs[-1].send == 16 and Buffer.made[1].nvlink == HIDDEN * 2 * 32 * 32  # for the largest that was tried
    peer.close()
    assert [buffer.destroyed for buffer in Buffer.made] == [True, True]


def test_a_peer_across_nodes_and_one_that_cannot_be() -> None:
    peer, o = peer_of("--tokens", "1024", together=False)
    run_peer(peer, o, 1024)
    assert not peer.in_graphs and peer.how == f"normal mode, {SMS} SMs" and Buffer.made[0].rdma == HIDDEN * 2
    with pytest.raises(Off, match="Buffer"):
        peer_of(library=SimpleNamespace())
    with pytest.raises(Off, match="bfloat16"):
        peer_of("--dtype", "fp16")
    assert [rows_of_a_rank(*of) for of in ((1, 2), (1, 4), (3, 6), (1, 3), (128, 8))] == [2, 1, 4, 4, 128]
