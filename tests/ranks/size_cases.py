"""Tensors whose last rows lie beyond 2^31 elements and 2^32 bytes, of which only the rows that are used are ever touched."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from typing import Any

import rank_cases
import reference
import torch
from cases import Case
from harness import seed
from outcomes import must
from rank_cases import Runner

import pplx_comm as pc
from pplx_comm.gpus import cuda_module

FAR_BYTES, FAR_ELEMENTS = 2**32, 2**31
HIDDEN = 7168
MOST_RESIDENT = 1 << 30
"""Bytes of memory that a rank may come to have during a case: the least that it could clear by mistake is four times as much."""


def far_layout(layout: str, row_bytes: int) -> dict[str, Any]:
    """Layout of a Case in which ranks with four experts each have the rows of their last one beyond both. row_bytes: of a row of
    d.x."""
    rows = -(-FAR_BYTES // (3 * row_bytes)) + 1
    if layout == "padded":
        return {"layout": "padded", "rows": rows}
    if layout == "ragged":
        return {"layout": "ragged", "align": rows, "rows": 4 * rows}
    return {"layout": layout}


def far_case(number: int, layout: str, wire: str, *, world: int = 2, **changes: Any) -> Case:
    row_bytes = HIDDEN * (2 if wire == "native" else 1)
    arguments = {"max_tokens": 20, "steps": 4, **far_layout(layout, row_bytes), **changes}
    return Case(seed() * 100 + number, world, num_experts=4 * world, top_k=3, hidden=HIDDEN, wire=wire, **arguments)


def are_far(case: Case, found: list[dict[str, int]]) -> None:
    """That the rows were where this is about; Compact has them one after the other, so its inputs and outputs alone are far apart."""
    for rank in found:
        assert case.layout == "compact" or (rank["byte"] > FAR_BYTES and rank["element"] > FAR_ELEMENTS), found


def far_apart(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, of which the last one begins beyond both."""
    if rows.shape[0] < 2 or rows.nbytes > FAR_BYTES:
        return rows
    unit = 16 // rows.element_size()
    all_rows = max(FAR_ELEMENTS, FAR_BYTES // rows.element_size())
    stride = (all_rows // (rows.shape[0] - 1) // unit + 1) * unit
    apart = torch.empty_strided(rows.shape, (stride, 1), dtype=rows.dtype, device=rows.device)
    return apart.copy_(rows)


class FarRunner(Runner):
    """All inputs and outputs that may have rows far apart have them so. Unused rows are memory that was never touched."""

    def __init__(self, me: Any, case: Case, a2a: pc.AllToAll) -> None:
        super().__init__(me, case, a2a)
        for step in self.steps:
            step.strided = [True] * case.world_size
        # One step at least is plain and whole: its rows of own tokens cross no memory.
        last = self.steps[-1]
        last.released, last.tails, last.late_weights, last.how = False, None, None, ["whole"] * case.world_size
        self.farthest = 0  # row of d.x, of those received

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        return far_apart(rows)

    def run_experts(self, d: pc.Dispatched, weighted: bool) -> torch.Tensor:
        if self.case.layout == "compact":
            return super().run_experts(d, weighted)[: int(d.num_rows)]  # the last one is used
        shape = self.case.shape
        out = torch.empty(d.x.shape, dtype=shape.dtype, device=self.a2a.device)
        first = shape.experts_of(self.rank).start
        for e, (at, where) in enumerate(self._segments(d)):
            rows = d.x[where].float() if d.scale is None else reference.dequantise(d.x[where], d.scale[where], self.case.wire)
            out[where] = reference.expert(shape, torch.full((rows.shape[0],), first + e), rows).to(out.device)
            self.farthest = max(self.farthest, at + rows.shape[0] - 1)
        return out

    def spoil(self, expert_out: torch.Tensor, d: pc.Dispatched) -> None:
        if self.case.layout == "compact":
            super().spoil(expert_out, d)
            return
        for _, where in self._segments(d):
            expert_out[where] = torch.nan

    def _segments(self, d: pc.Dispatched) -> Iterator[tuple[int, Any]]:
        """The row that an expert's first one is, and where its rows are."""
        for e, count in enumerate(d.counts.tolist()):
            if self.case.layout == "padded":
                yield e * d.x.shape[1], (e, slice(0, count))
            else:
                at = int(d.offsets[e])
                yield at, slice(at, at + count)

    def _digest(self, d: pc.Dispatched) -> None:
        pass


def resident() -> int:
    """The most that this process has had so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def found(runner: FarRunner) -> dict[str, int]:
    """The first byte and element of the farthest row that was received, and how many steps went by the large kernels."""
    shape, stats = runner.case.shape, runner.a2a.stats()
    element = runner.farthest * shape.hidden
    size = 1 if shape.quantised else shape.dtype.itemsize
    return {"element": element, "byte": element * size, "large": stats.get("large_combines", 0)}


def far_rows(me: Any, case: Case) -> dict[str, int]:
    """A case whose rows are far apart, against the reference. Nearly nothing between them is touched."""
    before = resident()
    with rank_cases.open_all_to_all(me, case) as a2a:
        runner = FarRunner(me, case, a2a)
        runner.run()
        where = found(runner)
    grown = resident() - before
    must(grown < MOST_RESIDENT, f"{grown >> 20} MiB were touched")
    return where


def shared_resident() -> int:
    """The bytes of memory between ranks whose pages this process has mapped."""
    smaps = open("/proc/self/smaps").read()
    kib = re.findall(r"^[0-9a-f]+-.* /memfd:pplx_comm .*\n(?:[A-Za-z_]+:.*\n)*?Rss: +(\d+) kB", smaps, re.MULTILINE)
    return 1024 * sum(map(int, kib))


def mapped_pages(me: Any, case: Case) -> dict[str, int]:
    with rank_cases.open_all_to_all(me, case) as a2a:
        opened = shared_resident()
        rank_cases.Good(me, case, a2a).step()
        return {"opened": opened, "stepped": shared_resident(), "heap": a2a._steps.session.config.heap_bytes}


def agreed(me: Any, case: Case, tuned: list[int]) -> dict[str, int]:
    """A case on GPUs of which each would have steps go by the large kernels from another number of tokens on: what they agreed on."""
    kernels = cuda_module()
    before = kernels.large_tokens
    setattr(kernels, "large_tokens", lambda config, device, num_sms: tuned[me.rank])  # noqa: B010
    try:
        with rank_cases.open_all_to_all(me, case) as a2a:
            Runner(me, case, a2a).run()
            stats: dict[str, int] = a2a.stats()
            return stats
    finally:
        setattr(kernels, "large_tokens", before)  # noqa: B010
