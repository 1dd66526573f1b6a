"""Forward and backward of two microbatches interleaved (1F1B), so that one's rows travel while the other's experts compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from pplx_comm.errors import Error
from pplx_comm.moe.layer import Begun

Part = Callable[[Any], Any]
"""From what the part before returned: a tensor, what MoE.begin() and compute() return, or tuples, lists and dicts of such."""


class Microbatch:
    """One microbatch on its way through the parts of a model, forward and then backward, a part at a time.

    The graph is cut between parts, so a part's backward pass runs by itself, and frees what the part kept.
    """

    def __init__(self, parts: Sequence[Part], x: Any) -> None:
        self._left = list(reversed(parts))
        self._value = x
        self._passed: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """Each part that went forward: its inputs, detached, and its outputs."""
        self._behind: list[torch.Tensor] | None = None
        """Inputs of the part behind, which have their gradients. None: no part is behind, and this one returned the loss."""

    def forward_part(self) -> bool:
        """Runs the next part forward. Whether there was one."""
        if not self._left:
            return False
        given: list[torch.Tensor] = []
        value = _cut(self._value, given)
        self._value = self._left.pop()(value)
        returned: list[torch.Tensor] = []
        _cut(self._value, returned, leaves=False)
        self._passed.append((given, returned))
        return True

    def loss(self) -> torch.Tensor:
        """The last part's output, without its graph."""
        if self._left or not isinstance(self._value, torch.Tensor) or self._value.numel() != 1:
            raise Error("Microbatch: the last part must return the loss, one number")
        return self._value.detach()

    def backward_part(self) -> bool:
        """Runs the last part that is left backward. Whether there was one."""
        if not self._passed:
            return False
        given, returned = self._passed.pop()
        gradients = [torch.ones_like(returned[0])] if self._behind is None else [leaf.grad for leaf in self._behind]
        self._behind = given
        pairs = [(t, g) for t, g in zip(returned, gradients, strict=True) if g is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        return True


def one_forward_one_backward(parts: Sequence[Part], inputs: Iterable[Any]) -> list[torch.Tensor]:
    """Takes microbatches through the parts of a model, forward and backward. Returns their losses; gradients are added up in order.

    While a microbatch goes backward the next one goes forward, a part of one after a part of the other. Where parts end behind
    MoE.begin() and MoE.compute(), a layer's steps of one travel while the other computes. AllToAlls need in_flight=2, and 4 with
    recompute="dispatch", which takes a step more. Every rank must have the same number of microbatches.

    parts: of the model, from its input to the loss. inputs: what the first part takes, by microbatch.
    """
    losses, last = [], None
    for x in inputs:
        batch = Microbatch(parts, x)
        forward = backward = True
        while forward or backward:
            forward = batch.forward_part()
            backward = last is not None and last.backward_part()
        losses.append(batch.loss())
        last = batch
    while last is not None and last.backward_part():
        pass
    return losses


def _cut(value: Any, found: list[torch.Tensor], leaves: bool = True) -> Any:
    """Finds the tensors that need gradients, in order, and puts leaves of a graph of their own in their place."""
    if isinstance(value, torch.Tensor):
        if not value.requires_grad:
            return value
        found.append(value.detach().requires_grad_() if leaves else value)
        return found[-1]
    if isinstance(value, Begun):
        return replace(value, ticket=_cut(value.ticket, found, leaves), shared=_cut(value.shared, found, leaves))
    if isinstance(value, (tuple, list)):
        each = [_cut(one, found, leaves) for one in value]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    if isinstance(value, dict):
        return {name: _cut(one, found, leaves) for name, one in value.items()}
    return value
