"""Weights of a layer under the names that Hugging Face and Megatron-Core give them, one tensor per expert and projection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from pplx_comm.errors import Error
from pplx_comm.moe.layer import MoE
from pplx_comm.moe.quantise import BLOCK, E4M3, dequantise_weights
from pplx_comm.moe.sharding import local


@dataclass(frozen=True)
class Names:
    """Names that a family of models gives the parts of a layer, behind the layer's prefix. {e} is an expert's number."""

    router: str
    bias: str
    """The router's correction bias; empty where the family has none."""
    gate_up: tuple[str, ...]
    """Two names, of gate and up; or one, of both in one tensor, the gate first."""
    down: str
    shared_gate_up: tuple[str, ...] = ()
    shared_down: str = ""
    shared_gate: str = ""
    local_numbers: bool = False
    """{e} counts the rank's own experts, and not those of all ranks."""


_HF = (("experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight"), "experts.{e}.down_proj.weight")


def _hf_shared(prefix: str) -> tuple[tuple[str, ...], str]:
    return (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"), f"{prefix}.down_proj.weight"


_MEGATRON_SHARED = (("shared_experts.linear_fc1.weight",), "shared_experts.linear_fc2.weight", "shared_experts.gate_weight", True)

FAMILIES = {
    "deepseek": Names("gate.weight", "gate.e_score_correction_bias", *_HF, *_hf_shared("shared_experts")),
    "qwen": Names("gate.weight", "", *_HF, *_hf_shared("shared_expert"), "shared_expert_gate.weight"),
    "mixtral": Names("gate.weight", "", ("experts.{e}.w1.weight", "experts.{e}.w3.weight"), "experts.{e}.w2.weight"),
    "megatron": Names(
        "router.weight", "router.expert_bias", ("experts.linear_fc1.weight{e}",), "experts.linear_fc2.weight{e}", *_MEGATRON_SHARED
    ),
    "megatron_sequential": Names(
        "router.weight", "router.expert_bias", ("experts.local_experts.{e}.linear_fc1.weight",),
        "experts.local_experts.{e}.linear_fc2.weight", *_MEGATRON_SHARED,
    ),
}  # fmt: skip
"""Usual prefixes: "model.layers.N.mlp." of deepseek (V2, V3) and qwen (Qwen2-MoE, Qwen3-MoE), "model.layers.N.block_sparse_moe." of
mixtral, "decoder.layers.N.mlp." of megatron, whose experts are one module, and of megatron_sequential, where each is one."""

_NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SCALES = (torch.float32, torch.bfloat16)


def save(layer: MoE, family: str, prefix: str = "") -> dict[str, torch.Tensor]:
    """The router, this rank's experts and the shared expert: name to tensor. The tensors are the layer's own memory.

    family: "deepseek", "qwen", "mixtral", "megatron", "megatron_sequential"; see FAMILIES. With expert_tp= Megatron's alone, whose
        ranks have slices too.
    prefix: in front of every name, with its dot: "model.layers.3.mlp.".
    """
    if layer.placement.slices > 1 and not family.startswith("megatron"):
        raise Error(f"checkpoints of {family!r} have whole experts, but this layer has slices (expert_tp)")
    return {prefix + name: tensor for name, tensor in _parts(layer, family)}


@torch.no_grad()
def load(layer: MoE, tensors: Mapping[str, torch.Tensor], family: str, prefix: str = "") -> None:
    """Fills the layer from tensors of these names: whole checkpoints too, of which a rank takes its own experts, or slices.

    Tensors are bfloat16, float16, float32 or float64. Or they are float8_e4m3fn codes, with float32 or bfloat16 scales per 128x128
    behind them (`..._scale_inv`, as DeepSeek-V3 publishes them), which are multiplied out. A load that raises has changed nothing.
    """
    of_experts = {name for name, _ in _of_experts(layer, _names(family))}
    found = [
        (memory, _checked(layer, tensors, prefix + name, memory, name in of_experts)) for name, memory in _parts(layer, family)
    ]
    for memory, numbers in found:
        memory.copy_(numbers())


def _checked(
    layer: MoE, tensors: Mapping[str, torch.Tensor], name: str, memory: torch.Tensor, of_expert: bool
) -> Callable[[], torch.Tensor]:
    """Returns the function that makes the numbers for `memory` from a tensor and its scales, if it has scales."""
    scale_name = f"{name}_scale_inv"
    found, scale = tensors.get(name), tensors.get(scale_name)
    if found is None:
        raise Error(f"load: there is no tensor {name!r}")
    for each, tensor in ((name, found), (scale_name, scale)):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise Error(f"load: {each!r} is a {type(tensor).__name__}, must be a tensor")
    scale_shape = tuple(-(-n // BLOCK) for n in found.shape)
    if scale is None and found.dtype == E4M3:
        raise Error(
            f"load: {name!r} is {E4M3}, and there is no {scale_name!r} with its scales per 128x128, float32 {list(scale_shape)}. "
            "Multiply out codes whose scales have another name or shape"
        )
    wanted = _NUMBERS if scale is None else (E4M3,)
    if found.dtype not in wanted:
        beside = "" if scale is None else f" and has scales, {scale_name!r}"
        raise Error(f"load: {name!r} is {found.dtype}{beside}, must be {' or '.join(map(str, wanted))}")
    if scale is not None and (scale.dtype not in _SCALES or scale.shape != scale_shape):
        raise Error(
            f"load: {scale_name!r} is {scale.dtype} {tuple(scale.shape)}, must be {' or '.join(map(str, _SCALES))} {scale_shape}"
        )

    def fitting(whole: torch.Tensor) -> torch.Tensor:
        return _slice(layer, whole, memory) if of_expert and whole.dim() == 2 else whole

    if fitting(found.to("meta")).shape != memory.shape:
        raise Error(f"load: {name!r} is {tuple(found.shape)}, but the layer's is {tuple(memory.shape)}")
    return lambda: fitting(found if scale is None else dequantise_weights(found, scale))


def _parts(layer: MoE, family: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Names, and the memory that each stands for."""
    names = _names(family)
    yield from _of_router(layer, names, family)
    yield from _of_experts(layer, names)
    yield from _of_shared_expert(layer, names, family)


def _names(family: str) -> Names:
    if family not in FAMILIES:
        raise Error(f"checkpoints of {family!r} are not supported; supported are {', '.join(map(repr, FAMILIES))}")
    return FAMILIES[family]


def _of_experts(layer: MoE, names: Names) -> Iterator[tuple[str, torch.Tensor]]:
    gate_up, down = local(layer.experts.gate_up).detach(), local(layer.experts.down).detach()
    for place, expert in enumerate(layer.experts.experts):
        number = place if names.local_numbers else expert
        yield from _split(names.gate_up, gate_up[place], number)
        yield names.down.format(e=number), down[place]


def _slice(layer: MoE, found: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a whole expert's tensor. What is a slice already stays."""
    slices, part = layer.placement.slices, layer.placement.part
    if slices == 1 or found.shape == memory.shape:
        return found
    if found.shape[1] != memory.shape[1]:
        return part(found, 1)
    if len(memory) == 2 * local(layer.experts.down).shape[2]:
        return torch.cat([part(half, 0) for half in found.chunk(2)])
    return part(found, 0)


def _of_router(layer: MoE, names: Names, family: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield names.router, layer.router.weight.detach()
    if layer.router.correction_bias is not None:
        yield _exists(names.bias, family, "correction bias"), layer.router.correction_bias


def _of_shared_expert(layer: MoE, names: Names, family: str) -> Iterator[tuple[str, torch.Tensor]]:
    if layer.shared is None:
        return
    _exists(names.shared_down, family, "shared expert")
    yield from _split(names.shared_gate_up, layer.shared.gate_up.detach(), 0)
    yield names.shared_down, layer.shared.down.detach()
    if layer.shared.gate is not None:
        yield _exists(names.shared_gate, family, "gate of the shared expert"), layer.shared.gate.detach()


def _split(names: tuple[str, ...], both: torch.Tensor, number: int) -> Iterator[tuple[str, torch.Tensor]]:
    parts = both.chunk(len(names)) if len(names) > 1 else (both,)
    yield from ((name.format(e=number), part) for name, part in zip(names, parts, strict=True))


def _exists(name: str, family: str, what: str) -> str:
    if not name:
        raise Error(f"checkpoints of {family!r} have no {what}, but this layer has one")
    return name
