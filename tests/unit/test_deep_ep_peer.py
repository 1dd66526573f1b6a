"""DeepEP as a peer: which of its calls are made at which size, with what. In its place is a library that notes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu.deep_ep import MOST_LOW_LATENCY, DeepEp, rows_of_a_rank
from bench.gpu.peers import Inputs
from bench.harness.batch import Shape
from bench.harness.options import Options, from_arguments, parser_of
from bench.harness.world import Off

WORLD = 2
EXPERTS, HIDDEN, TOP_K = 8, 256, 2


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
        self.nvlink, self.rdma, self.options, self.calls = num_nvl_bytes, num_rdma_bytes, options, []
        Buffer.made.append(self)

    def note(self, name: str, **what: Any) -> None:
        self.calls: list[tuple[str, dict[str, Any]]]
        self.calls.append((name, what))

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
        self.note("clean", rows=rows)

    def low_latency_dispatch(self, x: Any, ids: torch.Tensor, rows: int, experts: int, **wire: bool) -> Any:
        assert len(x) <= rows and ids.dtype == torch.int32 and (rows * WORLD) % 4 == 0
        self.note("low_latency_dispatch", rows=rows, **wire)
        return object(), None, ("handle of", ids.data_ptr()), None, None

    def low_latency_combine(self, answers: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: Any) -> Any:
        assert handle == ("handle of", ids.data_ptr()) and len(answers) == EXPERTS // WORLD and len(weights) == len(ids)
        assert answers.shape[1] == WORLD * self.calls[-1][1]["rows"] and answers.is_contiguous()
        self.note("low_latency_combine", rows=answers.shape[1] // WORLD)
        return weights, None, None

    def get_dispatch_layout(self, ids: torch.Tensor, experts: int) -> Any:
        return None, None, None, None, None

    def dispatch(self, x: Any, handle: Any = None, num_worst_tokens: int = 0, config: Any = None, **rest: Any) -> Any:
        rows = x[0] if isinstance(x, tuple) else x
        about = {"send": config.send, "sms": config.sms, "fp8": isinstance(x, tuple)}
        self.note("dispatch", cached=handle is not None, worst=num_worst_tokens, **about)
        return rows.repeat(2, 1), None, rest.get("topk_weights"), None, "handle", None

    def combine(self, answers: torch.Tensor, handle: Any, topk_weights: Any = None, config: Any = None) -> Any:
        self.note("combine", rows=len(answers), send=config.send, sms=config.sms)
        return answers, None, None

    def destroy(self) -> None:
        self.note("destroy")


class Device:
    """A rank's clock, by which chunks of 16 tokens are the fastest to dispatch and of 8 to combine."""

    device = torch.device("cpu")

    def time(self, run: Any) -> float:
        run()
        name, what = Buffer.made[-1].calls[-1]
        return float(abs(what["send"] - (16 if name == "dispatch" else 8)))


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Buffer.made = []
    monkeypatch.delenv("NVSHMEM_QP_DEPTH", raising=False)
    yield
    os.environ.pop("NVSHMEM_QP_DEPTH", None)


def options(*arguments: str) -> Options:
    layer = ["--hidden", str(HIDDEN), "--experts", str(EXPERTS), "--top-k", str(TOP_K), "--device", "cuda", "--wire", "fp8"]
    return from_arguments(parser_of("test", None).parse_args([*layer, *arguments]))


def peer(o: Options, together: bool = True, library: Any = None) -> DeepEp:
    world = SimpleNamespace(size=WORLD, rank=0, together=together, barrier=lambda: None, gather=lambda value, tag: [value] * WORLD)
    fake = library or SimpleNamespace(Buffer=Buffer, Config=Config, topk_idx_t=torch.int32)
    return DeepEp(fake, "group", world, o, Device())  # type: ignore[arg-type]


def run(p: DeepEp, o: Options, tokens: int, num_sms: int | None = None) -> list[str]:
    """Two inputs, dispatched and combined; the calls."""
    x = [torch.randn(tokens, HIDDEN).to(torch.bfloat16) for _ in range(2)]
    ids = [torch.randint(0, EXPERTS, (tokens, TOP_K)) for _ in range(2)]
    p.prepare(Shape(o, tokens, 0, WORLD), Inputs(x, ids, [torch.rand(tokens, TOP_K) for _ in range(2)]), num_sms)
    before = len(Buffer.made[-1].calls)
    for i in (0, 1):
        p.dispatch(i)
        p.combine(i)
    return [name for name, _ in Buffer.made[-1].calls[before:]]


