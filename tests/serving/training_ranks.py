"""One of the ranks that train MoE layers of torchtitan and of Megatron-Core over this library on CPU tensors.

`python training_ranks.py CASES` with RANK and WORLD_SIZE, run by the Python that has both. Prints how far each case is from the same
layer in one process, which has the tokens of all ranks: outputs, gradients, and parameters after steps of SGD.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RATE = 0.2


def error(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    """The length of the difference, relative to what was wanted."""
    seen = local(seen)
    return float((seen.detach().double() - wanted.detach().double()).norm() / (wanted.detach().double().norm() + 1e-30))


Part = Callable[[torch.Tensor], torch.Tensor]


def trained(
    layer: nn.Module,
    alone: nn.Module,
    case: dict[str, Any],
    shared: list[tuple[nn.Parameter, nn.Parameter]],
    split: list[tuple[nn.Parameter, nn.Parameter, Part]],
) -> dict[str, float]:
    """Both layers take the same steps. shared: parameters that all ranks have; split: of which a rank has a part."""
    g, found = torch.Generator().manual_seed(case["seed"]), {"y": 0.0, "dx": 0.0}
    for _ in range(case["steps"]):
        inputs = [torch.randn(case["tokens"], 1, case["hidden"], generator=g) for _ in range(2 * WORLD)]
        x, dy = inputs[RANK].requires_grad_(), inputs[WORLD + RANK]
        whole = torch.cat([t.detach() for t in inputs[:WORLD]]).requires_grad_()
        passed = checkpoint(layer, x, use_reentrant=case["reentrant"]) if "reentrant" in case else layer(x)
        y, wanted = (result[0] if isinstance(result, tuple) else result for result in (passed, alone(whole)))
        y.backward(dy)
        wanted.backward(torch.cat(inputs[WORLD:]))
        mine = slice(RANK * case["tokens"], (RANK + 1) * case["tokens"])
        assert x.grad is not None
        assert whole.grad is not None
        found["y"] = max(found["y"], error(y, wanted[mine]))
        found["dx"] = max(found["dx"], error(x.grad, whole.grad[mine]))
        for ours, _ in shared:
            dist.all_reduce(ours.grad)
        with torch.no_grad():
            for parameter in (*layer.parameters(), *alone.parameters()):
                assert parameter.grad is not None
                parameter -= RATE / case["tokens"] * parameter.grad
                parameter.grad = None
    found["shared"] = max(error(ours, theirs) for ours, theirs in shared)
    found["split"] = max(error(ours, part(theirs)) for ours, theirs, part in split)
    return found


def local(t: torch.Tensor) -> torch.Tensor:
    part = getattr(t, "to_local", None)
    return t if part is None else part()


def torchtitan_layer(case: dict[str, Any]) -> dict[str, float]:
    """torchtitan's layer with its own experts, through its overrides."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torchtitan.config import OverrideConfig
    from torchtitan.config.override import apply_overrides
    from torchtitan.models.common.config_utils import make_token_dispatcher_config
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter

    hidden, experts, top_k = case["hidden"], case["experts"], case["top_k"]

    def build(overrides: list[Any]) -> Any:
        routed = RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=hidden, hidden_dim=case["inner"], num_experts=experts),
            token_dispatcher=make_token_dispatcher_config(num_experts=experts, top_k=top_k, comm_backend="standard"),
        )
        router = TokenChoiceTopKRouter.Config(
            num_experts=experts, gate=Linear.Config(in_features=hidden, out_features=experts), top_k=top_k, score_func="softmax",
            route_norm=True,
        )  # fmt: skip
        config = MoE.Config(num_experts=experts, routed_experts=routed, router=router)
        assert len(apply_overrides(OverrideConfig(imports=overrides), config)) == len(overrides)
        layer, g = config.build(), torch.Generator().manual_seed(case["seed"])
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g) / parameter.shape[-1] ** 0.5)
        return layer

    given = {"precision": case["precision"], "max_rows": case.get("max_rows")}
    layer, alone = build([("pplx_comm.compat.torchtitan.pplx_comm_override", given)]), build([])
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    ours, theirs = layer.routed_experts, alone.routed_experts
    assert type(ours.token_dispatcher).__name__ == "PplxCommTokenDispatcher"
    ours.token_dispatcher.wire_meshes(ep_mesh=mesh)
    for name, parameter in list(ours.inner_experts.named_parameters()):
        setattr(ours.inner_experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    split = [
        (ours_, theirs_, lambda whole: whole.chunk(WORLD)[RANK])
        for ours_, theirs_ in zip(ours.inner_experts.parameters(), theirs.inner_experts.parameters(), strict=True)
    ]
    return trained(layer, alone, case, [(layer.router.gate.weight, alone.router.gate.weight)], split)


def megatron_layers(case: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Megatron-Core's layer with its own router and experts, in groups of expert and of expert tensor parallel ranks, and the same in
    one process; parameters of which a rank has slices; and what builds grouped experts like its own."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 asks for it, and has it with Transformer Engine only
    torch.cuda.current_device = lambda: "cpu"  # its router moves weights that it finds on a CPU
    tp = case["expert_tp"]
    myself = [dist.new_group([rank]) for rank in range(WORLD)][RANK]
    tp_groups = [dist.new_group(list(range(first, first + tp))) for first in range(0, WORLD, tp)]
    ep_groups = [dist.new_group(list(range(first, WORLD, tp))) for first in range(tp)]

    named = {
        "moe_shared_expert_intermediate_size": case["inner"], "moe_shared_expert_gate": True, "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
    } if case.get("named") else {}  # fmt: skip

    made: list[Any] = []

    def build(ep: Any, expt_tp: Any, tp_ep: Any) -> Any:
        config = TransformerConfig(
            num_layers=1, hidden_size=case["hidden"], num_attention_heads=1, ffn_hidden_size=case["inner"],
            moe_ffn_hidden_size=case["inner"], num_moe_experts=case["experts"], moe_router_topk=case["top_k"],
            expert_model_parallel_size=ep.size(), expert_tensor_parallel_size=expt_tp.size(), add_bias_linear=False,
            gated_linear_unit=True, activation_func=torch.nn.functional.silu, use_cpu_initialization=True,
            moe_token_dispatcher_type=case.get("dispatcher", "allgather") if tp_ep.size() > 1 else "allgather",
            moe_router_dtype="fp32", moe_router_load_balancing_type="none",
            bias_activation_fusion=False, gradient_accumulation_fusion=False, **named,
        )  # fmt: skip
        groups = ProcessGroupCollection(
            tp=myself, cp=myself, tp_cp=myself, dp=myself, ep=ep, expt_tp=expt_tp, tp_ep=tp_ep, expt_dp=myself, dp_cp=myself,
            tp_dp_cp=myself,
        )  # fmt: skip
        made.append(groups)
        spec = get_gpt_layer_local_spec(num_experts=case["experts"], moe_grouped_gemm=False)
        return MoELayer(config, spec.submodules.mlp.submodules, pg_collection=groups)

    def grouped_like(experts: Any) -> Any:
        """Grouped experts like these."""
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe.experts import TEGroupedMLP

        class Linear(nn.Module):
            def __init__(self, experts: int, inner: int, outer: int, **_: Any) -> None:
                super().__init__()
                for number in range(experts):
                    self.register_parameter(f"weight{number}", nn.Parameter(torch.empty(outer, inner)))

        return TEGroupedMLP(
            experts.num_local_experts, experts.config, MLPSubmodules(linear_fc1=Linear, linear_fc2=Linear), made[-1]
        )

    alone = build(myself, myself, myself)
    layer = build(ep_groups[RANK % tp], tp_groups[RANK // tp], dist.group.WORLD)
    g, slices, split = torch.Generator().manual_seed(case["seed"]), RANK % tp, []
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) / parameter.shape[-1] ** 0.5)
        layer.router.weight.copy_(alone.router.weight)
        for place, ours in enumerate(layer.experts.local_experts):
            theirs = alone.experts.local_experts[layer.local_expert_indices[place]]

            def half(whole: torch.Tensor) -> torch.Tensor:  # half of gates and of ups
                return torch.cat([both.chunk(tp)[slices] for both in whole.chunk(2)])

            def columns(whole: torch.Tensor) -> torch.Tensor:
                return whole.chunk(tp, 1)[slices]

            split += [
                (ours.linear_fc1.weight, theirs.linear_fc1.weight, half),
                (ours.linear_fc2.weight, theirs.linear_fc2.weight, columns),
            ]
        for ours, theirs, part in split:
            ours.copy_(part(theirs))
        if named:
            alone.router.expert_bias.copy_(torch.randn(case["experts"], generator=g))
            layer.router.expert_bias.copy_(alone.router.expert_bias)
            layer.shared_experts.load_state_dict(alone.shared_experts.state_dict())
    return layer, alone, split, grouped_like


def megatron_layer(case: dict[str, Any]) -> dict[str, float]:
    """Over this library."""
    from pplx_comm.compat import megatron

    layer, alone, split, _ = megatron_layers(case)
    given = {"precision": case["precision"], "max_rows": case.get("max_rows")}
    assert megatron.use(layer, max_tokens_per_rank=case["tokens"], **given) == 1
    return trained(layer, alone, case, [(layer.router.weight, alone.router.weight)], split)


def megatron_deepep_layer(case: dict[str, Any]) -> dict[str, float]:
    """With its own dispatcher for DeepEP, unchanged, over the package in DeepEP's place."""
    from megatron.core.transformer.moe import fused_a2a
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    layer, alone, split, _ = megatron_layers(case | {"dispatcher": "flex"})
    assert isinstance(layer.token_dispatcher, MoEFlexTokenDispatcher)
    found = trained(layer, alone, case, [(layer.router.weight, alone.router.weight)], split)
    dist.barrier()
    fused_a2a._buffer.destroy()
    fused_a2a._buffer = None
    return found


def megatron_names_layer(case: dict[str, Any]) -> dict[str, float]:
    """Our layer takes all that Megatron-Core's has in its state_dict, and gives it back, and computes what that computes.

    Grouped experts are Megatron-Core's class over a stand-in for Transformer Engine's linear layers, which call their weights so.
    """
    import pplx_comm as pc
    from pplx_comm.moe import MoE, RouterOptions, checkpoint

    theirs, alone, _, grouped = megatron_layers(case | {"named": True, "expert_tp": 1})
    found: dict[str, float] = {}
    with pc.Communicator.from_torch() as comm:
        ours = MoE(
            case["hidden"], case["inner"], case["experts"], case["top_k"], comm, max_tokens_per_rank=case["tokens"],
            dtype=torch.float32, shared_intermediate=case["inner"], shared_gate=True, router=RouterOptions("sigmoid", correction_bias=True),
            all_to_all={"device": "cpu"},
        )  # fmt: skip
        state = {name: t for name, t in theirs.state_dict().items() if isinstance(t, torch.Tensor)}
        checkpoint.load(ours, state, "megatron_sequential")
        saved = checkpoint.save(ours, "megatron_sequential")
        assert set(saved) == set(state), set(saved) ^ set(state)
        found["sequential"] = max(error(saved[name], t) for name, t in state.items())
        names = {f"experts.{name}" for name, t in grouped(theirs.experts).state_dict().items() if isinstance(t, torch.Tensor)}
        assert {name for name in checkpoint.save(ours, "megatron") if name.startswith("experts.")} == names, names
        x = torch.randn(case["tokens"], 1, case["hidden"], generator=torch.Generator().manual_seed(case["seed"] + RANK))
        with torch.no_grad():
            found["y"] = error(ours(x), alone(x)[0])
    return found


def main() -> None:
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD)
    from pplx_comm.compat.groups import close_all

    results = [globals()[f"{case['library']}_layer"](case) for case in json.loads(sys.argv[1])]
    close_all()
    dist.barrier()
    dist.destroy_process_group()
    print("RESULTS", json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
