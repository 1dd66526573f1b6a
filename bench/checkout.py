"""`import checkout` in a script of this folder: `python bench/NAME.py` then runs on this checkout, from any folder.

Python puts the script's folder first on its path. The checkout takes that place, so that `pplx_comm` and `bench` are found
without an installation, and no file here hides a module of the same name elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != HERE)]
if not list((HERE.parent / "pplx_comm").glob("_core.*.so")):
    sys.exit(f"{sys.argv[0]}: {HERE.parent} is not built yet: run make build there")
