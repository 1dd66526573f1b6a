"""Writes what is generated in docs/: api.md from the docstrings, the tables of settings and deadlines. --check says what is old."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pplx_comm import settings  # noqa: E402
from pplx_comm.control import deadlines  # noqa: E402

CLASSES = {
    "communicator": ["Communicator"],
    "all_to_all": ["AllToAll"],
    "handles": ["Dispatched", "Combining", "Plan"],
    "hooks": ["ExpertGroup"],
    "layouts": ["Ragged", "Padded", "Compact"],
    "wire": ["Wire"],
    "errors": ["Error", "PeerError", "StepTimeout"],
    "moe/layer": ["MoE"],
    "moe/router": ["RouterOptions"],
    "moe/routed": ["Options"],
    "moe/exchange": ["Exchange"],
}
MADE_BY_USERS = ("AllToAll", "Ragged", "Padded", "Compact", "MoE", "RouterOptions", "Options", "Exchange")


def documented(text: str | None, before: str = "") -> str:
    """A docstring as Markdown: lines that begin with a name and a colon are a list, but not what follows `before` in its line."""
    lines = []
    for number, line in enumerate(inspect.cleandoc(text or "").splitlines()):
        if number == 0 and before:
            lines.append(f"{before} {line}")
            continue
        named = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        lines.append(f"- `{named[1]}`: {named[2]}" if named else re.sub(r"^    ", "  ", line))
    return "\n".join(lines)


def call(name: str, arguments: ast.arguments, returns: ast.expr | None) -> str:
    """The signature as the source has it, without self, a parameter a line where it is long."""
    for own in arguments.args[:1]:
        if own.arg in ("self", "cls"):
            arguments.args = arguments.args[1:]
    given = re.sub(r"(: [^=,]+)=", r"\1 = ", ast.unparse(arguments)).replace("DEFAULT_TIMEOUT", str(deadlines.DEFAULT_TIMEOUT))
    result = f" -> {ast.unparse(returns)}" if returns is not None else ""
    if len(name) + len(given) + len(result) > 110:
        parts = re.split(r", (?=\w+: |\*)", given)
        given = "\n    " + ",\n    ".join(parts) + ",\n"
    return f"```python\n{name}({given}){result}\n```"


def members(kind: ast.ClassDef) -> Iterator[str]:
    for node, following in zip(kind.body, [*kind.body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            shown = documented(str(following.value.value), f"`{ast.unparse(node.annotation)}`.")
            yield f"#### {ast.unparse(node.target)}\n\n{shown}"
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            is_property = any(ast.unparse(one) == "property" for one in node.decorator_list)
            assert node.returns is not None
            text = ast.get_docstring(node)
            if is_property:
                shown = documented(text, f"`{ast.unparse(node.returns)}`.")
            else:
                shown = call(node.name, node.args, node.returns) + "\n\n" + documented(text)
            yield f"#### {node.name}\n\n{shown.rstrip()}"


def described(kind: ast.ClassDef) -> str:
    parts = [f"## {kind.name}"]
    made = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    if made and kind.name in MADE_BY_USERS:
        parts.append(call(kind.name, made[0].args, None))
    elif kind.name in MADE_BY_USERS:
        fields = [ast.unparse(node) for node in kind.body if isinstance(node, ast.AnnAssign)]
        parts.append(f"```python\n{kind.name}({', '.join(fields)})\n```")
    return "\n\n".join([*parts, documented(ast.get_docstring(kind)), *members(kind)])


def api() -> str:
    parts = [
        "# API",
        "Written by `make docs` from the docstrings. `import pplx_comm as pc` has all of it, typed, but for [the layer](moe.md): "
        "`MoE` and `RouterOptions` are in `pplx_comm.moe`, `Options` and `Exchange` in `pplx_comm.moe.functional`.",
    ]
    for module, names in CLASSES.items():
        tree = ast.parse((ROOT / "pplx_comm" / f"{module}.py").read_text())
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        parts += [described(classes[name]) for name in names]
    return "\n\n".join(parts) + "\n"


def with_table(page: Path, marker: str, table: str) -> str:
    pattern = rf"(<!-- {marker}: make docs -->\n).*?(<!-- end -->)"
    changed, count = re.subn(pattern, lambda found: f"{found[1]}{table}\n{found[2]}", page.read_text(), flags=re.S)
    assert count == 1, f"{page} has no place for the table of {marker}"
    return changed


def pages() -> dict[Path, str]:
    api_page, tuning, failure = (ROOT / "docs" / name for name in ("api.md", "tuning.md", "failure.md"))
    return {
        api_page: api(),
        tuning: with_table(tuning, "settings", settings.table()),
        failure: with_table(failure, "deadlines", deadlines.table()),
    }


def main() -> int:
    old = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    if "--check" in sys.argv[1:]:
        for path in old:
            print(f"{path.relative_to(ROOT)} is not what the sources say: make docs")
        return 1 if old else 0
    for path, text in old.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
