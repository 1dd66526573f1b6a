"""An AllToAll on a GPU that takes and returns CPU tensors, so that the runner and the reference of the CPU device judge it."""

from __future__ import annotations

from typing import Any

import torch

import pplx_comm as pc

_TENSORS = ("x", "scale", "counts", "offsets", "weights", "src_rank", "src_token", "topk_ids", "topk_weights", "num_rows")


def moved(tensor: torch.Tensor | None, device: torch.device | str) -> torch.Tensor | None:
    """With the same strides: what lies between rows must not travel."""
    if tensor is None:
        return None
    if tensor.dtype == torch.float8_e8m0fnu:  # bytes, since not all devices copy e8m0
        there = moved(tensor.view(torch.uint8), device)
        assert there is not None
        return there.view(tensor.dtype)
    there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return there.copy_(tensor)


class CarriedDispatched:
    def __init__(self, owner: Carried, inner: pc.Dispatched) -> None:
        self.owner, self.inner = owner, inner
        self.plan = inner.plan
        self._there: dict[str, torch.Tensor | None] = {}

    def __getattr__(self, name: str) -> Any:
        if name in self._there:
            return self._there[name]
        value = getattr(self.inner, name)
        if name not in _TENSORS:
            return value
        there = moved(value, "cpu")
        if value is None or not value.requires_grad:  # the runner looks at each many times
            self._there[name] = there
        return there

    def wait(self) -> CarriedDispatched:
        self.inner.wait()
        self._there.clear()
        self.owner.ended()
        return self

    def release(self) -> None:
        self.inner.release()
        self.owner.ended()


class CarriedCombining:
    def __init__(self, owner: Carried, inner: pc.Combining, out: torch.Tensor | None) -> None:
        self.owner, self.inner, self.out = owner, inner, out

    def wait(self) -> Any:
        result = self.inner.wait()
        self.owner.ended()  # before a copy, during which the AllToAll could not tell where it stands
        return self.owner.back(result, self.out)


class Carried:
    """An AllToAll on a GPU that takes and returns CPU tensors. `checked`: each call waits for what it launched, and raises what
    went wrong with it, as the calls of the CPU device do."""

    def __init__(self, inner: pc.AllToAll, checked: bool = False) -> None:
        self.inner, self.checked = inner, checked
        self.device = inner.device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> Carried:
        return self

    def __exit__(self, *_: object) -> None:
        self.inner.close()

    def ended(self) -> None:
        if self.checked:
            torch.cuda.synchronize()
            self.inner.check()

    def back(self, result: Any, out: torch.Tensor | None) -> Any:
        y, *tail = result if isinstance(result, tuple) else (result,)
        y = moved(y, "cpu")
        if out is not None:
            out.copy_(y)
            y = out
        return (y, moved(tail[0], "cpu")) if tail else y

    def _dispatch(
        self, call: Any, x: Any, ids: Any = None, weights: Any = None, x_scale: Any = None, **options: Any
    ) -> CarriedDispatched:
        there = [moved(t, self.device) for t in (x, ids, weights, x_scale)]
        d = CarriedDispatched(self, call(there[0], there[1], there[2], x_scale=there[3], **options))
        self.ended()
        return d

    def dispatch(self, *args: Any, **options: Any) -> CarriedDispatched:
        return self._dispatch(self.inner.dispatch, *args, **options)

    def dispatch_send(self, *args: Any, **options: Any) -> CarriedDispatched:
        return self._dispatch(self.inner.dispatch_send, *args, **options)

    def open_for_combine(self, ids: torch.Tensor) -> CarriedDispatched:
        d = CarriedDispatched(self, self.inner.open_for_combine(ids.to(self.device)))
        self.ended()
        return d

    def dispatch_recv(self, d: CarriedDispatched) -> CarriedDispatched:
        return d.wait()

    def _combine(
        self,
        call: Any,
        expert_out: Any,
        d: CarriedDispatched,
        weights: Any = None,
        tail: Any = None,
        out: Any = None,
        **options: Any,
    ) -> Any:
        there = [moved(t, self.device) for t in (expert_out, weights, tail, out)]
        result = call(there[0], d.inner, weights=there[1], tail=there[2], out=there[3], **options)
        self.ended()  # as in CarriedCombining.wait
        return CarriedCombining(self, result, out) if isinstance(result, pc.Combining) else self.back(result, out)

    def combine(self, *args: Any, **options: Any) -> Any:
        return self._combine(self.inner.combine, *args, **options)

    def combine_send(self, *args: Any, **options: Any) -> CarriedCombining:
        c = self._combine(self.inner.combine_send, *args, **options)
        assert isinstance(c, CarriedCombining)
        return c

    def combine_recv(self, c: CarriedCombining) -> Any:
        return c.wait()
