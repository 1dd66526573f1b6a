"""Fixtures and hooks that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import drawn
import pytest
import torch

import pplx_comm as pc

# Other tests run beside this one: threads of torch would wait for cores more than they compute. Ranks do the same.
torch.set_num_threads(1)

DRAWN = int(os.environ.get("PPLX_TEST_DRAWN", "1"))
"""One in that many slow tests, and variants of other tests, is run, others at each commit. `make check` says 8."""
VARIED = {"ranks": 1, "efa": 1, "emulation": 4}
"""Folders whose variants are drawn, and how many times fewer of each are in any case, unless PPLX_TEST_VOLUME is at least 1."""


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if float(os.environ.get("PPLX_TEST_VOLUME", "0")) >= 1:
        return
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent.name in VARIED or is_slow(item):
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set[pytest.Item]()
    for of_test in variants.values():
        of_folder = VARIED.get(of_test[0].path.parent.name, 1)
        runs = [item for item in of_test if drawn.is_drawn(item.nodeid, DRAWN * of_folder)]
        quick = [item for item in of_test if DRAWN == 1 or not is_slow(item)]
        if not runs and quick and (DRAWN == 1 or of_folder == 1):
            runs = [min(quick, key=lambda item: drawn.number(item.nodeid))]
        left_out.update(item for item in of_test if item not in runs)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module")
def comm() -> Iterator[pc.Communicator]:
    """A world of one rank, whatever launcher the tests were started by."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
            patch.delenv(name, raising=False)
        comm = pc.Communicator.from_env()
    with comm:
        yield comm
