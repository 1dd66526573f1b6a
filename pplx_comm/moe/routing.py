"""The mathematics of a router: scores, choices, losses, and the bias that balances without a loss."""

from __future__ import annotations

import torch


def softmax_scores(logits: torch.Tensor) -> torch.Tensor:
    """float32 [tokens, experts]: each row sums to one."""
    return logits.float().softmax(-1)


def sigmoid_scores(logits: torch.Tensor) -> torch.Tensor:
    """float32 [tokens, experts]: each score between 0 and 1, independent of the others, as DeepSeek-V3 has them."""
    return logits.float().sigmoid()


def choose(
    scores: torch.Tensor,
    top_k: int,
    *,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts, int64 [tokens, top_k], and their float32 weights, through which gradients reach the scores.

    bias: added to the scores for the choice only; weights are those of the scores themselves.
    groups, top_groups: `groups` equal ranges of experts; a token chooses among the experts of its `top_groups` best ones.
        A group counts as its best expert, with a bias as the sum of its best two, as DeepSeek-V2 and V3 do.
    normalise: a token's weights sum to one, before scale.
    """
    ranked = scores.detach()
    if bias is not None:
        ranked = ranked + bias
    if groups > 1:
        ranked = _within_groups(ranked, groups, top_groups, best=1 if bias is None else 2)
    ids = ranked.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale


def _within_groups(ranked: torch.Tensor, groups: int, top_groups: int, best: int) -> torch.Tensor:
    by_group = ranked.unflatten(-1, (groups, -1))
    worth = by_group.topk(min(best, by_group.shape[-1]), dim=-1).values.sum(-1)
    chosen = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, worth.topk(top_groups, dim=-1).indices, True)
    return by_group.masked_fill(~chosen[..., None], -torch.inf).flatten(-2)


def expert_load(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """float32 [experts]: how many choices fell on each, exact up to 2^24. The host waits for nothing, as it would with bincount."""
    flat = ids.reshape(-1)
    return torch.zeros(num_experts, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))


def load_balance_loss(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """experts * sum of (share of choices) * (mean share of the score): 1 when balanced, up to the number of experts when not.

    Of these tokens alone. Its gradient goes through the scores.
    """
    tokens, num_experts = scores.shape
    share = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    load = expert_load(ids, num_experts) / max(ids.numel(), 1)
    return num_experts * (load * share.sum(0)).sum() / max(tokens, 1)


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean square of log-sum-exp of the logits, which keeps them small."""
    return logits.float().logsumexp(-1).square().sum() / max(logits.shape[0], 1)


@torch.no_grad()
def update_bias(bias: torch.Tensor, load: torch.Tensor, rate: float = 1e-3) -> None:
    """In place: experts with less than the mean load become more attractive by `rate`, those with more less so."""
    bias += rate * torch.sign(load.mean() - load)
