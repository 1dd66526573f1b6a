"""Expert-parallel communication: dispatch() sends tokens to the ranks that own their experts, combine() brings the results back."""

from pplx_comm._version import __version__
from pplx_comm.all_to_all import AllToAll
from pplx_comm.communicator import Communicator
from pplx_comm.errors import Error, PeerError, StepTimeout
from pplx_comm.handles import Combining, Dispatched, Plan
from pplx_comm.layouts import Compact, Padded, Ragged
from pplx_comm.wire import Wire

__all__ = [
    "AllToAll",
    "Combining",
    "Communicator",
    "Compact",
    "Dispatched",
    "Error",
    "Padded",
    "PeerError",
    "Plan",
    "Ragged",
    "StepTimeout",
    "Wire",
    "__version__",
]
