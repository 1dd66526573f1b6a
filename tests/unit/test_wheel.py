"""The wheel has the product and nothing else: no benchmark, no test, no instrument."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_files(tmp_path: Path) -> None:
    """The build takes these files from the checkout; nothing is compiled for it."""
    pytest.importorskip("scikit_build_core")
    run(
        sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--config-settings=wheel.cmake=false",
        "--wheel-dir", str(tmp_path), ".",
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    # Modules that were built in place are in the folder too, but CMake's are the wheel's.
    strangers = [name for name in names if not re.fullmatch(r"pplx_comm/(\w+/)*(\w+\.pyi?|py\.typed)", name)]
    assert not strangers, strangers
    assert "pplx_comm/all_to_all.py" in names and not [name for name in names if "bench" in name or "test" in name]


def test_the_wheel_of_stages_is_of_this_version() -> None:
    of = {folder: (ROOT / folder / "pyproject.toml").read_text() for folder in (".", "tools/stages")}
    [[version], [its]] = [re.findall(r'^version = "(.+)"', of[folder], re.M) for folder in of]
    assert version == its and f'"pplx_comm=={version}"' in of["tools/stages"]


def test_what_cmake_installs(tmp_path: Path) -> None:
    """The compiled part, from a build that is only configured."""
    run(
        "cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DPPLX_IN_PLACE=OFF", "-DPPLX_CUDA=OFF",
        f"-DPPLX_PYTHON_INTERPRETER={sys.executable}",
    )  # fmt: skip
    rules = "\n".join(path.read_text() for path in tmp_path.rglob("cmake_install.cmake"))
    installed = re.findall(r'file\(INSTALL DESTINATION "([^"]+)" TYPE \w+ (?:OPTIONAL )?FILES "([^"]+)"', rules)
    assert {(Path(folder).name, Path(file).name.partition(".")[0]) for folder, file in installed} == {
        ("pplx_comm", "_core"),
        ("pplx_comm", "_version"),
        *((("lib", "libibverbs"), ("lib", "libefa")) if platform.machine() in ("x86_64", "aarch64") else ()),
    }
