"""A MoE layer in distributed checkpoints, under FSDP2 and DDP, and under other libraries' names."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as dist

import pplx_comm as pc
from pplx_comm.moe import MoE, RouterOptions, checkpoint, expert_parameters
from pplx_comm.moe.experts import Experts
from pplx_comm.moe.placement import Placement
from pplx_comm.moe.sharding import local as part_of

SIZES = {"hidden": 64, "intermediate": 32, "num_experts": 6, "top_k": 2}


def make_layer(comm: Any, seed: int, mesh: Any = None, **arguments: Any) -> MoE:
    return MoE(
        **SIZES, comm=comm, max_tokens_per_rank=16, dtype=torch.float32, shared_intermediate=32, mesh=mesh, seed=seed,
        router=RouterOptions("sigmoid", correction_bias=True), all_to_all={"timeout": 20.0, "device": "cpu"}, **arguments,
    )  # fmt: skip


def start(me: Any, store: str) -> None:
    """A process group of gloo, in place of one of an earlier case."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=me.rank, world_size=me.world_size)


def reshard(me: Any, store: str, load_from: str | None, save_to: str, expert_tp: int, seed: int) -> list[bool]:
    """Loads what another number of ranks saved, if there is something, and saves. Whether each parameter is that of `seed`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    start(me, store)
    shape = (me.world_size // expert_tp, expert_tp)[: 1 if expert_tp == 1 else 2]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "tp")[: len(shape)])
    layer = make_layer(me.comm, seed if load_from is None else seed + 1, mesh, expert_tp=expert_tp)
    wanted = make_layer(me.comm, seed, expert_tp=expert_tp)
    if load_from is not None:
        state = layer.state_dict()
        dcp.load(state, checkpoint_id=load_from)
        layer.load_state_dict(state)
    dcp.save(layer.state_dict(), checkpoint_id=save_to)
    pairs = zip(layer.parameters(), wanted.parameters(), strict=True)
    return [a.is_leaf and torch.equal(part_of(a).detach(), b.detach()) for a, b in pairs]


def whole_world(rank: int, world_size: int, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    x = [torch.randn(5 + r, SIZES["hidden"], generator=g) for r in range(world_size)]
    return x, [torch.randn(len(t), SIZES["hidden"], generator=g) for t in x]


def train_step(model: torch.nn.Module, layer: MoE, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    (model(x) * dy).sum().backward()
    return {name: w.grad for name, w in layer.named_parameters()}


def fsdp(me: Any, store: str, seed: int) -> dict[str, float]:
    """Two replicas of a layer whose experts are on two ranks each: gradients beside those of a layer over all four ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    start(me, store)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    x, dy = whole_world(me.rank, 4, seed)
    plain = make_layer(me.comm, seed)
    wanted = train_step(plain, plain, x[me.rank], dy[me.rank])
    for name in ("router.weight", "shared.gate_up", "shared.down"):  # gradients of this rank's tokens alone
        dist.all_reduce(wanted[name], group=mesh["dp"].get_group())
    with pc.Communicator.from_torch(mesh["ep"].get_group(), timeout=20) as comm:
        layer = make_layer(comm, seed, mesh["ep"])
        fully_shard(layer, mesh=mesh["dp"])
        found = train_step(layer, layer, x[me.rank], dy[me.rank])
        return {name: error(full(found[name]) * 2, everywhere(wanted[name], name)) for name in found}


def full(t: Any) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def everywhere(t: torch.Tensor, name: str) -> torch.Tensor:
    """Gathers the experts' weights of all ranks."""
    if not name.startswith("experts."):
        return t
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, t)
    return torch.cat(parts)


