"""Maps vLLM's placement of experts to the numbers of an AllToAll, which gives each rank an equal share."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """The experts of a layer, redundant ones included, over the ranks.

    round_robin: expert e is on rank e % ranks; else each rank has a range of them, the first ranks one more if they do not divide.
    """

    num_experts: int
    ranks: int
    rank: int
    round_robin: bool = False

    @property
    def per_rank(self) -> int:
        return -(-self.num_experts // self.ranks)

    @property
    def num_physical(self) -> int:
        """With those that a rank lacks."""
        return self.per_rank * self.ranks

    def owner(self, expert: int) -> tuple[int, int]:
        """Its rank, and its number there."""
        if self.round_robin:
            return expert % self.ranks, expert // self.ranks
        base, more = divmod(self.num_experts, self.ranks)
        if expert < more * (base + 1):
            return expert // (base + 1), expert % (base + 1)
        rank, local = divmod(expert - more * (base + 1), base)
        return more + rank, local

    def physical(self, device: torch.device) -> torch.Tensor | None:
        """The AllToAll's number of each expert, and -1 at the end, for -1; None if the numbers are vLLM's."""
        numbers = []
        for expert in range(self.num_experts):
            rank, local = self.owner(expert)
            numbers.append(rank * self.per_rank + local)
        if numbers == list(range(self.num_experts)):
            return None
        return torch.tensor([*numbers, -1], dtype=torch.int32, device=device)

    def global_of_local(self, device: torch.device) -> torch.Tensor:
        """vLLM's number of each of this rank's experts."""
        mine = [expert for expert in range(self.num_experts) if self.owner(expert)[0] == self.rank]
        return torch.tensor(mine, dtype=torch.int32, device=device)

    @property
    def elsewhere(self) -> int:
        """The number of an expert of another rank."""
        return next(expert for expert in range(self.num_experts) if self.owner(expert)[0] != self.rank)
