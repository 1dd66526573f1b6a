"""Expert-parallel communication: dispatch() sends tokens to the ranks that own their experts, combine() brings the results back."""

from ._version import __version__
from .all_to_all import AllToAll
from .communicator import Communicator
from .errors import Error, PeerError, StepTimeout
from .handles import Combining, Dispatched, Plan
from .layouts import Compact, Padded, Ragged
from .wire import Wire

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
