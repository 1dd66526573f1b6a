"""A layer's products are chosen by the tokens of the call, not by the room that its buffers have."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from harness import seed

import pplx_comm as pc
from pplx_comm.moe import MoE
from pplx_comm.moe import functional as F
from pplx_comm.moe.grouped import choose, products, tiles
from pplx_comm.moe.grouped.loop import Loop, ScaledLoop
from pplx_comm.moe.grouped.pair import TritonPair
from pplx_comm.moe.segments import Segments
from pplx_comm.moe.swiglu import swiglu_quantise

GPU = torch.device("cuda")
CPU = {"device": "cpu"}
FEW, MANY = 8, 4096


class Timed:
    """A loop whose speed is made up: a measurement takes `times[rows]`, by the power of two of an expert's rows."""

    waits, mx = False, False

    def __init__(self, name: str, times: dict[int, float]) -> None:
        self.name, self.times, self.measured = name, times, 0

    def takes(self, *_: object) -> bool:
        return True

    def forward(self, x: torch.Tensor, w: torch.Tensor, where: Segments) -> torch.Tensor:
        self.rows = choose.rows_class(where.average(len(x)))
        return Loop().forward(x, w, where)

    def product(self, x: Any, w: Any, where: Segments, *arguments: Any) -> torch.Tensor:
        self.rows = choose.rows_class(where.average(len(x[0])))
        return ScaledLoop().product(x, w, where, *arguments)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Timed]:
    """Two backends, of which one is faster for few rows and the other for many; and nothing says that this is no GPU."""
    both = [Timed("for many", {2: 2.0, 1024: 1.0}), Timed("for few", {2: 1.0, 1024: 2.0})]
    pick = choose.pick

    def microseconds(call: Any) -> float:
        backend = call.args[0]
        call()
        backend.measured += 1
        return backend.times[backend.rows]

    for name in ("backends", "scaled_backends"):
        monkeypatch.setattr(products, name, lambda: both)
    monkeypatch.setattr(choose, "_chosen", {})
    monkeypatch.setattr(choose, "_microseconds", microseconds)
    monkeypatch.setattr(products, "pick", lambda found, key, device, run: pick(found, key, GPU, run))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return both


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_few_tokens_and_many(comm: pc.Communicator, timed: list[Timed], precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever come first, each number is measured once, with tiles for its rows; and never while a graph is captured."""
    layer = MoE(128, 64, 8, 2, comm, precision, max_tokens_per_rank=MANY, inference=True, all_to_all=CPU)
    g = torch.Generator().manual_seed(seed())
    x = torch.randn(MANY, 128, generator=g).bfloat16()
    asked: list[Segments] = []
    like = products._like
    monkeypatch.setattr(products, "_like", lambda where, rows: asked.append(where) or like(where, rows))
    with torch.no_grad():
        for tokens in (FEW, MANY, FEW, MANY):
            layer(x[:tokens])
        measured = [one.measured for one in timed]
        assert measured == [4, 4], "two products, each for few and for many rows"
        assert sorted(F.choices().values()) == ["for few", "for few", "for many", "for many"]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for tokens in (FEW, MANY, 100):  # 100 were not seen before
            layer(x[:tokens])
    assert [one.measured for one in timed] == measured
    of = tiles.shape_of_rows if precision == "bf16" else tiles.shape_of_codes
    few, many = ({of(where.average(10**6), torch.device("cpu")) for where in asked[first : first + 2]} for first in (0, 2))
    wanted = (tiles.SHAPE_OF_FEW, tiles.SHAPE_OF_SOME), (tiles.SHAPE_OF_FEW_CODES, tiles.SHAPE_OF_MANY_CODES)
    assert (few, many) == tuple({shape} for shape in wanted[precision == "fp8"])


class TimedPair(TritonPair):
    """Both products in one launch, whose speed is made up."""

    times: ClassVar[dict[int, float]] = {2: 1.5, 1024: 3.0}

    def __init__(self) -> None:
        super().__init__()
        self.measured, self.launches = 0, 0

    def takes_both(self, *_: object) -> bool:
        return True

    def through(self, x: Any, gate_up: Any, down: Any, where: Segments, dtype: torch.dtype) -> torch.Tensor:
        self.rows = choose.rows_class(where.average(len(x[0])))
        self.launches += 1
        h = ScaledLoop().product(x, gate_up, where, False, dtype)
        return ScaledLoop().product(swiglu_quantise(h, where), down, where, False, dtype)


def test_both_products_in_one_launch(comm: pc.Communicator, timed: list[Timed], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured beside the launches apart, for passes that keep nothing; and never while a graph is captured."""
    pair = TimedPair()
    monkeypatch.setattr(products, "scaled_backends", lambda: [*timed, pair])
    microseconds = choose._microseconds

    def of_both(call: Any) -> float:
        if isinstance(call.args[0], products.Apart):
            call()
            return 2.0
        return microseconds(call)

    monkeypatch.setattr(choose, "_microseconds", of_both)
    layer = MoE(128, 64, 8, 2, comm, "fp8", max_tokens_per_rank=MANY, all_to_all=CPU)
    x = torch.randn(MANY, 128, generator=torch.Generator().manual_seed(seed())).bfloat16()
    names = ["forward 128x128", "forward 64x128"]
    with torch.no_grad():
        for tokens in (FEW, MANY, FEW, MANY):
            layer(x[:tokens])
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for tokens in (FEW, 100):
            layer(x[:tokens])
    assert (pair.measured, pair.launches) == (2, 5), "measured for few and for many rows, and taken for few"
    assert {n: ran.products for n, ran in layer.choices().items()} == {
        FEW: dict.fromkeys(names, "pair"), MANY: dict.fromkeys(names, "for many"), 100: dict.fromkeys(names, "for many")
    }  # fmt: skip
    assert {key[0]: name for key, name in F.choices().items() if key[0] == "through" and 2 in key} == {"through": "pair"}
    layer(x[:FEW].requires_grad_())
    assert set(layer.choices()[FEW].products.values()) == {"for few"} and pair.launches == 5


def test_a_backward_pass_expects_the_same_rows(comm: pc.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    averages: list[int] = []
    like = products._like
    monkeypatch.setattr(products, "_like", lambda where, rows: averages.append(where.average(10**6)) or like(where, rows))
    for recompute in ("nothing", "dispatch"):
        averages.clear()
        layer = MoE(64, 32, 8, 2, comm, max_tokens_per_rank=MANY, recompute=recompute, dtype=torch.float32, all_to_all=CPU)
        layer(torch.randn(40, 64, requires_grad=True)).sum().backward()
        assert averages == [10] * (6 if recompute == "nothing" else 7), (recompute, averages)


def test_expected_rows(comm: pc.Communicator) -> None:
    """Expectation by most_tokens where ranks know it, else by this rank's tokens; without tokens, by the most that there may be."""
    seen = []
    layer = MoE(64, 32, 8, 2, comm, max_tokens_per_rank=128, inference=True, decode_tokens=64, dtype=torch.float32, all_to_all=CPU)
    compute = layer.experts.forward

    def noted(ticket: torch.Tensor, one: F.Pass, *arguments: Any) -> torch.Tensor:
        seen.append(one.tokens)
        return compute(ticket, one, *arguments)

    layer.experts.forward = noted  # type: ignore[method-assign]
    with torch.no_grad():
        for tokens, most in ((3, None), (3, 16), (3, 100), (0, None)):
            layer(torch.randn(tokens, 64), most)
    assert seen == [3, 16, 100, 0]
    from pplx_comm.moe.received import expected_rows

    assert [expected_rows(layer.a2a, tokens) for tokens in seen] == [1, 4, 25, 32]


def test_choices_of_calls(comm: pc.Communicator, timed: list[Timed]) -> None:
    """Choices by tokens, and the way that they went."""
    layer = MoE(128, 64, 8, 2, comm, max_tokens_per_rank=MANY, decode_tokens=16, inference=True, all_to_all=CPU)
    with torch.no_grad():
        for tokens, most in ((FEW, None), (MANY, None), (5, 8)):
            layer(torch.randn(tokens, 128), most)
    ran = layer.choices()
    products = ["forward 128x128", "forward 64x128"]
    assert {n: (one.layout, one.products) for n, one in ran.items()} == {
        FEW: ("ragged", dict.fromkeys(products, "for few")),
        MANY: ("ragged", dict.fromkeys(products, "for many")),
        5: ("padded", dict.fromkeys(products, "for few")),
    }


def test_choices_of_a_training_step(comm: pc.Communicator) -> None:
    layer = MoE(128, 64, 8, 2, comm, max_tokens_per_rank=32, gemm="loop", all_to_all=CPU)
    layer(torch.randn(7, 128, requires_grad=True)).sum().backward()
    every = [f"{what} {weights}" for what in ("forward", "dgrad", "wgrad") for weights in ("128x128", "64x128")]
    assert layer.choices() == {7: F.Ran("ragged", dict.fromkeys(every, "loop"))}
