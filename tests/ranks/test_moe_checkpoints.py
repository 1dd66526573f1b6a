"""Checkpoints of MoE layers: resharded by torch across numbers of ranks, and under other libraries' names. FSDP2 and DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import Crew, run_ranks, seed

import pplx_comm as pc
from pplx_comm.moe import MoE, checkpoint, functional


def test_resharded(tmp_path: Path) -> None:
    """One rank saves, two load and save, four (the last one has no expert), four and two that share experts, and one loads."""
    before = None
    for number, (ranks, expert_tp) in enumerate(((1, 1), (2, 1), (4, 1), (4, 2), (2, 2), (1, 1))):
        store, now = str(tmp_path / f"store{number}"), str(tmp_path / f"checkpoint{number}")
        for same in run_ranks(ranks, "moe_checkpoint_cases:reshard", store, before, now, expert_tp, seed(), timeout=120):
            assert len(same) == 5 and all(same), (ranks, expert_tp, same)
        before = now


def test_fsdp_ddp_and_main_grad(tmp_path: Path) -> None:
    with Crew(4) as crew:
        for case in ("fsdp", "ddp", "main_grad"):
            for found in crew.run(f"moe_checkpoint_cases:{case}", str(tmp_path / case), seed(), timeout=120):
                assert len(found) >= 2 and max(found.values()) < 1e-5, (case, found)


def test_main_grad_under_fsdp(tmp_path: Path) -> None:
    """It refuses before anything is sent: the gradients would not be where they were asked for."""
    for found in run_ranks(4, "moe_checkpoint_cases:main_grad_under_fsdp", str(tmp_path / "store"), seed(), timeout=120):
        assert "fully_shard" in found["said"] and found["open"] == 0, found


def test_trained_under_fsdp_and_resharded(tmp_path: Path) -> None:
    """Weights and the optimiser's state, from two ranks' experts with two replicas to four ranks'."""
    arguments = str(tmp_path / "store"), str(tmp_path / "checkpoint"), seed()
    for rank, found in enumerate(run_ranks(4, "moe_checkpoint_cases:trained_and_resharded", *arguments, timeout=120)):
        assert len(found) == (10 if rank < 3 else 6) and max(found.values()) < 1e-5, (rank, found)


PREFIX = "model.layers.3.mlp."
EXPERTS = {
    "deepseek": ("experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight", "experts.{e}.down_proj.weight"),
    "qwen": ("experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight", "experts.{e}.down_proj.weight"),
    "mixtral": ("experts.{e}.w1.weight", "experts.{e}.w3.weight", "experts.{e}.w2.weight"),
    "megatron": ("experts.linear_fc1.weight{e}", "experts.linear_fc2.weight{e}"),
    "megatron_sequential": ("experts.local_experts.{e}.linear_fc1.weight", "experts.local_experts.{e}.linear_fc2.weight"),
}
OTHERS = {
    "deepseek": {
        "gate.weight", "gate.e_score_correction_bias", "shared_experts.gate_proj.weight", "shared_experts.up_proj.weight",
        "shared_experts.down_proj.weight",
    },
    "qwen": {
        "gate.weight", "shared_expert.gate_proj.weight", "shared_expert.up_proj.weight", "shared_expert.down_proj.weight",
        "shared_expert_gate.weight",
    },
    "mixtral": {"gate.weight"},
    "megatron": {
        "router.weight", "router.expert_bias", "shared_experts.linear_fc1.weight", "shared_experts.linear_fc2.weight",
    },
}  # fmt: skip


def test_names() -> None:
    with Crew(2) as crew:
        for family, experts in EXPERTS.items():
            others = OTHERS[family.removesuffix("_sequential")]
            shared, bias = any("shared" in name for name in others), any("bias" in name for name in others)
            for rank, found in enumerate(crew.run("moe_checkpoint_cases:names", family, shared, bias)):
                numbers = range(3) if "megatron" in family else range(3 * rank, 3 * rank + 3)
                wanted = {PREFIX + name.format(e=e) for name in experts for e in numbers} | {PREFIX + name for name in others}
                assert found["same"] and set(found["shapes"]) == wanted, (family, found)


