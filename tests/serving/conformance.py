"""One of two ranks that run vLLM's modular MoE kernel with the classes that GPUs use, on CPU tensors. Run by the engine's Python.

`python conformance.py CASES BACKEND` with RANK and WORLD_SIZE; prints the largest error of each case beside the largest output. With
`theirs` behind it, it runs vLLM's own classes for that backend, over the package that is in DeepEP's place.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from layers import layer_of, rank_of
from vllm.config import set_current_vllm_config
from vllm.distributed import get_ep_group, init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config, fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.v1.worker.workspace import init_workspace_manager

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BACKEND, THEIRS = sys.argv[2], "theirs" in sys.argv
BLOCK = 128


def dequantised(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return x.float()
    return x.float() * scale.float().repeat_interleave(BLOCK, -1)[..., : x.shape[-1]]


def mlp(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ w1.float().T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.float().T


class TorchExperts(mk.FusedMoEExpertsModular):
    """Standard experts in torch, which need an expert map as those on GPUs do, and add up with the weights themselves."""

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> Any:
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, **given: Any) -> None:
        ids, weights, expert_map = given["topk_ids"], given["topk_weights"], given["expert_map"]
        assert int(ids.min()) >= 0, "an id that vLLM's kernels would read past the map with"
        local = expert_map[ids.long()]
        x = dequantised(hidden_states, given["a1q_scale"])
        result = torch.zeros(output.shape)
        meant = given["expert_tokens_meta"].expert_num_tokens
        for expert in range(w1.shape[0]):
            row, choice = (local == expert).nonzero(as_tuple=True)
            assert row.numel() == int(meant[expert]), "a count that is not that of the ids"
            weight = 1.0 if given["apply_router_weight_on_input"] else weights[row, choice, None]
            result.index_add_(0, row, weight * mlp(x[row], w1[expert], w2[expert]))
        output.copy_(result)


def quantised(x: torch.Tensor, scale: Any, quant_dtype: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantises blocks with a scale each, as a kernel of vLLM does before a dispatch."""
    if quant_dtype is None:
        return x, None
    blocks = x.float().view(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax(-1).clamp(min=1e-10) / 448
    return (blocks / scales.unsqueeze(-1)).to(quant_dtype).view(x.shape), scales


def their_manager() -> Any:
    """The manager of vLLM's classes for DeepEP, which it imports on GPUs only."""
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht, deepep_ll

    deepep_ht.moe_kernel_quantize_input = quantised
    all2all_utils.DEEPEP_QUANT_BLOCK_SHAPE = deepep_ll.DEEPEP_QUANT_BLOCK_SHAPE
    all2all_utils.DeepEPLLPrepareAndFinalize = deepep_ll.DeepEPLLPrepareAndFinalize
    all2all_utils.DeepEPHTPrepareAndFinalize = deepep_ht.DeepEPHTPrepareAndFinalize
    kind = all2all.DeepEPLLAll2AllManager if BACKEND == "deepep_low_latency" else all2all.DeepEPHTAll2AllManager
    return kind(get_ep_group().cpu_group)


def case_of(case: dict[str, Any], manager: Any) -> dict[str, float]:
    """A layer with that case's numbers, twice: the largest difference to one process, and the largest output."""
    experts, top_k, hidden, inner = case["experts"], case["top_k"], case["hidden"], 64
    generator = torch.Generator().manual_seed(case["seed"])
    w1 = (torch.randn(experts, 2 * inner, hidden, generator=generator) / hidden**0.5).bfloat16()
    w2 = (torch.randn(experts, hidden, inner, generator=generator) / inner**0.5).bfloat16()
    strategy = "round_robin" if case.get("round_robin") else "linear"
    count, expert_map, _ = determine_expert_map(WORLD, RANK, experts, strategy)
    mine = (expert_map >= 0).nonzero().flatten()

    moe = layer_of(
        WORLD, RANK, BACKEND, experts=experts, local=count, top_k=top_k, hidden=hidden, inner=inner, max_tokens=48,
        device=torch.device("cpu"),
    )  # fmt: skip
    if case["fp8"]:
        # Scales of one and weights that fit: what differs is the activations, which travel as FP8.
        ones = lambda w: torch.ones(w.shape[0], -(-w.shape[1] // BLOCK), -(-w.shape[2] // BLOCK))  # noqa: E731
        quant = fp8_w8a8_moe_quant_config(w1_scale=ones(w1[mine]), w2_scale=ones(w2[mine]), block_shape=[BLOCK, BLOCK])
    else:
        quant = biased_moe_quant_config(None, None)

    from vllm.model_executor.layers.fused_moe import all2all_utils

    tables = (torch.empty(0),) * 3 if case.get("round_robin") else None
    prepare_finalize = all2all_utils.maybe_make_prepare_finalize(
        moe, quant, tables, allow_new_interface=True, all2all_manager=manager
    )
    if case["format"] == "batched":
        fused: Any = fused_batched_moe.NaiveBatchedExperts(
            moe,
            quant,
            max_num_tokens=prepare_finalize.max_num_tokens_per_rank(),
            num_dispatchers=prepare_finalize.num_dispatchers(),
        )
    else:
        fused = TorchExperts(moe, quant)
    kernel = mk.FusedMoEKernel(prepare_finalize, fused)

    worst, largest = 0.0, 0.0
    for step in range(2):
        tokens = case["tokens"][step][RANK]
        own = torch.Generator().manual_seed(1000 * case["seed"] + 10 * step + RANK)
        x = torch.randn(tokens, hidden, generator=own).bfloat16()
        ids = (
            torch.stack([torch.randperm(experts, generator=own)[:top_k] for _ in range(tokens)])
            if tokens
            else torch.empty(0, top_k)
        )
        ids, weights = ids.to(torch.int32), torch.rand(tokens, top_k, generator=own)
        on_input = bool(case.get("on_input"))
        y = kernel.apply(
            hidden_states=x, w1=w1[mine], w2=w2[mine], topk_weights=weights, topk_ids=ids, activation=MoEActivation.SILU,
            global_num_experts=experts, expert_map=expert_map, apply_router_weight_on_input=on_input,
        )  # fmt: skip
        wanted = torch.zeros(tokens, hidden)
        for t in range(tokens):
            for k in range(top_k):
                given = (x[t] * weights[t, k].bfloat16()).float() if on_input else x[t].float()
                answer = mlp(given, w1[ids[t, k]], w2[ids[t, k]])
                wanted[t] += answer if on_input else weights[t, k] * answer
        if tokens:
            worst, largest = max(worst, float((y - wanted).abs().max())), max(largest, float(wanted.abs().max()))
    return {"worst": worst, "largest": largest}


def two_in_flight(case: dict[str, Any]) -> dict[str, Any]:
    """Two steps open at once, whose hooks another thread runs, in the order that two-batch overlap has."""
    from vllm.distributed import get_ep_group as group

    from pplx_comm.serving.vllm import prepare_finalize as ours
    from pplx_comm.serving.vllm.placement import Placement

    manager = group().device_communicator.all2all_manager
    experts, hidden = case["experts"], case["hidden"]
    layer = ours.Layer(Placement(experts, WORLD, RANK), experts // WORLD, 2, hidden, torch.bfloat16, 16, 1, 2)
    steps = [ours.Batches(layer, manager), ours.Batches(layer, manager)]  # a handle each, as of two micro-batches
    quant = biased_moe_quant_config(None, None)
    for step in steps:
        step._a2a = manager.all_to_all(step._shape(ours.Wire.NATIVE))
    assert steps[0]._a2a is steps[1]._a2a
    own = torch.Generator().manual_seed(7 + RANK)
    inputs = [torch.randn(5 + RANK, hidden, generator=own).bfloat16() for _ in steps]
    ids = [torch.randint(0, experts, (len(x), 1), generator=own, dtype=torch.int32).repeat(1, 2) for x in inputs]
    for one in ids:
        one[:, 1] = (one[:, 0] + 1) % experts
    weights = [torch.rand(x.shape[0], 2, generator=own) for x in inputs]
    alone, ours.dbo_enabled = ours.dbo_enabled, lambda: True  # that would dispatch in one call
    prepared = [
        step.prepare_async(x, w, i, experts, None, False, quant) for step, x, w, i in zip(steps, inputs, weights, ids, strict=True)
    ]
    ours.dbo_enabled = alone

    def elsewhere(hook: Any) -> None:
        thread = threading.Thread(target=hook)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()

    worst = 0.0
    for hook, _ in prepared:
        elsewhere(hook)
    outputs = [torch.empty_like(x) for x in inputs]
    ended = []
    for step, output, (_, receiver), w, i in zip(steps, outputs, prepared, weights, ids, strict=True):
        x = receiver()[0]
        ended.append(step.finalize_async(output, x.clone(), w, i, False, ours.TopKWeightAndReduceDelegate()))
    for hook, receiver in ended:
        elsewhere(hook)
        receiver()
    for x, w, output in zip(inputs, weights, outputs, strict=True):
        worst = max(worst, float((output - x.float() * w.sum(1, keepdim=True)).abs().max()))
    return {"worst": worst, "largest": max(float(x.abs().max()) for x in inputs)}


def faults() -> dict[str, Any]:
    manager = get_ep_group().device_communicator.all2all_manager
    before = manager.query_active_mask().tolist(), bool(manager.query_fault())
    manager.clean_buffers()
    manager.warmup()
    after = manager.query_active_mask().tolist()
    manager.comm.barrier()  # a rank that has left is gone
    return {"mask": before[0], "fault": before[1], "after": after}


def main() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = rank_of(WORLD, RANK, BACKEND, "cpu")
    with set_current_vllm_config(config):
        init_distributed_environment(WORLD, RANK, "env://", RANK, "gloo")
        initialize_model_parallel(1)
        # Answers these classes' questions about a GPU, each version's own, also where there is none.
        fused_batched_moe._is_capturing_or_compiling = torch.cuda.is_current_stream_capturing = lambda: False
        torch.accelerator.empty_cache = lambda: None
        init_workspace_manager(torch.device("cpu"))
        from pplx_comm.serving.vllm import prepare_finalize as ours

        ours.LocalRows = ours.Tokens  # as on a GPU
        manager = their_manager() if THEIRS else None
        results: list[Any] = []
        for case in json.loads(sys.argv[1]):
            os.environ["PPLX_COMM_VLLM_FORMAT"] = case.get("format", "standard")
            results.append(two_in_flight(case) if case.get("in_flight") else case_of(case, manager))
        print("RESULTS " + json.dumps(results), flush=True)
        if manager is None:
            print("FAULTS " + json.dumps(faults()), flush=True)
        else:
            torch.distributed.barrier(get_ep_group().cpu_group)
            manager.destroy()


if __name__ == "__main__":
    main()
