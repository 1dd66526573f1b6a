"""Finds openings and words that make prose hard to read: in comments, docstrings, messages and Markdown. Prints each place."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPENING = re.compile(r"(Of|By|For|Whether|Which|What|The other)\b(?! example)", re.IGNORECASE)
WORD = re.compile(r"\b(who|whoever|whom|nobody|so many|as many)\b", re.IGNORECASE)
# History, measurements, and pages of docs/ that get a rewrite of their own. The text of docs/api.md stands in docstrings.
LEFT_OUT = ("CHANGELOG.md", "bench/results/", "bench/notes.md", "docs/", "tools/voice.py", "tests/unit/test_voice.py")
ALLOWED: dict[tuple[str, str], str] = {
    ("proxy/sim/faults.cpp", "immediate of nobody"): "a key of saved states of `make sim-long`, and of its results",
}
"""Path and words of a text that may stay: why. At most 40."""

Text = tuple[int, str, bool]
"""Line, text, and whether its opening counts. That of a message does not. C++ strings that end with a full stop are docstrings."""
CPP = re.compile(r'//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/|R"\((?P<raw>.*?)\)"|"(?P<string>(?:\\.|[^"\\\n])*)"|\'\\?.\'', re.DOTALL)


def comments_of(lines: list[tuple[int, int, str]]) -> Iterator[Text]:
    """Joins neighbouring lines of one column. `lines`: line, column (0 behind code) and text."""
    joined: dict[tuple[int, int], tuple[int, str]] = {}
    for line, column, text in lines:
        first, before = (joined.pop((line - 1, column), None) if column else None) or (line, "")
        joined[line, column] = first, f"{before} {text.strip('/#! ')}".strip()
    return ((first, text, True) for first, text in joined.values())


def python_texts(source: str) -> Iterator[Text]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    yield from comments_of([(one.start[0], one.line.lstrip().startswith("#") and one.start[1] + 1, one.string) for one in comments])
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value.strip(), id(node) in docstrings


def cpp_texts(source: str) -> Iterator[Text]:
    lines = []
    for found in CPP.finditer(source):
        at = source.count("\n", 0, found.start()) + 1
        before = source[source.rfind("\n", 0, found.start()) + 1 : found.start()]
        if found["line"] is not None:
            lines.append((at, 0 if before.strip() else len(before) + 1, found["line"]))
        else:
            text = (found["block"] or found["raw"] or found["string"] or "").strip("* \n")
            yield at, text, found["block"] is not None or text.endswith(".")
    yield from comments_of(lines)


def markdown_texts(source: str) -> Iterator[Text]:
    """Splits sentences. A cell of a table may open as it likes."""
    prose = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), source, flags=re.DOTALL | re.MULTILINE)
    for line, text in enumerate(prose.split("\n"), 1):
        for sentence in re.split(r"(?<=[.:?!]) (?=[A-Z])", text):
            opening = sentence.lstrip("#-*> ")
            yield line, opening, opening[:1].isupper() and not text.startswith("|")


READERS: dict[str, Callable[[str], Iterator[Text]]] = {".py": python_texts, ".md": markdown_texts}
READERS |= dict.fromkeys((".h", ".cpp", ".cu", ".cuh"), cpp_texts)


def offences(path: str, source: str) -> Iterator[tuple[int, str, str]]:
    """Yields line, what is forbidden, and the text. Code between backquotes is not prose, nor is a single word."""
    for line, text, opens in READERS[Path(path).suffix](source):
        prose = " ".join(re.sub(r"`[^`]*`", "``", text).split())
        found = (OPENING.match(prose) if opens else None) or WORD.search(prose)
        if found and " " in prose:
            yield line, found[1], prose


def main() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [path for path in listed if Path(path).suffix in READERS and not path.startswith(LEFT_OUT)]
    unused = set(ALLOWED)
    wrong = []
    for path in paths:
        for line, word, prose in offences(path, (ROOT / path).read_text()):
            excused = {(where, words) for where, words in ALLOWED if where == path and words in prose}
            unused -= excused
            wrong += [] if excused else [f"{path}:{line}: {word!r}: {prose[:120]}"]
    wrong += [f"{path}: no longer needs the exception for {words!r}" for path, words in sorted(unused)]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong) or len(ALLOWED) > 40)


if __name__ == "__main__":
    main()
