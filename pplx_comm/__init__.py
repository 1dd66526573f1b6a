"""Expert-parallel communication: dispatch() sends tokens to the ranks that own their experts, combine() brings the results back."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pplx_comm import log
from pplx_comm._version import __version__

if TYPE_CHECKING:
    from pplx_comm.all_to_all import AllToAll
    from pplx_comm.communicator import Communicator
    from pplx_comm.control.failure import Failure
    from pplx_comm.errors import Error, PeerError, StepTimeout
    from pplx_comm.handles import Combining, Dispatched, Plan
    from pplx_comm.hooks import HOOK_ROWS, RAISED, ExpertGroup
    from pplx_comm.layouts import Compact, Padded, Ragged
    from pplx_comm.wire import Wire

__all__ = [
    "HOOK_ROWS",
    "RAISED",
    "AllToAll",
    "Combining",
    "Communicator",
    "Compact",
    "Dispatched",
    "Error",
    "ExpertGroup",
    "Failure",
    "Padded",
    "PeerError",
    "Plan",
    "Ragged",
    "StepTimeout",
    "Wire",
    "__version__",
]

_HOMES = {
    "AllToAll": "all_to_all", "Communicator": "communicator", "Error": "errors", "PeerError": "errors", "StepTimeout": "errors",
    "Failure": "control.failure", "ExpertGroup": "hooks", "HOOK_ROWS": "hooks", "RAISED": "hooks",
    "Combining": "handles", "Dispatched": "handles", "Plan": "handles", "Compact": "layouts", "Padded": "layouts",
    "Ragged": "layouts", "Wire": "wire",
}  # fmt: skip


log.start()


def __getattr__(name: str) -> Any:
    """At first use: importing torch takes seconds, and the command line can do without."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
