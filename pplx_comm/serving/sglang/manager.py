"""The AllToAlls of a process."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch

import pplx_comm
from pplx_comm.control.failure import Failure
from pplx_comm.errors import Error
from pplx_comm.serving import compiling
from pplx_comm.settings import Sglang, read

logger = logging.getLogger("sglang.pplx_comm")


@dataclass(frozen=True)
class Shape:
    """Key of an AllToAll: all layers with the same one share it."""

    num_experts: int
    top_k: int
    hidden: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    wire: str
    layout: pplx_comm.Padded | pplx_comm.Compact
    scale_layout: str
    in_flight: int
    num_sms: int | None


class Manager:
    """Makes and shares the AllToAlls of one group of expert parallel ranks. Making one is collective."""

    _of: dict[Any, Manager] = {}  # noqa: RUF012

    @classmethod
    def of(cls, group: Any, device: torch.device) -> Manager:
        """group: SGLang's group of the ranks among which the experts are."""
        if group not in cls._of:
            cls._of[group] = cls(group, device)
        return cls._of[group]

    def __init__(self, group: Any, device: torch.device) -> None:
        self.settings = read(Sglang)
        self.device = device
        self.comm = pplx_comm.Communicator.from_torch(group.cpu_group)
        self.world_size = self.comm.world_size
        self._all_to_alls: dict[Shape, pplx_comm.AllToAll] = {}
        self.comm.on_failure(self._hear)
        compiling.watch(self.comm)
        if self.comm.rank == 0:
            logger.info("pplx_comm %s serves %d expert parallel ranks on %s", pplx_comm.__version__, self.world_size, device.type)

    def _hear(self, failure: Failure) -> None:
        """Reports the failure: SGLang's own collectives may end first, with errors that name no rank."""
        (logger.info if failure.kind == "closed" else logger.error)("pplx_comm: %s", failure.message)

    def all_to_all(self, shape: Shape) -> pplx_comm.AllToAll:
        """The AllToAll of that shape. The first call for a shape is collective, and takes a step."""
        if shape not in self._all_to_alls:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise Error(
                    "a MoE layer of a new shape was first used while a CUDA graph is captured, where nothing can be built: run it "
                    "once without a graph, or say with --deepep-dispatcher-output-dtype how its tokens travel, so that all is "
                    "built when the model is loaded"
                )
            a2a = pplx_comm.AllToAll(
                self.comm,
                **{name: getattr(shape, name) for name in asdict(shape)},
                device=self.device,
                transport=self.settings.transport,
                timeout=self.settings.timeout,
            )
            a2a.warmup()
            self._all_to_alls[shape] = a2a
        return self._all_to_alls[shape]

    def all_to_alls(self) -> list[pplx_comm.AllToAll]:
        return list(self._all_to_alls.values())
