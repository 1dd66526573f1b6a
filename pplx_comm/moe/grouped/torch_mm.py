"""torch._grouped_mm, where torch has it: CUTLASS on compute capability 9.0 and 10.0, a loop elsewhere.

Rows that lie as Padded lays them are a batch for torch.bmm, which computes all the room that there is."""

from __future__ import annotations

import torch

from pplx_comm.errors import Error
from pplx_comm.moe.segments import Segments
from pplx_comm.settings import foreign


class TorchGroupedMm:
    name, waits = "torch", False

    def takes(self, device: torch.device, dtype: torch.dtype) -> bool:
        if dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm") or has_a_part(device):
            return False
        # Elsewhere torch runs a loop of its own, for which the host waits.
        return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)

    def forward(self, x: torch.Tensor, w: torch.Tensor, where: Segments) -> torch.Tensor:
        if where.room:
            if has_a_part(x.device):
                raise Error(
                    "gemm='torch': torch.bmm gives wrong results under MPS with a part of the multiprocessors: use gemm='triton'"
                )
            return torch.bmm(x.unflatten(0, (-1, where.room)), w.mT).flatten(0, 1)
        return torch._grouped_mm(x, w.mT, offs=where.where[1:])

    def dgrad(self, dy: torch.Tensor, w: torch.Tensor, where: Segments) -> torch.Tensor:
        return torch._grouped_mm(dy, w, offs=where.where[1:])

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, where: Segments, out: torch.Tensor, accumulate: bool) -> None:
        product = torch._grouped_mm(dy.mT, x, offs=where.where[1:])
        if accumulate:
            out += product
        else:
            out.copy_(product)


def has_a_part(device: torch.device) -> bool:
    """True if MPS gives this process a part of the multiprocessors. torch.bmm then leaves out matrices of a batch.

    Seen with 20 of an H200's 132, torch 2.11 and CUDA 13.0: of 4 to 8 products of 16 or 32 rows about half were old memory.
    """
    return device.type == "cuda" and foreign("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100") != "100"