def test_low_latency_at_decode_sizes() -> None:
    o = options("--tokens", "1,128,512")
    p = peer(o)
    for tokens, rows in ((1, 2), (128, 128), (512, 512)):
        assert run(p, o, tokens) == ["low_latency_dispatch", "low_latency_combine"] * 2
        assert p.in_graphs and p.how == "low-latency mode"
        [*_, cleaned] = [what["rows"] for name, what in Buffer.made[0].calls if name == "clean"]
        assert cleaned == rows  # the words of another size lie elsewhere
    (buffer,) = Buffer.made
    assert buffer.options["low_latency_mode"] and buffer.options["num_qps_per_rank"] == EXPERTS // WORLD
    assert buffer.rdma == Buffer.get_low_latency_rdma_size_hint(512, HIDDEN, WORLD, EXPERTS)
    assert int(os.environ["NVSHMEM_QP_DEPTH"]) >= 2 * (512 + 1)
    assert all(what["use_fp8"] and "use_ue8m0" not in what for name, what in buffer.calls if name == "low_latency_dispatch")
    p.close()
    assert buffer.calls[-1][0] == "destroy"


def test_scales_that_are_powers_of_two() -> None:
    o = options("--tokens", "4", "--wire", "fp8_ue8m0")
    run(peer(o), o, 4)
    (what,) = {tuple(what.items()) for name, what in Buffer.made[0].calls if name == "low_latency_dispatch"}
    assert dict(what) == {"rows": 4, "use_fp8": True, "round_scale": True, "use_ue8m0": True}


def test_the_normal_mode_beyond_is_tuned() -> None:
    """With the configuration that the slowest rank is fastest with; as many rows as there could be, so that no count is waited for."""
    o = options("--tokens", f"8,{MOST_LOW_LATENCY + 4}")
    p = peer(o)
    run(p, o, 8)
    tokens = MOST_LOW_LATENCY + 4
    assert run(p, o, tokens) == ["dispatch", "combine"] * 2
    assert p.in_graphs and p.how == "normal mode, 24 SMs, tuned" and Buffer.sms == 24
    _, buffer = Buffer.made
    timed = [what for name, what in buffer.calls[:-4] if name == "dispatch"][1:]
    assert all(what["cached"] for what in timed) and {what["send"] for what in timed} > {6, 16, 32}
    assert [what for _, what in buffer.calls[-4:]] == [
        {"cached": False, "worst": WORLD * tokens, "send": 16, "sms": 24, "fp8": True},
        {"rows": WORLD * tokens, "send": 8, "sms": 24},
    ] * 2  # fmt: skip
    assert buffer.rdma == 0 and buffer.nvlink == HIDDEN * 2 * 32 * 24  # for the largest that was tried
    p.close()
    assert [one.calls[-1][0] for one in Buffer.made] == ["destroy", "destroy"]


def test_across_nodes_the_host_waits_for_counts() -> None:
    o = options("--tokens", "1024", "--num-sms", "31", "--wire", "native")
    p = peer(o, together=False)
    run(p, o, 1024, 31)
    (buffer,) = Buffer.made
    assert not p.in_graphs and p.how == "normal mode, 30 SMs" and buffer.rdma == HIDDEN * 2
    assert all(what["worst"] == 0 and what["send"] == 6 and not what["fp8"] for name, what in buffer.calls if name == "dispatch")


def test_the_normal_mode_on_as_many_multiprocessors_as_were_asked_for() -> None:
    """One buffer, large enough for all; what is tuned at each is of that many. The low-latency mode has no such setting."""
    o = options("--tokens", "8,1024", "--num-sms", "32,all,8,9")
    assert o.num_sms == (8, 9, 32, None)
    p = peer(o)
    assert not p.has_num_sms(Shape(o, 8, 0, WORLD)) and p.has_num_sms(Shape(o, 1024, 0, WORLD))
    for num_sms, sms in ((8, 8), (9, 8), (32, 32), (None, 24)):
        before = len(Buffer.made[-1].calls) if Buffer.made else 0
        run(p, o, 1024, num_sms)
        assert p.how == f"normal mode, {sms} SMs, tuned" and Buffer.sms == sms
        configs = [what["sms"] for name, what in Buffer.made[-1].calls[before:] if name in ("dispatch", "combine")]
        assert len(configs) > 4 and set(configs) == {sms}
    (buffer,) = Buffer.made
    assert buffer.nvlink == HIDDEN * 2 * 32 * 32


def test_what_cannot_be_measured_is_off() -> None:
    with pytest.raises(Off, match="Buffer"):
        peer(options(), library=SimpleNamespace())
    with pytest.raises(Off, match="bfloat16"):
        peer(options("--dtype", "fp16"))


@pytest.mark.parametrize(("tokens", "world", "rows"), [(1, 2, 2), (1, 4, 1), (3, 6, 4), (1, 3, 4), (128, 8, 128)])
def test_rows_of_all_ranks_are_a_multiple_of_four(tokens: int, world: int, rows: int) -> None:
    assert rows_of_a_rank(tokens, world) == rows
