"""Fixtures of the tests with real engines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import HERE, PYTHON, ROOT, SGLANG_PYTHON, TRAINING_PYTHON, Engines, Nest, engines, environment

PYTHONS = {"test_sglang.py": SGLANG_PYTHON, "test_training.py": TRAINING_PYTHON, "test_loops.py": TRAINING_PYTHON}
"""Environment of a test file. Others: vLLM's."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = Path(item.path)
        if path.parent != HERE or path.name == "test_kernels_gpu.py":
            continue
        if PYTHONS.get(path.name, PYTHON) is None:
            item.add_marker(pytest.mark.skip(reason="`make check-serving` makes the environment that these need"))


@pytest.fixture(scope="session")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution's metadata as a wheel would have it: its entry points are how vLLM finds the plug-in."""
    folder = tmp_path_factory.mktemp("metadata")
    code = f"import scikit_build_core.build as build; build.prepare_metadata_for_build_wheel({os.fspath(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    assert PYTHON is not None
    folder = tmp_path_factory.mktemp("models")
    for kind in ("qwen3_moe", "mixtral"):
        subprocess.run([PYTHON, HERE / "models.py", folder / kind, kind], check=True)
    return {kind: folder / kind for kind in ("qwen3_moe", "mixtral")}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def nest(metadata: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nest]:
    assert PYTHON is not None
    nest = Nest(PYTHON, environment(metadata, cache), tmp_path_factory.mktemp("nest") / "said")
    yield nest
    nest.close()


@pytest.fixture
def run(tmp_path: Path, metadata: Path, cache: Path, nest: Nest) -> Iterator[Engines]:
    with engines(tmp_path, metadata, cache, nest=nest) as started:
        yield started


@pytest.fixture
def run_afresh(tmp_path: Path, metadata: Path, cache: Path) -> Iterator[Engines]:
    """Each process has imported nothing yet."""
    with engines(tmp_path, metadata, cache) as started:
        yield started


@pytest.fixture(scope="session")
def alone(
    models: dict[str, Path], metadata: Path, cache: Path, nest: Nest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[int, list[int]]]:
    """Output of one process for each model."""
    with engines(tmp_path_factory.mktemp("alone"), metadata, cache, nest=nest) as started:
        both = {kind: started.ranks(1, model)[0] for kind, model in models.items()}
        made = {}
        for kind, process in both.items():
            assert process.ended() == 0, process.text[-6000:]
            made[kind] = {int(number): tokens for number, tokens in process.said("TOKENS").items()}
        return made
