"""Inputs and recorded outputs of the training loops of torchtitan and of Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

LAYERS, STEPS, MICRO_BATCHES, MICRO_BATCH, VOCABULARY = 2, 4, 2, 2, 256


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """After the first step, by parameter: this rank's part."""
    steps: list[int] = field(default_factory=list)
    """Steps of the AllToAlls, after each step of the loop."""


class Used:
    """The AllToAlls that an adapter takes."""

    def __init__(self, adapter: Any) -> None:
        self._all: dict[int, Any] = {}
        make = adapter.rows_by_expert

        def noted(*given: Any, **named: Any) -> Any:
            a2a = make(*given, **named)
            return self._all.setdefault(id(a2a), a2a)

        adapter.rows_by_expert = noted

    def total(self, counter: str) -> int:
        found = [a2a.stats()[counter] for a2a in self._all.values()]
        return sum(sum(each) if isinstance(each, list) else each for each in found)


def batches(seed: int, rank: int, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and the next ones. Each follows from the one before, so that a model can learn something."""
    g = torch.Generator().manual_seed(seed * 1000 + rank)
    while True:
        columns = [torch.randint(VOCABULARY, (MICRO_BATCH,), generator=g)]
        for _ in range(length):
            columns.append((columns[-1] * 5 + 3) % VOCABULARY)
        rows = torch.stack(columns, 1)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def local(t: Any) -> torch.Tensor:
    part: torch.Tensor = t.to_local() if hasattr(t, "to_local") else t
    return part.detach()
