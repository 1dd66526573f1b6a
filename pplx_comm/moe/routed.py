"""Tokens to their experts and back, with gradients: dispatch, two grouped products, combine; and the same backwards.

The backward pass is a step on the plan of the forward one. It dispatches the gradients, so that a quantised wire carries tokens
forward and gradients back, and combine brings the tokens' gradients home in their own dtype, and behind them those of
the router's weights.

A pass has three parts, so that what needs no other rank, or what belongs to another pass, runs while rows travel. Each part begins
with the receive half of an exchange and ends with the send half of the next one, and backwards just so:

              forward                                       backward
    send      dispatch, send                                combine, receive
    compute   dispatch, receive; experts; combine, send     dispatch, receive; experts; combine, send; gradients of the weights
    finish    combine, receive                              dispatch, send

Where nothing runs between two parts, their halves are one call, which is faster: `whole=True`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pplx_comm.all_to_all import AllToAll
from pplx_comm.errors import Error
from pplx_comm.handles import Combined, Combining, Dispatched, Plan
from pplx_comm.layouts import Compact, Padded
from pplx_comm.moe.arithmetic import Arithmetic, Precise, Quantised, Rows, WeightCodes
from pplx_comm.moe.grouped import products
from pplx_comm.moe.grouped.backend import Codes
from pplx_comm.moe.grouped.choose import backends, named, scaled_backends
from pplx_comm.moe.ran import Ran
from pplx_comm.moe.received import received
from pplx_comm.moe.segments import Segments
from pplx_comm.moe.stranded import telling
from pplx_comm.moe.swiglu import swiglu_backward

RECOMPUTE = ("nothing", "activations", "dispatch")


@dataclass(frozen=True)
class Options:
    """How the routed part of a layer computes.

    quantised: the products of rows with weights take e4m3 codes, otherwise the dtype of the AllToAll. The weights' gradients take
        that dtype always.
    backend, scaled_backend: of the grouped products, and of those of codes. "auto" measures, a name insists.
    recompute: what the backward pass computes again in place of keeping it: "nothing"; "activations", the rows between the two
        products; "dispatch", the received rows too, by a further dispatch on the saved plan.
    """

    quantised: bool = False
    backend: str = "auto"
    scaled_backend: str = "auto"
    recompute: str = "nothing"

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise Error(f"recompute={self.recompute!r}: must be one of {', '.join(map(repr, RECOMPUTE))}")
        if self.backend != "auto":
            named(backends(), self.backend)
        if self.scaled_backend != "auto":
            named(scaled_backends(), self.scaled_backend)


@dataclass
class Extras:
    """Optional inputs of a pass besides weights.

    main_gate_up, main_down: like the weights, of any dtype: the weights' gradients are added there, and the weights get none.
    subnormal: int64 []: codes that became subnormal when MXFP8 was rescaled are added.
    codes: the codes of both weights, if known already: weights that do not change.
    """

    main_gate_up: torch.Tensor | None = None
    main_down: torch.Tensor | None = None
    subnormal: torch.Tensor | None = None
    codes: tuple[Codes, Codes] | None = None


class Pass:
    """One pass of tokens through the experts, between its parts."""

    plan: Plan
    ticket: torch.Tensor
    """Ties the parts together for autograd, until the last of them. It holds nothing."""

    def __init__(self, a2a: AllToAll, x: torch.Tensor) -> None:
        self.a2a = a2a
        self.options = Options()
        self.combines_whole = False
        """True if compute() is followed by finish(), and backwards finish() by compute()."""
        self.keeps = True
        """True if there may be a backward pass, which needs the rows between the products."""
        self.x: torch.Tensor | None = x
        self.ran = Ran("padded" if isinstance(a2a.layout, Padded) else "ragged")
        self.tokens = len(x)
        """See received.expected_rows()."""
        self.sent: Dispatched | None = None
        """On its way to the experts: of this rank's tokens, and backwards of their gradients."""
        self.rows: Rows | None = None
        """Backwards, the received rows, where they were dispatched again."""
        self.returning: Combining | Combined | None = None
        """On its way home, or there: the experts' outputs, and backwards the tokens' gradients."""


