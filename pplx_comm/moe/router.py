"""The router of a layer: which experts each token goes to, with what weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pplx_comm.errors import Error
from pplx_comm.moe import routing


@dataclass(frozen=True)
class RouterOptions:
    """How a router chooses.

    score: "softmax" over all experts, or "sigmoid" of each.
    correction_bias: a bias for the choice alone, which `MoE.update_bias` moves after each step, so that the load is even without a
        loss (DeepSeek-V3).
    groups, top_groups: of how many groups of experts a token takes its best.
    normalise: a token's weights sum to one.
    scale: what all weights are multiplied with.
    load_balance, z: coefficients of the losses that `MoE.aux_loss` adds up.
    """

    score: str = "softmax"
    correction_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
    load_balance: float = 0.0
    z: float = 0.0


@dataclass(frozen=True)
class Routing:
    """Where tokens go."""

    ids: torch.Tensor
    """int64 [tokens, top_k]"""
    weights: torch.Tensor
    """float32 [tokens, top_k]"""
    loss: torch.Tensor
    """float32, the losses with their coefficients."""
    load: torch.Tensor
    """float32 [experts]: choices that fell on each."""


class Router(nn.Module):
    """A linear map to a logit per expert, in float32, and the choice that follows from them."""

    correction_bias: torch.Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        options: RouterOptions,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.options = num_experts, top_k, options
        _check(num_experts, top_k, options)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        bias = torch.zeros(num_experts, device=device) if options.correction_bias else None
        self.register_buffer("correction_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal, with the standard deviation that keeps logits near one."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: torch.Tensor) -> Routing:
        o = self.options
        logits = x.float() @ self.weight.float().mT
        scores = routing.softmax_scores(logits) if o.score == "softmax" else routing.sigmoid_scores(logits)
        ids, weights = routing.choose(
            scores, self.top_k, bias=self.correction_bias, groups=o.groups, top_groups=o.top_groups, normalise=o.normalise,
            scale=o.scale,
        )  # fmt: skip
        loss = logits.new_zeros(())
        if o.load_balance:
            loss = loss + o.load_balance * routing.load_balance_loss(scores, ids)
        if o.z:
            loss = loss + o.z * routing.z_loss(logits)
        return Routing(ids, weights, loss, routing.expert_load(ids, self.num_experts))


def _check(num_experts: int, top_k: int, o: RouterOptions) -> None:
    if o.score not in ("softmax", "sigmoid"):
        raise Error(f"RouterOptions(score={o.score!r}): must be 'softmax' or 'sigmoid'")
    if not 1 <= o.top_groups <= o.groups or num_experts % o.groups:
        raise Error(
            f"{num_experts} experts cannot be split into groups={o.groups} with top_groups={o.top_groups}: groups must divide "
            "num_experts, and top_groups be 1 to groups"
        )
    if top_k > num_experts // o.groups * o.top_groups:
        raise Error(f"top_k={top_k}, but {o.top_groups} of {o.groups} groups have fewer of the {num_experts} experts")
