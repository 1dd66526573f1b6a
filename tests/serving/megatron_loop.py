"""Megatron-Core's own training step on a small GPTModel with experts: schedule, DistributedDataParallel, optimizer and its scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from loops import LAYERS, MICRO_BATCH, MICRO_BATCHES, STEPS, VOCABULARY, Trained, Used, batches
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from pplx_comm.compat import megatron as adapter

Batch = tuple[torch.Tensor, torch.Tensor]


def model(case: dict[str, Any]) -> GPTModel:
    """Experts are SequentialMLP: grouped GEMMs are Transformer Engine's or grouped_gemm's, which run on GPUs only."""
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    overlap = {"overlap_moe_expert_parallel_comm": True, "bf16": True, "params_dtype": torch.bfloat16}
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=case["hidden"], num_attention_heads=4, ffn_hidden_size=case["inner"],
        moe_ffn_hidden_size=case["inner"], num_moe_experts=case["experts"], moe_router_topk=case["top_k"],
        expert_model_parallel_size=dist.get_world_size(), add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, moe_token_dispatcher_type="alltoall", moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, **(recompute if case["recompute"] else {}), **(overlap if case["overlapped"] else {}),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=case["experts"], moe_grouped_gemm=False, normalization="RMSNorm")
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=case["length"])


def forward_step(data: Iterator[Batch], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    tokens, labels = next(data)
    length = tokens.shape[1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]

    def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = losses.float().mean()
        return loss, {"loss": float(loss)}

    call = model.build_schedule_plan if return_schedule_plan else model
    return call(tokens, torch.arange(length).expand_as(tokens), later, labels=labels), mean


def train(case: dict[str, Any], used: Used) -> Trained:
    """precision: of our wire; None for Megatron-Core's own all-to-all. sharded: the optimizer, and gradients, while they come.

    overlapped: forward and backward passes of two microbatches alternate, which Megatron-Core has in bfloat16 only.
    """
    precision, overlapped = case["precision"], case["overlapped"]
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    torch.manual_seed(case["seed"])
    model_parallel_cuda_manual_seed(case["seed"], force_reset_rng=True)
    gpt, rate, sharded = model(case), case["rate"], case["sharded"]
    if precision:
        made = adapter.use(gpt, max_tokens_per_rank=MICRO_BATCH * case["length"], precision=precision)
        assert made == LAYERS
    kind = adapter.PplxCommTokenDispatcher if precision else MoEAlltoAllTokenDispatcher
    assert all(type(layer.mlp.token_dispatcher) is kind for layer in gpt.decoder.layers)

    wrapped = DistributedDataParallelConfig(use_distributed_optimizer=sharded, overlap_grad_reduce=sharded)
    ddp = DistributedDataParallel(gpt.config, wrapped, Float16Module(gpt.config, gpt) if overlapped else gpt)
    wanted = OptimizerConfig(
        optimizer="adam", lr=rate, min_lr=rate / 10, weight_decay=0.1, clip_grad=1.0, use_distributed_optimizer=sharded,
        bf16=overlapped, params_dtype=torch.bfloat16 if overlapped else torch.float32,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(wanted, [ddp])
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=rate, min_lr=rate / 10, lr_warmup_steps=0, lr_decay_steps=100, lr_decay_style="linear",
        start_wd=0.1, end_wd=0.1, wd_incr_steps=100, wd_incr_style="constant",
    )  # fmt: skip
    gpt.config.finalize_model_grads_func = finalize_model_grads
    gpt.config.grad_scale_func = optimizer.scale_loss
    gpt.config.no_sync_func = ddp.no_sync

    trained, data = Trained(), batches(case["seed"], dist.get_rank(), case["length"])
    for _ in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=[ddp], num_microbatches=MICRO_BATCHES,
            seq_length=case["length"], micro_batch_size=MICRO_BATCH, forward_only=False,
        )  # fmt: skip
        trained.gradients = trained.gradients or {name: p.main_grad.clone() for name, p in gpt.named_parameters()}
        updated, _, _ = optimizer.step()
        assert updated
        scheduler.step(1)
        trained.losses.append(sum(each["loss"] for each in losses) / MICRO_BATCHES)
        trained.steps.append(used.total("steps"))
    return trained
