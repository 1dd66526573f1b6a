"""The product of codes by DeepGEMM's contiguous kernel for compute capability 9.0, where it is installed."""

from __future__ import annotations

import torch

from pplx_comm.moe.quantise import BLOCK


class DeepGemm:
    """Needs segments at multiples of 128, and hidden and intermediate too."""

    name, waits = "deepgemm", False

    def takes(self, codes: torch.Tensor) -> bool:
        if codes.device.type != "cuda" or codes.shape[1] % BLOCK or codes.shape[2] % BLOCK:
            return False
        return torch.cuda.get_device_capability(codes.device)[0] == 9

    def product(
        self,
        x: tuple[torch.Tensor, torch.Tensor],
        w: tuple[torch.Tensor, torch.Tensor],
        offsets: torch.Tensor,
        transposed: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        import deep_gemm

        codes, scale = (t.mT.contiguous() for t in w) if transposed else w
        out = torch.empty(len(x[0]), codes.shape[1], dtype=torch.bfloat16, device=codes.device)
        # A segment ends where the next one begins, and that is how the kernel finds the next one's begin: rounded up to 128.
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(x, (codes, scale), out, offsets[1:], use_psum_layout=True)
        return out.to(dtype)
