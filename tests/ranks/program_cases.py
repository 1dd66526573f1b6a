"""Whole programs, run by ranks that have imported torch already."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any


def run(me: Any, path: str, arguments: list[str]) -> None:
    """As `python path arguments` would."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
