"""Ranks that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulation_cases import PARTS
from harness import Crews


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    with Crews(request.param, PARTS) as crews:
        yield crews
