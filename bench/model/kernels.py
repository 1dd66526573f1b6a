"""Kernel times, the model's input: what each half of an operation takes, by rows. No network can be run here; GPUs can."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass
from math import comb

from bench.model import _model


def distinct_ranks(ranks: int, experts: int = 256, top_k: int = 8) -> float:
    """Expected number of ranks that a token's choices live on."""
    missed = comb(experts - experts // ranks, top_k) / comb(experts, top_k)
    return ranks * (1 - missed)


@dataclass(frozen=True)
class Kernels:
    """An operation in one launch: fixed + rows * row_us, of which its send half and its receive half take half each."""

    name: str
    source: str
    dispatch_fixed_us: float
    dispatch_row_us: float
    combine_fixed_us: float
    combine_row_us: float

    def into(self, costs: _model.OurCosts) -> None:
        dispatch = _model.KernelTime(self.dispatch_fixed_us / 2, self.dispatch_row_us / 2)
        combine = _model.KernelTime(self.combine_fixed_us / 2, self.combine_row_us / 2)
        costs.dispatch_send = costs.dispatch_recv = dispatch
        costs.combine_send = costs.combine_recv = combine


def through(name: str, source: str, dispatch: tuple[float, float], combine: tuple[float, float]) -> Kernels:
    """The line through what 1 and 4096 tokens take at 4 ranks, less the way of a flag between GPUs, which the model adds."""
    rows = distinct_ranks(4)
    flag = _model.OurCosts().mapped_us

    def line(one: float, many: float) -> tuple[float, float]:
        row = (many - one) / (4095 * rows)
        return one - rows * row - flag, row

    return Kernels(name, source, *line(*dispatch), *line(*combine))


# Fixed costs did not differ between two and four GPUs when both were last measured (bench/results/h200-2-gpus.md, h200-4-gpus.md).
KERNELS = {
    k.name: k
    for k in (
        through(
            "measured",
            "measured over NVLink, Compact: 1 token on 2 x H200 (6d48fd1, bench/results/h200-2-gpus.md), dispatch 6.8 and combine "
            "5.4 us; 4096 tokens on 4 x H200 (9f47e96, bench/results/h200-large.md), 303 and 473 us",
            (6.8, 302.9),
            (5.4, 473.4),
        ),
        through(
            "bars",
            "aimed at: 1 and 4096 tokens at 4 ranks: dispatch 7.5 and 275 us, combine 6.5 and 515 us",
            (7.5, 275.0),
            (6.5, 515.0),
        ),
    )
}


def of_copies(few: float, many: float) -> _model.KernelTime:
    """The line through what 32 and 128 tokens take at top-8 with a row for each choice, less the way of a flag between GPUs."""
    row = (many - few) / (96 * 8)
    return _model.KernelTime(few - 32 * 8 * row - _model.OurCosts().mapped_us, row)


# bench/results/h200-2-gpus.md has them.
DEEPEP_SOURCE = (
    "measured: DeepEP V1's low-latency kernels on 2 x H200 over NVLink, 32 and 128 tokens: "
    "dispatch 17.8 and 31.9 us, combine 26.0 and 46.7 us"
)
DEEPEP_DISPATCH, DEEPEP_COMBINE = of_copies(17.8, 31.9), of_copies(26.0, 46.7)


# DeepEP V1's normal mode on 8 GPUs of one node, 4096 tokens: what the NVLink of an H800 lets through by its README, and a combine
# on 24 multiprocessors of an H200 (aiconfigurator). Fixed: 1 token on the H200.
NORMAL_H800 = Kernels("H800", "153 and 158 GB/s over NVLink", 26.7, 7392 / 153e3, 47.1, 14336 / 158e3)
NORMAL_HOPPER = Kernels("H200", "979 us", 26.7, 7392 / 319e3, 47.1, (979 - 47.1) / (4096 * distinct_ranks(8)))


def given(text: str) -> Kernels:
    """Parses a name, or four numbers: dispatch fixed and per row, combine fixed and per row."""
    if text in KERNELS:
        return KERNELS[text]
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 4 or min(numbers) < 0:
        raise ArgumentTypeError(f"{text!r} is neither {' nor '.join(KERNELS)} nor four numbers")
    return Kernels("given", f"--kernels {text}", *numbers)
