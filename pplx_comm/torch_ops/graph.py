"""The calls of an AllToAll that torch.compile traces or autograd records: the operators, and handles of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

# torch.compiler.disable, but it imports the compiler, which takes as long as torch itself, at the first call.
from torch._compile import _disable_dynamo as untraced

from pplx_comm.device.steps import Steps
from pplx_comm.errors import Error
from pplx_comm.handles import Dispatched, Plan
from pplx_comm.layouts import Compact
from pplx_comm.torch_ops.operators import Spec, enroll

Optional = torch.Tensor | None

# Every call asks both, and finding them takes as long as the answer.
is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled


class GraphPlan(Plan):
    """A plan that is a tensor."""

    def __init__(self, graph: Graph, ticket: torch.Tensor, weights: Optional, tokens: Any) -> None:
        self.owner = graph.steps
        self._ticket = ticket
        self.tokens = tokens  # while it is traced, a symbol
        self._weights = weights
        self._spec = graph.spec

    @property
    def topk_weights(self) -> torch.Tensor | None:
        return self._weights

    def rows(self, rank: int) -> int:
        steps = self.owner
        assert isinstance(steps, Steps)
        return steps.device.of_plan_ticket(steps, self._ticket, self.tokens).rows(rank)


class GraphDispatched(Dispatched):
    """A dispatch of which everything is a tensor. Its step's number is unknown."""

    plan: GraphPlan

    def __init__(self, graph: Graph, plan: GraphPlan, ticket: torch.Tensor, row_weights: torch.Tensor) -> None:
        self.owner = graph.steps
        self._graph = graph
        self.plan = plan
        self._ticket = ticket
        self._row_weights = row_weights
        self.received = True
        self.used = False
        self.step = -1

    def wait(self) -> Dispatched:
        return self

    def release(self) -> None:
        self._graph.release(self)


