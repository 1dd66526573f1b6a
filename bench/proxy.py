"""Measures the proxy: from a device's mailbox words to the posts of the writes, over a null fabric."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import checkout  # noqa: F401

from bench import _instruments
from pplx_comm._version import __version__
from pplx_comm.machine import machine

BAR = 200.0
"""Nanoseconds a peer, p50, from the first mailbox word to the last post."""

HEAD = ["peers", "endpoints", "writes", "bells", "ns/peer", "last p50", "p90", "p99", "first p50", "p90", "p99", "idle step"]

NOTES = """\
last, first: ns from before the first mailbox word is written to the last and the first post of an operation.
writes, bells: of one operation; writes that share a bell are announced to the NIC together.
idle step: ns of a step of the proxy that finds nothing ("one thread" only).
Of two proxies, last is that of the later one, each timed from the announcement and without the other's turn on "one thread"."""


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(peers: int, endpoints: int, threads: bool, a: argparse.Namespace) -> dict[str, Any]:
    """The best of several turns, by its p50: other work on the machine can only make a turn slower."""
    allowed = os.sched_getaffinity(0)
    own = set(range(a.cpu - a.proxies + 1, a.cpu + 1))  # the proxies' CPUs
    if threads and own < allowed:
        os.sched_setaffinity(0, allowed - own)  # on one CPU the two would take turns, and the scheduler be measured
    runs = [
        _instruments.proxy_cost(
            peers=peers, endpoints=endpoints, rows=a.rows, shard_bytes=a.shard_bytes, in_flight=a.in_flight, objects=a.objects,
            proxies=a.proxies, operations=a.operations, threads=threads, cpu=a.cpu if threads and own < allowed else -1,
        )
        for _ in range(a.turns)
    ]  # fmt: skip
    os.sched_setaffinity(0, allowed)
    best = min(runs, key=lambda run: percentile(run["last"], 0.5))
    point: dict[str, Any] = {
        "mode": "two threads" if threads else "one thread",
        "proxies": a.proxies,
        "peers": peers,
        "endpoints": endpoints,
        "writes": best["writes"],
        "doorbells": best["doorbells"],
        "idle_step_ns": None if threads else min(run["idle"] for run in runs),
    }
    for what in ("last", "first"):
        point[f"{what}_ns"] = {name: percentile(best[what], share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    point["ns_per_peer"] = point["last_ns"]["p50"] / peers
    return point


def row(point: dict[str, Any]) -> list[str]:
    times = [f"{point[what][name]:.0f}" for what in ("last_ns", "first_ns") for name in ("p50", "p90", "p99")]
    idle = "" if point["idle_step_ns"] is None else f"{point['idle_step_ns']:.0f}"
    counts = [str(point["peers"]), str(point["endpoints"]), str(point["writes"]), f"{point['doorbells']:.0f}"]
    return [*counts, f"{point['ns_per_peer']:.1f}", *times, idle]


def markdown(cells: list[list[str]]) -> list[str]:
    """A Markdown table that reads well in a terminal too. The first line is its head."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    text = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells]
    return [text[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *text[1:]]


def table(points: list[dict[str, Any]]) -> str:
    lines = []
    for mode in dict.fromkeys(point["mode"] for point in points):
        rows = [row(point) for point in points if point["mode"] == mode]
        lines += [f"{mode}:", "", *markdown([HEAD, *rows]), ""]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="bench/proxy.py",
        description="Host cost of the proxy without a NIC: from the mailbox words of one operation (dispatch and combine take "
        "turns) to the posts of its writes. 'one thread': device and proxy take turns on one thread. 'two threads': the proxy's "
        "own thread, as in production, idle for 20 to 26 us before each operation.",
    )
    numbers = lambda text: [int(one) for one in text.split(",")]  # noqa: E731
    p.add_argument("--peers", type=numbers, default=[8, 16, 32, 64], metavar="N,...", help="remote peers (8,16,32,64)")
    p.add_argument("--endpoints", type=numbers, default=[1, 2, 4], metavar="N,...", help="endpoints (1,2,4)")
    p.add_argument(
        "--threads",
        choices=["1", "2", "both"],
        default="both",
        help="one thread, two threads, or first the one and then the other (both)",
    )
    p.add_argument("--rows", type=int, default=16, help="rows of 7.4 KB in each block (16)")
    p.add_argument("--shard-bytes", type=int, default=256 * 1024, help="larger blocks are split over the endpoints (262144)")
    p.add_argument("--in-flight", type=int, default=1, help="sets of mailboxes to look at (1)")
    p.add_argument("--objects", type=int, default=1, help="AllToAlls on the proxy; all but one are idle (1)")
    p.add_argument(
        "--proxies",
        type=int,
        choices=[1, 2],
        default=1,
        help="proxies of a rank, as proxy_threads= makes them; each has its part of the peers (1)",
    )
    p.add_argument("--operations", type=int, default=2000, help="operations of a turn (2000)")
    p.add_argument("--turns", type=int, default=5, help="turns; the best is shown (5)")
    p.add_argument("--cpu", type=int, default=max(os.sched_getaffinity(0)), help="CPU of the proxy's thread, -1 for any (the last)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the result there too, as JSON")
    p.add_argument("--check", action="store_true", help=f"exit 1 if a point takes more than {BAR:.0f} ns a peer")
    return p


def main(arguments: Sequence[str] | None = None) -> None:
    a = parser().parse_args(arguments)
    modes = {"1": [False], "2": [True], "both": [False, True]}[a.threads]
    points = [measure(peers, endpoints, threads, a) for threads in modes for endpoints in a.endpoints for peers in a.peers]
    m = machine()
    report = {
        "command": shlex.join(["bench/proxy.py", *(sys.argv[1:] if arguments is None else arguments)]),
        "version": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": m,
        "load": os.getloadavg()[0],
        "bar_ns_per_peer": BAR,
        "points": points,
    }
    print(f"{report['command']}: {__version__}, {m['cores_allowed']} cores of {m['cpu']}, load {report['load']:.1f}\n")
    print(table(points))
    print(NOTES)
    if a.json:
        a.json.write_text(json.dumps(report, indent=1) + "\n")
    slow = [point for point in points if point["ns_per_peer"] > BAR]
    if a.check and slow:
        sys.exit(f"{len(slow)} of {len(points)} points take more than {BAR:.0f} ns a peer")


if __name__ == "__main__":
    main()
