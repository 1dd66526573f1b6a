"""Which backend made the grouped products of a call: what ran, whoever chose it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pplx_comm.moe.grouped.beside import Beside
from pplx_comm.moe.grouped.choose import backends, scaled_backends

PRODUCTS = ("up", "down")


class Ran:
    """The backends of both products."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {which: set() for which in PRODUCTS}

    def note(self, which: str, name: str) -> None:
        self._names[which].add(name)

    def __str__(self) -> str:
        up, down = (" and ".join(sorted(self._names[which])) for which in PRODUCTS)
        return up if up == down else f"up {up}, down {down}"


@contextlib.contextmanager
def noted(up: torch.Size) -> Iterator[Ran]:
    """While this lasts. up: [experts, 2 * intermediate, hidden], the shape of the first product's weights.

    What is measured in order to choose would be noted too: call once before.
    """
    ran = Ran()
    before: list[tuple[Any, str, Any]] = []

    def instead(owner: Any, name: str, call: Callable[..., Any]) -> None:
        before.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, call)

    def by_shape(backend: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any, w: Any, *arguments: Any, **options: Any) -> Any:
            codes = w if isinstance(w, torch.Tensor) else w[0]
            ran.note(PRODUCTS[codes.shape[1:] != up[1:]], backend.name)
            return call(x, w, *arguments, **options)

        return run

    def of_signals(which: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            ran.note(which, "triton")
            return call(*arguments, **options)

        return run

    try:
        for backend in (*backends(), *scaled_backends()):
            for name in ("forward", "product"):
                if (call := getattr(backend, name, None)) is not None:
                    instead(backend, name, by_shape(backend, call))
        for which in PRODUCTS:
            instead(Beside, which, of_signals(which, getattr(Beside, which)))
        yield ran
    finally:
        for owner, name, call in before:
            if call is None:
                delattr(owner, name)
            else:
                setattr(owner, name, call)