def error(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    seen = seen.reshape(wanted.shape)  # DTensors have gates and ups in a dimension of their own
    return float((seen - wanted).norm() / wanted.norm()) if bool(seen.isfinite().all()) else math.inf


def ddp(me: Any, store: str, seed: int) -> dict[str, float]:
    """Data parallelism over the ranks of the experts: all but their parameters are averaged."""
    from torch.nn.parallel import DistributedDataParallel

    start(me, store)
    x, dy = whole_world(me.rank, me.world_size, seed)
    plain, layer = make_layer(me.comm, seed), make_layer(me.comm, seed)
    wanted = train_step(plain, plain, x[me.rank], dy[me.rank])
    for name in ("router.weight", "shared.gate_up", "shared.down"):
        dist.all_reduce(wanted[name])
        wanted[name] /= me.world_size
    model = torch.nn.Sequential(layer)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name for name, _ in expert_parameters(model)])
    found = train_step(DistributedDataParallel(model), layer, x[me.rank], dy[me.rank])
    return {name: error(found[name], wanted[name]) for name in found if wanted[name].numel()}


def names(me: Any, family: str, shared: bool, bias: bool) -> dict[str, Any]:
    """A layer's tensors under a family's names, and whether another layer loads them back."""
    one, other = (
        MoE(
            **SIZES, comm=me.comm, max_tokens_per_rank=16, dtype=torch.float32, shared_intermediate=32 if shared else 0,
            shared_gate=family == "qwen", seed=seed, router=RouterOptions("sigmoid", correction_bias=bias),
            all_to_all={"device": "cpu"},
        )
        for seed in (1, 2)
    )  # fmt: skip
    saved = {name: t.clone() for name, t in checkpoint.save(one, family, "model.layers.3.mlp.").items()}
    checkpoint.load(other, saved, family, "model.layers.3.mlp.")
    same = all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    return {"same": same, "shapes": {name: tuple(t.shape) for name, t in saved.items()}}


def slices(me: Any, family: str) -> dict[str, Any]:
    """Whole experts, loaded by ranks that have slices of them, beside slices that follow from the same seed; and saved."""
    sizes = {
        **SIZES,
        "comm": me.comm,
        "max_tokens_per_rank": 16,
        "dtype": torch.float32,
        "expert_tp": 2,
        "all_to_all": {"device": "cpu"},
    }
    one, other, third = (MoE(**sizes, seed=seed) for seed in (1, 2, 3))
    whole = Experts(
        Placement(one.placement.num_experts, 1, 0), SIZES["hidden"], SIZES["intermediate"], one.a2a.device, torch.float32
    )
    whole.reset_parameters(1)
    tensors = {"gate.weight": one.router.weight, "router.weight": one.router.weight}
    for e, (gate_up, down) in enumerate(zip(whole.gate_up, whole.down, strict=True)):
        tensors |= {f"experts.{e}.{name}_proj.weight": t for name, t in zip(("gate", "up"), gate_up.chunk(2), strict=True)}
        tensors |= {
            f"experts.{e}.down_proj.weight": down,
            f"experts.linear_fc1.weight{e}": gate_up,
            f"experts.linear_fc2.weight{e}": down,
        }
    checkpoint.load(other, tensors, family)
    checkpoint.load(third, checkpoint.save(one, "megatron"), "megatron")
    loaded = [all(torch.equal(a, b) for a, b in zip(one.parameters(), each.parameters(), strict=True)) for each in (other, third)]
    try:
        checkpoint.save(one, "deepseek")
    except pc.Error as problem:
        return {"loaded": loaded, "said": str(problem)}
    return {"loaded": loaded, "said": ""}


