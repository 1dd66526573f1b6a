"""The entry point."""

from __future__ import annotations

from pplx_comm.serving.vllm import rebind, versions
from pplx_comm.settings import Serving, read


def register() -> None:
    """Makes vLLM know the backend "pplx_comm". Everything else happens later, in the workers, if the backend is asked for. vLLM
    calls this in every process on any host that has this package, and possibly more than once.
    """
    import vllm

    settings = read(Serving)
    refusal = None if settings.untested else versions.problem(vllm.__version__)
    rebind.names(settings, refusal)
