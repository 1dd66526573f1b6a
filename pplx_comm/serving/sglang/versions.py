"""The versions of SGLang that the plug-in was tested with."""

from __future__ import annotations

from pplx_comm.serving.refusal import refusal

TESTED = ((0, 5, 23),)
"""docs/sglang.md says what was run with which."""


def problem(version: str) -> str | None:
    """Why this version of SGLang is refused, or None."""
    return refusal("SGLang", version, TESTED, "PPLX_COMM_SGLANG_UNTESTED")
