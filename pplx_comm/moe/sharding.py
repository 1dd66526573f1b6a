"""Expert weights as DTensors: which experts are where is then known to distributed checkpoints and to FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pplx_comm.errors import Error


def shard(experts: Any, mesh: Any, num_experts: int, slices: int) -> None:
    """The parameters of this rank's experts, gate_up and down, become DTensors over the whole mesh, of all experts.

    DTensor gives the first ranks ceil(experts / ranks) each, as AllToAll does. Gates and ups have a dimension of their own then,
    [experts, 2, intermediate, hidden], so that slices of both are slices of one dimension.
    mesh: over ranks, or over groups of ranks that share experts and the ranks of a group.
    """
    from torch.distributed.tensor import DTensor, Shard

    if mesh.ndim != (1 if slices == 1 else 2) or (slices > 1 and mesh.size(1) != slices):
        raise Error(f"mesh= must have a dimension, with expert_tp={slices} a second one of that size; it has {tuple(mesh.shape)}")
    for name, part in (("gate_up", experts.gate_up), ("down", experts.down)):
        weight = part.detach().unflatten(1, (2, -1)) if name == "gate_up" else part.detach()
        shape = [num_experts, *weight.shape[1:]]
        shape[2] *= slices  # both parameters' `intermediate`
        placements = [Shard(0), Shard(2)] if slices > 1 else [Shard(0)]
        stride = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(weight, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
        setattr(experts, name, nn.Parameter(whole, requires_grad=part.requires_grad))


def local(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, with its gradient, gates before ups in one dimension; any other tensor as it is."""
    part = own(weight)
    return weight if part is weight else part.flatten(1, -2)


def own(weight: torch.Tensor) -> torch.Tensor:
    """The same as it lies in the DTensor."""
    part = getattr(weight, "to_local", None)
    return weight if part is None else part()
