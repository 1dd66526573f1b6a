"""No code of the package reaches into another object's private names across folders. What may import what, `make lint` checks."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "pplx_comm"
ELSEWHERE = {
    "_C", "_cdata", "_cuda_getCurrentRawStream", "_dynamo", "_grouped_mm", "_len_torch_function_stack", "_profiler_enabled",
    "_resolve_process_group", "_sleep", "_storage_Use_Count", "_version", "_will_engine_execute_node",
}  # fmt: skip
"""Private names of other packages, which have no public ones for it."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def reached_into(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """a._b where a is neither self nor cls, and `from pplx_comm.a import _b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pplx_comm"):
            yield from ((node.lineno, name.name) for name in node.names if private(name.name))
        if not isinstance(node, ast.Attribute) or not private(node.attr):
            continue
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            yield node.lineno, node.attr


def defined_in(tree: ast.Module) -> Iterator[str]:
    """Names of functions, classes, variables, and attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def intrusions(sources: dict[Path, str]) -> list[str]:
    """Uses of private names that nothing in the file's folder defines."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    own: dict[Path, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        own[path.parent].update(defined_in(tree))
    return [
        f"{path}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in reached_into(tree)
        if name not in own[path.parent] and name not in ELSEWHERE
    ]


def test_a_planted_one_is_found() -> None:
    sources = {
        Path("control/mesh.py"): "class Mesh:\n    def __init__(self):\n        self._failure = None\n",
        Path("control/leave.py"): "def leave(mesh):\n    return mesh._failure\n",
        Path("wiring/connect.py"): "from pplx_comm.control.mesh import _lost\ndef connect(mesh):\n    return mesh._failure\n",
    }
    assert intrusions(sources) == ["wiring/connect.py:1: _lost", "wiring/connect.py:3: _failure"]


def test_folders_keep_their_private_names() -> None:
    found = intrusions({path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))})
    assert found == [], "\n".join(found)
