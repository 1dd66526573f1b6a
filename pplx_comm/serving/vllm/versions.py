"""The versions of vLLM that the plug-in was tested with."""

from __future__ import annotations

import re

TESTED = (0, 26), (0, 32), (0, 33)
"""docs/vllm.md says what was run with which."""


def problem(version: str) -> str | None:
    """Why this version of vLLM is refused, or None."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) in TESTED:
        return None
    *others, last = (".".join(map(str, tested)) for tested in TESTED)
    return (
        f"pplx_comm was tested with vLLM {', '.join(others)} and {last}, and this is {version}, whose classes may differ: install "
        "a version that was tested, or set PPLX_COMM_VLLM_UNTESTED=1 to go on at your own risk"
    )
