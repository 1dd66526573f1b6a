"""Tables, JSON and plots of bench/layer.py."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.clock import Figure
from bench.moe.measure import Point
from bench.moe.options import LayerOptions
from bench.proxy import markdown
from pplx_comm._version import __version__
from pplx_comm.machine import machine, versions

SCHEMA = 1
STAGES = ("dispatch", "up", "activation", "down", "combine", "all")


def record(options: LayerOptions, points: Sequence[Point], ranks: int, where: str, arguments: Sequence[str]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "version": __version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join([Path(sys.argv[0]).name, *arguments]),
        "machine": machine() | {"device": where},
        "versions": versions(),
        "ranks": ranks,
        "cores": os.cpu_count(),
        "options": options.described(),
        "points": [point.described() for point in points],
    }


def tables(points: Sequence[Point]) -> str:
    """Times, then stages. What is off is named below."""
    on = [point for point in points if point.off is None]
    many = len({point.routing for point in on}) > 1
    cells = [
        ["tokens", *(["routing"] if many else []), "precision", "layer", "forward, us", "in a graph", "and backward", "error", ""]
    ]
    for point in sorted(on, key=_order):
        dropped = point.notes.get("dropped")
        cells.append([
            str(point.tokens), *([point.routing] if many else []), point.precision, point.layer, _p50(point.forward),
            _p50(point.graph), _p50(point.both), f"{100 * point.error:.2f} %",
            f"{100 * dropped:.1f} % of choices dropped" if dropped else "",
        ])  # fmt: skip
    stages = [["tokens", *(["routing"] if many else []), "precision", "layer", *STAGES]]
    for point in sorted(on, key=_order):
        times = [_number(point.stages[stage]) if stage in point.stages else "" for stage in STAGES]
        stages.append([str(point.tokens), *([point.routing] if many else []), point.precision, point.layer, *times])
    off = {f"{point.layer} ({point.precision}): {point.off}" for point in points if point.off is not None}
    return "\n".join([*markdown(cells), "", *markdown(stages), "", *(f"off: {one}" for one in sorted(off))])


def _order(point: Point) -> tuple[Any, ...]:
    return point.tokens, point.routing, point.precision


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _p50(figure: Figure | None) -> str:
    return "" if figure is None else _number(figure.p50)


def heading(of: dict[str, Any]) -> str:
    o = of["options"]
    return (
        f"{of['ranks']} ranks, hidden {o['hidden']}, intermediate {o['intermediate']}, {o['experts']} experts, top-{o['top_k']}\n"
        f"{of['machine']['device']}; pplx_comm {of['version']}, {of['date']}"
    )


def plot(of: dict[str, Any], path: str) -> None:
    """Times against tokens, with the first routing: forward, in a graph where there is one; and forward with backward."""
    plt = pyplot()
    routing = of["options"]["routings"][0]
    points = [p for p in of["points"] if p["routing"] == routing and p["off"] is None]
    figure, axes = plt.subplots(1, 2, figsize=(13, 5.4), sharey=True)
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(p["layer"] for p in points))}
    for axis, title in zip(axes, ("forward", "forward and backward"), strict=True):
        for layer, precision in dict.fromkeys((p["layer"], p["precision"]) for p in points):
            times = [
                (p["tokens"], (p["graph"] or p["forward"] if title == "forward" else p["both"] or {}).get("p50"))
                for p in points
                if (p["layer"], p["precision"]) == (layer, precision)
            ]
            known = [(tokens, us) for tokens, us in times if us is not None]
            if known:
                style = {"bf16": "-", "fp8": "--", "mxfp8": ":"}[precision]
                axis.plot(*zip(*known, strict=True), style, marker="o", color=colours[layer], label=f"{layer}, {precision}")
        axis.set(title=title, xscale="log", yscale="log", xlabel="tokens per rank")
        axis.set_xticks(of["options"]["tokens"], [str(n) for n in of["options"]["tokens"]])
        axis.grid(True, alpha=0.3)
    axes[0].set_ylabel("us, p50 of the slowest rank")
    axes[0].legend(frameon=False)
    figure.suptitle(heading(of), fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_capacity(of: dict[str, Any], path: str) -> None:
    """What experts compute, ours and with padded capacity, by routing, at the largest size; what was dropped is on the bars."""
    plt = pyplot()
    o = of["options"]
    routings, tokens = o["routings"], max(o["tokens"])
    points = [
        p for p in of["points"] if p["tokens"] == tokens and p["precision"] == "bf16" and p["off"] is None
        and (p["layer"] == "ours" or p["layer"].startswith("capacity"))
    ]  # fmt: skip
    layers = list(dict.fromkeys(p["layer"] for p in points))
    figure, axis = plt.subplots(figsize=(8.5, 5))
    for place, layer in enumerate(layers):
        for p in (p for p in points if p["layer"] == layer):
            at = routings.index(p["routing"]) + (place - (len(layers) - 1) / 2) * 0.8 / len(layers)
            label = ("ours, dropless" if layer == "ours" else layer) if p["routing"] == routings[0] else None
            height = p["notes"]["rows"] / (tokens * o["top_k"])
            axis.bar(at, height, width=0.75 / len(layers), color=f"C{place}", label=label)
            dropped = p["notes"].get("dropped")
            text = f"{height:.1f}" + (f"\n{100 * dropped:.2g} %\ndropped" if dropped else "")
            axis.text(at, height, text, ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(routings)), [f"{routing} routing" for routing in routings])
    axis.set(ylabel="rows of the fullest rank's experts, beside an even share", title=f"{tokens} tokens per rank")
    axis.margins(y=0.15)
    axis.legend(frameon=False)
    figure.suptitle(heading(of), fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
