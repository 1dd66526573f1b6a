"""bench/layer.py as its users start it, at small sizes; and that a wrong layer does not pass for a fast one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bench import ROOT, ranks_of

from bench.harness.clock import Figure
from bench.harness.reference import Wrong
from bench.harness.world import World
from bench.moe import layers, measure, report, theirs, timeline
from bench.moe.options import LayerOptions, from_arguments, parser_of
from pplx_comm.moe import functional as F
from pplx_comm.moe.grouped import products
from pplx_comm.moe.segments import Segments

TINY = ["--hidden", "128", "--intermediate", "64", "--experts", "4", "--top-k", "2", "--rounds", "1", "--timeout", "60"]
STAGES = {"dispatch", "up", "activation", "down", "combine"}


def test_all_layers(tmp_path: Path) -> None:
    """That run on CPUs, with all times, and no more error than formats explain; peers that are for GPUs say so."""
    file, picture, capacity = tmp_path / "layer.json", tmp_path / "layer.png", tmp_path / "capacity.png"
    arguments = [*TINY, "--tokens", "4,24", "--decode-tokens", "4", "--routings", "even,hot"]
    arguments += ["--precisions", "bf16,fp8-dispatch,fp8", "--capacities", "1,most", "--json", str(file)]
    try:
        import matplotlib  # noqa: F401

        arguments += ["--plot", str(picture), "--capacity-plot", str(capacity)]
    except ImportError:
        picture = capacity = Path(__file__)
    statuses, said = ranks_of(ROOT / "bench" / "layer.py", *arguments)
    assert statuses == [0, 0], said
    assert "off: mega (fp8)" in said and "off: deep_ep (fp8)" in said and "capacity most" in said
    of = json.loads(file.read_text())
    assert of["ranks"] == 2 and of["options"]["tokens"] == [4, 24] and picture.stat().st_size and capacity.stat().st_size
    on = [point for point in of["points"] if point["off"] is None]
    layers_of = {(point["layer"], point["precision"]) for point in on}
    bf16 = {(name, "bf16") for name in ("ours", "nccl", "ag_rs", "capacity 1", "capacity most")}
    assert layers_of == {*bf16, ("ours", "fp8-dispatch"), ("ours", "fp8")} and len(on) == 4 * len(layers_of)
    for point in on:
        dropped = point["notes"].get("dropped", 0)
        assert set(point["stages"]) == STAGES and point["forward"]["p50"] > 0, point
        assert (point["both"] is None) == (point["layer"] == "ag_rs"), point
        if point["layer"] == "capacity most":  # room for all that there is
            assert point["notes"]["rows"] >= point["tokens"] * 2
        assert dropped == 0 or point["layer"] == "capacity 1"
        limits = measure.LIMITS if point["layer"] == "ours" else measure.LIMITS_OF_OTHERS
        assert dropped or 0 < point["error"] < limits[point["precision"]]
        assert set(point["beside"]) == ({"nccl"} if point["layer"] == "ag_rs" else {"nccl", "nccl, training"})
        if point["layer"] == "ours":
            assert (point["notes"]["product"], point["notes"]["overlap"]) == ("loop", "none")
            assert min(point["alone"][what]["p50"] for what in ("compute", "step")) > 0
            assert point["notes"]["layout"].startswith("Padded" if point["tokens"] == 4 else "Ragged")
    assert any(point["notes"].get("dropped", 0) > 0.1 for point in on if point["routing"] == "hot")


def test_overlap(tmp_path: Path) -> None:
    """A line for each way, and a timeline of each: products of four groups beside combine's send half, in a thread of its own."""
    file, picture = tmp_path / "layer.json", tmp_path / "timeline.png"
    pytest.importorskip("matplotlib")
    arguments = [*TINY, "--tokens", "24", "--decode-tokens", "1", "--experts", "8", "--layers", "ours", "--routings", "ordered"]
    arguments += [
        "--overlap",
        "none,groups,signals",
        "--transport",
        "proxy",
        "--provider",
        "tcp",
        "--timeline",
        str(picture),
        "--json",
        str(file),
    ]
    statuses, said = ranks_of(ROOT / "bench" / "layer.py", *arguments)
    assert statuses == [0, 0] and picture.stat().st_size, said
    of = json.loads(file.read_text())
    on = {(point["layer"], point["precision"]): point for point in of["points"] if point["off"] is None}
    assert set(on) == {(name, precision) for name in ("ours", "ours groups") for precision in ("bf16", "fp8")}
    assert "off: ours signals (bf16): overlap=" in said
    assert all(point["error"] == on["ours", precision]["error"] for (_, precision), point in on.items()), "not the same bits"
    halves = ["dispatch, send", "dispatch, receive", "up", "down", "combine, send", "combine, receive"]
    assert len(of["timelines"]) == 4
    for one in of["timelines"]:
        groups = 1 if one["layer"] == "ours" else 4
        point = on[one["layer"], one["precision"]]
        assert point["notes"]["overlap"] == ("none" if groups == 1 else "groups") and point["notes"]["product"] == "loop"
        assert point["exposed"] is not None
        for spans in one["spans"]:
            assert sorted(span["what"] for span in spans) == sorted(halves + ["up", "down"] * (groups - 1)), spans
            beside = {span["what"] for span in spans if span["lane"]}
            assert beside == (set() if groups == 1 else {"dispatch, receive", "combine, send"})
            assert all(span["begin"] <= span["end"] for span in spans)


