"""A name that callers import from here."""

from pplx_comm.compat.pplx_kernels import AllToAll

__all__ = ["AllToAll"]