def send(
    a2a: AllToAll,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    options: Options | None = None,
    *,
    whole: bool = False,
    most_tokens: int | None = None,
) -> Pass:
    """Begins a pass: the send half of dispatch. Every rank calls it. whole: the receive half too, where compute() follows.

    a2a: of layout Ragged, for gradients with zero_pad=True; without gradients also of layout Padded, for few tokens.
    x: [tokens, hidden]. ids, weights: [tokens, top_k].
    options: those of compute(), where it is given none.
    most_tokens: of any rank in this call, where that is known. Tiles and backends of products follow from it, or from this rank's
        tokens: never from what there is room for.
    """
    if isinstance(a2a.layout, Compact):
        raise Error("send: layout must be Ragged or Padded, not Compact")
    if isinstance(a2a.layout, Padded) and torch.is_grad_enabled():
        raise Error("send: rows in Padded layout have no gradients: call it under torch.no_grad()")
    one = Pass(a2a, x.detach())
    one.options = options or one.options
    one.tokens = one.tokens if most_tokens is None else most_tokens
    one.ticket = _Send.apply(x, weights, ids, one, whole)
    return one


def compute(
    one: Pass,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    options: Options | None = None,
    extras: Extras | None = None,
    *,
    whole: bool = False,
) -> None:
    """The middle of a pass: the experts, and the send half of combine. whole: the receive half too, where finish() follows.

    gate_up: [local experts, 2 * intermediate, hidden], gates before ups. down: [local experts, hidden, intermediate].
    """
    options = options or one.options
    one.options, one.combines_whole = options, whole
    one.keeps = torch.is_grad_enabled()
    one.ticket = _Compute.apply(one.ticket, gate_up, down, one, extras or Extras(), one.ticket.grad_fn)


def finish(one: Pass) -> torch.Tensor:
    """Ends a pass: [tokens, hidden], the experts' outputs, weighted and added."""
    y: torch.Tensor = _Finish.apply(one.ticket, one)
    # Its graph holds the pass. One that held its graph, too, would never be freed, nor what was saved in it.
    del one.ticket
    return y


def receive(
    one: Pass, gate_up: torch.Tensor, down: torch.Tensor, options: Options | None = None, extras: Extras | None = None
) -> torch.Tensor:
    """compute() and finish()."""
    compute(one, gate_up, down, options, extras, whole=True)
    return finish(one)


def _home(returning: Combining | Combined | None) -> Combined:
    if returning is None:
        raise Error("finish: this pass was not computed, or has ended already")
    return returning.wait() if isinstance(returning, Combining) else returning


def _ticket(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device=device)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, one: Pass, whole: bool) -> torch.Tensor:
        one.sent = (one.a2a.dispatch if whole else one.a2a.dispatch_send)(x, ids, weights)
        one.plan = one.sent.plan
        ctx.one = one
        return _ticket(x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        returning, ctx.one.returning = ctx.one.returning, None
        dx, dw = _home(returning)
        return dx, dw, None, None, None


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ticket: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, one: Pass, extras: Extras, sender: Any
    ) -> torch.Tensor:
        """sender: the node of _Send, which a backward pass may leave out."""
        sent, one.sent = one.sent, None
        if sent is None:
            raise Error("compute: this pass was computed already")
        with one.ran.noted(), telling(sent, "compute"):
            rows, h = _computed(one, sent, gate_up, down, extras)
        ctx.one, ctx.extras, ctx.sender, ctx.expected = one, extras, sender, rows.where.expected
        ctx.save_for_backward(gate_up, down, rows.where.where, *_kept(rows, h, one.options.recompute))
        return _ticket(ticket.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        with ctx.one.ran.noted(), telling(ctx.one.sent, "backward of compute"):
            d_up, d_down = _computed_backwards(ctx)
        return _ticket(ctx.one.a2a.device), d_up, d_down, None, None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, one: Pass) -> torch.Tensor:
        returning, one.returning = one.returning, None
        y = _home(returning)
        ctx.one = one
        # Also where x is not needed: taking out what was saved is when a checkpoint runs the forward pass again, and that must be
        # over before the first step of the backward pass begins.
        ctx.save_for_backward(ticket, one.x if one.options.recompute == "dispatch" else None)
        one.x = None
        assert isinstance(y, torch.Tensor)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        one, a2a = ctx.one, ctx.one.a2a
        _, x = ctx.saved_tensors
        if x is not None:
            one.rows = _dispatched_again(one, x)
        one.sent = (a2a.dispatch if one.combines_whole else a2a.dispatch_send)(dy.contiguous(), plan=one.plan)
        return _ticket(dy.device), None


