"""Where the tests are, and what their processes inherit."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
ROOT = TESTS.parent
FOLDERS = [str(TESTS / name) for name in ("", "ranks", "gpu", "emulation", "mutants", "unit", "efa")]
"""Folders that pyproject.toml puts on pytest's path."""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "PMI", "MPI_", "OMPI_", "SLURM_", "TORCHELASTIC_", "PPLX_")


def seed() -> int:
    """PPLX_SEED, so that a failure can be run again; else always the same."""
    value = int(os.environ.get("PPLX_SEED", "1"), 0)
    print(f"seed {value} (again with PPLX_SEED={value})")
    return value


def clean_environment() -> dict[str, str]:
    """This process's, without what any launcher may have put there. What is for the tests themselves stays."""
    environment = {
        name: value for name, value in os.environ.items() if name.startswith("PPLX_TEST_") or not name.startswith(LAUNCHERS)
    }
    environment["PYTHONPATH"] = os.pathsep.join([*FOLDERS, str(ROOT), environment.get("PYTHONPATH", "")])
    return environment


def control_plane_only() -> None:
    """pplx_comm/__init__.py imports torch, which costs every process seconds. The control plane needs none of it."""
    package = types.ModuleType("pplx_comm")
    package.__path__ = [str(ROOT / "pplx_comm")]
    sys.modules["pplx_comm"] = package
