"""The host path of device="cuda" up to a launch needs no GPU."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks

from pplx_comm.device.cuda import Cuda
from pplx_comm.gpus import built

try:
    built()
except Exception as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_launches_and_refusals(layout: str) -> None:
    run_ranks(1, "host_cases:launches", layout)


@pytest.mark.parametrize(
    ("width", "between", "as_they_are"), [(48, 0, True), (48, 16, True), (48, 1, False), (40, 0, False), (40, 8, False)]
)
@pytest.mark.parametrize("rows", [1, 2])
def test_rows_are_read_by_whole_vectors(rows: int, width: int, between: int, as_they_are: bool) -> None:
    """So a row that ends within one is copied to where there is room behind it. One row alone has no stride."""
    given = torch.arange(rows * (width + between), dtype=torch.uint8).view(rows, -1)[:, :width]
    found, stride = Cuda._rows_of(given)
    assert (found is given) == (as_they_are or (width, rows) == (48, 1))
    assert torch.equal(found[:, :width], given) and stride % 16 == 0 and found.data_ptr() % 16 == 0
    assert found.untyped_storage().nbytes() >= (rows - 1) * stride + 48
