"""DeepEP as a peer, where it is installed: its low-latency mode for decode sizes, its normal mode, tuned, beyond."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch

from bench.gpu import deep_ep_buffers
from bench.gpu.deep_ep_buffers import SMS, Modes, is_low_latency
from bench.gpu.inputs import Inputs
from bench.harness.batch import Shape
from bench.harness.options import Options
from bench.harness.world import Off, World
from pplx_comm.wire import Wire


class Mode(Protocol):
    how: str
    in_graphs: bool

    def prepare(self, shape: Shape, inputs: Inputs, num_sms: int | None = None) -> None: ...

    def dispatch(self, i: int) -> None: ...

    def combine(self, i: int) -> None: ...

    def close(self) -> None: ...


class DeepEp:
    name, in_pairs = "deep_ep", False

    def __init__(self, library: Any, group: Any, world: World, options: Options, device: Any) -> None:
        if not hasattr(library, "Buffer"):
            raise Off("this deep_ep has no Buffer, the interface that is measured here")
        if options.dtype != torch.bfloat16:
            raise Off("deep_ep takes bfloat16")
        made = library, group, world, options
        self._modes: Modes[Mode] = Modes(partial(LowLatency, *made), partial(Normal, *made, device))

    def has_num_sms(self, shape: Shape) -> bool:
        return not is_low_latency(shape.tokens)

    def prepare(self, shape: Shape, inputs: Inputs, num_sms: int | None = None) -> None:
        mode = self._mode = self._modes.at(shape.tokens)
        mode.prepare(shape, inputs, num_sms)
        self.how, self.in_graphs = mode.how, mode.in_graphs

    def dispatch(self, i: int) -> None:
        self._mode.dispatch(i)

    def combine(self, i: int) -> None:
        self._mode.combine(i)

    def close(self) -> None:
        self._modes.close()


class LowLatency:
    how, in_graphs = "low-latency mode", True

    def __init__(self, library: Any, group: Any, world: World, options: Options) -> None:
        self._world, self._options = world, options
        self._buffer = deep_ep_buffers.LowLatency(library, group, world, options)

    def prepare(self, shape: Shape, inputs: Inputs, num_sms: int | None = None) -> None:
        o, buffer = self._options, self._buffer
        buffer.prepare(shape.tokens)
        self._x, self._weights = inputs.x, inputs.weights
        self._ids = [buffer.ids(ids) for ids in inputs.ids]
        self._wire: dict[str, bool] = {"use_fp8": shape.quantised}
        if shape.wire in (Wire.FP8_UE8M0, Wire.MXFP8):
            self._wire |= {"round_scale": True, "use_ue8m0": True}
        answer = torch.randn(o.hidden, device=inputs.x[0].device).to(o.dtype)
        self._answers = answer.expand(o.experts // self._world.size, self._world.size * buffer.rows, -1).contiguous()
        self._handles: dict[int, Any] = {}

    def dispatch(self, i: int) -> None:
        self._received, _, self._handles[i] = self._buffer.dispatch(self._x[i], self._ids[i], **self._wire)

    def combine(self, i: int) -> None:
        self.y = self._buffer.combine(self._answers, self._ids[i], self._weights[i], self._handles[i])

    def close(self) -> None:
        self._buffer.close()


class Normal:
    """Inside a node it can return the largest possible number of rows, and counts stay on the device; else the host waits for
    them."""

    def __init__(self, library: Any, group: Any, world: World, options: Options, device: Any) -> None:
        self._world, self._options, self._device = world, options, device
        row, num_sms = options.hidden * options.dtype.itemsize, [_even(num_sms) for num_sms in options.num_sms]
        self._buffer = deep_ep_buffers.Normal(library, group, world, options.experts, row, num_sms)
        self.in_graphs = self._buffer.has_worst

    def prepare(self, shape: Shape, inputs: Inputs, num_sms: int | None = None) -> None:
        o, buffer = self._options, self._buffer
        self._weights, self._ids = inputs.weights, [buffer.ids(ids) for ids in inputs.ids]
        self._x: list[Any] = [_quantised(x) if shape.quantised else x for x in inputs.x]
        most = shape.tokens * self._world.size
        self._worst = {"num_worst_tokens": most} if self.in_graphs else {}
        device = inputs.x[0].device
        self._answers = torch.randn(o.hidden, device=device).to(o.dtype).expand(most, -1).contiguous()
        self._state: dict[int, tuple[Any, Any, int]] = {}
        sms = _even(num_sms)
        self.how = f"normal mode, {sms} SMs{', tuned' if self._world.together else ''}"
        # With the first input, whose layout is known after one call.
        buffer.tune(sms, lambda: self._dispatched(0), lambda rows: self._answers[: len(rows)], self._x[0], self._device.time)

    def _dispatched(self, i: int) -> tuple[torch.Tensor, Any]:
        received, _, weights, _, handle = self._buffer.dispatch(self._x[i], self._ids[i], self._weights[i], **self._worst)
        rows = received[0] if isinstance(received, tuple) else received
        self._state[i] = handle, weights, len(rows)
        return rows, handle

    def dispatch(self, i: int) -> None:
        self._dispatched(i)

    def combine(self, i: int) -> None:
        handle, weights, rows = self._state[i]
        self.y = self._buffer.combine(self._answers[:rows], handle, weights)

    def close(self) -> None:
        self._buffer.close()


def _even(num_sms: int | None) -> int:
    """It takes them in pairs."""
    return max(2, (num_sms or SMS) // 2 * 2)


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and a scale for each 128, by the user: this mode carries what it is given."""
    blocks = x.float().unflatten(1, (-1, 128))
    scale = blocks.abs().amax(-1).clamp(min=1e-4) / 448
    return (blocks / scale[..., None]).flatten(1).to(torch.float8_e4m3fn), scale
