"""The AllToAlls of a worker."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase
from vllm.logger import init_logger

import pplx_comm
from pplx_comm.control.failure import Failure
from pplx_comm.errors import Error
from pplx_comm.serving import compiling
from pplx_comm.settings import Serving, read

logger = init_logger("vllm.pplx_comm")


_NOT_MODULAR = (
    "pplx_comm serves vLLM's modular MoE kernels, and this layer's quantisation method has none, so that vLLM gathers all tokens: "
    "use --all2all-backend allgather_reducescatter, or another quantisation"
)


@dataclass(frozen=True)
class Shape:
    """Key of an AllToAll: all layers with the same one share it."""

    num_experts: int
    top_k: int
    hidden: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    wire: str
    layout: pplx_comm.Ragged | pplx_comm.Padded | pplx_comm.Compact
    scale_layout: str
    in_flight: int
    replicas: int


class All2AllManager(All2AllManagerBase):
    """Belongs to the communicator of the expert parallel ranks."""

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None, *, device: torch.device) -> None:
        if tcp_store_group is not None:
            raise Error("pplx_comm does not serve elastic expert parallelism: start vLLM without --enable-elastic-ep")
        super().__init__(cpu_group, tcp_store_group)
        self.settings = read(Serving)
        self.device = device
        self.comm = pplx_comm.Communicator.from_torch(cpu_group)
        parallel = get_current_vllm_config().parallel_config
        self.micro_batches = int(parallel.num_ubatches) if parallel.use_ubatching else 1
        self.tensor_parallel = int(parallel.tensor_parallel_size)
        self.support_fault_tolerance = bool(getattr(parallel, "enable_fault_tolerance", False))
        self._all_to_alls: dict[Shape, pplx_comm.AllToAll] = {}
        self._num_sms: int | None = None
        self._seen: torch.Tensor | None = None
        self.comm.on_failure(self._hear)
        self._compiles_no_more = compiling.watch(self.comm)
        if self.rank == 0:
            logger.info("pplx_comm %s serves %d expert parallel ranks on %s", pplx_comm.__version__, self.world_size, device.type)

    def _hear(self, failure: Failure) -> None:
        """Reports the failure: vLLM's own collectives may end first, with errors that name no rank."""
        (logger.info if failure.kind == "closed" else logger.error)("pplx_comm: %s", failure.message)

    # ---- layers ----------------------------------------------------------------------------------------------------------

    def get_handle(self, kwargs: dict[str, Any]) -> pplx_comm.AllToAll:
        """The AllToAll of that shape, see Shape. The first call for a shape is collective."""
        return self.all_to_all(Shape(**kwargs))

    def all_to_all(self, shape: Shape) -> pplx_comm.AllToAll:
        if shape not in self._all_to_alls:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise Error(
                    "a MoE layer of a new shape was first used while a CUDA graph is captured, where nothing can be built: call "
                    "warmup() of its all2all manager before, or run the layer once without a graph"
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

    def warmup(self) -> None:
        """Takes a step of every shape there is. Collective."""
        for a2a in self._all_to_alls.values():
            a2a.warmup()

    # ---- SMs -------------------------------------------------------------------------------------------------------------

    def set_num_sms(self, num_sms: int) -> None:
        """From the next launch on, at most what each AllToAll was made with. CPU tensors have no SMs."""
        for a2a in self._all_to_alls.values():
            a2a.set_num_sms(num_sms)

    def max_sms_used(self) -> int | None:
        return None  # the number that there is

    # ---- what other backends are asked for -------------------------------------------------------------------------------

    def dispatch(self, *_: Any, **__: Any) -> Any:
        raise Error(_NOT_MODULAR)

    def dispatch_router_logits(self, *_: Any, **__: Any) -> Any:
        raise Error(_NOT_MODULAR)

    def combine(self, *_: Any, **__: Any) -> Any:
        raise Error(_NOT_MODULAR)

    # ---- living ranks ----------------------------------------------------------------------------------------------------

    def query_active_mask(self) -> torch.Tensor:
        """1 for each rank that is gone, or that this rank waited for in vain."""
        failure = self.comm.failure
        blamed = None if failure is None else failure.rank if failure.peer is None else failure.peer
        mask = [0 if there and rank != blamed else 1 for rank, there in enumerate(self.comm.control.alive())]
        return torch.tensor(mask, dtype=torch.int32, device=self.device)

    def query_fault(self) -> torch.Tensor:
        mask = self.query_active_mask()
        if self._seen is None:
            self._seen = torch.zeros_like(mask)
        return (mask != self._seen).any()

    def clean_buffers(self) -> None:
        """After a failure: collective over the ranks that are left, which go on without the others."""
        self.comm.reset()
        self._seen = self.query_active_mask()

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        self._compiles_no_more()
        for a2a in self._all_to_alls.values():
            a2a.close()
        self._all_to_alls.clear()
        self.comm.close()
