"""Both products of few rows of codes, and what is between them, in one launch of our own kernel: see kernels/pair.py."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from pplx_comm.moe.grouped import tiles
from pplx_comm.moe.grouped.backend import Codes
from pplx_comm.moe.grouped.tiles import Shape
from pplx_comm.moe.grouped.triton_mm import by_tma, described
from pplx_comm.moe.grouped.triton_scaled import TritonScaledMm
from pplx_comm.moe.kernels.launch import E4M3, empty_scales, strides_of_scales
from pplx_comm.moe.kernels.usable import kernels, power_of_two_at_least, programs, usable
from pplx_comm.moe.quantise import BLOCK
from pplx_comm.moe.segments import Segments

MOST_WORDS = 1 << 16
SLAB = 1 << 20
"""Words that are cleared together, for launches that are captured: some hundred of them."""


class TritonPair(TritonScaledMm):
    """Takes both products at once. Products by themselves are TritonScaledMm's: a caller that asks for the pair gets the same bits
    everywhere."""

    name = "pair"

    def takes(self, codes: torch.Tensor, where: Segments) -> bool:
        return False

    def takes_both(self, x: Codes, gate_up: Codes, down: Codes, where: Segments) -> bool:
        """Few rows, on a GPU whose multiprocessors have room for the programs. More rows make the tensor cores work."""
        (rows, scale), device, s = x, x[0].device, tiles.SHAPE_OF_PAIR
        if not usable(device) or (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9):
            return False
        fits = scale.dtype == torch.float32 and not down[0].shape[2] % BLOCK
        few = where.average(len(rows)) <= tiles.FEW and words_of(where, len(rows), down[0].shape[2], s) <= MOST_WORDS
        return fits and few and rows.numel() > 0 and gate_up[0].numel() > 0

    def through(self, x: Codes, gate_up: Codes, down: Codes, where: Segments, dtype: torch.dtype) -> torch.Tensor:
        """Codes and scales of [rows, hidden], [experts, 2 * width, hidden], [experts, hidden, width]. Returns [rows, hidden]."""
        (rows, hidden), width, device = x[0].shape, down[0].shape[2], x[0].device
        between = torch.empty(rows, 2 * width, dtype=dtype, device=device)
        codes = torch.empty(rows, width, dtype=torch.uint8, device=device)
        out = torch.empty(rows, hidden, dtype=dtype, device=device)
        grid = tiles.SHAPE_OF_PAIR.programs * programs(device)
        place, words = _words.take(device, words_of(where, rows, width, tiles.SHAPE_OF_PAIR))
        launch(x, gate_up, down, where, Memory(between, (codes, empty_scales(rows, width, where)), out, words), grid, tma=self._tma)
        _words.give_back(place, words)
        return out


@dataclass(frozen=True)
class Memory:
    """Memory that a launch writes."""

    h: torch.Tensor
    activated: Codes
    """Bytes, and scales."""
    out: torch.Tensor
    words: torch.Tensor
    """See Words."""


def launch(
    x: Codes, gate_up: Codes, down: Codes, where: Segments, memory: Memory, grid: int, *, others: int = 0, tma: bool | None = None
) -> None:
    """others: programs of other launches that take part. tma: None where it is possible."""
    s, on_gpu = tiles.SHAPE_OF_PAIR, x[0].is_cuda
    rows, up, low = (t.contiguous() for t in (x[0], gate_up[0], down[0]))
    experts, hidden, width = low.shape
    codes, scale = memory.activated
    a = codes.view(E4M3)
    tma = by_tma(rows, up, low) if tma is None else tma
    rows_tma = tma and not s.masked
    of_rows, of_weights = [s.rows, s.inner], [s.side, s.inner]
    kernels("pair").rows_through_experts[(grid,)](
        described(rows, of_rows) if rows_tma else rows, x[1],
        described(up, of_weights) if tma else up, gate_up[1].contiguous(),
        described(low, of_weights) if tma else low, down[1].contiguous(), low.view(torch.uint8),
        where.where, memory.h, codes, described(a, of_rows) if rows_tma else a, scale, memory.out, memory.words,
        grid + others, experts, where.room, hidden, width, *strides_of_scales(x[1]), *strides_of_scales(scale),
        EXPERTS=power_of_two_at_least(experts), PADDED=where.room > 0, ROWS_TMA=rows_tma, TMA=tma, ASSEMBLY=on_gpu,
        ROWS=s.rows, SIDE=s.side, BLOCK=BLOCK, SOME=tiles.ROWS_OF_ACTIVATION, LINES=s.ahead,
        num_warps=s.warps, num_stages=s.stages, **tiles.most_registers(s),
    )  # fmt: skip


def words_of(where: Segments, rows: int, width: int, s: Shape) -> int:
    """Returns the number of words for the blocks; enough for any routing."""
    high = where.experts * -(-where.room // s.rows) if where.room else -(-rows // s.rows) + where.experts
    return int(kernels("pair").WRITTEN.value) + power_of_two_at_least(where.experts) + high * (width // BLOCK)


Place = tuple[torch.device, int] | None


class Words:
    """Holds zeros for a launch, which leaves zeros behind: to clear them by a launch of their own would cost what one launch saves.

    Launches of one stream come one after the other and share theirs. Graphs may be replayed at a time, on any stream: each captured
    launch has words of its own, for ever, since torch does not tell when a graph is freed.
    """

    def __init__(self) -> None:
        self._left: dict[Place, torch.Tensor] = {}
        self._slabs: dict[torch.device, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []

    def take(self, device: torch.device, count: int) -> tuple[Place, torch.Tensor]:
        """And where they belong. A launch that raises never gives them back, and the next one gets others."""
        if device.type != "cuda":
            place: Place = device, threading.get_ident()
        elif torch.cuda.is_current_stream_capturing():
            return None, self._of_graph(device, count)
        else:
            place = device, torch.cuda.current_stream(device).cuda_stream
            self._fill(device)
        words = self._left.pop(place, None)
        if words is None or len(words) < count:
            words = torch.zeros(count, dtype=torch.int32, device=device)
        return place, words

    def give_back(self, place: Place, words: torch.Tensor) -> None:
        if place is not None:
            self._left[place] = words

    def _of_graph(self, device: torch.device, count: int) -> torch.Tensor:
        slab, size = self._slabs.get(device), -(-count // 32) * 32
        if slab is None or len(slab) < size:
            return torch.zeros(count, dtype=torch.int32, device=device)  # a launch more, at each replay
        self._slabs[device] = slab[size:]
        return slab[:size]

    def _fill(self, device: torch.device) -> None:
        """Before a capture, in which nothing can be cleared once and for all. The host waits, as a graph may run on any stream."""
        slab = self._slabs.get(device)
        if slab is None or len(slab) < SLAB // 2:
            self._slabs[device] = slab = torch.zeros(SLAB, dtype=torch.int32, device=device)
            self._kept.append(slab)
            torch.cuda.current_stream(device).synchronize()


_words = Words()
