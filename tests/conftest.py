"""Fixtures and hooks that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import pplx_comm as pc

# Other tests run beside this one: threads of torch would wait for cores more than they compute. Ranks do the same.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def comm() -> Iterator[pc.Communicator]:
    """A world of one rank, whatever launcher the tests were started by."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
            patch.delenv(name, raising=False)
        comm = pc.Communicator.from_env()
    with comm:
        yield comm
