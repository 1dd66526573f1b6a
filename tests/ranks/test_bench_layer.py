"""bench/layer.py and bench/train.py at small sizes; and that a wrong layer does not pass for a fast one."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bench import ROOT, ranks_of, written_by

from bench.harness.reference import Wrong
from bench.harness.world import Off, World
from bench.moe import layers, measure, theirs
from bench.moe.options import from_arguments, parser_of

TINY = ["--hidden", "128", "--intermediate", "64", "--experts", "4", "--top-k", "2", "--rounds", "1", "--timeout", "60"]


def test_all_layers(tmp_path: Path) -> None:
    """That run on CPUs, with all times, and no more error than formats explain; peers that are for GPUs say so."""
    arguments = [*TINY, "--tokens", "4,24", "--decode-tokens", "4", "--routings", "hot", "--precisions", "bf16,fp8"]
    arguments += ["--plot", str(tmp_path / "layer.png")] if find_spec("matplotlib") else []
    of, said = written_by(tmp_path, ROOT / "bench" / "layer.py", *arguments, "--capacities", "1,most")
    assert not find_spec("matplotlib") or (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")
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


def test_a_wrong_layer_of_others_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's wrong result is a line of the table. It does not end the run."""
    world: Any = SimpleNamespace(gather=lambda value, tag: [value], all_or_none=lambda call, what: call())
    layer: Any = SimpleNamespace(notes=dict[str, Any], forward=lambda mark: torch.zeros(1))
    monkeypatch.setattr(measure, "_error", lambda *_: 0.5)
    with pytest.raises(Off, match=r"theirs, fp8, 8 tokens: off by 0\.5"):
        measure._check(layer, None, measure.Point("theirs", "fp8", 8, "even"), world)  # type: ignore[arg-type]


def test_gradients_are_those_of_the_textbook() -> None:
    """Forward and backward: our layer beside the others, which autograd differentiates."""
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
