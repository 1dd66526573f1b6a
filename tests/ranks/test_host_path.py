"""What device="cuda" does before a launch needs no GPU."""

from __future__ import annotations

import pytest
from harness import run_ranks

from pplx_comm.gpus import built

try:
    built()
except Exception as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_launches_and_refusals(layout: str) -> None:
    run_ranks(1, "host_cases:launches", layout)
