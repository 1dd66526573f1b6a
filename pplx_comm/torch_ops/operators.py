"""dispatch and combine as torch's operators, for torch.compile and autograd. torch sees tensors in and tensors out:

spec    which AllToAll, and all that the shapes of the outputs follow from: they are functions of the arguments alone
ticket  what a dispatch leaves for its combine, in memory that is the handle's; float32, so that it has a gradient, for the backward
        pass is a step too: the gradient of a ticket is the ticket of the backward step, which combine's backward opens and
        dispatch's backward closes. A ticket is combined once, so nothing is ever added to it.
plan    the routing, for further dispatches

Each has memory of its own, as torch wants it of what an operator returns.

Nothing in them says that steps have an order, nor that other ranks need a step whose result is unused here. Without tokens it is
unused: a compiler knows what is in a tensor without elements. So the operators have effects, in order, forward and backward. torch
allows that to operators that write to nothing they are given: what combine adds to is `onto`, and it returns another.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import pplx_comm._core as _core
from pplx_comm.device.arguments import How
from pplx_comm.device.failing import Failing
from pplx_comm.device.steps import Steps
from pplx_comm.errors import Error
from pplx_comm.handles import Combining
from pplx_comm.torch_ops.inductor import keep_order

Optional = torch.Tensor | None

_library = torch.library.Library("pplx_comm", "DEF")
_library.define(
    "dispatch(str spec, Tensor x, Tensor? topk_ids, Tensor? topk_weights, Tensor? x_scale, Tensor? plan, "
    "bool zeroed, bool closed) -> (Tensor x, Tensor scale, Tensor weights, Tensor ticket, Tensor plan)"
)
_library.define(
    "combine(str spec, Tensor expert_out, Tensor row_weights, Tensor ticket, Tensor plan, SymInt tokens, "
    "Tensor? weights, bool weighted, Tensor? tail, Tensor? onto) -> (Tensor y, Tensor tail)"
)
_library.define("release(str spec, Tensor ticket, Tensor plan, SymInt tokens) -> ()")


@dataclass(frozen=True)
class Spec:
    """Identifies an AllToAll to an operator, as text: a compiler's cache on disk must tell two AllToAlls apart by it."""

    number: int
    """The AllToAll's number in this process."""
    generation: int
    """Counts reset()s: tensors that hold a step or a plan of an earlier generation do not say so themselves."""
    hidden: int
    top_k: int
    dtype: str
    x_dtype: str
    x_shape: list[int]
    scale: tuple[str, list[int], list[int]] | None
    """dtype, shape and strides."""
    weights_shape: list[int]
    """The shape of the rows' weights; Compact: of topk_weights."""
    ticket_words: int
    plan: tuple[str, int]
    """dtype and elements."""

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    @functools.cache
    def of(text: str) -> Spec:
        return Spec(**json.loads(text))


_of_number: weakref.WeakValueDictionary[int, Steps] = weakref.WeakValueDictionary()
_next_number = 0


def enroll(steps: Steps) -> int:
    global _next_number
    _next_number += 1
    _of_number[_next_number] = steps
    return _next_number


def _steps(spec: str) -> Steps:
    known = Spec.of(spec)
    steps = _of_number.get(known.number)
    if steps is None:
        raise Error("the AllToAll that this code was compiled with is gone: compile it again with a live one")
    if known.generation != steps.device.core.generation:
        raise Error("this backward pass, or compiled code, is from before reset(): run the forward pass again")
    return steps


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _nothing(like: torch.Tensor, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=like.device)


# ---- what runs -------------------------------------------------------------------------------------------------------------


