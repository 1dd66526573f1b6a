"""Builds and runs the C++ tests, each a program of its own: tests/cpp/*.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "dev"
SOURCES = sorted((ROOT / "tests" / "cpp").glob("*.cpp"))


def run(*command: str | Path, timeout: float) -> str:
    """The output; a failure shows it."""
    # cmake and ninja may be the environment's own, which need not be activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
        env={**os.environ, "PATH": path},
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}", pytrace=False)
    return done.stdout


def build(target: str, *options: str) -> Path:
    """The folder of what is built for tests."""
    if not (BUILD / "CMakeCache.txt").exists():
        # Tests of an installed package; `make build` configures this tree with everything.
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        run("cmake", "-S", ROOT, "-B", BUILD, *generator, "-DPPLX_TESTS=ON", *options, timeout=120)
    run("cmake", "--build", BUILD, "--target", target, timeout=600)
    return BUILD / "tests"


@pytest.fixture(scope="session")
def programs() -> Path:
    return build("pplx_cpp_tests", "-DPPLX_PYTHON=OFF")


@pytest.mark.parametrize("name", [source.stem for source in SOURCES])
def test_cpp(programs: Path, name: str) -> None:
    print(run(programs / name, timeout=300))


def test_vector_kernels_share_nothing() -> None:
    """A function that two instruction sets share by name would be linked once: AVX-512 on all machines."""
    build("pplx_core", "-DPPLX_PYTHON=OFF")
    objects = sorted(BUILD.glob("CMakeFiles/pplx_vector_*.dir/**/*.o"))
    assert objects
    shared = [line for line in run("nm", "-AC", "--defined-only", *objects, timeout=60).splitlines() if " W " in line]
    assert not shared, "\n".join(shared)
