"""Inputs of the GPU baselines, and the interface that each implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from bench.harness.batch import Shape


@dataclass(frozen=True)
class Inputs:
    """On the device, by input."""

    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]


class GpuPeer(Protocol):
    name: str
    how: str
    """How it is called at the size that was prepared."""
    in_graphs: bool
    """True if these calls can be captured."""
    in_pairs: bool
    """True if each combine must follow a dispatch: its time is that of both, less a dispatch's."""

    def has_num_sms(self, shape: Shape) -> bool:
        """True if its number of multiprocessors can be set at this size."""
        ...

    def prepare(self, shape: Shape, inputs: Inputs, num_sms: int | None = None) -> None:
        """Collective, before any call at this size, and with this setting."""
        ...

    def dispatch(self, i: int) -> None:
        """Input i."""
        ...

    def combine(self, i: int) -> None:
        """Answers to input i, which was dispatched before."""
        ...

    def close(self) -> None: ...
