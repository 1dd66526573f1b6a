"""The common part of pplx_kernels and pplx_garden: steps that fill the caller's tensors, in halves with the same arguments."""

from __future__ import annotations

from typing import Any

import torch

from pplx_comm.compat.shared import Lane, Pool, Routes, Step, refuse
from pplx_comm.errors import Error
from pplx_comm.wire import Wire


class Halves:
    """One step is open at a time."""

    def __init__(self, pool: Pool, **arguments: Any) -> None:
        """arguments: those of AllToAll that do not depend on a dtype."""
        self._pool, self._arguments = pool, arguments
        self._routes: Routes | None = None
        self._returning: Step | None = None
        self._scales: Step | None = None
        self._answers = torch.bfloat16
        """The dtype that combine returned last: codes travel in an AllToAll of it."""

    def destroy(self) -> None:
        self._pool.close()

    def _lane(self, dtype: torch.dtype, wire: Wire, device: torch.device, **further: int) -> Lane:
        key = dtype, wire, *further.values()
        arguments = {**self._arguments, "dtype": dtype, "wire": wire, "device": device, **further}
        return self._pool.known(key) or self._pool.open(key, arguments)

    def dispatch_into(
        self, counts: torch.Tensor, out: torch.Tensor, out_scale: torch.Tensor | None, x: torch.Tensor,
        x_scale: torch.Tensor | None, indices: torch.Tensor, bound_m: torch.Tensor | None, do_send: bool, do_recv: bool,
    ) -> None:  # fmt: skip
        """Fills counts, out and out_scale."""
        if do_send:
            codes = x.dtype == torch.float8_e4m3fn
            if x_scale is not None and x_scale.dtype != torch.float32:
                raise refuse("dispatch", f"scales of {x_scale.dtype}", "send float32")
            lane = self._lane(self._answers, Wire.FP8, x.device) if codes else self._lane(x.dtype, Wire.NATIVE, x.device)
            self._routes = Routes(_bounded(indices, bound_m))
            wire_scale = _wire_scale(x, x_scale) if codes else None
            self._routes.dispatch(lane, x, None, wire_scale, send_only=not do_recv)
            self._scales = None if x_scale is None or x_scale is wire_scale else self._send_scales(x_scale, self._routes.ids)
        if do_recv:
            if self._routes is None or self._routes.step is None:
                raise Error("dispatch: do_recv=True without do_send=True receives what an earlier call sent, and there is none")
            self._routes.step.receive()
            d = self._routes.step.rows()
            counts.copy_(d.counts)
            rows = min(len(out), len(d.x))
            out[:rows].copy_(d.x[:rows])
            scales, self._scales = self._scales, None
            scale = d.scale
            if scales is not None:
                scales.receive()
                scale = scales.rows().x
            if scale is not None and out_scale is not None:
                out_scale[:rows].copy_(scale[:rows, ..., : out_scale.shape[-1]])
            if scales is not None:
                scales.end()

    def _send_scales(self, x_scale: torch.Tensor, ids: torch.Tensor) -> Step:
        """Scales that no wire has travel as rows of their own, to the same places."""
        tokens, scales = x_scale.shape
        wide = torch.empty((tokens, -(-scales // 4) * 4), dtype=torch.float32, device=x_scale.device)
        wide[:, :scales] = x_scale
        lane = self._lane(torch.float32, Wire.NATIVE, x_scale.device, hidden=wide.shape[1])
        return Routes(ids).dispatch(lane, wide, send_only=True)

    def combine_into(
        self, out: torch.Tensor, weights: torch.Tensor, expert_y: torch.Tensor, do_send: bool, do_recv: bool, accumulate: bool
    ) -> None:
        """Fills the first rows of out, one for each row of indices."""
        if do_send:
            if self._routes is None:
                raise Error("combine: nothing was dispatched")
            self._answers = out.dtype
            step = self._routes.step
            if step is None or step.lane.a2a.dtype != out.dtype:
                step = self._routes.open_step(self._lane(out.dtype, Wire.NATIVE, out.device))
            elif not step.combinable:
                step = self._routes.open_step(step.lane)
            tokens = len(self._routes.ids)
            step.combine(expert_y.to(out.dtype), send_only=not do_recv, weights=weights, out=out[:tokens], accumulate=accumulate)
            self._returning = step
        if do_recv:
            if self._returning is None:
                raise Error("combine: do_recv=True without do_send=True receives what an earlier call sent, and there is none")
            self._returning.finish()


def _wire_scale(x: torch.Tensor, x_scale: torch.Tensor | None) -> torch.Tensor:
    """The scales that go with codes: ones where x_scale has others than the wire, and so travels by itself."""
    shape = len(x), -(-x.shape[1] // Wire.FP8.scale_block)
    if x_scale is not None and x_scale.shape == shape:
        return x_scale
    return torch.ones(shape, dtype=torch.float32, device=x.device)


def _bounded(indices: torch.Tensor, bound_m: torch.Tensor | None) -> torch.Tensor:
    """The first bound_m rows of indices; the others choose nothing."""
    ids = indices.view(torch.int32) if indices.dtype == torch.uint32 else indices
    if bound_m is None:
        return ids
    rows = torch.arange(len(ids), dtype=torch.int32, device=ids.device).unsqueeze(1)
    return ids.masked_fill(rows >= bound_m.view(torch.int32), -1)
