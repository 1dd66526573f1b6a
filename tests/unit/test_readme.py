"""tests/README.md tells the truth about the tests."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CARRIERS = {"cpu": ("mapped", "proxy", "simulation"), "cuda": ("mapped", "proxy", "emulation", "nvshmem")}


def table() -> dict[tuple[str, str, str], str]:
    rows = re.findall(r"^\| (\d) \| (\w+) \| (\w+) \| (.*) \|$", (TESTS / "README.md").read_text(), re.M)
    return {(number, device, carrier): tests for number, device, carrier, tests in rows}


def functions() -> set[str]:
    found = set()
    for path in TESTS.rglob("test_*.py"):
        found |= {f"{path.stem}::{node.name}" for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    return found


def test_every_invariant_is_held_on_every_device_and_carrier() -> None:
    invariants = re.findall(r"^(\d)\. ", (TESTS.parent / "docs" / "design.md").read_text().partition("## 5. Invariants")[2], re.M)
    wanted = {(n, device, carrier) for n in invariants for device, carriers in CARRIERS.items() for carrier in carriers}
    assert invariants == [str(n) for n in range(1, 10)]
    assert set(table()) == wanted
    for number in invariants:
        assert any("`" in tests for (n, *_), tests in table().items() if n == number), number
    for place, tests in table().items():
        assert tests.startswith("none: ") or re.search(r"`|,|^[a-zA-Z]", tests), place


def test_what_is_named_exists() -> None:
    known = functions() | {path.name for path in (TESTS / "cpp").glob("*.cpp")} | {"make sim"}
    for place, tests in table().items():
        for name in re.findall(r"`([^`]+)`", tests):
            assert name in known, (place, name)


def test_faults_of_the_simulation_are_named_as_it_prints_them() -> None:
    faults = set(re.findall(r'return "([^"]+)";', (TESTS.parent / "proxy" / "sim" / "faults.cpp").read_text()))
    rows = [tests for (_, _, carrier), tests in table().items() if carrier == "simulation" and not tests.startswith("none: ")]
    for name in itertools.chain.from_iterable(tests.split(", ") for tests in rows):
        assert name in faults or name.startswith("`make sim`: "), name
