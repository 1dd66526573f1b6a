"""Writes a tiny model with random weights: `python models.py FOLDER qwen3_moe|mixtral [seed]`. Run by the engine's Python."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, EXPERTS, TOP_K, INTERMEDIATE, VOCABULARY = 4, 128, 8, 2, 64, 512
HEADS, KV_HEADS, HEAD = 4, 2, 32

COMMON = {
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "num_experts_per_tok": TOP_K,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "moe_intermediate_size": INTERMEDIATE,
        "intermediate_size": 256,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "attention_bias": False,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "intermediate_size": INTERMEDIATE,
        "sliding_window": None,
    },
}
# Names that each model gives the parts of an expert, and their places.
EXPERT_OF = {"qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"), "mixtral": ("block_sparse_moe", "w1", "w3", "w2")}


def weights(kind: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (2.0 / shape[-1] ** 0.5)

    block, gate, up, down = EXPERT_OF[kind]
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "lm_head.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        attention = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
        for name, rows in attention.items():
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = random(rows, HIDDEN)
        tensors[f"{layer}.self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD)
        if kind == "qwen3_moe":
            tensors[f"{layer}.self_attn.q_norm.weight"] = torch.ones(HEAD)
            tensors[f"{layer}.self_attn.k_norm.weight"] = torch.ones(HEAD)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(HIDDEN)
        tensors[f"{layer}.{block}.gate.weight"] = random(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            at = f"{layer}.{block}.experts.{expert}"
            tensors[f"{at}.{gate}.weight"] = random(INTERMEDIATE, HIDDEN)
            tensors[f"{at}.{up}.weight"] = random(INTERMEDIATE, HIDDEN)
            tensors[f"{at}.{down}.weight"] = random(HIDDEN, INTERMEDIATE)
    return tensors


def write(folder: Path, kind: str, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(kind, seed), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(COMMON | CONFIGS[kind]))


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1)
