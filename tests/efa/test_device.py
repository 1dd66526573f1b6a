"""The software EFA device by itself: processes that call its verbs functions, a case each. The cases are tests/efa/device/*.cpp."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import pytest
from test_cpp import build, run

SOURCES = sorted((Path(__file__).parent / "device").glob("*.cpp"))
CASES = [name for source in SOURCES for name in re.findall(r"^CASE\((\w+)\)", source.read_text(), re.MULTILINE)]

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"),
    reason="the software device is for Linux on x86-64 and aarch64",
)


@pytest.fixture(scope="session")
def program() -> Path:
    return build("efasoft_cases", "-DPPLX_PYTHON=OFF") / "efasoft_cases"


@pytest.mark.parametrize("case", CASES)
def test_device(program: Path, case: str) -> None:
    print(run(program, case, timeout=120))


def test_every_case_is_listed(program: Path) -> None:
    assert sorted(run(program, "--list", timeout=20).split()) == sorted(CASES)
