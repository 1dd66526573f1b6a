"""Two steps in flight on two streams beside a GEMM on the rest of the GPU: what the GEMM loses, and what the bytes alone cost it.

mpirun -n 2 --bind-to none python bench/overlap.py --tokens 4096 --wire fp8 --layout compact --num-sms 4,8,16,24 --rounds 1000

bench/gpu/beside.py says what the lines of the table are. The run fails if a step fails, times out, or has another result than the
first one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

if __name__ == "__main__":
    import checkout  # noqa: F401

from bench.gpu import measure as gpu
from bench.gpu.beside import STREAMS, WAYS, Asked, Beside, Measurement
from bench.gpu.device import local_rank
from bench.gpu.gemm import NAMES, Gemms
from bench.harness import report
from bench.harness.options import Options, from_arguments, parser_of
from bench.harness.plot import pyplot
from bench.harness.rank import leave, measure
from bench.harness.world import World
from bench.proxy import markdown
from pplx_comm._version import __version__
from pplx_comm.layer_arguments import positive

STYLES = {"fewer SMs": ("#999999", "v"), "bytes": ("#d62728", "s"), "steps": ("#1f77b4", "o"), "delayed steps": ("#2ca02c", "^")}


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if unknown := set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: there are {' and '.join(NAMES)}")
    return names


def parser() -> argparse.ArgumentParser:
    p = parser_of("overlap.py", __doc__)
    p.set_defaults(device="cuda", peers=(), tokens=(4096,), num_sms=(4, 8, 16, 24))
    default = Asked()
    g = p.add_argument_group("beside a GEMM; --num-sms are those of each of the two steps (4,8,16,24)")
    shapes = default.shapes
    for name, of, what in (
        ("rounds", default.rounds, "rounds with random delays"),
        ("calm", default.calm, "rounds of each other way"),
        ("gemm-size", shapes.size, "compute: each side"),
        ("gemm-experts", shapes.experts, "weights: experts"),
        ("gemm-rows", shapes.rows, "weights: rows of an expert"),
        ("intermediate", shapes.intermediate, "weights: of a layer"),
    ):
        g.add_argument(f"--{name}", type=positive, default=of, metavar="N", help=f"{what} ({of})")
    longest = default.delay_us
    g.add_argument("--delay-us", type=float, default=longest, metavar="US", help=f"longest delay before a phase ({longest:g})")
    g.add_argument(
        "--gemm", type=_names, default=default.gemms, metavar="G,G",
        help="compute: bound by computing; weights: bound by reading the weights of all experts of a rank (both)",
    )  # fmt: skip
    return p


def asked_of(a: argparse.Namespace) -> Asked:
    shapes = Gemms(size=a.gemm_size, experts=a.gemm_experts, intermediate=a.intermediate, rows=a.gemm_rows)
    return Asked(rounds=a.rounds, calm=a.calm, delay_us=a.delay_us, gemms=a.gemm, shapes=shapes)


def table(options: Options, world: World, points: list[Beside], device: str) -> str:
    o = options
    lines = [
        f"pplx_comm {__version__}: {world.size} ranks, {device}",
        f"hidden {o.hidden}, {o.experts} experts, top-{o.top_k}, wire {o.wire}, {o.layout}, {o.routing} routing"
        f"{report.slots(o, world)}",
        f"{STREAMS} steps in flight beside GEMMs that last longer; microseconds of a round, slowest rank",
        "",
    ]
    for name, about in dict.fromkeys((point.gemm, point.about) for point in points):
        cells = [["tokens", "SMs", "GEMMs", "", "rounds", "p50", "p99", "slowdown", "lost", "beside p50", "p99"]]
        for point in (point for point in points if point.gemm == name):
            for i, way in enumerate(WAYS):
                times, beside = point.times[way], point.beside.get(way)
                head = [str(point.tokens), f"{STREAMS} x {point.num_sms}", str(point.gemms)] if i == 0 else ["", "", ""]
                figures = [f"{times.p50:.0f}", f"{times.p99:.0f}", f"{point.slowdown(way):.3f}", f"{point.lost(way):.0f}"]
                others = [f"{beside.p50:.0f}", f"{beside.p99:.0f}"] if beside else ["", ""]
                cells.append([*head, way, str(point.rounds[way]), *figures, *others])
        lines += [f"{name}: {about}", "", *markdown(cells), ""]
    rounds = sum(point.rounds["delayed steps"] for point in points)
    lines.append(f"{rounds} rounds of {STREAMS} steps with delays: no timeout, and the same bits in all")
    return "\n".join(lines)


def record(options: Options, asked: Asked, world: World, points: list[Beside], arguments: list[str]) -> dict[str, Any]:
    return {
        **report.origin(options, world, arguments),
        "asked": asdict(asked),
        "points": [
            {
                **asdict(point),
                "slowdown": {way: point.slowdown(way) for way in WAYS},
                "lost": {way: point.lost(way) for way in WAYS},
            }
            for point in points
        ],
    }


def lines_of(record: dict[str, Any], gemm: str, tokens: int) -> dict[str, list[tuple[int, float, float]]]:
    """Way -> multiprocessors of a step, microseconds lost in the median round, and how much more that is at p99."""
    points = [p for p in record["points"] if (p["gemm"], p["tokens"]) == (gemm, tokens)]
    points.sort(key=lambda p: int(p["num_sms"]))
    return {
        way: [(p["num_sms"], p["lost"][way], p["times"][way]["p99"] - p["times"][way]["p50"]) for p in points]
        for way in WAYS if way != "alone"
    }  # fmt: skip


def plot(record: dict[str, Any], path: str) -> None:
    plt = pyplot()

    pictures = list(dict.fromkeys((p["gemm"], p["tokens"]) for p in record["points"]))
    figure, axes = plt.subplots(1, len(pictures), figsize=(6.2 * len(pictures), 5.2), squeeze=False)
    for axis, (gemm, tokens) in zip(axes[0], pictures, strict=True):
        of = [p for p in record["points"] if (p["gemm"], p["tokens"]) == (gemm, tokens)]
        for way, found in lines_of(record, gemm, tokens).items():
            colour, marker = STYLES[way]
            x, y, up = zip(*found, strict=True)
            axis.errorbar(x, y, yerr=[[0.0] * len(up), up], color=colour, marker=marker, capsize=3, elinewidth=0.8, label=way)
        axis.set_xticks(sorted(p["num_sms"] for p in of))
        axis.set_title(f"{gemm}, {tokens} tokens\n{of[0]['about']}", fontsize=9)
        axis.set_xlabel(f"SMs of each of the {STREAMS} steps")
        axis.grid(True, alpha=0.3)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0][0].set_ylabel("µs that a round of GEMMs loses, p50 with p99 whiskers")
    axes[0][0].legend(frameon=False)
    o = record["options"]
    layer = f"hidden {o['hidden']}, {o['experts']} experts, top-{o['top_k']}, wire {o['wire']}, {o['layout'].partition('(')[0]}"
    figure.suptitle(f"{record['ranks']} ranks, {layer}; pplx_comm {record['version']}, {record['date']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def overlap(asked: Asked, options: Options, world: World, arguments: Sequence[str]) -> None:
    device = gpu.opened(local_rank())
    points = Measurement(options, asked, world, device).run()
    if world.rank != 0:
        return
    print(table(options, world, points, device.name), flush=True)
    if options.json:
        report.write_json(options.json, record(options, asked, world, points, list(arguments)))
    if options.plot:
        plot(record(options, asked, world, points, list(arguments)), options.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    p = parser()
    parsed = p.parse_args(given)
    if None in parsed.num_sms:
        p.error("--num-sms: a number for each step, not all: the rest is the GEMM's")
    if parsed.device != "cuda":
        p.error("--device: multiprocessors are a GPU's")
    return measure(from_arguments(parsed), given, partial(overlap, asked_of(parsed)))


if __name__ == "__main__":
    leave(main())
