"""The CPU device of an AllToAll: the phases run on the calling thread and the library's own, and return when they are done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import _core
from ._failing import Failing
from ._halves import RECV
from ._held import Held
from ._outputs import Outputs
from ._parts import Links
from .errors import Error
from .handles import Combining, Dispatched, Plan

if TYPE_CHECKING:
    from .all_to_all import AllToAll


class Cpu:
    """The phases of one AllToAll."""

    def __init__(self, owner: AllToAll) -> None:
        self._owner = owner
        self._held = Held()
        self._outputs = Outputs(owner._config, owner.layout, owner.dtype, owner.wire)

    def close(self) -> None:
        self._outputs.close()

    # ---- dispatch ----------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        halves: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        x_scale: torch.Tensor | None,
        plan: Plan | None,
        *,
        apart: bool = False,
        zeroed: bool = False,
    ) -> Dispatched:
        """apart: for linked(), which sees to it here. zeroed: rows of d.x and d.weights that no token fills are zero."""
        owner = self._owner
        checks, core = owner._checks, owner._core
        tokens = checks.tokens(x, x_scale)
        if plan is None:
            ids = checks.ids(topk_ids, tokens)
            plan = self._make_plan(ids, checks.weights("topk_weights", topk_weights, tokens), tokens)
        else:
            plan = checks.plan(plan, core.generation, topk_ids, topk_weights, tokens)
        weights = plan.topk_weights
        size = owner.wire.scale_dtype.itemsize
        scales = (0, 0, 0) if x_scale is None else (x_scale.data_ptr(), size * x_scale.stride(0), size * x_scale.stride(1))
        with Failing(owner, "dispatch_send"):
            step = core.dispatch_send(
                plan._core, x.data_ptr(), x.stride(0) * x.element_size(), *scales,
                0 if weights is None else weights.data_ptr(), bool(halves & RECV),
            )  # fmt: skip
        d = Dispatched(owner, plan, step, (x, weights))
        d._zeroed = zeroed
        return owner.dispatch_recv(d) if halves & RECV else d

    def _make_plan(self, ids: torch.Tensor, weights: torch.Tensor | None, tokens: int) -> Plan:
        owner = self._owner
        core = _core.make_plan(owner._config, ids.data_ptr(), ids.dtype == torch.int64, tokens, owner._alive)
        return Plan(owner, core, weights, owner._core.generation)

    def dispatch_recv(self, d: Dispatched) -> None:
        arguments = self._outputs.allocate(d, d._zeroed)
        with Failing(self._owner, "dispatch_recv"):
            d._received = self._owner._core.dispatch_recv(d.step, **arguments)
        d._inputs = ()

    # ---- combine -----------------------------------------------------------------------------------------------------

    def combine(
        self,
        halves: int,
        expert_out: torch.Tensor,
        d: Dispatched,
        weights: torch.Tensor | None,
        weighted: bool,
        tail: torch.Tensor | None,
        out: torch.Tensor | None,
        accumulate: bool,
    ) -> Combining:
        owner = self._owner
        checks, core, plan = owner._checks, owner._core, d.plan
        received = checks.received(d)
        stride = checks.expert_rows(expert_out)
        if received.generation != core.generation:
            raise Error("combine: this dispatch is from before reset()")
        checks.enough_rows("expert_out", expert_out.shape[0], received)
        weights = checks.combine_weights(weights, weighted, plan.tokens)
        tail = checks.tail(tail)
        if tail is not None:
            checks.enough_rows("tail", tail.shape[0], received)
        out = checks.out(out, accumulate, plan.tokens)
        if out is None:
            out = self._outputs.tensor((plan.tokens, owner.hidden), owner.dtype)
        tail_out = None if tail is None else self._outputs.tensor((plan.tokens, owner.top_k), torch.float32)
        d._used = True
        with Failing(owner, "combine_send"):
            core.combine_send(
                d.step, received, expert_out.data_ptr(), stride, weighted, weights is not None,
                0 if weights is None else weights.data_ptr(), plan._core,
                tail is not None, 0 if tail is None else tail.data_ptr(),
            )  # fmt: skip
        c = Combining(owner, d, out, accumulate, tail_out)
        if halves & RECV:
            owner.combine_recv(c)
        return c

    def combine_recv(self, c: Combining) -> None:
        with Failing(self._owner, "combine_recv"):
            self._owner._core.combine_recv(
                c._dispatched.step, c._out.data_ptr(), c._out.stride(0) * c._out.element_size(), c._accumulate,
                0 if c._tail is None else c._tail.data_ptr(),
            )  # fmt: skip
        c._done = True

    def release(self, d: Dispatched) -> None:
        d._used = True
        with Failing(self._owner, "release"):
            self._owner._core.release(d.step)

    # ---- as tensors, for _ops.py -----------------------------------------------------------------------------------------

    def links(self) -> Links:
        outputs = self._outputs
        rows = outputs.parts["topk_weights" if "topk_weights" in outputs.parts else "weights"].shape
        return Links(outputs.x_shape, outputs.parts, rows, outputs.small_bytes // 4, (torch.int64, 1), outputs.scale_like())

    def linked(self, d: Dispatched) -> tuple[torch.Tensor, ...]:
        """x, scale, weights and link, each its own memory."""
        weights = d.topk_weights if d.weights is None else d.weights
        assert weights is not None
        scale = torch.empty(0) if d.scale is None else d.scale
        bare = Dispatched(self._owner, d.plan, d.step, ())  # a link keeps no rows
        bare._received = d._received
        return d.x, scale, weights.clone(), self._held.keep(bare, d._small).view(torch.float32)

    def plan_link(self, plan: Plan) -> torch.Tensor:
        return self._held.keep(plan, torch.empty(1, dtype=torch.int64))

    def of_plan_link(self, link: torch.Tensor, tokens: int) -> Plan:
        plan = self._held.of(link)
        assert isinstance(plan, Plan)
        return plan

    def of_link(self, link: torch.Tensor, plan: torch.Tensor, tokens: int) -> Dispatched:
        d = self._held.of(link)
        assert isinstance(d, Dispatched)
        return d
