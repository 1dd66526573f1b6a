"""Checks the arguments of an AllToAll, and makes the plain struct that the C++ side works from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import pplx_comm._core as _core
from pplx_comm.control.deadlines import checked_timeout
from pplx_comm.errors import Error
from pplx_comm.gpus import device_index
from pplx_comm.layouts import Compact, Padded, Ragged
from pplx_comm.settings import Settings, read
from pplx_comm.wire import Wire
from pplx_comm.wiring import nvshmem
from pplx_comm.wiring.carriers import named_nics
from pplx_comm.wiring.compare import plain
from pplx_comm.wiring.placement import PLACEMENTS
from pplx_comm.wiring.request import Request

WHOLE = (1 << 32) - 1
"""part_bytes of blocks that leave whole."""

_DTYPES = {
    torch.bfloat16: _core.Dtype.BFLOAT16,
    torch.float16: _core.Dtype.FLOAT16,
    torch.float32: _core.Dtype.FLOAT32,
}
_WORST_CASE_LIMIT = 1 << 30  # bytes of d.x that the library takes without being asked


def integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Error(f"{name} must be an integer, not {value!r}")
    if not low <= value <= high:
        raise Error(f"{name}={value} must be {low} to {high}")
    return value


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB ({nbytes:,} bytes)"


def make_config(
    world_size: int,
    rank: int,
    *,
    num_experts: int,
    top_k: int,
    hidden: int,
    max_tokens_per_rank: int,
    dtype: torch.dtype,
    wire: Wire | str,
    layout: Ragged | Padded | Compact,
    in_flight: int,
    scale_layout: str,
    replicas: int = 1,
    slot_bytes: int | None = None,
    dedup: str = "rank",
    first_step: int = 1,
    on_gpu: bool = False,
) -> _core.Config:
    """The plain struct that the C++ side works from; says what is wrong with the arguments."""
    c = _core.Config()
    c.world, c.rank, c.on_gpu = integer("world_size", world_size, 1, 1024), rank, on_gpu
    c.num_experts = integer("num_experts", num_experts, 1, 1 << 20)
    c.top_k = integer("top_k", top_k, 1, 16)
    c.hidden = integer("hidden", hidden, 1, 1 << 20)
    c.max_tokens = integer("max_tokens_per_rank", max_tokens_per_rank, 1, 1 << 20)
    c.in_flight = integer("in_flight", in_flight, 1, 8)
    c.replicas = integer("replicas", replicas, 1, 1024)
    if world_size % replicas:
        raise Error(
            f"replicas={replicas} must divide the world size, {world_size}: each group of {replicas} ranks holds the same tokens"
        )
    if dtype not in _DTYPES:
        raise Error(f"dtype={dtype} is not supported: torch.bfloat16, torch.float16 and torch.float32 are")
    c.dtype = _DTYPES[dtype]
    if hidden * dtype.itemsize % 16:
        raise Error(f"hidden={hidden} of {dtype} is {hidden * dtype.itemsize} bytes: a row must be a multiple of 16 bytes")
    c.wire = _core.Wire.__members__[Wire.of(wire).name]
    if dedup not in ("auto", "rank", "node"):
        raise Error(f"dedup={dedup!r} must be 'auto', 'rank' or 'node'")
    if scale_layout not in ("row", "tma"):
        raise Error(f"scale_layout={scale_layout!r} must be 'row' or 'tma'")
    c.scale_tma = scale_layout == "tma"
    _fill_layout(c, layout, c.payload_bytes)
    c.first_step = first_step
    if c.invalid:
        raise Error(c.invalid)
    if slot_bytes is not None:
        c.slot_bytes = integer("slot_bytes", slot_bytes, 1, 1 << 62)
        if c.in_pieces and c.slot_bytes < c.least_slot_bytes:
            raise Error(
                f"slot_bytes={slot_bytes} must be at least {c.least_slot_bytes} here: steps of up to 256 tokens a rank never go "
                "in pieces"
            )
        if c.in_pieces and dedup == "node":
            raise Error(
                f"dedup='node' needs whole blocks, and slot_bytes={slot_bytes} cuts them in pieces: give slot_bytes at least "
                f"{c.whole_slot_bytes}, or leave it out"
            )
        if is_by_node(c, dedup):
            c.slot_bytes = 0  # whole, also with the larger headers of node blocks
        if c.in_pieces and replicas > 1 and on_gpu:
            raise Error(
                f"replicas={replicas} with device='cuda' needs whole blocks, and slot_bytes={slot_bytes} cuts them in pieces: "
                f"give slot_bytes at least {c.whole_slot_bytes}, or leave it out"
            )
    return c


def is_by_node(c: _core.Config, dedup: str) -> bool:
    """True: rows may go once per node. "auto": where the limits of that change nothing."""
    if dedup != "auto":
        return dedup == "node"
    return c.in_flight == 1 and not c.in_pieces


def _fill_layout(c: _core.Config, layout: Ragged | Padded | Compact, row_bytes: int) -> None:
    experts = c.experts_per_rank
    tokens = c.world // c.replicas * c.max_tokens
    if isinstance(layout, Ragged):
        c.layout = _core.LayoutKind.RAGGED
        c.align, c.zero_pad = layout.align, layout.zero_pad
        choices = tokens * c.top_k
        worst = choices + min(experts, choices) * (layout.align - 1)
        worst = (worst + layout.align - 1) // layout.align * layout.align
        if layout.max_rows is None and worst * row_bytes > _WORST_CASE_LIMIT:
            even = -(-tokens * c.top_k // c.world) + experts * (layout.align - 1)
            raise Error(
                f"the worst case, all tokens to one rank, needs {worst} rows, {_gib(worst * row_bytes)}, above the "
                f"1 GiB that is taken without asking; an even load needs about {even} rows, {_gib(even * row_bytes)}. Pass "
                f"layout=pc.Ragged(align={layout.align}, max_rows=...)"
            )
        c.max_rows = layout.max_rows if layout.max_rows is not None else worst
    elif isinstance(layout, Padded):
        c.layout = _core.LayoutKind.PADDED
        most = layout.max_tokens_per_expert if layout.max_tokens_per_expert is not None else tokens
        c.max_per_expert = -(-most // layout.align) * layout.align
        rows = experts * c.max_per_expert
        if layout.max_tokens_per_expert is None and rows * row_bytes > _WORST_CASE_LIMIT:
            raise Error(
                f"the worst case, every token to each expert, needs {rows} rows, {_gib(rows * row_bytes)}, above the "
                "1 GiB that is taken without asking. Pass layout=pc.Padded(max_tokens_per_expert=...)"
            )
    elif isinstance(layout, Compact):
        c.layout = _core.LayoutKind.COMPACT
        c.max_rows = tokens
    else:
        raise Error(f"layout={layout!r} must be pc.Ragged(...), pc.Padded(...) or pc.Compact()")


def seconds(name: str, value: Any) -> float:
    if not checked_timeout(value, name):
        raise Error(f"{name}={value!r} must be a positive number of seconds")
    return float(value)


def device_of(given: str | torch.device | None) -> torch.device:
    """Returns where an AllToAll's tensors are: for None a GPU where torch sees one, and never the CPU in its place."""
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if given is None else given)
    if where.type not in ("cpu", "cuda"):
        raise Error(f"device={str(given)!r} must be 'cpu' or 'cuda'")
    # "cpu:0" has an index, which is no GPU's.
    return torch.device("cuda", device_index(where)) if where.type == "cuda" else torch.device("cpu")


