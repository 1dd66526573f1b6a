"""The product of codes by DeepGEMM, where it is installed: its kernels for compute capability 9.0, contiguous and masked."""

from __future__ import annotations

import torch

from pplx_comm.moe.grouped.backend import Codes, laid_out
from pplx_comm.moe.quantise import BLOCK
from pplx_comm.moe.segments import Segments


class DeepGemm:
    """Needs segments, or rooms, at multiples of 128, and hidden and intermediate too."""

    name, waits, mx = "deepgemm", False, False

    def takes(self, codes: torch.Tensor, where: Segments) -> bool:
        if codes.device.type != "cuda" or any(size % BLOCK for size in (*codes.shape[1:], where.room)):
            return False
        return torch.cuda.get_device_capability(codes.device)[0] == 9

    def product(self, x: Codes, w: Codes, where: Segments, transposed: bool, dtype: torch.dtype) -> torch.Tensor:
        import deep_gemm

        codes, scale = laid_out(w, transposed)
        made = torch.empty(len(x[0]), codes.shape[1], dtype=torch.bfloat16, device=codes.device)
        if where.room:
            rows, room = x[0].unflatten(0, (-1, where.room)), made.unflatten(0, (-1, where.room))
            deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked((rows, x[1]), (codes, scale), room, where.where, where.expected)
        else:
            # A segment ends where the next one begins, and that is how the kernel finds the next one's begin: rounded up to 128.
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(x, (codes, scale), made, where.where[1:], use_psum_layout=True)
        return made.to(dtype)
