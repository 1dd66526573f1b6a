"""What device="cuda" does before a launch needs no GPU."""

from __future__ import annotations

import pytest
from crew import run_ranks

from pplx_comm import _gpu

try:
    _gpu.built()
except Exception as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_launches_and_refusals(layout: str) -> None:
    run_ranks(1, "host_cases:launches", layout)
