"""The CPU device of an AllToAll: the phases run on the calling thread and the library's own, and return when they are done."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

import pplx_comm._core as _core
from pplx_comm.device.arguments import ORDINARY, How, Returned, Rows, Sent
from pplx_comm.device.checks import Checks
from pplx_comm.device.failing import Failing
from pplx_comm.device.held import Held
from pplx_comm.device.outputs import Filled, Outputs, Reserved
from pplx_comm.device.parts import Tickets
from pplx_comm.device.session import Session
from pplx_comm.errors import Error
from pplx_comm.handles import Combining, Dispatched, Owner, Plan
from pplx_comm.hooks import HOOK_ROWS, RAISED, Hooks
from pplx_comm.wiring.record import CLOSED

_BETWEEN_LOOKS = 50e-6  # seconds: threads that raise words wake no consumer

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(phase: Callable[Concatenate[Cpu, P], T]) -> Callable[Concatenate[Cpu, P], T]:
    """reset() waits until it returns."""

    @functools.wraps(phase)
    def call(self: Cpu, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.life:
            return phase(self, *args, **kwargs)

    return call


class CpuPlan(Plan):
    def __init__(self, owner: Owner, core: _core.Plan, weights: torch.Tensor | None, generation: int) -> None:
        self.owner = owner
        self.core = core
        self.generation = generation
        self.tokens = int(core.tokens)
        self._weights = None if weights is None else weights.detach().clone()

    @property
    def topk_weights(self) -> torch.Tensor | None:
        return self._weights

    def rows(self, rank: int) -> int:
        return int(self.core.rows(rank))

    def with_weights(self, weights: torch.Tensor) -> Plan:
        return CpuPlan(self.owner, self.core, weights, self.generation)


class CpuDispatched(Dispatched):
    plan: CpuPlan
    routes: _core.Received
    """The output row of every choice of every received row, for the combine."""
    small: torch.Tensor
    """The memory of all but x and scale."""
    filled: Filled | None = None
    """With hooks its tensors are there before the receive half."""
    totals: torch.Tensor | None

    def __init__(self, plan: CpuPlan, step: int, inputs: tuple[Any, ...] = (), memory: Reserved | None = None) -> None:
        self.owner = plan.owner
        self.plan = plan
        self.step = step
        self.receiving = threading.Lock()
        self.inputs = inputs  # must live until the step's rows are placed
        self.memory = memory  # where the outputs lie
        self.zeroed, self.totals = False, None
        for name in ("scale", "offsets", "weights", "topk_ids", "topk_weights", "num_rows"):
            setattr(self, name, None)


class CpuCombining(Combining):
    inputs: tuple[Any, ...] = ()
    """Must live until the step's rows are sent."""


