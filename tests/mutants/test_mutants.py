"""Every planted bug still has its place in the sources. Planting them is for `make mutants` and, on GPUs, tests/mutants/run_cuda.py."""

from __future__ import annotations

import mutants
import run
import run_cuda
import run_emulation


def test_they_apply() -> None:
    assert run.check_list(mutants.MUTANTS, run.ROOT) == []
    assert run.check_list(run_cuda.MUTANTS, run.ROOT) == []
    assert run.check_list(run_emulation.MUTANTS, run.ROOT) == []
