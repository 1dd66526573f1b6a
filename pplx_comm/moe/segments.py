"""Where each expert's rows are among those that a rank received. The host does not know: it waits for nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pplx_comm.errors import Error
from pplx_comm.handles import Dispatched


@dataclass(frozen=True)
class Segments:
    """Segments of rows that lie as Ragged or Padded lays them, one under the other.

    where: int32. Ragged: [experts + 1], where each expert's begin, d.offsets; padding counts. Padded: [experts], d.counts.
    room: Padded: rows that each expert has room for. 0 is Ragged.
    expected: how many an expert has on average, as a hint: a wrong one costs time only. 0: unknown.
    """

    where: torch.Tensor
    room: int = 0
    expected: int = 0

    @staticmethod
    def of(where: torch.Tensor | Segments) -> Segments:
        """Offsets are those of Ragged."""
        return where if isinstance(where, Segments) else Segments(where)

    @property
    def experts(self) -> int:
        return self.where.shape[0] - (self.room == 0)

    def average(self, rows: int) -> int:
        """The rows of an expert if the host knows them; else as if all memory for rows were filled."""
        return self.expected or self.room or rows // max(self.experts, 1)

    def slices(self) -> Iterator[tuple[int, slice]]:
        """Experts that have rows, and where those are. The host waits."""
        numbers = self.where.tolist()
        pairs = [(e * self.room, e * self.room + min(n, self.room)) for e, n in enumerate(numbers)] if self.room else None
        for expert, (begin, end) in enumerate(itertools.pairwise(numbers) if pairs is None else pairs):
            if end > begin:
                yield expert, slice(begin, end)


def segments(d: Dispatched, expected: int = 0) -> Segments:
    """Returns the segments of a dispatch: with Padded, those of d.x.flatten(0, 1). expected: see Segments."""
    if d.offsets is not None:
        return Segments(d.offsets, expected=expected)
    if d.x.dim() != 3:
        raise Error("segments: rows in Compact layout belong to no single expert")
    return Segments(d.counts, d.x.shape[1], expected)
