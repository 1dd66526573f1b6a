"""Maps experts, or slices of them, to ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pplx_comm.errors import Error

MOST_CHOICES = 16
"""An AllToAll's limit for each token."""


@dataclass(frozen=True)
class Placement:
    """Experts are spread over groups of `slices` neighbouring ranks. Each rank of a group has a slice of each of its experts.

    For dispatch a slice is an expert of its own: a choice of an expert becomes a choice of all its slices, with the same weight,
    and combine adds up what they make, which is the whole expert's output. Nothing else is exchanged.
    """

    num_experts: int
    world_size: int
    rank: int
    slices: int = 1

    def __post_init__(self) -> None:
        if self.slices < 1 or self.world_size % self.slices:
            raise Error(f"expert_tp={self.slices} does not divide the {self.world_size} ranks")

    @property
    def share(self) -> int:
        """Experts of a group; the last groups may have fewer."""
        return -(-self.num_experts // (self.world_size // self.slices))

    @property
    def experts(self) -> range:
        """The experts of this rank's group."""
        group = self.rank // self.slices
        return range(min(group * self.share, self.num_experts), min((group + 1) * self.share, self.num_experts))

    @property
    def slice(self) -> int:
        """The slice that this rank has."""
        return self.rank % self.slices

    @property
    def num_targets(self) -> int:
        """The number of experts that the AllToAll sees."""
        return self.num_experts if self.slices == 1 else self.share * self.world_size

    def top_k(self, top_k: int) -> int:
        """Choices of a token, as an AllToAll counts them."""
        if top_k * self.slices > MOST_CHOICES:
            raise Error(f"top_k={top_k} with expert_tp={self.slices}: a token has at most {MOST_CHOICES} choices of slices")
        return top_k * self.slices

    def part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's slice of what an expert has `intermediate` of along dim."""
        return whole.chunk(self.slices, dim)[self.slice]

    def targets(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choices of experts, [tokens, top_k], as those of an AllToAll. -1 stays."""
        if self.slices == 1:
            return ids, weights
        first = ids // self.share * self.slices * self.share + ids % self.share
        slices = torch.arange(self.slices, device=ids.device, dtype=ids.dtype) * self.share
        each = torch.where(ids[..., None] < 0, -1, first[..., None] + slices)
        return each.flatten(-2), weights[..., None].expand(each.shape).flatten(-2)
