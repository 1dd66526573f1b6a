"""The kernels of activation.py and formats.py as functions of tensors. What they return is undefined where no expert's rows are."""

from __future__ import annotations

import torch

from pplx_comm.moe.kernels.usable import power_of_two_at_least, programs
from pplx_comm.moe.segments import Segments

BLOCK, MX_BLOCK, ROWS = 128, 32, 16
E4M3 = torch.float8_e4m3fn


def _grid(t: torch.Tensor) -> tuple[int]:
    """As many programs as a multiprocessor has room for: these kernels wait for memory, and have 4 to 8 KB each on its way."""
    return (16 * programs(t.device),)


def _place(s: Segments) -> tuple[torch.Tensor, int, int]:
    return s.where, s.experts, s.room


def _tiles(s: Segments) -> dict[str, int]:
    return {"EXPERTS": power_of_two_at_least(s.experts), "PADDED": s.room > 0, "ROWS": ROWS}


def _scales(rows: int, width: int, s: Segments) -> torch.Tensor:
    """Column by column, and columns at multiples of 16 bytes, as grouped products read them: by expert where each has a room."""
    blocks = -(-width // BLOCK)
    if not s.room:
        pitch = -(-rows // 4) * 4
        return torch.empty_strided((rows, blocks), (1, pitch), dtype=torch.float32, device=s.where.device)
    pitch = -(-s.room // 4) * 4
    shape, strides = (s.experts, s.room, blocks), (blocks * pitch, 1, pitch)
    return torch.empty_strided(shape, strides, dtype=torch.float32, device=s.where.device)


def strides_of_scales(scale: torch.Tensor) -> tuple[int, int, int]:
    """Of rows, of blocks, and the skew: how much further an expert's are than its rows say. See kernels.tiles.scales_of."""
    if scale.dim() == 2:
        return scale.stride(0), scale.stride(1), 0
    by_expert, by_row, by_block = scale.stride()
    return by_row, by_block, by_expert - scale.shape[1] * by_row


def swiglu(h: torch.Tensor, s: Segments) -> torch.Tensor:
    """See swiglu.swiglu."""
    from pplx_comm.moe.kernels.activation import swiglu_forward

    rows, width = h.shape[0], h.shape[1] // 2
    out = h.new_empty(rows, width)
    where, experts, room = _place(s)
    swiglu_forward[_grid(h)](h, where, out, out, experts, room, width, 0, 0, 0, **_tiles(s), BLOCK=BLOCK, QUANTISED=False)
    return out


def swiglu_quantise(h: torch.Tensor, s: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """See swiglu.swiglu_quantise."""
    from pplx_comm.moe.kernels.activation import swiglu_forward

    rows, width = h.shape[0], h.shape[1] // 2
    codes, scales = h.new_empty(rows, width, dtype=torch.uint8), _scales(rows, width, s)
    where, experts, room = _place(s)
    swiglu_forward[_grid(h)](
        h, where, codes, scales, experts, room, width, *strides_of_scales(scales), **_tiles(s), BLOCK=BLOCK, QUANTISED=True
    )
    return codes.view(E4M3), scales


def swiglu_backward(
    h: torch.Tensor, da: torch.Tensor, weights: torch.Tensor, s: Segments
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See swiglu.swiglu_backward."""
    from pplx_comm.moe.kernels.activation import swiglu_gradients

    dh, weighted, d_weights = torch.empty_like(h), torch.empty_like(da), torch.empty_like(weights)
    swiglu_gradients[_grid(h)](h, da, weights, s.where, dh, weighted, d_weights, s.experts, da.shape[1], ROWS=ROWS, BLOCK=BLOCK)
    return dh, weighted, d_weights


def quantise(x: torch.Tensor, s: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """See quantise.quantise."""
    from pplx_comm.moe.kernels.formats import quantise_rows

    rows, width = x.shape
    codes, scales = torch.empty(x.shape, dtype=torch.uint8, device=x.device), _scales(rows, width, s)
    where, experts, room = _place(s)
    quantise_rows[_grid(x)](x, where, codes, scales, experts, room, width, *strides_of_scales(scales), **_tiles(s), BLOCK=BLOCK)
    return codes.view(E4M3), scales


def quantise_weights(w: torch.Tensor, across: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See quantise.quantise_weights."""
    from pplx_comm.moe.kernels.formats import quantise_squares

    w = w.contiguous()
    experts, height, width = w.shape
    scales = w.new_empty(experts, -(-height // BLOCK), -(-width // BLOCK), dtype=torch.float32)
    codes = w.new_empty(*((experts, width, height) if across else w.shape), dtype=torch.uint8)
    if scales.numel():
        quantise_squares[(scales.numel(),)](w, codes, scales, height, width, BLOCK=BLOCK, ACROSS=across, num_warps=8)
    return (codes.view(E4M3).mT if across else codes.view(E4M3)), scales


def dequantise(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, s: Segments) -> torch.Tensor:
    """See quantise.dequantise."""
    from pplx_comm.moe.kernels.formats import numbers_of_rows

    out, e8m0 = torch.empty(codes.shape, dtype=dtype, device=codes.device), scale.dtype == torch.uint8
    where, experts, room = _place(s)
    numbers_of_rows[_grid(codes)](
        codes, scale, where, out, experts, room, codes.shape[1], *strides_of_scales(scale), **_tiles(s),
        BLOCK=MX_BLOCK if e8m0 else BLOCK, E8M0=e8m0,
    )  # fmt: skip
    return out


def rescale_mx(codes: torch.Tensor, scale: torch.Tensor, s: Segments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See quantise.rescale_mx."""
    from pplx_comm.moe.kernels.formats import rescale_rows

    out, scales = torch.empty(codes.shape, dtype=torch.uint8, device=codes.device), _scales(codes.shape[0], codes.shape[1], s)
    became = torch.zeros((), dtype=torch.int64, device=codes.device)
    where, experts, room = _place(s)
    rescale_rows[_grid(codes)](
        codes, scale, where, out, scales, became, experts, room, codes.shape[1],
        *strides_of_scales(scale), *strides_of_scales(scales), **_tiles(s), MX=MX_BLOCK, GROUPS=BLOCK // MX_BLOCK,
    )  # fmt: skip
    return out.view(E4M3), scales, became
