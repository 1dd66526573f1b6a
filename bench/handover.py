"""The handover between a GPU's kernel and the proxy: from mailbox stores to posts, and from arrivals to the kernel going on."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import checkout  # noqa: F401

from bench.gpu.device import instruments
from bench.proxy import markdown, percentile
from pplx_comm._version import __version__
from pplx_comm.machine import machine

WHAT = {
    "first": "mailbox store to first post",
    "last": "mailbox store to last post",
    "on": "last post to the kernel going on",
    "seen": "all of it",
}
"""In microseconds. "on": completions and arrivals taken, arrival words raised, and seen by the kernel."""

SHARES = (("p50", 0.5), ("p99", 0.99))


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {name: percentile(values, share) / 1000 for name, share in SHARES}


def measure(device: int, peers: int, endpoints: int, operations: int) -> dict[str, Any]:
    run = instruments().handover(device, peers, endpoints, operations)
    run["on"] = [seen - last for seen, last in zip(run["seen"], run["last"], strict=True)]
    return {"peers": peers, "endpoints": endpoints, "fastest_ping": run["ping"] / 1000, **{w: _percentiles(run[w]) for w in WHAT}}


def table(points: list[dict[str, Any]]) -> str:
    cells = [["peers", "endpoints", *(f"{words} {name}" for words in WHAT.values() for name, _ in SHARES)]]
    for point in points:
        times = [f"{point[what][name]:.2f}" for what in WHAT for name, _ in SHARES]
        cells.append([str(point["peers"]), str(point["endpoints"]), *times])
    return "\n".join(markdown(cells))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="bench/handover.py",
        description="A kernel plays the device of an AllToAll, dispatches and combines in turn; a proxy carries over a fabric "
        "that costs nothing, where every peer answers at once. Microseconds. The clocks of host and GPU are compared by pings: "
        "times from one to the other may be off by half of the fastest ping.",
    )
    numbers = lambda text: [int(one) for one in text.split(",")]  # noqa: E731
    p.add_argument("--device", type=int, default=0, help="GPU (0)")
    p.add_argument("--peers", type=numbers, default=[1, 8, 16, 32, 63], metavar="N,...", help="remote peers (1,8,16,32,63)")
    p.add_argument("--endpoints", type=numbers, default=[1, 2], metavar="N,...", help="endpoints (1,2)")
    p.add_argument("--operations", type=int, default=5000, help="operations of a point (5000)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the result there too, as JSON")
    return p


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    a = parser().parse_args(given)
    pings = _percentiles(instruments().ping(a.device, a.operations))
    points = [measure(a.device, peers, endpoints, a.operations) for endpoints in a.endpoints for peers in a.peers]
    m = machine()
    command = shlex.join(["bench/handover.py", *given])
    print(f"{command}: {__version__}, {m['cpu']}")
    print(f"from the host to the GPU and back: p50 {pings['p50']:.2f} us, p99 {pings['p99']:.2f} us\n")
    print(table(points))
    if a.json:
        report = {"command": command, "version": __version__, "machine": m, "ping": pings, "points": points}
        a.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
