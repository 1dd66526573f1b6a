"""Names that callers import from here."""

from pplx_comm.compat.deep_ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
