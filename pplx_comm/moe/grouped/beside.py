"""The products of a layer beside their step, by our own kernels: see kernels/beside.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pplx_comm.handles import Dispatched
from pplx_comm.hooks import HOOK_ROWS
from pplx_comm.moe.grouped import tiles
from pplx_comm.moe.grouped.tiles import Shape
from pplx_comm.moe.grouped.triton_mm import by_tma, described
from pplx_comm.moe.kernels.launch import strides_of_scales
from pplx_comm.moe.kernels.usable import power_of_two_at_least, programs
from pplx_comm.moe.ran import note
from pplx_comm.moe.segments import Segments

Operand = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Values, or e4m3 codes and their scales."""
CHUNK = 2
"""Blocks that programs take together. More share weights in the cache; fewer are there earlier."""
WINDOW = 256
LINES = 8
"""Of 128 bytes, for each row of weights that is asked for before its rows are there."""
STRIP_OF_CODES = 4
"""Tiles of codes that a program takes at a time: one takes little longer than to find the next one."""
KEPT_FREE = 4
"""Multiprocessors that no product takes: a step must be able to go on."""
OWNERS = 1024
"""Words for multiprocessors: more than a GPU has, whose numbers may have gaps. Two that share one would stay or go together."""


@dataclass(frozen=True)
class Beside:
    """One pass beside its step: the words of its dispatch, and memory for what its programs tell each other."""

    arrived: torch.Tensor
    ready: torch.Tensor
    scratch: torch.Tensor
    """int32, zeros: what is claimed of each chunk, the order of chunks, how many were noted, and what the second product counts."""
    chunks: int
    sms_of_step: int
    ordered: bool = False
    """Whether the first product noted the order of chunks."""

    @staticmethod
    def of(d: Dispatched, where: Segments, sms_of_step: int) -> Beside:
        words = len(d.arrived)
        chunks = words if where.room else -(-words // CHUNK)
        scratch = torch.zeros(words_of_scratch(chunks), dtype=torch.int32, device=d.x.device)
        return Beside(d.arrived.view(torch.int32), d.ready.view(torch.int32), scratch, chunks, sms_of_step)

    @property
    def noted(self) -> torch.Tensor:
        """How many chunks the first product noted."""
        return self.scratch[2 * self.chunks :]

    @property
    def begun(self) -> torch.Tensor:
        """How many programs of the second product have begun. Behind it, what else that product counts."""
        return self.scratch[2 * self.chunks + 1 :]

    @property
    def kept(self) -> int:
        """Multiprocessors of the second product: the rest is combine's."""
        return max(1, programs(self.scratch.device) - max(self.sms_of_step, KEPT_FREE))

    def producers(self, x: Operand, where: Segments) -> int:
        """Programs of the second product. Those of multiprocessors that are not kept begin and end."""
        return _shape(x, where).programs * programs(self.scratch.device)

    def up(self, x: Operand, w: Operand, where: Segments, out: torch.Tensor) -> None:
        """x @ w^T by expert, to out, of rows that may still be coming. It is launched when `planned` is raised."""
        from pplx_comm.moe.kernels.beside import rows_by_weights_as_they_come

        one = _Product(x, w, where, out)
        note("forward", _values(w).shape, "triton")
        if not one.empty:
            # As many programs as there is room for when the dispatch has ended: those that find none yet begin then.
            on_gpu = out.device.type == "cuda"
            count = max(1, programs(out.device) - KEPT_FREE) if on_gpu else programs(out.device)
            rows_by_weights_as_they_come[(one.shape.programs * count,)](
                *one.rows, *one.weights, one.bytes_of_weights, where.where, self.arrived, self.scratch, self.scratch[self.chunks :],
                self.noted, out, *one.sizes[:3], self.chunks, *one.sizes[3:], **one.options, CHUNK=CHUNK,
                STRIP=STRIP_OF_CODES if one.scaled else 1, WINDOW=WINDOW, LINES=LINES, BYTES=one.bytes_of_weights.element_size(),
            )  # fmt: skip

    def down(self, x: Operand, w: Operand, where: Segments, out: torch.Tensor) -> None:
        """x @ w^T by expert, to out, block by block as `ready` tells combine."""
        from pplx_comm.moe.kernels.beside import rows_by_weights_with_words

        one = _Product(x, w, where, out)
        note("forward", _values(w).shape, "triton")
        if one.empty:
            self.begun[:1].fill_(self.producers(x, where))
            return
        rows_by_weights_with_words[(self.producers(x, where),)](
            *one.rows, *one.weights, where.where, self.scratch[self.chunks :], self.ready, self.begun, out, self.kept, *one.sizes,
            ORDERED=self.ordered and not where.room, **one.options, CHUNK=CHUNK, GROUP=one.shape.group, OWNERS=OWNERS,
            PROGRAMS=one.shape.programs,
        )  # fmt: skip

    def ready_value(self, x: Operand, w: Operand, where: Segments) -> int:
        """What a word of `ready` has when its rows are written."""
        shape = _shape(x, where)
        return -(-_values(w).shape[1] // shape.side) * -(-(where.room or HOOK_ROWS) // shape.rows)


def words_of_scratch(chunks: int) -> int:
    """Behind what is noted of chunks: programs that have begun, tiles taken, multiprocessors, and a word for each of these."""
    return 2 * chunks + 1 + 3 + OWNERS


def _values(x: Operand) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else x[0]


def _shape(x: Operand, where: Segments) -> Shape:
    """As by itself, so that it has the same bits."""
    of = tiles.shape_of_rows if isinstance(x, torch.Tensor) else tiles.shape_of_codes
    values = _values(x)
    return of(where.average(len(values)), values.device)


class _Product:
    """What both kernels are told of operands."""

    def __init__(self, x: Operand, w: Operand, where: Segments, out: torch.Tensor) -> None:
        self.scaled = not isinstance(x, torch.Tensor)
        values, scale = (x, out) if isinstance(x, torch.Tensor) else (x[0], x[1])
        weights, weights_scale = (w, out) if isinstance(w, torch.Tensor) else (w[0], w[1].contiguous())
        values, weights = values.contiguous(), weights.contiguous()
        self.shape = s = _shape(x, where)
        self.empty = not out.numel() or not len(weights)
        tma = not self.empty and by_tma(values, weights)
        self.rows = described(values, [s.rows, s.inner]) if tma else values, scale
        self.weights = described(weights, [s.side, s.inner]) if tma else weights, weights_scale
        self.bytes_of_weights = weights
        strides = strides_of_scales(scale) if self.scaled else (0, 0, 0)
        self.sizes = len(weights), where.room, len(values), values.shape[1], weights.shape[1], *strides
        self.options = {
            "EXPERTS": power_of_two_at_least(len(weights)), "PADDED": where.room > 0, "SCALED": self.scaled, "TMA": tma,
            "ASSEMBLY": out.device.type == "cuda", "ROWS": s.rows, "SIDE": s.side, "INNER": s.inner, "BLOCK": HOOK_ROWS,
            "num_warps": s.warps, "num_stages": s.stages, **tiles.most_registers(s),
        }  # fmt: skip
