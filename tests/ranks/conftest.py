"""Fixtures that several files of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Crews


@pytest.fixture(scope="module")
def crew() -> Iterator[Crews]:
    """Three ranks. A file that wants another number has a fixture of its own."""
    crews = Crews(3)
    yield crews
    crews.close()
