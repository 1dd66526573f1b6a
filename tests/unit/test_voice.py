"""tools/voice.py finds each kind of place, and lets plain prose pass."""

from __future__ import annotations

import pytest
import voice

PYTHON = '''"""Which rows are sent."""
rows = 1  # of a step
# Sends rows
# to whoever wants them.
def f():
    """Nobody waits."""
    raise ValueError(f"{rows} rows, not so many")
"""The other rows."""
'''
CPP = """// By rank, then
// by expert.
int rows;  // those who wait
/* What is left. */
throw Error("as many as there are");
"""
MARKDOWN = """# For users

It is fast. Of its rows
most are sent. `who` | **whom** it serves
"""
GOOD = {
    "good.py": '''"""Returns which rows are sent."""
who = "nobody"
# Sends rows of `who`, for every rank. For example one.
print("Of all rows")
''',
    "good.h": "// Counts rows by rank.\nint who;  // rows\nchar c = '\"';  // one quote\n",
    "good.md": "| what | for |\n\nRows go\nby rank.\n\n```\n# For nobody\n```\n",
}


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("bad.py", PYTHON, [(1, "Which"), (2, "of"), (3, "whoever"), (6, "Nobody"), (7, "so many"), (8, "The other")]),
        ("bad.cuh", CPP, [(1, "By"), (3, "who"), (4, "What"), (5, "as many")]),
        ("bad.md", MARKDOWN, [(1, "For"), (3, "Of"), (4, "whom")]),
        *((path, source, []) for path, source in GOOD.items()),
    ],
)
def test_each_kind_is_found_and_plain_prose_passes(path: str, source: str, expected: list[tuple[int, str]]) -> None:
    assert sorted((line, word) for line, word, _ in voice.offences(path, source)) == expected


def test_an_exception_has_a_reason_and_there_are_few() -> None:
    assert all(voice.ALLOWED.values()) and len(voice.ALLOWED) <= 40
