"""The median of several runs of the benchmark, as Markdown.

for i in 1 2 3 4 5 6 7; do mpirun -n 4 python bench/latency.py --json run$i.json; done
python bench/summary.py run*.json > bench/results/NAME.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

PHASES = ("dispatch", "combine", "round trip")


def find(of: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    return next((one for one in of if all(one.get(name) == value for name, value in wanted.items())), {})


def middle(values: list[float | None], form: str) -> str:
    """The median over the runs that have the figure."""
    had = [value for value in values if value is not None]
    return format(median(had), form) if had else "off"


def sms(num_sms: int | None) -> str:
    return "all" if num_sms is None else str(num_sms)


def rows(runs: list[dict[str, Any]], point: dict[str, Any], peers: list[str]) -> list[str]:
    """Rows of a point of the first run, which all runs have."""
    which = {name: point.get(name) for name in ("transport", "tokens", "num_sms")}
    points = [find(run["points"], **which) for run in runs]
    begin = [str(which["transport"]), str(which["tokens"]), sms(which["num_sms"])]
    reasons = [point.get("off") for point in points if point.get("off")]
    if reasons:
        return [f"| {' | '.join(begin)} | off: {reasons[0]} |" + " |" * (6 + len(peers))]
    lines = []
    for phase in PHASES:
        ours = [point["phases"][phase]["p50"] for point in points]

        def bare(kind: str, ratio: str, phase: str = phase) -> list[str]:
            figures = [point.get(kind, {}).get(phase, {}).get("p50") for point in points]
            return [middle(figures, ".1f"), middle([point.get(ratio, {}).get(phase) for point in points], ".2f")]

        cells = [*begin, phase, middle([*ours], ".1f"), *bare("floor", "ratio"), *bare("composite", "ratio_to_composite")]
        cells.append(_to_best(points, ours, phase))
        for peer in peers:
            theirs = [_beside(run, peer, which, phase) for run in runs]
            times = [them / us if them is not None else None for them, us in zip(theirs, ours, strict=True)]
            cells.append(middle(times, ".2f"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _beside(run: dict[str, Any], peer: str, which: dict[str, Any], phase: str) -> float | None:
    """A peer's p50 at the setting, or at its only one."""
    found = [one for one in run["peers"] if (one["peer"], one["tokens"]) == (peer, which["tokens"])]
    for wanted in (which["num_sms"], None):
        for one in found:
            if one.get("num_sms") == wanted:
                figure = one["phases"].get(phase, {}).get("p50")
                return None if figure is None else float(figure)
    return None


def _to_best(points: list[dict[str, Any]], ours: list[float], phase: str) -> str:
    """Our time relative to the fastest baseline's, with the baseline's name."""
    best = [point.get("best_peer", {}).get(phase) for point in points]
    ratio = middle([us / one["p50"] if one else None for one, us in zip(best, ours, strict=True)], ".2f")
    names = dict.fromkeys(one["peer"] + (f" on {one['num_sms']}" if one["num_sms"] else "") for one in best if one)
    return f"{ratio} ({', '.join(names)})" if names else ratio


def summary(runs: list[dict[str, Any]]) -> str:
    first = runs[0]
    peers = sorted({peer["peer"] for run in runs for peer in run["peers"]})
    machine, versions = first["machine"], first["versions"]
    head = ["transport", "tokens", "SMs", "phase", "us", "floor us", "ours / floor", "composite us", "ours / composite"]
    head += ["ours / best peer", *(f"{peer} / ours" for peer in peers)]
    lines = [
        f"Median of {len(runs)} runs; each figure is the p50 of its run, each ratio is taken within its run.",
        "",
        f"- command: `{first['command']}`, {first['ranks']} ranks, {first['threads_per_rank']} thread(s) each",
        f"- commit: {first['version']}; {runs[0]['date']} to {runs[-1]['date']}",
        f"- machine: {machine['cpu']}, {machine['cores_allowed']} cores, {machine['isa']}, Linux {machine['kernel']}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        *([f"- {first['software_device']}"] if first.get("software_device") else []),
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    transports = list(dict.fromkeys(point["transport"] for point in first["points"]))
    for point in sorted(first["points"], key=lambda one: transports.index(one["transport"])):
        lines += rows(runs, point, peers)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    runs = sorted((json.loads(path.read_text()) for path in parser.parse_args().runs), key=lambda run: str(run["date"]))
    # Runs that differ in one of these are not one measurement.
    for name in ("ranks", "version", "routing_digest"):
        if any(run[name] != runs[0][name] for run in runs):
            print(f"summary: the runs differ in {name}", file=sys.stderr)
            return 1
    print(summary(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