def main_grad(me: Any, store: str, seed: int) -> dict[str, float]:
    """Gradients of experts as DTensors, shared by two ranks, in float32 main_grad: beside those of experts that are plain tensors."""
    from torch.distributed.device_mesh import init_device_mesh

    start(me, store)
    mesh = init_device_mesh("cpu", (me.world_size // 2, 2), mesh_dim_names=("ep", "tp"))
    x, dy = whole_world(me.rank, me.world_size, seed)
    plain, layer = (make_layer(me.comm, seed, m, expert_tp=2, main_grad=m is not None) for m in (None, mesh))
    wanted = train_step(plain, plain, x[me.rank], dy[me.rank])
    train_step(layer, layer, x[me.rank], dy[me.rank])
    found = {name: w.main_grad for name, w in layer.experts.named_parameters()}
    assert all(found[name].shape == w.to_local().shape and w.grad is None for name, w in layer.experts.named_parameters())
    return {name: error(found[name], wanted[f"experts.{name}"]) for name in found}


def main_grad_under_fsdp(me: Any, store: str, seed: int) -> dict[str, Any]:
    """Returns the error of a layer whose weights, and so their main_grad, fully_shard() has replaced; nothing was sent."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    start(me, store)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    x, _ = whole_world(me.rank, 4, seed)
    with pc.Communicator.from_torch(mesh["ep"].get_group(), timeout=20) as comm:
        layer = make_layer(comm, seed, mesh["ep"], main_grad=True)
        fully_shard(layer, mesh=mesh["dp"])
        try:
            layer(x[me.rank])
        except pc.Error as problem:
            return {"said": str(problem), "open": layer.a2a.stats()["open_steps"]}
    return {"said": "nothing"}


def optimiser_of(layer: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(layer.parameters(), lr=0.05, weight_decay=0.1, foreach=False)


def stepped(me: Any, layer: MoE, optimiser: torch.optim.Optimizer, seed: int, group: Any, share: float) -> None:
    """One step of the ranks' tokens. group: those that have the same router and shared expert, but gradients of their own tokens."""
    x, dy = whole_world(me.rank, me.world_size, seed)
    optimiser.zero_grad()
    (layer(x[me.rank]) * dy[me.rank] * share).sum().backward()
    for name, w in layer.named_parameters():
        if not name.startswith("experts."):
            dist.all_reduce(part_of(w.grad) if not hasattr(w.grad, "to_local") else w.grad.to_local(), group=group)
    optimiser.step()


def trained_and_resharded(me: Any, store: str, folder: str, seed: int) -> dict[str, float]:
    """Two replicas of experts on two ranks, under FSDP2, take a step of AdamW and are saved with its state. A layer whose experts are on
    four ranks loads both and takes another step. Beside a layer on four ranks that takes both steps."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    start(me, store)
    wide, narrow = (
        init_device_mesh("cpu", (4,), mesh_dim_names=("ep",)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")),
    )
    plain, loaded = make_layer(me.comm, seed, wide), make_layer(me.comm, seed + 1, wide)
    with pc.Communicator.from_torch(narrow["ep"].get_group(), timeout=20) as comm:
        layer = make_layer(comm, seed, narrow["ep"])
        fully_shard(layer, mesh=narrow["dp"])
        optimiser = optimiser_of(layer)
        stepped(me, layer, optimiser, seed, narrow["ep"].get_group(), 2.0)  # FSDP2 averages over two replicas
        state, of_optimiser = get_state_dict(layer, optimiser)
        dcp.save({"layer": state, "optimiser": of_optimiser}, checkpoint_id=folder)
    optimisers = [optimiser_of(plain), optimiser_of(loaded)]
    stepped(me, plain, optimisers[0], seed, None, 1.0)
    state, of_optimiser = get_state_dict(loaded, optimisers[1])
    dcp.load({"layer": state, "optimiser": of_optimiser}, checkpoint_id=folder)
    set_state_dict(loaded, optimisers[1], model_state_dict=state, optim_state_dict=of_optimiser)
    found = differences(loaded, plain, "loaded ")
    for each, its in zip((plain, loaded), optimisers, strict=True):
        stepped(me, each, its, seed + 1, None, 1.0)
    before = make_layer(me.comm, seed, wide)
    assert all(found > 0.01 for found in differences(before, plain, "").values()), "nothing was trained"
    return found | differences(loaded, plain, "trained on ")


def differences(seen: MoE, wanted: MoE, prefix: str) -> dict[str, float]:
    pairs = zip(seen.named_parameters(), wanted.parameters(), strict=True)
    return {prefix + name: error(part_of(a).detach(), part_of(b).detach()) for (name, a), b in pairs if part_of(b).numel()}
