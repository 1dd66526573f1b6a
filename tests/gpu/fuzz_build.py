"""The fuzz build of the kernels, which test_fuzz.py and test_nvshmem.py share."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from run_cuda import build_modules, nvcc

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def fuzz_module(name: str) -> str:
    """Path of "_cuda" or "_nvshmem" with PPLX_CUDA_FUZZ, for this GPU. Builds all that the checkout has; of several test runs the first
    builds and the others wait. PPLX_TEST_CUDA and PPLX_TEST_NVSHMEM name modules that are built already."""
    if given := os.environ.get(f"PPLX_TEST{name.upper()}"):
        return given
    if nvcc() is None or shutil.which("cmake") is None:
        pytest.skip("no nvcc or cmake to make a fuzz build with")
    folder = ROOT / "build" / "gpu-fuzz"
    folder.mkdir(parents=True, exist_ok=True)
    targets = [target for target in ("_cuda", "_nvshmem") if importlib.util.find_spec(f"pplx_comm.{target}")]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            build_modules(ROOT, folder, *targets, jobs=(os.cpu_count() or 2) // 2)
        except subprocess.CalledProcessError as problem:
            pytest.fail(problem.output[-4000:])
    (module,) = folder.glob(f"{name}*.so")
    return str(module)
