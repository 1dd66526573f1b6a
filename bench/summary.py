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
    return next((one for one in of if all(one[name] == value for name, value in wanted.items())), {})


def middle(values: list[float | None], form: str) -> str:
    """The median over the runs that have the figure."""
    had = [value for value in values if value is not None]
    return format(median(had), form) if had else "off"


def rows(runs: list[dict[str, Any]], transport: str, tokens: int, peers: list[str]) -> list[str]:
    points = [find(run["points"], transport=transport, tokens=tokens) for run in runs]
    reasons = [point.get("off") for point in points if point.get("off")]
    if reasons:
        return [f"| {transport} | {tokens} | off: {reasons[0]} |" + " |" * (3 + len(peers))]
    lines = []
    for phase in PHASES:
        ours = [point["phases"][phase]["p50"] for point in points]
        floors = [point["floor"].get(phase, {}).get("p50") for point in points]
        ratios = [point["ratio"].get(phase) for point in points]
        cells = [transport, str(tokens), phase, middle([*ours], ".1f"), middle(floors, ".1f"), middle(ratios, ".2f")]
        for peer in peers:
            theirs = [find(run["peers"], peer=peer, tokens=tokens).get("phases", {}).get(phase, {}).get("p50") for run in runs]
            times = [them / us if them is not None else None for them, us in zip(theirs, ours, strict=True)]
            cells.append(middle(times, ".2f"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary(runs: list[dict[str, Any]]) -> str:
    first = runs[0]
    peers = sorted({peer["peer"] for run in runs for peer in run["peers"]})
    machine, versions = first["machine"], first["versions"]
    head = ["transport", "tokens", "phase", "us", "floor us", "ours / floor", *(f"{peer} / ours" for peer in peers)]
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
    for transport in dict.fromkeys(point["transport"] for point in first["points"]):
        for tokens in first["options"]["tokens"]:
            lines += rows(runs, transport, tokens, peers)
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
