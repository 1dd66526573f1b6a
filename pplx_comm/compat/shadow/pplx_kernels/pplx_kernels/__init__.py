"""Stands for pplx_kernels where this folder's parent is on the path."""

from pplx_comm.compat.pplx_kernels import AllToAll, PyTorchStreamWrapper, nvshmem_init

__all__ = ["AllToAll", "PyTorchStreamWrapper", "nvshmem_init"]
