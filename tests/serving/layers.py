"""Describes a rank and a layer to vLLM, on CPUs and GPUs alike."""

from __future__ import annotations

import torch
from vllm.config import CompilationConfig, DeviceConfig, ParallelConfig, VllmConfig
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType


def rank_of(world: int, rank: int, backend: str, device: str) -> VllmConfig:
    return VllmConfig(
        parallel_config=ParallelConfig(
            data_parallel_size=world, data_parallel_rank=rank, enable_expert_parallel=True, all2all_backend=backend,
            distributed_executor_backend="external_launcher",
        ),
        device_config=DeviceConfig(device),
        compilation_config=CompilationConfig(),
    )  # fmt: skip


def layer_of(
    world: int, rank: int, backend: str, *, experts: int, local: int, top_k: int, hidden: int, inner: int, max_tokens: int,
    device: torch.device,
) -> FusedMoEConfig:  # fmt: skip
    """Every rank has tokens and experts of its own."""
    parallel = FusedMoEParallelConfig(
        tp_size=1, tp_rank=0, pcp_size=1, pcp_rank=0, dp_size=world, dp_rank=rank, ep_size=world, ep_rank=rank, sp_size=1,
        use_ep=True, all2all_backend=backend, enable_eplb=False,
    )  # fmt: skip
    return FusedMoEConfig(
        num_experts=experts, experts_per_token=top_k, hidden_dim=hidden, intermediate_size=inner, num_local_experts=local,
        num_logical_experts=experts, activation=MoEActivation.SILU, device=device, routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel, in_dtype=torch.bfloat16, max_num_tokens=max_tokens,
    )  # fmt: skip
