"""Write pplx_comm/_version.py: the release, and the commit where one is known (0.1.0+gabcdef1.dirty)."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGED = ROOT / "pplx_comm" / "_version.py"


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def release() -> str:
    # Not tomllib: Python 3.10 has none.
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("pyproject.toml has no version line")
    return found.group(1)


def source() -> str:
    """The text of _version.py."""
    # An sdist may be unpacked inside another repository, whose commit says nothing about us.
    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT:
        # An sdist, or a copy without .git, has the file from where it was made.
        if PACKAGED.exists():
            return PACKAGED.read_text()
        return f'__version__ = "{release()}"\n'
    commit = git("rev-parse", "--short=7", "--verify", "HEAD")
    local = "" if commit is None else f"+g{commit}"
    if commit is not None and git("status", "--porcelain", "--untracked-files=no"):
        local += ".dirty"
    return f'__version__ = "{release()}{local}"\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="the file to write")
    output: Path = parser.parse_args().output
    text = source()
    # Unchanged files keep their time, so that nothing that depends on them is made again.
    if not output.exists() or output.read_text() != text:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)


if __name__ == "__main__":
    main()