@dataclass(frozen=True)
class Arguments:
    """See AllToAll."""

    num_experts: int
    top_k: int
    hidden: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    wire: Wire | str
    layout: Ragged | Padded | Compact
    device: str | torch.device | None
    transport: str
    provider: str | None
    nics: str | Sequence[str] | None
    proxy_threads: int
    node_size: int | None
    dedup: str
    combine_wire: str
    in_flight: int
    replicas: int
    slot_bytes: int | None
    num_sms: int | None
    hooks: bool
    timeout: float
    scale_layout: str
    placement: str | None
    first_step: int
    symmetric_memory: torch.Tensor | None = None

    def request(self, world_size: int, rank: int) -> Request:
        """Returns what the ranks agree about. A mistake is part of it, so that all of them hear of it and none waits."""
        config, settings, error = _core.Config(), Settings(), None
        names: tuple[str, ...] = ()
        where = torch.device("cpu")
        try:
            settings = read(Settings)
            names = settings.nics if self.nics is None else named_nics(self.nics)
            where = device_of(self.device)
            self._check_the_rest(world_size, where)
            config = make_config(
                world_size, rank, num_experts=self.num_experts, top_k=self.top_k, hidden=self.hidden,
                max_tokens_per_rank=self.max_tokens_per_rank, dtype=self.dtype, wire=self.wire, layout=self.layout,
                in_flight=self.in_flight, scale_layout=self.scale_layout, replicas=self.replicas, slot_bytes=self.slot_bytes,
                dedup=self.dedup, first_step=self.first_step, on_gpu=where.type == "cuda",
            )  # fmt: skip
            if where.type == "cuda":
                whole = self.transport == "nvshmem" and self.in_flight > nvshmem.MOST_IN_FLIGHT_WITH_PARTS
                config.part_bytes = WHOLE if whole else min(settings.part_bytes, WHOLE)
        except (Error, TypeError, ValueError, RuntimeError) as reason:  # torch's own words for a device that is none
            error = str(reason)
        return Request(
            config, self._compared(config, where, settings, error), self.transport,
            self.provider or settings.provider, self.node_size, self._dedup(config), self.combine_wire,
            100.0 if error else float(self.timeout), error, nics=names, proxies=self.proxy_threads, gpu=where.index,
            num_sms=self.num_sms or 0, hooks=self.hooks, placement=self.placement or settings.placement, settings=settings,
            symmetric_memory=self.symmetric_memory,
        )  # fmt: skip

    def _dedup(self, config: _core.Config) -> str:
        may = self.transport != "nvshmem" and (self.transport != "proxy" or self.node_size is not None)
        return self.dedup if self.dedup == "node" or (may and is_by_node(config, self.dedup)) else "rank"

    def _check_the_rest(self, world_size: int, where: torch.device) -> None:
        if self.transport not in ("auto", "mapped", "proxy", "nvshmem"):
            raise Error(f"transport={self.transport!r} must be 'auto', 'mapped', 'proxy' or 'nvshmem'")
        if self.transport == "nvshmem":
            if where.type != "cuda":
                raise Error("transport='nvshmem' needs device='cuda': GPUs post to the network")
            nvshmem.kernels()
        elif self.symmetric_memory is not None:
            raise Error(f"symmetric_memory= is for transport='nvshmem', not for {self.transport!r}")
        if self.placement is not None and self.placement not in PLACEMENTS:
            raise Error(f"placement={self.placement!r} must be 'auto', 'host' or 'device'")
        if self.placement == "device" and where.type != "cuda":
            raise Error("placement='device' needs device='cuda': the CPU device has no GPU memory")
        seconds("timeout", self.timeout)
        if self.node_size is not None:
            integer("node_size", self.node_size, 1, world_size)
        if self.combine_wire not in ("native", "fp8"):
            raise Error(f"combine_wire={self.combine_wire!r} must be 'native' or 'fp8'")
        if self.combine_wire == "fp8" and self.dedup != "node":
            raise Error(f"combine_wire='fp8' is for what a node's ranks answer together: it needs dedup='node', not {self.dedup!r}")
        if self.dedup == "node" and self.transport == "nvshmem":
            raise Error("dedup='node' does not take transport='nvshmem': a proxy carries for relays, so use 'auto'")
        integer("proxy_threads", self.proxy_threads, 1, 2)
        if not isinstance(self.hooks, bool):
            raise Error(f"hooks={self.hooks!r} must be True or False")
        if self.num_sms is not None:
            integer("num_sms", self.num_sms, 1, 1 << 20)

    def _compared(self, config: _core.Config, where: torch.device, settings: Settings, error: str | None) -> dict[str, Any]:
        """Returns the fields that must be equal on all ranks, as JSON carries them."""
        wire = repr(self.wire) if error and not isinstance(self.wire, Wire) else Wire.of(self.wire).value
        return plain({
            "num_experts": self.num_experts, "top_k": self.top_k, "hidden": self.hidden,
            "max_tokens_per_rank": self.max_tokens_per_rank, "dtype": str(self.dtype), "wire": wire, "layout": repr(self.layout),
            "transport": self.transport, "device": where.type, "provider": self.provider, "proxy_threads": self.proxy_threads,
            "node_size": self.node_size, "dedup": self.dedup, "combine_wire": self.combine_wire,
            "in_flight": self.in_flight, "replicas": self.replicas, "slot_bytes": self.slot_bytes,
            "timeout": self.timeout,
            "scale_layout": self.scale_layout, "first_step": config.first_step, "PPLX_COMM_LARGE_TOKENS": settings.large_tokens,
            "PPLX_COMM_PART_BYTES": settings.part_bytes,
        })  # fmt: skip
