"""The checked arguments of a constructor, as the wiring needs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import pplx_comm._core as _core
from pplx_comm.control import deadlines
from pplx_comm.settings import Settings


@dataclass(frozen=True)
class Request:
    """An AllToAll that a rank wants to make."""

    config: _core.Config  # rank, world and object are filled in here
    compared: dict[str, Any]  # must be equal on all ranks
    transport: str
    provider: str | None  # None: the best there is
    node_size: int | None
    dedup: str  # "rank", "node", or "auto": "node" if the nodes and their GPUs are such
    combine_wire: str
    timeout: float  # limit for a step
    error: str | None = None  # the mistake in this rank's arguments
    nics: tuple[str, ...] = ()  # names of this rank's NICs
    proxies: int = 1  # threads, of each rank
    gpu: int | None = None  # None: the CPU device
    num_sms: int = 0  # 0: all
    hooks: bool = False  # words for kernels that run beside its own
    placement: str = "auto"  # where remote peers' blocks lie: see wiring/placement.py
    settings: Settings = field(default_factory=Settings)
    symmetric_memory: torch.Tensor | None = None  # transport="nvshmem": the caller's, in place of our own

    @property
    def by_kernels(self) -> bool:
        """True if kernels drive the carrier to remote peers themselves."""
        return self.transport == "nvshmem"

    @property
    def patience(self) -> float:
        """Seconds to wait for other ranks' constructors: they may come as late as a first step."""
        longer = max(deadlines.FIRST_STEP_FACTOR * self.timeout, deadlines.CONSTRUCTOR_SECONDS)
        return min(longer, deadlines.LONGEST_TIMEOUT)
