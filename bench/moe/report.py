"""Tables, JSON and plots of bench/layer.py."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.harness.clock import Figure
from bench.harness.plot import pyplot
from bench.moe.measure import Point
from bench.moe.options import LayerOptions
from bench.proxy import markdown
from pplx_comm._version import __version__
from pplx_comm.machine import machine, versions

SCHEMA = 1
STAGES = ("dispatch", "up", "activation", "down", "experts", "combine", "all")


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
        "points": [point.described() | {"beside": beside(point, points), "exposed": exposed(point, points)} for point in points],
    }


BESIDE = ("mega", "nccl")
"""Layers of others beside whose times ours stand."""


def beside(point: Point, points: Sequence[Point]) -> dict[str, float]:
    """How many times as long others take for the same tokens in the same run, in whatever precision they have: above 1, this layer
    is faster. "training": forward and backward."""
    found = {}
    for name in BESIDE:
        it = _like(points, point, layer=name)
        if it is None:
            continue
        if it.best and point.best:
            found[name] = it.best.p50 / point.best.p50
        if it.both and point.both:
            found[f"{name}, training"] = it.both.p50 / point.both.p50
    return found


def exposed(point: Point, points: Sequence[Point]) -> float | None:
    """Returns how much longer a forward pass is than its products alone, as a share of dispatch and combine alone."""
    it = _like(points, point, layer="ours", precision=point.precision) if point.layer == "ours" else None
    if it is None or not it.alone or point.best is None:
        return None
    return (point.best.p50 - it.alone["compute"].p50) / it.alone["step"].p50


def _like(points: Sequence[Point], point: Point, **wanted: str) -> Point | None:
    """A point that was measured, of the same tokens."""
    wanted_here = {"tokens": point.tokens, "routing": point.routing, "off": None, **wanted}
    return next((one for one in points if all(getattr(one, name) == value for name, value in wanted_here.items())), None)


def tables(points: Sequence[Point]) -> str:
    """Times, then stages. What is off is named below."""
    on = sorted((point for point in points if point.off is None), key=_order)
    many = len({point.routing for point in on}) > 1
    head = ["tokens", *(["routing"] if many else []), "precision", "layer"]
    cells = [[
        *head, "product", "forward, us", "in a graph", "and backward", "beside mega", "beside nccl",
        "training beside nccl", "exposed", "error", "",
    ]]  # fmt: skip
    stages = [[*head, *STAGES, "compute alone", "step alone"]]
    for point in on:
        names = [str(point.tokens), *([point.routing] if many else []), point.precision, point.layer]
        dropped, others = point.notes.get("dropped"), beside(point, points)
        ratios = [f"{others[name]:.2f}x" if name in others else "" for name in ("mega", "nccl", "nccl, training")]
        share = exposed(point, points)
        cells.append([
            *names, point.notes.get("product", ""), _p50(point.forward), _p50(point.graph),
            _p50(point.both), *ratios, "" if share is None else f"{100 * share:.0f} %", f"{100 * point.error:.2f} %",
            f"{100 * dropped:.1f} % of choices dropped" if dropped else "",
        ])  # fmt: skip
        times = [_number(point.stages[stage]) if stage in point.stages else "" for stage in STAGES]
        stages.append([*names, *times, *(_p50(point.alone.get(what)) for what in ("compute", "step"))])
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
    """Times against tokens, with the first routing: forward, in a graph where there is one; and forward with backward, if it was
    measured."""
    plt = pyplot()
    routing = of["options"]["routings"][0]
    points = [p for p in of["points"] if p["routing"] == routing and p["off"] is None]
    titles = ["forward", *(["forward and backward"] if any(p["both"] for p in points) else [])]
    figure, (axes,) = plt.subplots(1, len(titles), figsize=(1 + 6 * len(titles), 5.4), sharey=True, squeeze=False)
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(p["layer"] for p in points))}
    for axis, title in zip(axes, titles, strict=True):
        for layer, precision in dict.fromkeys((p["layer"], p["precision"]) for p in points):
            times = [
                (p["tokens"], (p["graph"] or p["forward"] if title == "forward" else p["both"] or {}).get("p50"))
                for p in points
                if (p["layer"], p["precision"]) == (layer, precision)
            ]
            known = [(tokens, us) for tokens, us in times if us is not None]
            if known:
                style = {"bf16": "-", "fp8-dispatch": "-.", "fp8": "--", "mxfp8": ":"}[precision]
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
    """Plots rows that experts compute, ours and with padded capacity, by routing, at the largest size, and the time of a forward
    pass. Bars name the dropped tokens."""
    plt = pyplot()
    o = of["options"]
    tokens = max(o["tokens"])
    points = [
        p for p in of["points"] if p["tokens"] == tokens and p["precision"] == "bf16" and p["off"] is None
        and (p["layer"] == "ours" or p["layer"].startswith("capacity"))
    ]  # fmt: skip
    figure, axes = plt.subplots(1, 2, figsize=(15, 5))
    _bars(axes[0], points, o["routings"], lambda p: p["notes"]["rows"] / (tokens * o["top_k"]), "{:.1f}")
    _bars(axes[1], points, o["routings"], lambda p: (p["graph"] or p["forward"])["p50"], "{:.0f}")
    axes[0].set_ylabel("rows of the fullest rank's experts, beside an even share")
    axes[1].set_ylabel("us of a forward pass, p50 of the slowest rank")
    axes[0].legend(frameon=False)
    figure.suptitle(f"{heading(of)}; {tokens} tokens per rank", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bars(axis: Any, points: list[dict[str, Any]], routings: list[str], height_of: Callable[..., float], form: str) -> None:
    """Draws a bar for each layer, grouped by routing."""
    layers = list(dict.fromkeys(p["layer"] for p in points))
    for p in points:
        place = layers.index(p["layer"])
        at = routings.index(p["routing"]) + (place - (len(layers) - 1) / 2) * 0.8 / len(layers)
        label = ("ours, dropless" if p["layer"] == "ours" else p["layer"]) if p["routing"] == routings[0] else None
        height, dropped = height_of(p), p["notes"].get("dropped")
        axis.bar(at, height, width=0.75 / len(layers), color=f"C{place}", label=label)
        text = form.format(height) + (f"\n{100 * dropped:.2g} %\ndropped" if dropped else "")
        axis.text(at, height, text, ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(routings)), [f"{routing} routing" for routing in routings])
    axis.margins(y=0.15)
