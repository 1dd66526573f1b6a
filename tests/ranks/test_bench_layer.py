"""bench/layer.py and bench/train.py at small sizes; and that a wrong layer does not pass for a fast one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bench import ROOT, ranks_of, written_by

from bench.harness.clock import Figure
from bench.harness.reference import Wrong
from bench.harness.world import World
from bench.moe import layers, measure, report, theirs
from bench.moe.options import from_arguments, parser_of

TINY = ["--hidden", "128", "--intermediate", "64", "--experts", "4", "--top-k", "2", "--rounds", "1", "--timeout", "60"]


def test_all_layers(tmp_path: Path) -> None:
    """That run on CPUs, with all times, and no more error than formats explain; peers that are for GPUs say so."""
    arguments = [*TINY, "--tokens", "4,24", "--decode-tokens", "4", "--routings", "hot", "--precisions", "bf16,fp8"]
    of, said = written_by(tmp_path, ROOT / "bench" / "layer.py", *arguments, "--capacities", "1,most")
    assert "off: mega (fp8)" in said and "off: deep_ep (fp8)" in said and "capacity most" in said
    on = [point for point in of["points"] if point["off"] is None]
    layers_of = {(point["layer"], point["precision"]) for point in on}
    assert layers_of == {*((name, "bf16") for name in ("ours", "nccl", "ag_rs", "capacity 1", "capacity most")), ("ours", "fp8")}
    for point in on:
        dropped = point["notes"].get("dropped", 0)
        assert set(point["stages"]) == {"dispatch", "up", "activation", "down", "combine"} and point["forward"]["p50"] > 0, point
        assert dropped == 0 or point["layer"] == "capacity 1"
        limits = measure.LIMITS if point["layer"] == "ours" else measure.LIMITS_OF_OTHERS
        assert dropped or 0 < point["error"] < limits[point["precision"]]
    assert any(point["notes"].get("dropped", 0) > 0.1 for point in on)


def test_pictures(tmp_path: Path) -> None:
    """Of all sizes, and of capacity."""
    pytest.importorskip("matplotlib")
    pictures = {name: tmp_path / f"{name}.png" for name in ("plot", "capacity-plot")}
    drawn = [word for name, path in pictures.items() for word in (f"--{name}", str(path))]
    arguments = ["--tokens", "24", "--experts", "8", "--layers", "ours,capacity", "--capacities", "most", "--precisions", "bf16"]
    arguments += ["--transport", "proxy", "--provider", "tcp", "--no-backward"]
    written_by(tmp_path, ROOT / "bench" / "layer.py", *TINY, *arguments, *drawn)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.values())


def figure(p50: float) -> Figure:
    return Figure(3, p50, p50, p50, p50)


def test_what_stands_beside_what() -> None:
    """Exposed: a pass takes 130 us, its products alone 100 and its step alone 60, so half of the step shows."""

    def point(layer: str, precision: str, tokens: int, forward: float, **more: Any) -> measure.Point:
        return measure.Point(layer, precision, tokens, "even", forward=figure(forward), **more)

    alone = {"compute": figure(100), "step": figure(60)}
    plain = point("ours", "fp8", 8, 500, graph=figure(130), both=figure(400), alone=alone)
    nccl, mega = point("nccl", "bf16", 8, 650, both=figure(600)), point("mega", "fp8", 8, 210, graph=figure(195))
    others = [point("ours", "bf16", 8, 200), point("ours", "fp8", 16, 200), point("nccl", "bf16", 16, 1, off="not here")]
    points = [plain, nccl, mega, *others]
    assert report.beside(plain, points) == {"mega": 1.5, "nccl": 5, "nccl, training": 1.5}
    assert report.beside(others[1], points) == {}
    assert report.exposed(plain, points) == 0.5
    assert all(report.exposed(one, points) is None for one in (nccl, mega, *others))


@pytest.mark.parametrize("factor", [1.008, math.nan])
def test_a_wrong_layer(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = layers.Ours.forward
    monkeypatch.setattr(layers.Ours, "forward", lambda self, mark: right(self, mark) * factor)
    arguments = [*TINY, "--tokens", "4", "--layers", "ours", "--precisions", "bf16", "--no-backward"]
    options = from_arguments(parser_of(None).parse_args(arguments))
    world = World(options, None)
    try:
        with pytest.raises(Wrong, match="ours, bf16, 4 tokens"):
            measure.run(options, world, SimpleNamespace(device=torch.device("cpu"), name="CPU", synchronize=lambda: None))
    finally:
        world.close()


def test_gradients_are_those_of_the_textbook() -> None:
    """Of what is measured forward and backward: ours beside the others, which autograd differentiates."""
    options = from_arguments(parser_of(None).parse_args([*TINY, "--tokens", "24", "--experts", "8"]))
    world, cpu = World(options, None), torch.device("cpu")
    try:
        weights = measure.make_weights(options, 0, 1, cpu)
        problem = measure.Problem(options, 24, "zipf", 0, 1, cpu, weights)
        every = []
        for make in (
            layers.makers(options, "bf16")["ours"],
            lambda w, d: theirs.Nccl(w, options, d),
            lambda w, d: theirs.Capacity(w, options, d, "most"),
        ):
            layer = make(world, cpu)
            layer.prepare(problem)
            inputs = (problem.x, problem.choice_weights, weights.gate_up, weights.down)
            leaves = [t.detach().clone().requires_grad_() for t in inputs]
            layer.train(*leaves).backward(problem.dy)
            every.append([leaf.grad.double() for leaf in leaves])
        for other in every[1:]:
            assert all((a - b).norm() < 0.012 * b.norm() for a, b in zip(every[0], other, strict=True))
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
