"""The entry point."""

from __future__ import annotations

from pplx_comm.serving.sglang import rebind


def register() -> None:
    """Makes SGLang know the backend "pplx_comm". What it is asked for decides what else happens, later.

    SGLang calls this in every process of everybody who has this package. What it raises is only logged, so it raises nothing that
    matters: whoever asks for the backend hears of it when the arguments are resolved.
    """
    rebind.names()
