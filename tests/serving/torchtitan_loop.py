"""torchtitan's own Trainer, on a small Qwen3 with experts: its parallelism, FSDP, loss, gradient norm, AdamW, and loop."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from loops import LAYERS, MICRO_BATCH, MICRO_BATCHES, STEPS, VOCABULARY, Trained, Used, batches, local
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, OverrideConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import qwen3
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from pplx_comm.compat import torchtitan as adapter

RECOMPUTE = {"": None, "all": FullAC.Config(), "selected": SelectiveAC.Config()}


class Data(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, **_: Any) -> None:
        self.seed, self.rank, self.length = config.seed, dp_rank, seq_len

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for tokens, labels in batches(self.seed, self.rank, self.length):
            yield {"input": tokens, "positions": torch.arange(self.length).expand_as(tokens).contiguous()}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def parallelized(model: Any, **arguments: Any) -> Any:
    """Gloo can add, but not multiply while it adds, as FSDP would have it (ReduceOp.PREMUL_SUM)."""
    model = qwen3.parallelize_qwen3(model, **arguments)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def model(case: dict[str, Any]) -> ModelSpec:
    """Attention is torchtitan's SDPA: its flex attention has no backward pass on CPUs, and its varlen attention is CUDA's."""
    spec, dim = qwen3.model_registry("debugmodel_moe"), case["hidden"]
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=LAYERS, dim=dim, n_heads=4, n_kv_heads=2, head_dim=32, moe_hidden_dim=case["inner"], num_experts=case["experts"],
        top_k=case["top_k"], attn_backend="varlen", moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=32, max_seq_len=case["length"], theta=10000.0),
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    embeddings = Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=dim, param_init=qwen3._EMBEDDING_INIT)
    head = Linear.Config(in_features=dim, out_features=VOCABULARY, param_init=qwen3._LINEAR_INIT)
    config = dataclasses.replace(
        spec.model,
        vocab_size=VOCABULARY,
        dim=dim,
        layers=layers,
        norm=qwen3._qwen3_norm(dim),
        tok_embeddings=embeddings,
        lm_head=head,
    )
    return dataclasses.replace(spec, model=config, parallelize_fn=parallelized)


class Watching(Trainer):
    """Keeps what the tests look at."""

    def __init__(self, config: Trainer.Config, used: Used) -> None:
        super().__init__(config)
        self.used, self.trained = used, Trained()
        # torch draws each rank's part of a DTensor on a CPU from the same seed, so that expert 0 would be expert 4 as well.
        torch.manual_seed(config.debug.seed * 1000 + dist.get_rank())
        with torch.no_grad():
            self.model_parts[0].init_weights(buffer_device=None)
        self.metrics_processor.log = self.logged

    def logged(self, step: int, loss: float, *_: Any, **__: Any) -> None:
        self.trained.losses.append(loss)
        self.trained.steps.append(self.used.total("steps"))

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if self.step == 1:
            named = self.model_parts[0].named_parameters()
            wrapper = "_checkpoint_wrapped_module."
            self.trained.gradients = {name.replace(wrapper, ""): local(parameter.grad).clone() for name, parameter in named}


def train(case: dict[str, Any], used: Used) -> Trained:
    """precision: of our wire; None for torchtitan's own dispatcher. recompute: which activations."""
    precision = case["precision"]
    override = [("pplx_comm.compat.torchtitan.pplx_comm_override", {"precision": precision})] if precision else []
    with tempfile.TemporaryDirectory() as folder:
        config = Trainer.Config(
            model_spec=model(case),
            dataloader=Data.Config(seed=case["seed"]),
            tokenizer=NoTokenizer.Config(),
            loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
            optimizer=default_adamw(lr=case["rate"]),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
            training=TrainingConfig(
                local_batch_size=MICRO_BATCH, global_batch_size=MICRO_BATCH * MICRO_BATCHES * dist.get_world_size(),
                seq_len=case["length"], steps=STEPS, disable_cuda_graphs=True, mixed_precision_param="float32",
            ),
            # The default backend, spmd_types, wants an FSDP that torch 2.13 has not: its fully_shard() refuses plain parameters.
            parallelism=ParallelismConfig(expert_parallel_degree=dist.get_world_size(), spmd_backend="partial_dtensor"),
            metrics=MetricsProcessor.Config(log_freq=1),
            checkpoint=CheckpointManager.Config(enable=False),
            activation_checkpoint=RECOMPUTE[case["recompute"]],
            compile=CompileConfig(enable=False),
            debug=DebugConfig(seed=case["seed"]),
            comm=CommConfig(trace_buf_size=0),
            override=OverrideConfig(imports=override),
            dump_folder=folder,
        )  # fmt: skip
        trainer = Watching(config, used)
        ours = [isinstance(layer.moe.routed_experts.token_dispatcher, adapter.PplxCommTokenDispatcher)
                for layer in trainer.model_parts[0].layers.values()]  # fmt: skip
        assert ours == [precision is not None] * LAYERS
        trainer.train()
        trainer.close()
    return trainer.trained
