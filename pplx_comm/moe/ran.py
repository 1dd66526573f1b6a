"""Records how a pass ran, for reports and benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Ran:
    """One pass and its choices: complete when its backward pass has ended."""

    layout: str
    """Layout of its rows: "ragged" or "padded"."""
    products: dict[str, str] = field(default_factory=dict)
    """The backend of each product, by what it does and by the weights, k x n: {"forward 7168x4096": "triton", ...}."""

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """While this lasts, products of this thread are noted."""
        token = _noted.set(self.products)
        try:
            yield
        finally:
            _noted.reset(token)


_noted: ContextVar[dict[str, str] | None] = ContextVar("noted", default=None)


def note(product: str, weights: tuple[int, ...], backend: str) -> None:
    """weights: [experts, n, k]."""
    products = _noted.get()
    if products is not None:
        products[f"{product} {weights[2]}x{weights[1]}"] = backend