class Cpu:
    """The phases of one AllToAll."""

    def __init__(self, session: Session) -> None:
        self.core: _core.Exchange = session.wiring.exchange
        self.life = session.life
        self.checks = Checks(session)
        self._config, self._wire, self._dtype = session.config, session.wire, session.dtype
        self._hidden, self._top_k = session.hidden, session.top_k
        self._in_order: bool = session.config.in_pieces or session.config.node_ranks > 0
        self._held = Held()
        self._outputs = Outputs(session.config)
        self._hooks = _core.hook_layout(session.config) if session.request.hooks else None
        calls = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv", "release")
        self._failing = {call: Failing(session, call) for call in calls}

    def drain(self, seconds: float) -> None:
        """Does nothing: calls return when they are done."""

    def renew(self, alive: list[bool]) -> None:
        """Does nothing: the exchange has been told."""

    def set_num_sms(self, num_sms: int) -> None:
        """A CPU has none."""

    def explain(self, tokens: int) -> list[dict[str, Any]]:
        """A CPU launches nothing."""
        return []

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.core.stats()
        return stats

    def waits(self, half: str) -> torch.Tensor:
        stats = self.core.stats()
        if not stats["counted"]:
            raise Error("waits: PPLX_COMM_STATS=0 counts none")
        return torch.tensor([round(1e9 * seconds) for seconds in stats[f"{half}_wait_seconds"]])

    def end_calls(self) -> None:
        self.core.close()

    def close(self) -> None:
        self.core = CLOSED  # type: ignore[assignment]
        self._outputs.close()

    # ---- dispatch ----------------------------------------------------------------------------------------------------

    @_awaited
    def dispatch(self, owner: Owner, halves: int, sent: Sent, how: How = ORDINARY) -> Dispatched:
        core, (x, _, _, x_scale, plan) = self.core, sent
        if how.totals is not None:
            self.checks.totals(how.totals)
        plan = self._make_plan(owner, sent) if plan is None else self.checks.plan(owner, sent, core.generation)
        assert isinstance(plan, CpuPlan)
        weights = plan.topk_weights
        size = self._wire.scale_dtype.itemsize
        memory = self._outputs.reserve()
        with self._failing["dispatch_send"]:
            step = core.dispatch_send(
                plan.core,
                _core.Tokens(
                    x=x.data_ptr(),
                    stride=x.stride(0) * x.element_size(),
                    scales=0 if x_scale is None else x_scale.data_ptr(),
                    scale_row_stride=0 if x_scale is None else size * x_scale.stride(0),
                    scale_stride=0 if x_scale is None else size * x_scale.stride(1),
                    weights=0 if weights is None else weights.data_ptr(),
                    keep_own_rows=bool(halves & _core.RECV),
                ),
            )
            d = CpuDispatched(plan, step, (x, weights, x_scale), memory)
            d.zeroed, d.totals = how.zeroed, how.totals
            if self._hooks is not None and not how.apart:
                d.hooks = Hooks(torch.zeros(self._hooks.words, dtype=torch.uint32), self._hooks)
                d.filled = self._outputs.fill(d, memory, how.zeroed)
        return d

    def _make_plan(self, owner: Owner, sent: Sent) -> CpuPlan:
        x, topk_ids, topk_weights, x_scale, _ = sent
        tokens = self.checks.tokens(x, x_scale)
        ids, weights = self.checks.ids(topk_ids, tokens), self.checks.weights("topk_weights", topk_weights, tokens)
        core = self.core.make_plan(ids.data_ptr(), ids.dtype == torch.int64, tokens)
        return CpuPlan(owner, core, weights, self.core.generation)

    @_awaited
    def dispatch_recv(self, d: Dispatched) -> None:
        assert isinstance(d, CpuDispatched)
        assert d.memory is not None
        with self._failing["dispatch_recv"]:
            if self._in_order:
                self.core.check_order(d.step)  # before the memory is taken
            outputs = self._outputs.fill(d, d.memory, d.zeroed) if d.filled is None else d.filled
            d.small, d.memory, d.filled = outputs.small, None, None
            try:
                d.routes = self.core.dispatch_recv(d.step, outputs.addresses)
            except BaseException:
                if d.hooks is not None:  # no consumer may wait for rows that do not come
                    d.hooks.failed = True
                    d.hooks.planned.fill_(RAISED)
                    d.hooks.arrived.fill_(RAISED)
                raise
        if d.totals is not None:
            d.totals += d.counts
        d.received = True
        d.inputs = ()

    def rows(self, d: Dispatched) -> Rows:
        return d.x, d.scale, d.counts

    def watch(self, d: Dispatched) -> None:
        """Its words are this step's since the send half returned."""

    def await_experts(self, owner: Owner, d: Dispatched, experts: range) -> None:
        if not d.received and d.receiving.acquire(blocking=False):
            d.receiving.release()
            owner.dispatch_recv(d)
        assert d.hooks is not None
        planned, arrived = d.hooks.planned.view(torch.int32), d.hooks.arrived.view(torch.int32)
        self._await_raised(d, planned)
        if d.offsets is None:
            self._await_raised(d, arrived[experts.start : experts.stop])
            return
        begin, last = int(d.offsets[experts.start]), experts.stop - 1
        end = int(d.offsets[last]) + int(d.counts[last])
        self._await_raised(d, arrived[begin // HOOK_ROWS : -(-end // HOOK_ROWS)])

    def _await_raised(self, d: Dispatched, words: torch.Tensor) -> None:
        """The thread in the receive half gives up in time, and then raises them."""
        assert d.hooks is not None
        while not d.received and not bool((words < 0).all()):
            time.sleep(_BETWEEN_LOOKS)
        if d.hooks.failed:
            self.core.raise_trouble()
            raise Error("the receive half of this dispatch failed")

    # ---- combine -----------------------------------------------------------------------------------------------------

    @_awaited
    def combine(self, halves: int, returned: Returned) -> Combining:
        checks, core = self.checks, self.core
        expert_out, d, weights, weighted, tail, out, accumulate = returned
        checks.received(d)
        assert isinstance(d, CpuDispatched)
        plan, routes = d.plan, d.routes
        stride = checks.expert_rows(expert_out)
        if routes.generation != core.generation:
            raise Error("combine: this dispatch is from before reset()")
        checks.enough_rows("expert_out", expert_out.shape[0], routes.needed_rows)
        weights = checks.combine_weights(weights, weighted, plan.tokens)
        tail = checks.tail(tail)
        if tail is not None:
            checks.enough_rows("tail", tail.shape[0], routes.needed_rows)
        out = checks.out(out, accumulate, plan.tokens)
        if out is None:
            out = self._outputs.tensor((plan.tokens, self._hidden), self._dtype)
        tail_out = None if tail is None else self._outputs.tensor((plan.tokens, self._top_k), torch.float32)
        c = CpuCombining(d, out, accumulate, tail_out)
        c.inputs = (expert_out, weights, tail)
        d.used = True
        with self._failing["combine_send"]:
            core.combine_send(
                d.step,
                routes,
                plan.core,
                _core.ExpertOutputs(
                    expert_out=expert_out.data_ptr(),
                    stride=stride,
                    weighted=bool(weighted),
                    uses_weights=weights is not None,
                    weights=0 if weights is None else weights.data_ptr(),
                    has_tail=tail is not None,
                    tail=0 if tail is None else tail.data_ptr(),
                ),
            )
        return c

    @_awaited
    def combine_recv(self, c: Combining) -> None:
        with self._failing["combine_recv"]:
            self.core.combine_recv(
                c.dispatched.step,
                _core.Result(
                    y=c.out.data_ptr(),
                    stride=c.out.stride(0) * c.out.element_size(),
                    accumulate=bool(c.accumulate),
                    tail=0 if c.tail is None else c.tail.data_ptr(),
                ),
            )
        c.done = True
        if isinstance(c, CpuCombining):
            c.inputs = ()

    @_awaited
    def release(self, d: Dispatched) -> None:
        with self._failing["release"]:
            self.core.release(d.step)
        d.used = True

    # ---- as tensors, for torch_ops -----------------------------------------------------------------------------------

    def tickets(self) -> Tickets:
        outputs = self._outputs
        rows = outputs.parts["topk_weights" if "topk_weights" in outputs.parts else "weights"].shape
        return Tickets(outputs.x.shape, outputs.parts, rows, outputs.small_bytes // 4, (torch.int64, 1), outputs.scale)

    def as_tensors(self, d: Dispatched) -> tuple[torch.Tensor, ...]:
        assert isinstance(d, CpuDispatched)
        weights = d.topk_weights if d.weights is None else d.weights
        assert weights is not None
        scale = torch.empty(0) if d.scale is None else d.scale
        bare = CpuDispatched(d.plan, d.step)  # a ticket keeps no rows
        bare.routes, bare.received = d.routes, True
        return d.x, scale, weights.clone(), self._held.keep(bare, d.small).view(torch.float32)

    def plan_ticket(self, plan: Plan) -> torch.Tensor:
        return self._held.keep(plan, torch.empty(1, dtype=torch.int64))

    def of_plan_ticket(self, owner: Owner, ticket: torch.Tensor, tokens: int) -> Plan:
        plan = self._held.of(ticket)
        assert isinstance(plan, Plan)
        return plan

    def of_ticket(self, owner: Owner, ticket: torch.Tensor, plan: torch.Tensor, tokens: int) -> Dispatched:
        d = self._held.of(ticket)
        assert isinstance(d, Dispatched)
        return d