class Graph:
    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        session = steps.session
        self._wire, self._combine_fp8 = session.wire, session.config.combine_fp8
        tickets = steps.device.tickets()
        scale = tickets.scale
        spec = Spec(
            number=enroll(steps), generation=steps.device.core.generation, hidden=session.hidden, top_k=session.top_k,
            dtype=_name(session.dtype), x_dtype=_name(torch.float8_e4m3fn if session.wire.quantised else session.dtype),
            x_shape=list(tickets.x_shape),
            scale=None if scale is None else (_name(scale.dtype), list(scale.shape), list(scale.strides)),
            weights_shape=list(tickets.weights_shape), ticket_words=tickets.words, plan=(_name(tickets.plan[0]), tickets.plan[1]),
        )  # fmt: skip
        self.spec = spec.text()
        steps.on_renew(self.renew)
        self._compact = isinstance(session.layout, Compact)
        self._weights = "topk_weights" if self._compact else "weights"
        self._parts = [
            (name, (part.shape, part.strides, part.first))
            for name, part in tickets.parts.items()
            if part.dtype == torch.int32 and name not in ("x", "scale")
        ]
        self._absent = [
            name for name in ("offsets", "weights", "topk_ids", "topk_weights", "num_rows")
            if name not in tickets.parts
        ]  # fmt: skip

    def renew(self) -> None:
        """After a reset(). Compiled code has the spec as a constant, and is compiled again."""
        self.spec = replace(Spec.of(self.spec), generation=self.steps.device.core.generation).text()

    def _check_current(self, what: str, spec: str) -> None:
        if spec != self.spec:
            raise Error(f"{what} is from before reset(): dispatch again")

    # ---- whether ---------------------------------------------------------------------------------------------------------

    def wanted(self, x: Any, weights: Any, tail: Any = None, out: Any = None) -> bool:
        """True if this call goes through the operators. Arguments are those that may need a gradient."""
        if is_compiling():
            return True
        if is_grad_enabled():
            for tensor in (x, weights, tail, out):  # any() and a generator take three times as long
                if tensor is not None and getattr(tensor, "requires_grad", False):
                    return True
        return False

    def _check_differentiable(self, call: str) -> None:
        if self._wire.quantised:
            raise Error(
                f"{call}: autograd cannot follow wire={self._wire.value!r}, whose rows are codes: call it under "
                "torch.no_grad() and write the backward pass as a dispatch and a combine, or use wire='native'"
            )

        if self._combine_fp8:
            raise Error(
                f"{call}: autograd cannot follow combine_wire='fp8', which rounds sums on their way back: call it under "
                "torch.no_grad(), or use combine_wire='native'"
            )

    def refuse(self, call: str) -> None:
        raise Error(f"{call}: torch.compile and autograd take dispatch() and combine() whole, without async_op or halves")

    def refuse_hooks(self, call: str, argument: str) -> None:
        raise Error(f"{call}: torch.compile and autograd cannot follow kernels beside their operators: leave out {argument}=")

    # ---- the calls -------------------------------------------------------------------------------------------------------

    def dispatch(
        self, x: torch.Tensor, topk_ids: Optional, topk_weights: Optional, x_scale: Optional, plan: Plan | None
    ) -> GraphDispatched:
        if plan is not None:
            plan = self._adopt_plan(plan)
            self._check_current("dispatch: this plan", plan._spec)
            if topk_ids is not None:
                raise Error("dispatch: plan= replaces topk_ids; give one of them")
            if x.shape[0] != plan.tokens:
                raise Error(f"dispatch: x has {x.shape[0]} tokens, the plan is for {plan.tokens}")
            if topk_weights is None:
                topk_weights = plan.topk_weights
        zeroed = torch.is_grad_enabled() and (x.requires_grad or (topk_weights is not None and topk_weights.requires_grad))
        if zeroed:
            self._check_differentiable("dispatch")
        rows, scale, row_weights, ticket, new_plan = torch.ops.pplx_comm.dispatch(
            self.spec, x, topk_ids, topk_weights, x_scale, None if plan is None else plan._ticket, zeroed, False
        )
        if plan is None or topk_weights is not plan.topk_weights:
            kept = None if topk_weights is None else topk_weights.detach().clone()
            plan = GraphPlan(self, new_plan if plan is None else plan._ticket, kept, x.shape[0])
        d = GraphDispatched(self, plan, ticket, row_weights)
        d.x = rows
        d.scale = scale if self._wire.quantised else None
        words = ticket.detach().view(torch.int32)
        for name, part in self._parts:
            setattr(d, name, words.as_strided(*part))
        for name in self._absent:
            setattr(d, name, None)
        setattr(d, self._weights, row_weights)
        return d

    def combine(
        self,
        expert_out: torch.Tensor,
        d: Dispatched,
        weights: Optional,
        weighted: bool,
        tail: Optional,
        out: Optional,
        accumulate: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        given, d = d, self._adopt(d)
        if d.owner is not self.steps:
            raise Error("combine: this handle belongs to another AllToAll: combine it there")
        if d.used:
            raise Error("combine: this dispatch was combined or released already; a step is combined once")
        self._check_current("combine: this dispatch", d.plan._spec)
        self.steps.device.checks.out(out, accumulate, d.plan.tokens)
        if torch.is_grad_enabled():
            self._check_gradients(expert_out, d, weights, tail, out)
        weighted = weighted and not self._compact  # its rows are weighted already
        plan = d.plan
        y, back = torch.ops.pplx_comm.combine(
            self.spec, expert_out, d._row_weights, d._ticket, plan._ticket, plan.tokens, weights, weighted, tail,
            out if accumulate else None,
        )  # fmt: skip
        if out is not None:
            y = out.copy_(y)
        d.used = given.used = True
        return y if tail is None else (y, back)

    def _check_gradients(
        self, expert_out: torch.Tensor, d: GraphDispatched, weights: Optional, tail: Optional, out: Optional
    ) -> None:
        for name, tensor in (("weights", weights), ("tail", tail), ("out", out)):
            if tensor is not None and tensor.requires_grad:
                raise Error(f"combine: {name}= has no gradient; topk_weights of dispatch() do, and so does expert_out")
        if expert_out.requires_grad:
            self._check_differentiable("combine")
        if out is not None and (expert_out.requires_grad or d._ticket.requires_grad):
            raise Error("combine: with out= there is no gradient; leave it out, or call it under torch.no_grad()")

    def release(self, d: GraphDispatched) -> None:
        if d.used:
            raise Error("release: this dispatch was combined or released already")
        self._check_current("release: this dispatch", d.plan._spec)
        torch.ops.pplx_comm.release(self.spec, d._ticket, d.plan._ticket, d.plan.tokens)
        d.used = True

    # ---- handles of calls that were not here -----------------------------------------------------------------------------

    def _adopt(self, d: Dispatched) -> GraphDispatched:
        return d if isinstance(d, GraphDispatched) else self._linked(d)

    def _adopt_plan(self, plan: Plan) -> GraphPlan:
        return plan if isinstance(plan, GraphPlan) else self._plan_of(plan)

    @untraced
    def _linked(self, d: Dispatched) -> GraphDispatched:
        device = self.steps.device
        device.checks.received(d)
        _, _, weights, ticket = device.as_tensors(d)
        # The caller's d.weights may change in place; what the backward pass takes may not.
        return GraphDispatched(self, self._plan_of(d.plan), ticket, weights.clone())

    @untraced
    def _plan_of(self, plan: Plan) -> GraphPlan:
        device = self.steps.device
        device.checks.plan_of(plan, self.steps, device.core.generation, None)
        return GraphPlan(self, device.plan_ticket(plan), plan.topk_weights, plan.tokens)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
