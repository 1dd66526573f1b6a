"""DeepEP as a peer, where it is installed: its low-latency mode for decode sizes, its normal mode, tuned, beyond."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from bench.gpu.peers import Inputs
from bench.harness.batch import Shape
from bench.harness.options import Options
from bench.harness.world import Off, World
from pplx_comm.wire import Wire

MOST_LOW_LATENCY = 512
"""Tokens of a rank. DeepEP keeps that mode for decoding: its buffers grow with experts x tokens."""

SMS = 24
"""What its own tests give the normal mode; the measured setting "all" means that, too."""

DISPATCH_CHUNKS, COMBINE_CHUNKS = tuple(range(4, 33, 4)), tuple(range(2, 17, 2))
"""Tokens sent at once, as its own tests try them; the configuration that it comes with is tried too."""

CHUNKS_UNDER_WAY = 256
TUNING_CALLS = 5


class Mode(Protocol):
    how: str
    in_graphs: bool

    def prepare(self, shape: Shape, inputs: Inputs, num_sms: int | None = None) -> None: ...

    def dispatch(self, i: int) -> None: ...

    def combine(self, i: int) -> None: ...

    def close(self) -> None: ...


class DeepEp:
    name = "deep_ep"

    def __init__(self, library: Any, group: Any, world: World, options: Options, device: Any) -> None:
        if not hasattr(library, "Buffer"):
            raise Off("this deep_ep has no Buffer, the interface that is measured here")
        if options.dtype != torch.bfloat16:
            raise Off("deep_ep takes bfloat16")
        self._made = library, group, world, options, device
        self._modes: dict[type[LowLatency | Normal], Mode] = {}

    def _kind(self, shape: Shape) -> type[LowLatency | Normal]:
        return LowLatency if shape.tokens <= MOST_LOW_LATENCY else Normal

    def has_num_sms(self, shape: Shape) -> bool:
        return self._kind(shape) is Normal

    def prepare(self, shape: Shape, inputs: Inputs, num_sms: int | None = None) -> None:
        kind = self._kind(shape)
        if kind not in self._modes:
            self._modes[kind] = kind(*self._made)
        mode = self._mode = self._modes[kind]
        mode.prepare(shape, inputs, num_sms)
        self.how, self.in_graphs = mode.how, mode.in_graphs

    def dispatch(self, i: int) -> None:
        self._mode.dispatch(i)

    def combine(self, i: int) -> None:
        self._mode.combine(i)

    def close(self) -> None:
        for mode in self._modes.values():
            mode.close()


def rows_of_a_rank(tokens: int, world: int, multiple: int = 4) -> int:
    """num_max_dispatch_tokens_per_rank: that of all ranks together must be a multiple of 4, and may have to be one of more."""
    step = multiple // math.gcd(multiple, world)
    return -(-tokens // step) * step


def id_dtype(library: Any) -> torch.dtype:
    """Of the experts' ids that it takes."""
    found: torch.dtype = getattr(library, "topk_idx_t", torch.int64)
    return found


