"""The baseline, written by hand: sort top-k copies by expert, exchange counts, then rows, permute."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bench.harness.batch import Batch, Shape
from bench.harness.clock import Clock, Traffic
from bench.harness.quantise import scale_and_factor, stored
from bench.harness.reference import Checks
from bench.harness.world import Off, World


class Collective(Protocol):
    """All-to-all of counts, and of rows of bytes."""

    name: str

    def counts(self, out: torch.Tensor, mine: torch.Tensor) -> None: ...

    def rows(self, out: torch.Tensor, mine: torch.Tensor, out_rows: list[int], my_rows: list[int]) -> None: ...

    def close(self) -> None: ...


class Gloo:
    name = "gloo"

    def __init__(self, world: World, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        host = "127.0.0.1" if world.together else world.gather(socket.gethostname(), "gloo's host")[0]

        def serve() -> dist.TCPStore | None:
            return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit) if world.rank == 0 else None

        store = world.all_or_none(serve, "gloo's store")
        port = world.gather(store.port if store else None, "gloo's port")[0]
        if store is None:
            store = dist.TCPStore(host, port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)

    def counts(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        dist.all_to_all_single(out, mine)

    def rows(self, out: torch.Tensor, mine: torch.Tensor, out_rows: list[int], my_rows: list[int]) -> None:
        dist.all_to_all_single(out, mine, out_rows, my_rows)

    def close(self) -> None:
        dist.destroy_process_group()


class Mpi:
    name = "mpi"

    def __init__(self, world: World) -> None:
        if world.mpi is None:
            raise Off("not started by mpirun, or no mpi4py here")
        self._mpi: Any = world.mpi
        self._comm: Any = world.mpi.COMM_WORLD.Dup()

    def counts(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        self._comm.Alltoall(mine.numpy(), out.numpy())

    def rows(self, out: torch.Tensor, mine: torch.Tensor, out_rows: list[int], my_rows: list[int]) -> None:
        width = mine.shape[1]
        byte = self._mpi.BYTE
        self._comm.Alltoallv(
            [mine.view(torch.uint8).numpy(), [n * width for n in my_rows], byte],
            [out.view(torch.uint8).numpy(), [n * width for n in out_rows], byte],
        )

    def close(self) -> None:
        self._comm.Free()


@dataclass(frozen=True)
class Route:
    """Everything that the routing alone determines, for one batch on one rank."""

    order: torch.Tensor
    """The choices by expert."""
    place_of_choice: torch.Tensor
    """Where each choice is in that order."""
    my_rows: list[int]
    """Indexed by rank: the rows that it gets from here."""
    rows: list[int]
    """Indexed by rank: the rows that come from it."""
    by_expert: torch.Tensor
    """Permutes received rows from (source, expert) order to (expert, source)."""
    place_by_expert: torch.Tensor


def _inverse(permutation: torch.Tensor) -> torch.Tensor:
    """Gathering by it is four times as fast as scattering by the permutation."""
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), device=permutation.device)
    return inverse


class Packing:
    """Tokens as they travel."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape = shape
        block, hidden = shape.wire.scale_block, shape.options.hidden
        self._packed = torch.empty(shape.tokens, shape.payload_bytes + shape.scale_bytes, dtype=torch.uint8, device=device)
        self._wide = torch.zeros(shape.tokens, -(-hidden // block), block, device=device)
        self._magnitude = torch.empty_like(self._wide)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The bytes that travel, a row for each token: when the wire is quantised, codes and scales."""
        if self._shape.quantised:
            self._quantise(x)
            return self._packed
        return x.view(torch.uint8)

    def _quantise(self, x: torch.Tensor) -> None:
        shape, hidden = self._shape, self._shape.options.hidden
        flat = self._wide.view(shape.tokens, -1)
        flat[:, :hidden].copy_(x)
        scale, factor = scale_and_factor(shape.wire, torch.abs(self._wide, out=self._magnitude).amax(-1, keepdim=True))
        self._wide.mul_(factor)
        self._packed[:, :hidden].view(torch.float8_e4m3fn).copy_(flat[:, :hidden])
        self._packed[:, hidden:].view(shape.wire.scale_dtype).copy_(stored(shape.wire, scale[..., 0]))


class Peer:
    """Dispatch and combine over a collective. Every buffer that a user could keep is kept."""

    def __init__(self, world: World, shape: Shape, collective: Collective, device: torch.device | None = None) -> None:
        self._device = torch.device("cpu") if device is None else device
        self.name = collective.name
        self._all_to_all = collective
        self._shape = shape
        o, c = shape.options, shape.config
        self._world, self._local = shape.world, c.experts_per_rank
        choices = shape.tokens * o.top_k
        self._width = shape.payload_bytes + shape.scale_bytes
        self.pack = Packing(shape, self._device)
        self._send = torch.empty(choices, self._width, dtype=torch.uint8, device=self._device)
        self._recv, self._sorted = self._room(0), self._room(0)
        self._back_send = torch.empty(0, o.hidden, dtype=o.dtype, device=self._device)
        self._back = torch.empty(choices, o.hidden, dtype=o.dtype, device=self._device)
        self._by_choice = torch.empty_like(self._back)
        self._y = torch.empty(shape.tokens, 1, o.hidden, dtype=o.dtype, device=self._device)
        self._local_experts = torch.arange(self._local, device=self._device).repeat(self._world)
        self.traffic = Traffic()

    def _room(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, self._width, dtype=torch.uint8, device=self._device)

    def route(self, ids: torch.Tensor) -> Route:
        """Collective. The counts come to the host, which must know how many rows to expect."""
        flat = ids.view(-1)
        order = torch.argsort(flat, stable=True)
        my_counts = torch.bincount(flat, minlength=self._world * self._local)
        counts = torch.empty_like(my_counts)
        self._all_to_all.counts(counts, my_counts)
        my_rows, rows = (of.view(self._world, -1).sum(1).tolist() for of in (my_counts, counts))
        by_expert = torch.argsort(torch.repeat_interleave(self._local_experts, counts), stable=True)
        return Route(order, _inverse(order), my_rows, rows, by_expert, _inverse(by_expert))

    def carry(self, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """Packed rows by local expert."""
        total = sum(route.rows)
        if len(self._recv) < total:
            self._recv, self._sorted = self._room(total), self._room(total)
            self._back_send = torch.empty(total, *self._back.shape[1:], dtype=self._back.dtype, device=self._device)
        torch.index_select(rows, 0, route.order // self._shape.options.top_k, out=self._send)
        self._all_to_all.rows(self._recv[:total], self._send, route.rows, route.my_rows)
        return torch.index_select(self._recv[:total], 0, route.by_expert, out=self._sorted[:total])

    def carry_back(self, expert_out: torch.Tensor, weights: torch.Tensor, route: Route) -> torch.Tensor:
        sent = self._back_send[: len(expert_out)]
        torch.index_select(expert_out, 0, route.place_by_expert, out=sent)
        self._all_to_all.rows(self._back.view(torch.uint8), sent.view(torch.uint8), route.my_rows, route.rows)
        torch.index_select(self._back, 0, route.place_of_choice, out=self._by_choice)
        copies = self._by_choice.view(*weights.shape, -1)
        return torch.bmm(weights[:, None].to(copies.dtype), copies, out=self._y)[:, 0]

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Everything: nothing of the routing is known beforehand."""
        rows = self.pack(x)
        self._route = self.route(ids)
        return self.carry(rows, self._route)

    def combine(self, expert_out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.carry_back(expert_out, weights, self._route)

    def step(self, batch: Batch, clock: Clock, checks: Checks | None) -> None:
        x, ids, weights, expert_out = batch.x, batch.topk_ids, batch.topk_weights, batch.expert_out_by_expert
        if checks:
            self._recv.fill_(0xFF)
            self._sorted.fill_(0xFF)
            self._y.fill_(float("nan"))
        rows = clock.time(self.name, "dispatch", lambda: self.dispatch(x, ids))
        if checks:
            checks.rows(self.name, *self.unpacked(rows))
        y = clock.time(self.name, "combine", lambda: self.combine(expert_out, weights))
        if checks:
            checks.close(self.name, y)
            self._y.fill_(float("nan"))

        def round_trip() -> torch.Tensor:
            self.dispatch(x, ids)
            return self.combine(expert_out, weights)

        y = clock.time(self.name, "round trip", round_trip)
        if checks:
            checks.close(self.name, y)
        if clock.recording:
            route, me = self._route, self._shape.rank
            away, back = (sum(rows) - rows[me] for rows in (route.my_rows, route.rows))
            self.traffic.count(away * self._width, back * self._shape.row_bytes)

    def unpacked(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        payload = rows[:, : self._shape.payload_bytes].contiguous()
        if not self._shape.quantised:
            return payload.view(self._shape.options.dtype), None
        scales = rows[:, self._shape.payload_bytes :].contiguous().view(self._shape.wire.scale_dtype)
        return payload.view(torch.float8_e4m3fn), scales

    def close(self) -> None:
        """The collective serves other shapes too."""