def test_kernels_of_a_timeline() -> None:
    """What torch's profiler says of a step on two streams, as it is drawn."""
    names = ["dispatch_kernel", "dispatch_hooks", "until_raised", "rows_by_weights_as_they_come", "swiglu_forward", "memset"]
    names += ["rows_by_weights_with_words", "until_reached", "combine_kernel", "combine_kernel"]
    streams = [7, 7, 3, 3, 3, 3, 3, 7, 7, 3]
    kernels = [(name, stream, 1000 * (at + 5), 500) for at, (name, stream) in enumerate(zip(names, streams, strict=True))]
    spans = timeline.spans_of_kernels(kernels[::-1])
    wanted = "dispatch, send; dispatch, receive; wait; up; activation; down; wait; combine, send; combine, receive"
    assert "; ".join(span.what for span in spans) == wanted
    assert [span.lane for span in spans] == [1, 1, 0, 0, 0, 0, 1, 1, 0]
    assert (spans[0].begin, spans[0].end, spans[-1].end) == (0, 0.5, 9.5)


def figure(p50: float) -> Figure:
    return Figure(3, p50, p50, p50, p50)


def test_what_stands_beside_what() -> None:
    """Exposed: a pass in groups takes 130 us, its products alone 100 and its step alone 60, so half of the step shows."""

    def point(layer: str, precision: str, tokens: int, forward: float, **more: Any) -> measure.Point:
        return measure.Point(layer, precision, tokens, "even", forward=figure(forward), **more)

    alone = {"compute": figure(100), "step": figure(60)}
    plain = point("ours", "fp8", 8, 500, graph=figure(166), both=figure(400), alone=alone)
    groups = point("ours groups", "fp8", 8, 500, graph=figure(130))
    nccl, mega = point("nccl", "bf16", 8, 650, both=figure(600)), point("mega", "fp8", 8, 210, graph=figure(195))
    others = [point("ours", "bf16", 8, 200), point("ours groups", "fp8", 16, 200), point("nccl", "bf16", 16, 1, off="not here")]
    points = [plain, groups, nccl, mega, *others]
    assert report.beside(groups, points) == {"mega": 1.5, "nccl": 5}
    assert report.beside(plain, points)["nccl, training"] == 1.5
    assert report.beside(others[1], points) == {}
    assert report.exposed(groups, points) == 0.5 and report.exposed(plain, points) == pytest.approx(1.1)
    assert all(report.exposed(one, points) is None for one in (nccl, mega, *others))
    head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in report.tables(points).split("\n\n")[0].splitlines())
    [row] = (dict(zip(head, row, strict=True)) for row in rows if row[3] == "ours groups" and row[1] == "8")
    assert (row["exposed"], row["beside mega"], row["beside nccl"]) == ("50 %", "1.50x", "5.00x")


