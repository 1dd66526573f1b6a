"""Baselines for a GPU user, each called as its own documentation says for that size. Preparation that a user could do is not timed:
tokens are quantised and packed beforehand, and what the routing determines (orders, counts, places) is known. Calls that never ask
the host are captured in a graph. The answers that go back are any rows.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench.cpu.peers import Packing, Peer
from bench.gpu import symmetric
from bench.gpu.deep_ep import DeepEp
from bench.gpu.flashinfer import FlashInfer
from bench.gpu.inputs import GpuPeer, Inputs
from bench.harness.batch import Shape
from bench.harness.options import Options
from bench.harness.world import Limits, Off, World


def group(world: World, options: Limits, backend: str) -> Any:
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


def group_of(world: World, options: Limits, device: torch.device) -> Any:
    return group(world, options, "nccl" if device.type == "cuda" else "gloo")


class Groups:
    """torch's process groups for collectives: one that takes what multiprocessors it likes, and one for each number that is set."""

    def __init__(self, world: World, options: Limits, device: torch.device) -> None:
        self._all = group_of(world, options, device)
        self._on_sms: dict[int, Any] = {}
        self.has_num_sms = device.type == "cuda"

    def on(self, num_sms: int | None) -> Any:
        """Collective. NCCL launches a thread block on a multiprocessor, and no more of them than it is told."""
        if num_sms is None:
            return self._all
        if num_sms not in self._on_sms:
            settings = dist.ProcessGroupNCCL.Options()
            settings.config.max_ctas = num_sms
            self._on_sms[num_sms] = dist.new_group(backend="nccl", pg_options=settings)
        return self._on_sms[num_sms]


class Collectives:
    """The common part of baselines on torch's collectives."""

    in_pairs = False

    def __init__(self, world: World, options: Options, device: Any) -> None:
        self._world, self._device = world, device.device
        self._groups = Groups(world, options, self._device)

    def has_num_sms(self, shape: Shape) -> bool:
        return self._groups.has_num_sms


class AllToAllSingle(Collectives):
    """all_to_all_single between the permutes that bring top-k copies to their experts, and back; see cpu/peers.Peer."""

    name, how, in_graphs = "nccl", "all_to_all_single, counts known", True

    def counts(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        dist.all_to_all_single(out, mine, group=self._group)

    def rows(self, out: torch.Tensor, mine: torch.Tensor, out_rows: list[int], my_rows: list[int]) -> None:
        dist.all_to_all_single(out, mine, out_rows, my_rows, group=self._group)

    def prepare(self, shape: Shape, inputs: Inputs, num_sms: int | None = None) -> None:
        self._group = self._groups.on(num_sms)
        self._peer = Peer(self._world, shape, self, self._device)
        self._packed = [self._peer.pack(x).clone() for x in inputs.x]
        self._routes = [self._peer.route(ids) for ids in inputs.ids]
        self._weights = inputs.weights
        most = max(sum(route.rows) for route in self._routes)
        self._answers = torch.randn(most, shape.options.hidden, device=self._device).to(shape.options.dtype)

    def dispatch(self, i: int) -> None:
        self.received = self._peer.carry(self._packed[i], self._routes[i])

    def combine(self, i: int) -> None:
        route = self._routes[i]
        self.y = self._peer.carry_back(self._answers[: sum(route.rows)], self._weights[i], route)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class GatherAndReduce(Collectives):
    """Every rank gets all tokens with their routing, computes what its experts add to each, and the sums are scattered."""

    name, how, in_graphs = "ag_rs", "all_gather_into_tensor, reduce_scatter_tensor", True

    def prepare(self, shape: Shape, inputs: Inputs, num_sms: int | None = None) -> None:
        self._group = self._groups.on(num_sms)
        pack, o = Packing(shape, self._device), shape.options
        routes = [
            (ids.to(torch.int32).view(torch.uint8), w.view(torch.uint8)) for ids, w in zip(inputs.ids, inputs.weights, strict=True)
        ]
        self._rows = [torch.cat([pack(x), *route], dim=1) for x, route in zip(inputs.x, routes, strict=True)]
        everybody = shape.world * shape.tokens
        self.received = torch.empty(everybody, self._rows[0].shape[1], dtype=torch.uint8, device=self._device)
        self.partial = torch.randn(everybody, o.hidden, device=self._device).to(o.dtype)
        self.y = torch.empty(shape.tokens, o.hidden, dtype=o.dtype, device=self._device)

    def dispatch(self, i: int) -> None:
        dist.all_gather_into_tensor(self.received, self._rows[i], group=self._group)

    def combine(self, i: int) -> None:
        dist.reduce_scatter_tensor(self.y, self.partial, group=self._group)

    def close(self) -> None: ...


class SymmetricMemory:
    name, in_graphs, in_pairs = "symm_mem", True, False

    def __init__(self, world: World, options: Options, device: Any) -> None:
        self._device = device.device
        self._memory = symmetric.opened(self._device)
        if self._memory is None:
            raise Off("torch's symmetric memory has no NVSHMEM here")
        self._group = group(world, options, "nccl").group_name
        symmetric.enable(self._memory, self._group)

    def has_num_sms(self, shape: Shape) -> bool:
        return False

    def _empty(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = self._memory.empty(*size, dtype=dtype, device=self._device)
        self._memory.rendezvous(tensor, self._group)
        return tensor

    def prepare(self, shape: Shape, inputs: Inputs, num_sms: int | None = None) -> None:
        self._way = symmetric.way_of(shape, self._group, self._empty)
        self.how = self._way.how
        self._x, self._weights = inputs.x, inputs.weights
        self._routes = [self._way.route(ids) for ids in inputs.ids]

    def dispatch(self, i: int) -> None:
        self._way.dispatch(self._x[i], self._routes[i])

    def combine(self, i: int) -> None:
        weights, back = self._weights[i], self._way.combine(self._routes[i])
        copies = torch.empty_like(back)
        copies[self._routes[i].order] = back
        self.y = torch.bmm(weights[:, None].to(copies.dtype), copies.view(*weights.shape, -1))

    def close(self) -> None: ...


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise Off(f"import {name}: {problem}") from None


def _deep_ep(world: World, options: Options, device: Any) -> GpuPeer:
    return DeepEp(_imported("deep_ep"), group_of(world, options, device.device), world, options, device)


def _flashinfer(world: World, options: Options, device: Any) -> GpuPeer:
    return FlashInfer(lambda: _imported("flashinfer.comm"), world, options, device)


PEERS: dict[str, Callable[[World, Options, Any], GpuPeer]] = {
    "nccl": AllToAllSingle,
    "ag_rs": GatherAndReduce,
    "symm_mem": SymmetricMemory,
    "deep_ep": _deep_ep,
    "flashinfer": _flashinfer,
}
