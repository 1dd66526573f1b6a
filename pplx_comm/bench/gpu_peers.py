"""What a GPU user has without this library. A peer answers with what it received: rows of zeros would travel no faster."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from . import symmetric
from .batch import Shape
from .options import Options
from .peers import Peer
from .world import Off, World


class GpuPeer(Protocol):
    name: str

    def prepare(self, shape: Shape) -> None: ...

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None: ...

    def combine(self, weights: torch.Tensor) -> None: ...

    def close(self) -> None: ...


def group(world: World, options: Options, backend: str) -> Any:
    """torch's process group, made once."""
    if not dist.is_initialized():
        limit = timedelta(seconds=options.timeout)
        host = "127.0.0.1" if world.together else world.gather(socket.gethostname(), "torch's host")[0]
        master = world.rank == 0
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit) if master else None
        port = world.gather(store.port if store else None, "torch's port")[0]
        if store is None:
            store = dist.TCPStore(host, port, is_master=False, timeout=limit)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)
    return dist.group.WORLD


class Collective:
    """all_to_all_single of counts, then of rows, with permutes and quantise as a user would write them; see peers.Peer."""

    name = "nccl"

    def __init__(self, world: World, options: Options, device: Any) -> None:
        self._world, self._device = world, device.device
        group(world, options, "nccl" if self._device.type == "cuda" else "gloo")

    def counts(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        dist.all_to_all_single(out, mine)

    def rows(self, out: torch.Tensor, mine: torch.Tensor, out_rows: list[int], my_rows: list[int]) -> None:
        dist.all_to_all_single(out, mine, out_rows, my_rows)

    def prepare(self, shape: Shape) -> None:
        self._peer = Peer(self._world, shape, self, self._device)
        self._answers = torch.empty(0, device=self._device)

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        rows = self._peer.dispatch(x, ids)
        if len(self._answers) < len(rows):
            self._answers = torch.randn(2 * len(rows) + 1, x.shape[1], device=x.device).to(x.dtype)
        self._received = len(rows)

    def combine(self, weights: torch.Tensor) -> None:
        self._peer.combine(self._answers[: self._received], weights)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class SymmetricMemory:
    name = "symm_mem"

    def __init__(self, world: World, options: Options, device: Any) -> None:
        self._device = device.device
        self._memory = symmetric.opened(self._device)
        if self._memory is None:
            raise Off("torch's symmetric memory has no NVSHMEM here")
        self._group = group(world, options, "nccl").group_name
        symmetric.enable(self._memory, self._group)

    def _empty(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = self._memory.empty(*size, dtype=dtype, device=self._device)
        self._memory.rendezvous(tensor, self._group)
        return tensor

    def prepare(self, shape: Shape) -> None:
        self._way = symmetric.way_of(shape, self._group, self._empty)

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self._way.dispatch(x, ids)

    def combine(self, weights: torch.Tensor) -> None:
        back = self._way.combine()
        copies = torch.empty_like(back)
        copies[self._way.order] = back
        self.y = torch.bmm(weights[:, None].to(copies.dtype), copies.view(*weights.shape, -1))

    def close(self) -> None: ...


class DeepEp:
    """deep_ep.Buffer's dispatch and combine, bfloat16, or e4m3 with scales when the wire is quantised."""

    name = "deep_ep"

    def __init__(self, world: World, options: Options, device: Any) -> None:
        try:
            deep_ep = importlib.import_module("deep_ep")
        except ImportError as problem:
            raise Off(f"import deep_ep: {problem}") from None
        everybody = group(world, options, "nccl")
        size = options.hidden * options.dtype.itemsize
        configs = deep_ep.Buffer.get_dispatch_config(world.size), deep_ep.Buffer.get_combine_config(world.size)
        nvlink, rdma = (
            max(getattr(config, name)(size, world.size) for config in configs)
            for name in ("get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint")
        )
        self._buffer: Any = deep_ep.Buffer(everybody, nvlink, 0 if world.together else rdma)
        self._options = options

    def prepare(self, shape: Shape) -> None:
        self._shape = shape

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        buffer, experts = self._buffer, self._options.experts
        tokens: Any = x
        if self._shape.quantised:
            blocks = x.float().unflatten(1, (-1, 128))
            scale = blocks.abs().amax(-1).clamp(min=1e-4) / 448
            tokens = (blocks / scale[..., None]).flatten(1).to(torch.float8_e4m3fn), scale
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
        received, _, recv_weights, _, self._handle, _ = buffer.dispatch(
            tokens, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, topk_idx=ids, topk_weights=weights,
        )  # fmt: skip
        rows = received[0] if isinstance(received, tuple) else received
        self._answers = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        self._weights = recv_weights

    def combine(self, weights: torch.Tensor) -> None:
        self._buffer.combine(self._answers, self._handle, topk_weights=self._weights)

    def close(self) -> None:
        del self._buffer


PEERS: dict[str, Callable[[World, Options, Any], GpuPeer]] = {"nccl": Collective, "symm_mem": SymmetricMemory, "deep_ep": DeepEp}
