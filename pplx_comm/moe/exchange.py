"""Brings tokens to the rows of experts that the caller computes, and the experts' outputs back to tokens, with gradients.

What pplx_comm.compat puts under other libraries' layers. It is routed.py with a hole in the middle, and steps go the same way:

                    forward               backward
    send            dispatch, send        combine, receive
    receive         dispatch, receive     combine, send
    send_back       combine, send         dispatch, receive
    receive_back    combine, receive      dispatch, send

A quantised wire carries tokens forward and gradients back. Rows are numbers either way. dispatch() and combine() are two parts
each, with nothing between them: one call of the AllToAll.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pplx_comm.all_to_all import AllToAll
from pplx_comm.errors import Error
from pplx_comm.handles import Combined, Combining, Dispatched, Plan
from pplx_comm.layouts import Ragged
from pplx_comm.moe.received import received
from pplx_comm.moe.segments import Segments


class Exchange:
    """One pass of tokens to experts and back. Its parts are called in order, once each, by every rank."""

    where: Segments
    """After receive(): where each expert's rows are."""
    plan: Plan

    def __init__(self, a2a: AllToAll, *, weighted: bool, together: bool = True) -> None:
        """a2a: of layout Ragged, with zero_pad=True where experts' weights need gradients.

        weighted: whether combine applies the router's weights; otherwise experts apply them, or they are not applied.
        together: one backward pass goes through all parts, or leaves out receive()'s. Otherwise each part has a pass of its own, as
            schedules have it that put other work between them, and none is left out.
        """
        if not isinstance(a2a.layout, Ragged):
            raise Error(f"Exchange: layout must be Ragged, not {a2a.layout}")
        self.a2a, self.weighted, self.together = a2a, weighted, together
        self.dispatched: Dispatched | None = None
        """The step that is open: forward that of the tokens, backward that of the gradients."""
        self.returning: Combining | Combined | None = None
        self.receiver: Any = None
        """The node of receive(), which a backward pass may leave out."""
        self.d_weights: torch.Tensor | None = None
        self.dispatches_whole = self.combines_whole = False

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """send() and receive()."""
        self.dispatches_whole = True
        return self.receive(self.send(x, ids, weights))

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        """send_back() and receive_back()."""
        self.combines_whole = True
        return self.receive_back(self.send_back(out))

    def send(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]. ids, weights: [tokens, top_k]. Returns a ticket for receive(), which holds nothing."""
        ticket: torch.Tensor = _Send.apply(x, weights, ids, self)
        return ticket

    def receive(self, ticket: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows by expert, [rows, hidden], and the router's weight of each, float32 [rows], which need not be used."""
        rows, weights = _Receive.apply(ticket, self)
        self.receiver = rows.grad_fn
        return rows, weights

    def send_back(self, out: torch.Tensor) -> torch.Tensor:
        """out: [rows, hidden], of the experts. Returns a ticket for receive_back()."""
        ticket: torch.Tensor = _SendBack.apply(out, self)
        return ticket

    def receive_back(self, ticket: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]."""
        y: torch.Tensor = _ReceiveBack.apply(ticket, self)
        return y


def _home(returning: Combining | Combined | None) -> Combined:
    assert returning is not None
    return returning.wait() if isinstance(returning, Combining) else returning


def _ticket(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device=device)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, one: Exchange) -> torch.Tensor:
        dispatch = one.a2a.dispatch if one.dispatches_whole else one.a2a.dispatch_send
        one.dispatched = dispatch(x.contiguous(), ids, weights.float().contiguous())
        one.plan = one.dispatched.plan
        ctx.one, ctx.dtype = one, weights.dtype
        return _ticket(x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        returning, ctx.one.returning = ctx.one.returning, None
        dx, dw = _home(returning)
        return dx, dw.to(ctx.dtype), None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, one: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
        assert one.dispatched is not None
        rows = received(one.a2a, one.a2a.dispatch_recv(one.dispatched))
        one.where, ctx.one = rows.where, one
        assert one.dispatched.weights is not None
        values = rows.values(one.a2a.dtype)
        return values, one.dispatched.weights[: len(values)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor, d_weights: torch.Tensor) -> tuple[Any, ...]:
        one: Exchange = ctx.one
        g, one.dispatched = one.dispatched, None
        tail, one.d_weights = one.d_weights, None
        tail = d_weights if tail is None else d_weights + tail
        assert g is not None
        combine = one.a2a.combine if one.dispatches_whole else one.a2a.combine_send
        one.returning = combine(d_rows.contiguous(), g, weighted=False, tail=tail.contiguous())
        return _ticket(d_rows.device), None


class _SendBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, one: Exchange) -> torch.Tensor:
        d, one.dispatched = one.dispatched, None
        assert d is not None
        combine = one.a2a.combine if one.combines_whole else one.a2a.combine_send
        one.returning = combine(out.contiguous(), d, weighted=one.weighted)
        ctx.one, ctx.dtype = one, out.dtype
        ctx.save_for_backward(out if one.weighted else None)
        return _ticket(out.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        one: Exchange = ctx.one
        (out,) = ctx.saved_tensors
        assert one.dispatched is not None
        g = one.a2a.dispatch_recv(one.dispatched)
        d_out = received(one.a2a, g).values(one.a2a.dtype)
        if one.weighted:
            assert g.weights is not None
            one.d_weights = (d_out.float() * out.float()).sum(-1)
            d_out = (d_out.float() * g.weights[: len(d_out), None]).to(d_out.dtype)
        if one.receiver is None or (one.together and not torch._C._will_engine_execute_node(one.receiver)):
            one.dispatched = None
            g.release()
        return d_out, None


class _ReceiveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, one: Exchange) -> torch.Tensor:
        returning, one.returning = one.returning, None
        ctx.one = one
        ctx.save_for_backward(ticket)
        y = _home(returning)
        assert isinstance(y, torch.Tensor)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        one: Exchange = ctx.one
        _ = ctx.saved_tensors  # a checkpoint runs the forward pass again now, before a step of the backward pass is open
        one.dispatched = (one.a2a.dispatch if one.combines_whole else one.a2a.dispatch_send)(dy.contiguous(), plan=one.plan)
        return _ticket(dy.device), None