def test_slices_of_experts() -> None:
    with Crew(2) as crew:
        for family in ("deepseek", "megatron"):
            for found in crew.run("moe_checkpoint_cases:slices", family):
                assert found["loaded"] == [True, True] and "whole experts" in found["said"], found


def test_tensors_without_a_name() -> None:
    with pytest.raises(AssertionError, match="'mixtral' have no shared expert"):
        run_ranks(1, "moe_checkpoint_cases:names", "mixtral", True, False)


def test_codes_with_scales(comm: pc.Communicator) -> None:
    """As DeepSeek-V3 is published: e4m3 with a scale per 128 x 128."""
    one, other = (MoE(128, 128, 3, 1, comm, max_tokens_per_rank=8, seed=s, all_to_all={"device": "cpu"}) for s in (1, 2))
    saved = checkpoint.save(one, "deepseek")
    name = "experts.1.up_proj.weight"
    codes, scale = functional.quantise_weights(saved[name][None])
    saved = {**saved, name: codes[0], f"{name}_scale_inv": scale[0]}
    checkpoint.load(other, saved, "deepseek")
    loaded = checkpoint.save(other, "deepseek")
    for each, tensor in loaded.items():
        error = (tensor.float() - checkpoint.save(one, "deepseek")[each].float()).norm() / tensor.float().norm()
        assert (0.01 < error < 0.04) if each == name else error == 0, (each, error)


def test_tensors_that_are_not_loaded(comm: pc.Communicator) -> None:
    """A tensor that is missing, or of another type or shape, is named, and the layer is unchanged."""
    layer, other = (MoE(128, 128, 3, 1, comm, max_tokens_per_rank=8, seed=s, all_to_all={"device": "cpu"}) for s in (1, 2))
    before = [w.detach().clone() for w in layer.parameters()]
    saved = checkpoint.save(other, "deepseek")
    name = "experts.2.down_proj.weight"  # the last but the router's, of which all others would have been copied
    codes, scale = (t[0] for t in functional.quantise_weights(saved[name][None]))
    wrong: list[tuple[str, dict[str, object], str]] = [
        (name, {}, f"no tensor '{name}'"),
        (name, {"": torch.zeros(128, 64)}, rf"'{name}' is \(128, 64\).*\(128, 128\)"),
        (name, {"": torch.zeros(128)}, rf"'{name}' is \(128,\)"),
        (name, {"": torch.zeros(128, 128, dtype=torch.int32)}, f"'{name}' is torch.int32"),
        (name, {"": torch.zeros(128, 128, dtype=torch.bool)}, f"'{name}' is torch.bool"),
        (name, {"": [[0.0]]}, f"'{name}' is a list"),
        (name, {"": codes}, rf"'{name}' is torch.float8_e4m3fn.* no '{name}_scale_inv' .*float32 \[1, 1\]"),
        (name, {"": codes, ".weight_scale": scale}, f"'{name}' is torch.float8_e4m3fn.* no '{name}_scale_inv'"),
        (name, {"": codes.view(torch.float8_e5m2)}, f"'{name}' is torch.float8_e5m2"),
        (name, {"": codes, "_scale_inv": scale.view(torch.int32)}, f"'{name}_scale_inv' is torch.int32"),
        (name, {"": codes, "_scale_inv": scale[0]}, rf"'{name}_scale_inv' is torch.float32 \(1,\)"),
        (name, {"": saved[name], "_scale_inv": scale}, f"'{name}' is torch.bfloat16.*'{name}_scale_inv'.*float8_e4m3fn"),
    ]
    for name, given, says in wrong:
        tensors = {k: t for k, t in saved.items() if k != name} | {name + end: t for end, t in given.items()}
        with pytest.raises(pc.Error, match=says):
            checkpoint.load(layer, tensors, "deepseek")  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True)), says