def _computed(
    one: Pass, sent: Dispatched, gate_up: torch.Tensor, down: torch.Tensor, extras: Extras
) -> tuple[Rows, torch.Tensor | None]:
    """Received rows, and what the first product made of them, for a pass that keeps it. Combine is in flight, or was."""
    a2a = one.a2a
    d = a2a.dispatch_recv(sent)
    rows = received(a2a, d, one.tokens)
    arithmetic = _arithmetic(one, gate_up, down, rows.where, extras)
    h = arithmetic.up(rows) if one.keeps else None
    out = arithmetic.through(rows) if h is None else arithmetic.down(h)
    combine = a2a.combine if one.combines_whole else a2a.combine_send
    one.returning = combine(out.view_as(d.x) if rows.where.room else out, d)
    return rows, h


def _computed_backwards(ctx: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of both weights. Those of the tokens are in flight, if they are wanted."""
    one, extras, a2a = ctx.one, ctx.extras, ctx.one.a2a
    gate_up, down, offsets, x, scale, h = ctx.saved_tensors
    again, one.rows = one.rows, None
    rows = Rows(x, scale, Segments(offsets, expected=ctx.expected)) if again is None else again
    where = rows.where
    arithmetic = _arithmetic(one, gate_up, down, where, extras)
    if h is None:
        h = arithmetic.up(rows)
    g, one.sent = a2a.dispatch_recv(one.sent), None
    came = received(a2a, g, one.tokens)
    assert g.weights is not None
    dh, weighted, d_weights = swiglu_backward(h, arithmetic.back_through_down(came), g.weights[: len(h)], where)
    if ctx.needs_input_grad[0] and (ctx.sender is None or torch._C._will_engine_execute_node(ctx.sender)):
        # The weights' gradients need no other rank, and follow while this is in flight.
        one.returning = a2a.combine_send(arithmetic.back_through_up(dh), g, weighted=False, tail=d_weights)
    else:
        g.release()
    d_up = d_down = None
    if ctx.needs_input_grad[1]:
        d_up = _weight_gradient(dh, rows.values(a2a.dtype), where, gate_up, extras.main_gate_up, one.options.backend)
    if ctx.needs_input_grad[2]:
        d_down = _weight_gradient(came.values(a2a.dtype), weighted, where, down, extras.main_down, one.options.backend)
    return d_up, d_down


def _dispatched_again(one: Pass, x: torch.Tensor) -> Rows:
    d = one.a2a.dispatch(x, plan=one.plan)
    d.release()
    return received(one.a2a, d, one.tokens)


def _kept(rows: Rows, h: torch.Tensor | None, recompute: str) -> tuple[torch.Tensor | None, ...]:
    if recompute == "dispatch":
        return None, None, None
    return rows.x, rows.scale, h if recompute == "nothing" else None


def _arithmetic(one: Pass, gate_up: torch.Tensor, down: torch.Tensor, where: Segments, extras: Extras) -> Arithmetic:
    options, dtype = one.options, one.a2a.dtype
    if not options.quantised:
        return Precise(gate_up, down, where, dtype, options.backend)
    codes = WeightCodes(gate_up, down) if extras.codes is None else WeightCodes.known(*extras.codes)
    return Quantised(codes, where, dtype, options.scaled_backend, extras.subnormal)


def _weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, where: Segments, weight: torch.Tensor, main: torch.Tensor | None, backend: str
) -> torch.Tensor | None:
    if main is None:
        return products.wgrad(dy, x, where, torch.empty_like(weight), False, backend)
    products.wgrad(dy, x, where, main, True, backend)
    return None
