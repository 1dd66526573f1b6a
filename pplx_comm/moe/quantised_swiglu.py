"""The activation and the quantisation behind it as one operation."""

from __future__ import annotations

import torch

from pplx_comm.moe.quantise import quantise
from pplx_comm.moe.swiglu import swiglu


def swiglu_quantise(h: torch.Tensor, offsets: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """h: [rows, 2 * intermediate], gates before ups. e4m3 codes [rows, intermediate], and float32 scales per 1x128.

    The activation is rounded to h's dtype before it is quantised, as it would be if it were stored between.
    offsets: int32 [experts + 1]: rows behind the last one are left as they are. On a GPU with Triton that is one kernel.
    """
    return quantise(swiglu(h))
