"""The tests themselves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def test_names_of_modules() -> None:
    """They are found by name, whatever their folder: `pytest` could not collect two of one name, nor a case know its own."""
    folders = [folder for folder in TESTS.iterdir() if folder.is_dir()]
    names = Counter(path.name for folder in folders for path in folder.glob("*.py"))
    assert [name for name, times in names.items() if times > 1 and name != "conftest.py"] == []
