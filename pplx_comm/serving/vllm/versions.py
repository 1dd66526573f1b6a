"""The versions of vLLM that the plug-in was tested with."""

from __future__ import annotations

import re

TESTED = (0, 32), (0, 32)
"""From and to, both included. docs/vllm.md says what was run with which."""


def problem(version: str) -> str | None:
    """Why this version of vLLM is refused, or None."""
    found = re.match(r"(\d+)\.(\d+)", version)
    least, most = TESTED
    if found and least <= (int(found[1]), int(found[2])) <= most:
        return None
    tested = ".".join(map(str, least)) + ("" if least == most else " to " + ".".join(map(str, most)))
    return (
        f"pplx_comm was tested with vLLM {tested}, and this is {version}, whose classes may differ: install a version that was "
        "tested, or set PPLX_COMM_VLLM_UNTESTED=1 to go on at your own risk"
    )
