"""Ranks that the tests of a file share."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulation_cases import PARTS, VOLUME
from harness import Crews

FOLDER = Path(__file__).parent
WHOLE = "test_emulation.py"
"""All other files run one variant in four of each test, unless PPLX_TEST_VOLUME is at least 1."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if VOLUME >= 1:
        return
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent == FOLDER and item.path.name != WHOLE:
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set[pytest.Item]()
    for name, of_test in variants.items():
        first = zlib.crc32(name.encode()) % min(4, len(of_test))  # the first variant of some tests, the second of others
        left_out.update(item for number, item in enumerate(of_test) if number % 4 != first)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    crews = Crews(request.param, PARTS)
    yield crews
    crews.close()
