"""The name that callers import from here."""

from pplx_comm.compat.pplx_garden import P2PAllToAll

__all__ = ["P2PAllToAll"]
