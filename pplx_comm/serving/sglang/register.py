"""The entry point."""

from __future__ import annotations

from pplx_comm.serving.sglang import rebind


def register() -> None:
    """Makes SGLang know the backend "pplx_comm". Everything else happens later, if the backend is asked for.

    SGLang calls this in every process on any host that has this package, and only logs its errors. So it raises none: a user that
    asks for the backend gets the error when the arguments are resolved.
    """
    rebind.names()
