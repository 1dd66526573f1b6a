"""Fixtures that several files of this folder share, and which of their tests are slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Crews

FOLDER = Path(__file__).parent


def pytest_itemcollected(item: pytest.Item) -> None:
    """The variant of a test over shm is slow: `make test` runs the one over tcp, `make check` both."""
    variant = getattr(item, "callspec", None)
    if item.path.parent == FOLDER and variant is not None and str(variant.params.get("transport")).endswith(":shm"):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crews]:
    """Three ranks. A file that wants another number has a fixture of its own."""
    with Crews(3) as crews:
        yield crews
