"""What `make test` says of the two halves that it runs side by side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO

import halves
import pytest


@pytest.mark.parametrize(
    ("first", "second", "code", "says"),
    [
        (
            ("== 3 passed, 1 skipped in 2.00s ==", 0),
            ("2 passed, 4 deselected in 70.10s (0:01:10)", 0),
            0,
            "5 passed, 1 skipped, 4 des",
        ),
        (("== 1 failed, 2 passed in 2.00s ==", 1), ("== 2 passed in 1.00s ==", 0), 1, "1 failed, 4 passed"),
        (("== 2 passed in 2.00s ==", 0), ("== 1 passed, 2 errors in 1.00s ==", 2), 2, "3 passed, 2 errors"),
        (("== 7 deselected in 2.00s ==", 5), ("== 1 passed in 1.00s ==", 0), 0, "7 deselected, 1 passed"),
        (("== 7 deselected in 2.00s ==", 5), ("== 1 deselected in 1.00s ==", 5), 5, "8 deselected"),
        (("== 2 passed in 2.00s ==", 0), ("killed", -9), -9, "2 passed"),
    ],
    ids=["good", "one fails", "the other fails", "one is empty", "both are empty", "killed"],
)
def test_one_line_for_both(
    first: tuple[str, int], second: tuple[str, int], code: int, says: str,
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes],
) -> None:  # fmt: skip
    def start(number: int, options: list[str], said: int | IO[bytes]) -> subprocess.Popen[bytes]:
        text, ends = (first, second)[number]
        program = f"import os, signal; print({text!r}, flush=True); os.kill(os.getpid(), 9) if {ends} < 0 else os._exit({ends})"
        return subprocess.Popen([sys.executable, "-c", program], stdout=said)

    monkeypatch.setattr(halves, "start", start)
    assert halves.main([]) == code
    said = capfdbinary.readouterr().out.decode()
    assert first[0] in said and second[0] in said
    assert f"both halves: {says}" in said
    assert ("FAILED" in said) == (code != 0)


def test_every_file_is_in_one_half() -> None:
    first, second = (set(halves.files(number)) for number in (0, 1))
    assert not first & second
    assert first | second == {str(path) for path in halves.TESTS.rglob("test_*.py")}
    assert {Path(file).name for file in second} >= halves.COMPUTING and {Path(file).parent.name for file in first} == {"ranks"}
