"""The calls of an AllToAll that torch.compile traces or autograd records: the operators of _ops.py, and handles of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from . import _ops
from ._parts import Links
from .errors import Error
from .handles import Dispatched, Plan
from .layouts import Compact

if TYPE_CHECKING:
    from .all_to_all import AllToAll

Optional = torch.Tensor | None


class GraphPlan(Plan):
    """A plan that is a tensor."""

    def __init__(self, owner: AllToAll, link: torch.Tensor, weights: Optional, tokens: Any) -> None:
        self._owner = owner
        self._link = link
        self._tokens = tokens
        self._weights = weights
        self._spec = owner._graph._spec

    @property
    def tokens(self) -> int:
        return self._tokens  # while it is traced, a symbol

    def rows(self, rank: int) -> int:
        return self._owner._phases.of_plan_link(self._link, self._tokens).rows(rank)


class GraphDispatched(Dispatched):
    """A dispatch of which everything is a tensor. Its step's number is unknown."""

    def __init__(self, owner: AllToAll, plan: GraphPlan, link: torch.Tensor, row_weights: torch.Tensor) -> None:
        self._owner = owner
        self.plan: GraphPlan = plan
        self._link = link
        self._row_weights = row_weights
        self._used = False
        self.step = -1

    def wait(self) -> Dispatched:
        return self