def _dispatch(
    spec: str, x: torch.Tensor, topk_ids: Optional, topk_weights: Optional, x_scale: Optional, plan: Optional,
    zeroed: bool, closed: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    steps = _steps(spec)
    device = steps.device
    known = None if plan is None else device.of_plan_ticket(steps, plan, x.shape[0])
    d = steps.dispatch(_core.BOTH, (x, topk_ids, topk_weights, x_scale, known), How(apart=True, zeroed=zeroed))
    with Failing(steps.session, "dispatch"):  # only this call can close the step
        outputs = *device.as_tensors(d), _nothing(x) if plan is not None else device.plan_ticket(d.plan)
    if closed:
        steps.release(d)
    return outputs


def _combine(
    spec: str, expert_out: torch.Tensor, row_weights: torch.Tensor, ticket: torch.Tensor, plan: torch.Tensor, tokens: int,
    weights: Optional, weighted: bool, tail: Optional, onto: Optional,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    steps = _steps(spec)
    d = steps.device.of_ticket(steps, ticket, plan, tokens)
    out = None if onto is None else onto.clone(memory_format=torch.contiguous_format)
    result = steps.combine(_core.BOTH, (expert_out, d, weights, weighted, tail, out, out is not None))
    assert not isinstance(result, Combining)
    return result if isinstance(result, tuple) else (result, _nothing(expert_out, torch.float32))


def _release(spec: str, ticket: torch.Tensor, plan: torch.Tensor, tokens: int) -> None:
    steps = _steps(spec)
    steps.release(steps.device.of_ticket(steps, ticket, plan, tokens))


# ---- what a compiler is told -------------------------------------------------------------------------------------------------


def _dispatch_shapes(
    spec: str, x: torch.Tensor, topk_ids: Optional, topk_weights: Optional, x_scale: Optional, plan: Optional,
    zeroed: bool, closed: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    s = Spec.of(spec)

    def tensor(dtype: str, shape: list[int]) -> torch.Tensor:
        return torch.empty(shape, dtype=_dtype(dtype), device=x.device)

    scale = _nothing(x, torch.float32)
    if s.scale is not None:
        dtype, shape, strides = s.scale
        scale = torch.empty_strided(shape, strides, dtype=_dtype(dtype), device=x.device)
    plan_dtype, elements = s.plan
    return (
        tensor(s.x_dtype, s.x_shape), scale, tensor("float32", s.weights_shape), tensor("float32", [s.ticket_words]),
        tensor(plan_dtype, [elements]) if plan is None else _nothing(x),
    )  # fmt: skip


def _combine_shapes(
    spec: str, expert_out: torch.Tensor, row_weights: torch.Tensor, ticket: torch.Tensor, plan: torch.Tensor, tokens: Any,
    weights: Optional, weighted: bool, tail: Optional, onto: Optional,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    s = Spec.of(spec)
    y = torch.empty((tokens, s.hidden), dtype=_dtype(s.dtype), device=expert_out.device)
    back = (0,) if tail is None else (tokens, s.top_k)
    return y, torch.empty(back, dtype=torch.float32, device=expert_out.device)


def _release_shapes(spec: str, ticket: torch.Tensor, plan: torch.Tensor, tokens: Any) -> None:
    pass


def _traced(shapes: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(shapes)
    def traced(*args: Any, **kwargs: Any) -> Any:
        keep_order()
        return shapes(*args, **kwargs)

    return traced


# ---- backward ----------------------------------------------------------------------------------------------------------------


def _keep_of_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.spec, x, _, _, _, plan, _, _ = inputs
    ctx.tokens = x.shape[0]
    ctx.save_for_backward(output[4] if plan is None else plan)
    ctx.set_materialize_grads(False)


def _dispatch_backward(ctx: Any, rows: Optional, _: Any, weights: Optional, ticket: Optional, __: Any) -> tuple[Any, ...]:
    """A combine, on the step that combine's backward has opened."""
    (plan,) = ctx.saved_tensors
    s, ops = Spec.of(ctx.spec), torch.ops.pplx_comm
    dtype, device = _dtype(s.dtype), plan.device
    if ticket is None:  # the dispatched rows were used, but not combined
        nothing = torch.zeros((ctx.tokens, s.hidden), dtype=dtype, device=device)
        _, _, _, ticket, _ = ops.dispatch(ctx.spec, nothing, None, None, None, plan, False, False)
    if rows is None:
        rows = torch.zeros(s.x_shape, dtype=dtype, device=device)
    tail = None
    if ctx.needs_input_grad[3]:
        tail = torch.zeros(s.weights_shape, dtype=torch.float32, device=device) if weights is None else weights
    unweighted = _nothing(plan, torch.float32)
    dx, dw = ops.combine(ctx.spec, rows.contiguous(), unweighted, ticket, plan, ctx.tokens, None, False, tail, None)
    return None, dx if ctx.needs_input_grad[1] else None, None, None if tail is None else dw, None, None, None, None


def _keep_of_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.spec, expert_out, row_weights, _, plan, _, weights, ctx.weighted, _, _ = inputs
    ctx.save_for_backward(expert_out, row_weights, plan, weights)
    ctx.y_shape = output[0].shape
    ctx.set_materialize_grads(False)


def _combine_backward(ctx: Any, dy: Optional, d_back: Optional) -> tuple[Any, ...]:
    """Dispatches the gradients to where the tokens went. It closes its step itself if there is no gradient of x.

    A tail's gradients travel as weights do. Only the combine of dispatch's backward has them, and that one has no weights.
    """
    expert_out, row_weights, plan, weights = ctx.saved_tensors
    s = Spec.of(ctx.spec)
    wants_weights, wants_ticket = ctx.needs_input_grad[2], ctx.needs_input_grad[3]
    wants_tail = ctx.needs_input_grad[8] and d_back is not None
    if dy is None:
        dy = torch.zeros(ctx.y_shape, dtype=_dtype(s.dtype), device=plan.device)
    rows, _, late_weights, ticket, _ = torch.ops.pplx_comm.dispatch(
        ctx.spec, dy.contiguous(), None, d_back if wants_tail else weights, None, plan, True, not wants_ticket
    )
    rows = rows[: expert_out.shape[0]]  # the caller may leave out unused rows at the end
    d_out, d_weights = rows, None
    if ctx.weighted:
        used = row_weights if weights is None else late_weights
        d_out = (rows.float() * used[: rows.shape[0], ..., None]).to(rows.dtype)
        if wants_weights:
            d_weights = torch.zeros_like(row_weights)
            d_weights[: rows.shape[0]] = (rows.float() * expert_out.float()).sum(-1)
    d_tail = late_weights if wants_tail else None
    return None, d_out, d_weights, ticket if wants_ticket else None, None, None, None, None, d_tail, None


for _name, _run, _shapes in (
    ("dispatch", _dispatch, _dispatch_shapes),
    ("combine", _combine, _combine_shapes),
    ("release", _release, _release_shapes),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _run, _key)
    torch.library.register_fake(f"pplx_comm::{_name}", _traced(_shapes), lib=_library)
    _register_effectful_op(getattr(torch.ops.pplx_comm, _name).default, _EffectType.ORDERED)
torch.library.register_autograd("pplx_comm::dispatch", _dispatch_backward, setup_context=_keep_of_dispatch, lib=_library)
torch.library.register_autograd("pplx_comm::combine", _combine_backward, setup_context=_keep_of_combine, lib=_library)