def low_latency_buffer(
    library: Any, group: Any, world: World, experts: int, hidden: int, tokens: Sequence[int], multiple: int = 4
) -> Any:
    """For as many tokens as any size has that this mode is for. multiple: see rows_of_a_rank."""
    most = max(rows_of_a_rank(n, world.size, multiple) for n in tokens if n <= MOST_LOW_LATENCY)
    # Its queues must hold two requests for each token; 1024 is its default.
    os.environ.setdefault("NVSHMEM_QP_DEPTH", str(max(1024, 1 << (2 * most + 1).bit_length())))
    size = library.Buffer.get_low_latency_rdma_size_hint(most, hidden, world.size, experts)
    return library.Buffer(
        group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=max(1, experts // world.size),
        explicitly_destroy=True,
    )  # fmt: skip


def normal_buffer(library: Any, group: Any, world: World, row: int, num_sms: Sequence[int]) -> Any:
    """For rows of so many bytes, and whatever configs_of() has for each of the numbers of multiprocessors."""
    configs = [config for sms in num_sms for of_phase in configs_of(library, world, sms) for config in of_phase]
    nvlink, rdma = (
        max(getattr(config, name)(row, world.size) for config in configs)
        for name in ("get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint")
    )
    return library.Buffer(group, nvlink, 0 if world.together else rdma, explicitly_destroy=True)


def configs_of(library: Any, world: World, sms: int) -> list[list[Any]]:
    """To try, for dispatch and for combine, with that many multiprocessors from now on."""
    library.Buffer.set_num_sms(sms)
    own = library.Buffer.get_dispatch_config(world.size), library.Buffer.get_combine_config(world.size)
    configs: list[list[Any]] = [[own[0]], [own[1]]]
    if world.together:  # how to tune it across nodes is another matter
        for of_phase, chunks in zip(configs, (DISPATCH_CHUNKS, COMBINE_CHUNKS), strict=True):
            of_phase += [library.Config(sms, chunk, CHUNKS_UNDER_WAY) for chunk in chunks]
    return configs


def best_of(configs: Sequence[Any], call: Callable[[Any], Any], time: Callable[[Callable[[], None]], float], world: World) -> Any:
    """On every rank the same: what the slowest rank is fastest with."""
    if len(configs) == 1:
        return configs[0]
    times = []
    for config in configs:

        def calls(config: Any = config) -> None:
            for _ in range(TUNING_CALLS):
                call(config)

        calls()
        world.barrier()
        times.append(time(calls))
    slowest = [max(of_ranks) for of_ranks in zip(*world.gather(times, "tuning of deep_ep"), strict=True)]
    return configs[slowest.index(min(slowest))]


class LowLatency:
    how, in_graphs = "low-latency mode", True

    def __init__(self, library: Any, group: Any, world: World, options: Options, device: Any) -> None:
        self._world, self._options = world, options
        self._id_dtype = id_dtype(library)
        self._buffer = low_latency_buffer(library, group, world, options.experts, options.hidden, options.tokens)
        self._rows = 0

    def prepare(self, shape: Shape, inputs: Inputs, num_sms: int | None = None) -> None:
        o = self._options
        rows = rows_of_a_rank(shape.tokens, self._world.size)
        if rows != self._rows:  # its words lie elsewhere now
            self._buffer.clean_low_latency_buffer(rows, o.hidden, o.experts)
            self._rows = rows
        self._x, self._weights = inputs.x, inputs.weights
        self._ids = [ids.to(self._id_dtype) for ids in inputs.ids]
        self._wire: dict[str, bool] = {"use_fp8": shape.quantised}
        if shape.wire in (Wire.FP8_UE8M0, Wire.MXFP8):
            self._wire |= {"round_scale": True, "use_ue8m0": True}
        local = o.experts // self._world.size
        device = inputs.x[0].device
        self._answers = torch.randn(o.hidden, device=device).to(o.dtype).expand(local, self._world.size * rows, -1).contiguous()
        self._handles: dict[int, Any] = {}

    def dispatch(self, i: int) -> None:
        answer = self._buffer.low_latency_dispatch(self._x[i], self._ids[i], self._rows, self._options.experts, **self._wire)
        self._received, self._handles[i] = answer[0], answer[2]

    def combine(self, i: int) -> None:
        self.y = self._buffer.low_latency_combine(self._answers, self._ids[i], self._weights[i], self._handles[i])[0]

    def close(self) -> None:
        self._buffer.destroy()


class Normal:
    """Inside a node it can return as many rows as there could be, and counts stay on the device; else the host waits for them."""

    def __init__(self, library: Any, group: Any, world: World, options: Options, device: Any) -> None:
        self._world, self._options, self._device = world, options, device
        self._id_dtype = id_dtype(library)
        self._library = library
        row = options.hidden * options.dtype.itemsize
        self._buffer = normal_buffer(library, group, world, row, [_even(num_sms) for num_sms in options.num_sms])
        self.in_graphs = world.together and "num_worst_tokens" in inspect.signature(self._buffer.dispatch).parameters

    def prepare(self, shape: Shape, inputs: Inputs, num_sms: int | None = None) -> None:
        o = self._options
        self._weights, self._ids = inputs.weights, [ids.to(self._id_dtype) for ids in inputs.ids]
        self._x: list[Any] = [_quantised(x) if shape.quantised else x for x in inputs.x]
        most = shape.tokens * self._world.size
        self._worst = {"num_worst_tokens": most} if self.in_graphs else {}
        device = inputs.x[0].device
        self._answers = torch.randn(o.hidden, device=device).to(o.dtype).expand(most, -1).contiguous()
        self._state: dict[int, tuple[Any, Any, int]] = {}
        sms = _even(num_sms)
        self.how = f"normal mode, {sms} SMs{', tuned' if self._world.together else ''}"
        configs = configs_of(self._library, self._world, sms)
        self._dispatch_config, self._combine_config = (of_phase[0] for of_phase in configs)
        self._tune(configs)

    def _tune(self, configs: list[list[Any]]) -> None:
        """With the first input, whose layout is known after one call."""
        self.dispatch(0)
        handle, _, rows = self._state[0]
        answers = self._answers[:rows]
        x, buffer, time, world = self._x[0], self._buffer, self._device.time, self._world
        self._dispatch_config = best_of(configs[0], lambda c: buffer.dispatch(x, handle=handle, config=c), time, world)
        self._combine_config = best_of(configs[1], lambda c: buffer.combine(answers, handle, config=c), time, world)

    def dispatch(self, i: int) -> None:
        buffer, ids = self._buffer, self._ids[i]
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, self._options.experts)
        received, _, weights, _, handle, _ = buffer.dispatch(
            self._x[i], num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, topk_idx=ids, topk_weights=self._weights[i], config=self._dispatch_config,
            **self._worst,
        )  # fmt: skip
        rows = received[0] if isinstance(received, tuple) else received
        self._state[i] = handle, weights, len(rows)

    def combine(self, i: int) -> None:
        handle, weights, rows = self._state[i]
        answer = self._buffer.combine(self._answers[:rows], handle, topk_weights=weights, config=self._combine_config)
        self.y = answer[0]

    def close(self) -> None:
        self._buffer.destroy()


def _even(num_sms: int | None) -> int:
    """It takes them in pairs."""
    return max(2, (num_sms or SMS) // 2 * 2)


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and a scale for each 128, by the user: this mode carries what it is given."""
    blocks = x.float().unflatten(1, (-1, 128))
    scale = blocks.abs().amax(-1).clamp(min=1e-4) / 448
    return (blocks / scale[..., None]).flatten(1).to(torch.float8_e4m3fn), scale