def test_which_backends_ran() -> None:
    """Also where the two products have different ones."""
    up, down = torch.ones(1, 12, 8), torch.ones(1, 8, 6)
    where = Segments(torch.tensor([0, 4], dtype=torch.int32))
    ran = F.Ran("ragged", "none")
    with ran.noted():
        products.forward(torch.ones(4, 8), up, where, backend="loop")
        products.forward(torch.ones(4, 6), down, where, backend="loop")
    assert layers.products_of(ran, up, down) == "loop"
    ran.products["forward 6x8"] = "triton"
    assert layers.products_of(ran, up, down) == "up loop, down triton"


def one_rank(*more: str) -> tuple[LayerOptions, SimpleNamespace]:
    options = from_arguments(parser_of(None).parse_args([*TINY, "--tokens", "4", "--layers", "ours", *more]))
    return options, SimpleNamespace(device=torch.device("cpu"), name="CPU", synchronize=lambda: None)


@pytest.mark.parametrize("factor", [1.008, math.nan])
def test_a_wrong_layer(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = layers.Ours.forward
    monkeypatch.setattr(layers.Ours, "forward", lambda self, mark: right(self, mark) * factor)
    options, device = one_rank("--precisions", "bf16", "--no-backward")
    world = World(options, None)
    try:
        with pytest.raises(Wrong, match="ours, bf16, 4 tokens"):
            measure.run(options, world, device)
    finally:
        world.close()


def test_gradients_are_those_of_the_textbook() -> None:
    """Of what is measured forward and backward: ours beside the others, which autograd differentiates."""
    options, device = one_rank("--tokens", "24", "--experts", "8")
    world = World(options, None)
    try:
        weights = measure.make_weights(options, 0, 1, device.device)
        problem = measure.Problem(options, 24, "zipf", 0, 1, device.device, weights)
        every = []
        for make in (
            layers.makers(options, "bf16")["ours"],
            lambda w, d: theirs.Nccl(w, options, d),
            lambda w, d: theirs.Capacity(w, options, d, "most"),
        ):
            layer = make(world, device.device)
            layer.prepare(problem)
            leaves = [
                t.detach().clone().requires_grad_() for t in (problem.x, problem.choice_weights, weights.gate_up, weights.down)
            ]
            layer.train(*leaves).backward(problem.dy)
            every.append([leaf.grad.double() for leaf in leaves])
        for other in every[1:]:
            for a, b in zip(every[0], other, strict=True):
                assert (a - b).norm() < 0.012 * b.norm()
    finally:
        torch.distributed.destroy_process_group()
        world.close()


def test_a_model_beside_all_to_all(tmp_path: Path) -> None:
    """All variants train, from the same loss; `nccl` is the same model to the last bits of bfloat16."""
    file = tmp_path / "train.json"
    arguments = ["--variants", "bf16,fp8,nccl", "--steps", "1", "--rounds", "1", "--timeout", "60", "--json", str(file)]
    statuses, said = ranks_of(ROOT / "bench" / "train.py", *arguments)
    assert statuses == [0, 0] and "beside nccl" in said, said
    of = json.loads(file.read_text())
    assert set(of["tokens_per_second"]) == {"bf16", "fp8", "nccl"} and min(of["tokens_per_second"].values()) > 0
    losses = of["first_loss"]
    assert losses["nccl"] == pytest.approx(losses["bf16"], rel=1e-3) and losses["fp8"] != losses["bf16"]
