"""The versions of vLLM that the plug-in was tested with."""

from __future__ import annotations

from pplx_comm.serving.refusal import refusal

TESTED = (0, 26), (0, 32), (0, 33)
"""docs/vllm.md says what was run with which."""


def problem(version: str) -> str | None:
    """Why this version of vLLM is refused, or None."""
    return refusal("vLLM", version, TESTED, "PPLX_COMM_VLLM_UNTESTED")