class Graph:
    def __init__(self, owner: AllToAll) -> None:
        self._owner = owner
        links: Links = owner._phases.links()
        scale = links.scale
        spec = _ops.Spec(
            number=_ops.enroll(owner), generation=owner._core.generation, hidden=owner.hidden, top_k=owner.top_k,
            dtype=_name(owner.dtype), x_dtype=_name(torch.float8_e4m3fn if owner.wire.quantised else owner.dtype),
            x_shape=list(links.x_shape),
            scale=None if scale is None else (_name(scale.dtype), list(scale.shape), list(scale.strides)),
            weights_shape=list(links.weights_shape), link_words=links.words, plan=(_name(links.plan[0]), links.plan[1]),
        )  # fmt: skip
        self._spec = spec.text()
        self._compact = isinstance(owner.layout, Compact)
        self._weights = "topk_weights" if self._compact else "weights"
        self._parts = [
            (name, *part) for name, part in links.parts.items() if part.dtype == torch.int32 and name not in ("x", "scale")
        ]
        self._absent = [
            name for name in ("offsets", "weights", "topk_ids", "topk_weights", "num_rows")
            if name not in links.parts
        ]  # fmt: skip

    def renew(self) -> None:
        """After a reset(). Compiled code has the spec as a constant, and is compiled again."""
        self._spec = replace(_ops.Spec.of(self._spec), generation=self._owner._core.generation).text()

    def check_current(self, what: str, spec: str) -> None:
        if spec != self._spec:
            raise Error(f"{what} is from before reset()")

    # ---- whether ---------------------------------------------------------------------------------------------------------

    def wanted(self, *inputs: Any) -> bool:
        """Whether this call is for here. inputs: what may need a gradient."""
        if torch.compiler.is_compiling():
            return True
        if torch.is_grad_enabled():
            for tensor in inputs:  # any() and a generator take three times as long
                if tensor is not None and getattr(tensor, "requires_grad", False):
                    return True
        return False

    def _check_differentiable(self, call: str) -> None:
        if self._owner.wire.quantised:
            raise Error(
                f"{call}: autograd cannot follow wire={self._owner.wire.value!r}, whose rows are codes: call it under "
                "torch.no_grad() and write the backward pass as a dispatch and a combine, or use wire='native'"
            )

    def refuse(self, call: str) -> None:
        raise Error(f"{call}: torch.compile and autograd take dispatch() and combine() whole, without async_op or halves")

    # ---- the calls -------------------------------------------------------------------------------------------------------

    def dispatch(
        self, x: torch.Tensor, topk_ids: Optional, topk_weights: Optional, x_scale: Optional, plan: Plan | None
    ) -> GraphDispatched:
        owner = self._owner
        if plan is not None:
            plan = self._adopt_plan(plan)
            self.check_current("dispatch: this plan", plan._spec)
            if topk_ids is not None:
                raise Error("dispatch: plan= replaces topk_ids; give one of them")
            if x.shape[0] != plan._tokens:
                raise Error(f"dispatch: x has {x.shape[0]} tokens, the plan is for {plan._tokens}")
            if topk_weights is None:
                topk_weights = plan.topk_weights
        zeroed = torch.is_grad_enabled() and (x.requires_grad or (topk_weights is not None and topk_weights.requires_grad))
        if zeroed:
            self._check_differentiable("dispatch")
        rows, scale, row_weights, link, new_plan = torch.ops.pplx_comm.dispatch(
            self._spec, x, topk_ids, topk_weights, x_scale, None if plan is None else plan._link, zeroed, False
        )
        if plan is None or topk_weights is not plan.topk_weights:
            kept = None if topk_weights is None else topk_weights.detach().clone()
            plan = GraphPlan(owner, new_plan if plan is None else plan._link, kept, x.shape[0])
        d = GraphDispatched(owner, plan, link, row_weights)
        d.x = rows
        d.scale = scale if owner.wire.quantised else None
        words = link.detach().view(torch.int32)
        for name, at, _, shape, strides in self._parts:
            setattr(d, name, words.as_strided(shape, strides, at // 4))
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
        if d._owner is not self._owner:
            raise Error("combine: this handle belongs to another AllToAll")
        if d._used:
            raise Error("combine: this dispatch was combined or released already; a step is combined once")
        self.check_current("combine: this dispatch", d.plan._spec)
        self._owner._checks.out(out, accumulate, d.plan._tokens)
        if torch.is_grad_enabled():
            self._check_gradients(expert_out, d, weights, tail, out)
        weighted = weighted and not self._compact  # which are weighted already
        plan = d.plan
        y, back = torch.ops.pplx_comm.combine(
            self._spec, expert_out, d._row_weights, d._link, plan._link, plan._tokens, weights, weighted, tail,
            out if accumulate else None,
        )  # fmt: skip
        if out is not None:
            y = out.copy_(y)
        d._used = given._used = True
        return y if tail is None else (y, back)

    def _check_gradients(
        self, expert_out: torch.Tensor, d: GraphDispatched, weights: Optional, tail: Optional, out: Optional
    ) -> None:
        for name, tensor in (("weights", weights), ("tail", tail), ("out", out)):
            if tensor is not None and tensor.requires_grad:
                raise Error(f"combine: {name}= has no gradient; topk_weights of dispatch() do, and so does expert_out")
        if expert_out.requires_grad:
            self._check_differentiable("combine")
        if out is not None and (expert_out.requires_grad or d._link.requires_grad):
            raise Error("combine: with out= there is no gradient; leave it out, or call it under torch.no_grad()")

    def release(self, d: GraphDispatched) -> None:
        if d._used:
            raise Error("release: this dispatch was combined or released already")
        self.check_current("release: this dispatch", d.plan._spec)
        torch.ops.pplx_comm.release(self._spec, d._link, d.plan._link, d.plan._tokens)
        d._used = True

    # ---- handles of calls that were not here -----------------------------------------------------------------------------

    def _adopt(self, d: Dispatched) -> GraphDispatched:
        return d if isinstance(d, GraphDispatched) else self._linked(d)

    def _adopt_plan(self, plan: Plan) -> GraphPlan:
        return plan if isinstance(plan, GraphPlan) else self._linked_plan(plan)

    @torch.compiler.disable
    def _linked(self, d: Dispatched) -> GraphDispatched:
        phases = self._owner._phases
        self._owner._checks.received(d)
        _, _, weights, link = phases.linked(d)
        # The caller's d.weights may change in place; what the backward pass takes may not.
        return GraphDispatched(self._owner, self._linked_plan(d.plan), link, weights.clone())

    @torch.compiler.disable
    def _linked_plan(self, plan: Plan) -> GraphPlan:
        if not isinstance(plan, Plan):
            raise Error(f"dispatch: plan= takes d.plan of an earlier dispatch, not {type(plan).__name__}")
        if plan._owner is not self._owner:
            raise Error("dispatch: this plan belongs to another AllToAll")
        if plan._generation != self._owner._core.generation:
            raise Error("dispatch: this plan is from before reset()")
        return GraphPlan(self._owner, self._owner._phases.plan_link(plan), plan.topk_weights, plan.tokens)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
