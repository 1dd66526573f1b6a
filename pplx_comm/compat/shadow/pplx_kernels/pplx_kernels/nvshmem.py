"""Names that callers import from here."""

from pplx_comm.compat.pplx_kernels import PyTorchStreamWrapper, nvshmem_finalize, nvshmem_init

__all__ = ["PyTorchStreamWrapper", "nvshmem_finalize", "nvshmem_init"]
