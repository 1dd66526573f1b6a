"""A checkout that is built runs its benchmarks and examples as it is: nothing installed, no PYTHONPATH, from any folder."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "PMI_", "PMIX_", "OMPI_", "SLURM_", "MASTER_")
IS_SCRIPT = 'if __name__ == "__main__":'


def run(folder: Path, script: str, *arguments: str) -> str:
    """-S leaves out what site-packages hooks in, an editable installation for one; its packages are found all the same."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith((*LAUNCHERS, "PYTHON", "VIRTUAL_ENV"))}
    packages = [entry for entry in sys.path if entry.endswith("-packages")]
    environment["PYTHONPATH"] = os.pathsep.join(packages)
    command = [sys.executable, "-S", str(ROOT / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_example(tmp_path: Path) -> None:
    assert "64 tokens came back" in run(tmp_path, "examples/hello.py")


SCRIPTS = [path.name for path in sorted((ROOT / "bench").glob("*.py")) if IS_SCRIPT in path.read_text()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_finds_the_checkout_first(name: str) -> None:
    """Before it imports what lies there, or anything that a file beside it could hide."""
    body = ast.parse((ROOT / "bench" / name).read_text()).body
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement).startswith("if __name__ == '__main__':\n    import checkout"):
            return
        names = []
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            names = [statement.module or ""]
        tops = {name.partition(".")[0] for name in names}
        assert tops <= {*sys.stdlib_module_names}, f"bench/{name} imports {', '.join(sorted(tops))} before checkout"


def test_no_file_hides_a_module() -> None:
    """Python puts a script's folder first: a file named like a module of the standard library would be taken for it."""
    here = {path.stem for path in (ROOT / "bench").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not here & {*sys.stdlib_module_names}
