"""The kernels of activation.py and formats.py as functions of tensors. What they return is undefined behind the last segment."""

from __future__ import annotations

import torch

from pplx_comm.moe.kernels.usable import programs

BLOCK, MX_BLOCK, ROWS = 128, 32, 16
E4M3 = torch.float8_e4m3fn


def _grid(t: torch.Tensor) -> tuple[int]:
    """Several programs for each multiprocessor: these kernels wait for memory."""
    return (4 * programs(t.device),)


def _scales(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Column by column, and columns at multiples of 16 bytes, as grouped products read them."""
    pitch = -(-rows // 4) * 4
    return torch.empty_strided((rows, -(-width // BLOCK)), (1, pitch), dtype=torch.float32, device=device)


def swiglu(h: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """See swiglu.swiglu."""
    from pplx_comm.moe.kernels.activation import swiglu_forward

    rows, width = h.shape[0], h.shape[1] // 2
    out = h.new_empty(rows, width)
    swiglu_forward[_grid(h)](h, offsets, out, out, len(offsets) - 1, width, 0, 0, ROWS=ROWS, BLOCK=BLOCK, QUANTISED=False)
    return out


def swiglu_quantise(h: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See swiglu.swiglu_quantise."""
    from pplx_comm.moe.kernels.activation import swiglu_forward

    rows, width = h.shape[0], h.shape[1] // 2
    codes, scales = h.new_empty(rows, width, dtype=torch.uint8), _scales(rows, width, h.device)
    swiglu_forward[_grid(h)](
        h, offsets, codes, scales, len(offsets) - 1, width, *scales.stride(), ROWS=ROWS, BLOCK=BLOCK, QUANTISED=True
    )
    return codes.view(E4M3), scales


def swiglu_backward(
    h: torch.Tensor, da: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See swiglu.swiglu_backward."""
    from pplx_comm.moe.kernels.activation import swiglu_gradients

    dh, weighted, d_weights = torch.empty_like(h), torch.empty_like(da), torch.empty_like(weights)
    swiglu_gradients[_grid(h)](
        h, da, weights, offsets, dh, weighted, d_weights, len(offsets) - 1, da.shape[1], ROWS=ROWS, BLOCK=BLOCK
    )
    return dh, weighted, d_weights


def quantise(x: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See quantise.quantise."""
    from pplx_comm.moe.kernels.formats import quantise_rows

    codes, scales = torch.empty(x.shape, dtype=torch.uint8, device=x.device), _scales(x.shape[0], x.shape[1], x.device)
    quantise_rows[_grid(x)](x, offsets, codes, scales, len(offsets) - 1, x.shape[1], *scales.stride(), ROWS=ROWS, BLOCK=BLOCK)
    return codes.view(E4M3), scales


def quantise_weights(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See quantise.quantise_weights."""
    from pplx_comm.moe.kernels.formats import quantise_squares

    w = w.contiguous()
    experts, height, width = w.shape
    scales = w.new_empty(experts, -(-height // BLOCK), -(-width // BLOCK), dtype=torch.float32)
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    if scales.numel():
        quantise_squares[(scales.numel(),)](w, codes, scales, height, width, BLOCK=BLOCK, num_warps=8)
    return codes.view(E4M3), scales


def dequantise(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, offsets: torch.Tensor) -> torch.Tensor:
    """See quantise.dequantise."""
    from pplx_comm.moe.kernels.formats import numbers_of_rows

    out, e8m0 = torch.empty(codes.shape, dtype=dtype, device=codes.device), scale.dtype == torch.uint8
    numbers_of_rows[_grid(codes)](
        codes, scale, offsets, out, len(offsets) - 1, codes.shape[1], *scale.stride(),
        ROWS=ROWS, BLOCK=MX_BLOCK if e8m0 else BLOCK, E8M0=e8m0,
    )  # fmt: skip
    return out


def rescale_mx(codes: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See quantise.rescale_mx."""
    from pplx_comm.moe.kernels.formats import rescale_rows

    out = torch.empty(codes.shape, dtype=torch.uint8, device=codes.device)
    scales = codes.new_empty(codes.shape[0], -(-codes.shape[1] // BLOCK), dtype=torch.float32)
    became = torch.zeros((), dtype=torch.int64, device=codes.device)
    rescale_rows[_grid(codes)](
        codes, scale, offsets, out, scales, became, len(offsets) - 1, codes.shape[1], *scale.stride(),
        ROWS=ROWS, MX=MX_BLOCK, GROUPS=BLOCK // MX_BLOCK,
    )  # fmt: skip
    return out.view(E4M3), scales, became
