"""Expert weights as DTensors: which experts are where is then known to distributed checkpoints and to FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def shard(experts: nn.Module, mesh: Any, num_experts: int) -> None:
    """Each parameter, of this rank's experts, becomes a DTensor over the whole mesh, of all experts.

    DTensor gives the first ranks ceil(experts / ranks) each, as AllToAll does.
    """
    from torch.distributed.tensor import DTensor, Shard

    for name, weight in list(experts.named_parameters(recurse=False)):
        shape = torch.Size([num_experts, *weight.shape[1:]])
        whole = DTensor.from_local(
            weight.detach(), mesh, [Shard(0)], run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride()
        )
        setattr(experts, name, nn.Parameter(whole, requires_grad=weight.requires_grad))


def local(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, with its gradient; any other tensor as it is."""
    part = getattr(weight, "to_local", None)
    return weight if part is None else part()
