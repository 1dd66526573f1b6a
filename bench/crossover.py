"""From how many tokens the large kernels are faster, by number of multiprocessors. PPLX_COMM_LARGE_TOKENS should be what a combine
says; a dispatch is large from twice that.

mpirun -n 2 --bind-to none python bench/crossover.py --wire fp8 --num-sms 8,16,24,32,all --json crossover.json

Each point is measured with both kernels, one after the other, in graphs, on the same inputs. The large ones win from the least
number of tokens on at which, and at all larger ones, they are no slower. The kernels that ran are asked what they were.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

if __name__ == "__main__":
    import checkout  # noqa: F401

import torch

from bench.gpu import measure as gpu
from bench.gpu.device import local_rank
from bench.harness import report
from bench.harness.clock import Figure
from bench.harness.options import Options, from_arguments, parser_of
from bench.harness.progress import Progress
from bench.harness.rank import leave, measure
from bench.harness.reference import Wrong
from bench.harness.results import FUSED
from bench.harness.world import World
from bench.proxy import markdown
from pplx_comm._version import __version__

VARIABLE = "PPLX_COMM_LARGE_TOKENS"
KERNELS = {"plain": 1 << 30, "large": 1}
"""Their names, and the setting that makes every step theirs."""
TOKENS = (128, 256, 384, 512, 640, 768, 896, 1024, 1536, 2048, 4096)


@dataclass
class Both:
    """One number of tokens on one number of multiprocessors: microseconds by kernel and phase, of the slowest rank."""

    tokens: int
    num_sms: int | None
    us: dict[str, dict[str, Figure]] = field(default_factory=dict)

    def large_wins(self, phase: str) -> bool:
        return self.us["large"][phase].p50 <= self.us["plain"][phase].p50


def wins_from(points: Sequence[Both], phase: str) -> int | None:
    """Tokens from which on the large kernels are no slower. None: they are slower at the largest size. points: of one num_sms."""
    found = None
    for point in sorted(points, key=lambda one: one.tokens, reverse=True):
        if not point.large_wins(phase):
            break
        found = point.tokens
    return found


def crossovers(points: Sequence[Both]) -> list[dict[str, Any]]:
    """Crossovers for each number of multiprocessors and each phase."""
    found = []
    for num_sms in dict.fromkeys(point.num_sms for point in points):
        of = [point for point in points if point.num_sms == num_sms]
        found.append({"num_sms": num_sms, "from": {phase: wins_from(of, phase) for phase in FUSED}})
    return found


def table(options: Options, world: World, points: Sequence[Both], device: str) -> str:
    o = options
    cells = [["SMs", "tokens", *(f"{phase}, {kernel}" for phase in FUSED for kernel in KERNELS), "large/plain"]]
    for point in points:
        us = [f"{point.us[kernel][phase].p50:.1f}" for phase in FUSED for kernel in KERNELS]
        trip = point.us["large"]["round trip"].p50 / point.us["plain"]["round trip"].p50
        cells.append([report.sms(point.num_sms), str(point.tokens), *us, f"{trip:.2f}"])
    wins = [["SMs", *(f"{phase}: large from, tokens" for phase in FUSED)]]
    for one in crossovers(points):
        wins.append([report.sms(one["num_sms"]), *("never" if n is None else str(n) for n in one["from"].values())])
    return "\n".join([
        f"pplx_comm {__version__}: {world.size} ranks, {device}",
        f"hidden {o.hidden}, {o.experts} experts, top-{o.top_k}, wire {o.wire}, {o.layout}, {o.routing} routing; microseconds",
        "", *markdown(cells), "", *markdown(wins), "",
    ])  # fmt: skip


def record(options: Options, world: World, points: Sequence[Both], arguments: list[str]) -> dict[str, Any]:
    wins = crossovers(points)
    return {**report.origin(options, world, arguments), "points": [asdict(point) for point in points], "large_wins": wins}


@contextlib.contextmanager
def setting(value: int) -> Iterator[None]:
    """Sets the variable for AllToAlls that are made meanwhile."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(value)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def run(options: Options, world: World, device: Any) -> list[Both]:
    points, notes = [], list[str]()
    progress = Progress(options.tokens, quiet=world.rank != 0)
    try:
        with torch.no_grad():
            for tokens in options.tokens:
                size = gpu.Size(options, world, device, tokens, notes)
                for num_sms in options.num_sms:
                    progress.show(tokens, f"{report.sms(num_sms)} SMs", 0.0)
                    points.append(_point(size, options, world, device, Both(tokens, num_sms)))
    finally:
        progress.close()
    if said := [note for of_rank in world.gather(notes, "wrong results") for note in of_rank]:
        raise Wrong("\n  ".join(["wrong results:", *said[:8]]))
    return sorted(points, key=lambda point: (point.num_sms is None, point.num_sms or 0, point.tokens))


def _point(size: gpu.Size, options: Options, world: World, device: Any, point: Both) -> Both:
    for kernel, least in KERNELS.items():
        with setting(least):
            a2a = world.all_or_none(lambda: size.open(world.comm, options.transports[0], point.num_sms), f"{kernel} kernels")
        with a2a:
            point.us[kernel] = size.kernels(a2a)
            ran = device.large_launches(a2a)
        if (ran > 0) != (kernel == "large"):
            raise Wrong(f"{point.tokens} tokens: {ran} large launches, where {kernel} kernels were asked for")
    return point


def crossover(options: Options, world: World, arguments: Sequence[str]) -> None:
    device = gpu.opened(local_rank())
    points = run(options, world, device)
    if world.rank != 0:
        return
    print(table(options, world, points, device.name), flush=True)
    if options.json:
        report.write_json(options.json, record(options, world, points, list(arguments)))


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = parser_of("crossover.py", __doc__)
    parser.set_defaults(device="cuda", peers=(), tokens=TOKENS, num_sms=(8, 16, 24, 32, None))
    parsed = parser.parse_args(given)
    if parsed.device != "cuda":
        parser.error("--device: both kernels are a GPU's")
    return measure(from_arguments(parsed), given, crossover)


if __name__ == "__main__":
    leave(main())
