"""The kernels of activation.py and formats.py as functions of tensors. What they return is undefined where no expert's rows are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pplx_comm.errors import Error
from pplx_comm.moe.kernels.usable import kernels, power_of_two_at_least, programs
from pplx_comm.moe.segments import Segments

BLOCK, MX_BLOCK = 128, 32
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Tile:
    """Tile of a kernel between the products: rows, the warps that take them, and programs per multiprocessor. These kernels wait
    for memory: a copy has about 40 KB a multiprocessor in flight.
    """

    rows: int
    warps: int
    programs: int


# Measured: bench/notes.md.
SWIGLU = SWIGLU_BACKWARD = DEQUANTISE = Tile(16, 4, 16)
SWIGLU_QUANTISE, QUANTISE, RESCALE = Tile(32, 8, 8), Tile(32, 4, 8), Tile(8, 1, 32)


def _grid(t: torch.Tensor, tile: Tile) -> tuple[int]:
    return (tile.programs * programs(t.device),)


def _place(s: Segments) -> tuple[torch.Tensor, int, int]:
    return s.where, s.experts, s.room


def _tiles(s: Segments, tile: Tile) -> dict[str, int]:
    return {"EXPERTS": power_of_two_at_least(s.experts), "PADDED": s.room > 0, "ROWS": tile.rows, "num_warps": tile.warps}


def empty_scales(rows: int, width: int, s: Segments) -> torch.Tensor:
    """Column by column, and columns at multiples of 16 bytes, as grouped products read them: by expert where each has a room."""
    blocks = -(-width // BLOCK)
    if not s.room:
        pitch = -(-rows // 4) * 4
        return torch.empty_strided((rows, blocks), (1, pitch), dtype=torch.float32, device=s.where.device)
    pitch = -(-s.room // 4) * 4
    shape, strides = (s.experts, s.room, blocks), (blocks * pitch, 1, pitch)
    return torch.empty_strided(shape, strides, dtype=torch.float32, device=s.where.device)


def strides_of_scales(scale: torch.Tensor) -> tuple[int, int, int]:
    """Strides of rows, of blocks, and the skew: how much further an expert's are than its rows say. See kernels.tiles.scales_of."""
    if scale.dim() == 2:
        return scale.stride(0), scale.stride(1), 0
    by_expert, by_row, by_block = scale.stride()
    return by_row, by_block, by_expert - scale.shape[1] * by_row


def swiglu(h: torch.Tensor, s: Segments) -> torch.Tensor:
    """See swiglu.swiglu."""
    rows, width = h.shape[0], h.shape[1] // 2
    out = h.new_empty(rows, width)
    where, experts, room = _place(s)
    kernels("activation").swiglu_forward[_grid(h, SWIGLU)](
        h, where, out, out, experts, room, width, 0, 0, 0, **_tiles(s, SWIGLU), BLOCK=BLOCK, QUANTISED=False
    )
    return out


def swiglu_quantise(h: torch.Tensor, s: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """See swiglu.swiglu_quantise."""
    rows, width = h.shape[0], h.shape[1] // 2
    codes, scales = h.new_empty(rows, width, dtype=torch.uint8), empty_scales(rows, width, s)
    where, experts, room = _place(s)
    kernels("activation").swiglu_forward[_grid(h, SWIGLU_QUANTISE)](
        h, where, codes, scales, experts, room, width, *strides_of_scales(scales), **_tiles(s, SWIGLU_QUANTISE),
        BLOCK=BLOCK, QUANTISED=True,
    )  # fmt: skip
    return codes.view(E4M3), scales


def swiglu_backward(
    h: torch.Tensor, da: torch.Tensor, weights: torch.Tensor, s: Segments
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See swiglu.swiglu_backward."""
    dh, weighted, d_weights = torch.empty_like(h), torch.empty_like(da), torch.empty_like(weights)
    kernels("activation").swiglu_gradients[_grid(h, SWIGLU_BACKWARD)](
        h, da, weights, s.where, dh, weighted, d_weights, s.experts, da.shape[1],
        ROWS=SWIGLU_BACKWARD.rows, BLOCK=BLOCK, num_warps=SWIGLU_BACKWARD.warps,
    )  # fmt: skip
    return dh, weighted, d_weights


def quantise(x: torch.Tensor, s: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """See quantise.quantise."""
    rows, width = x.shape
    codes, scales = torch.empty(x.shape, dtype=torch.uint8, device=x.device), empty_scales(rows, width, s)
    where, experts, room = _place(s)
    kernels("formats").quantise_rows[_grid(x, QUANTISE)](
        x, where, codes, scales, experts, room, width, *strides_of_scales(scales), **_tiles(s, QUANTISE), BLOCK=BLOCK
    )
    return codes.view(E4M3), scales


def quantise_weights(w: torch.Tensor, across: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See quantise.quantise_weights."""
    w = w.contiguous()
    experts, height, width = w.shape
    scales = w.new_empty(experts, -(-height // BLOCK), -(-width // BLOCK), dtype=torch.float32)
    codes = w.new_empty(*((experts, width, height) if across else w.shape), dtype=torch.uint8)
    if scales.numel():
        kernels("formats").quantise_squares[(scales.numel(),)](
            w, codes, scales, height, width, BLOCK=BLOCK, ACROSS=across, num_warps=8
        )
    return (codes.view(E4M3).mT if across else codes.view(E4M3)), scales


def dequantise(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, s: Segments) -> torch.Tensor:
    """See quantise.dequantise."""
    out, e8m0 = torch.empty(codes.shape, dtype=dtype, device=codes.device), scale.dtype == torch.uint8
    where, experts, room = _place(s)
    kernels("formats").numbers_of_rows[_grid(codes, DEQUANTISE)](
        codes, scale, where, out, experts, room, codes.shape[1], *strides_of_scales(scale), **_tiles(s, DEQUANTISE),
        BLOCK=MX_BLOCK if e8m0 else BLOCK, E8M0=e8m0,
    )  # fmt: skip
    return out


def rescale_mx(codes: torch.Tensor, scale: torch.Tensor, s: Segments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See quantise.rescale_mx."""
    rows, width = codes.shape
    if width % 4:
        raise Error(f"rescale_mx() takes four codes at a time: rows of {width} are no multiple of that")
    out, scales = torch.empty(codes.shape, dtype=torch.uint8, device=codes.device), empty_scales(rows, width, s)
    became = torch.zeros((), dtype=torch.int64, device=codes.device)
    where, experts, room = _place(s)
    kernels("formats").rescale_rows[_grid(codes, RESCALE)](
        codes.contiguous().view(torch.int32), scale, where, out.view(torch.int32), scales, became, experts, room, width,
        *strides_of_scales(scale), *strides_of_scales(scales), **_tiles(s, RESCALE), MX=MX_BLOCK, GROUPS=BLOCK // MX_BLOCK,
        ASSEMBLY=codes.is_cuda,
    )  # fmt: skip
    return out.view(E4M3), scales, became
