"""The table, and everything as JSON."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness.batch import Shape
from bench.harness.clock import Figure
from bench.harness.options import WAYS, Options
from bench.harness.results import FUSED, PHASES, Point, Results
from bench.harness.world import World
from bench.harness.writes import remote_ranks
from bench.proxy import markdown
from pplx_comm._version import __version__
from pplx_comm.efasoft.machines import software_nics
from pplx_comm.layouts import Compact, Layout
from pplx_comm.machine import machine, versions
from pplx_comm.wiring import libfabric

SCHEMA = 1


def software_device(options: Options, world: World) -> str | None:
    """Names the software device of this run in every table: its figures must not pass for a NIC's."""
    over = [
        one.name
        for one in options.transports
        if one.transport in ("auto", "proxy") and _may_be_efa(one.provider) and remote_ranks(world, one)
    ]
    nics = software_nics() if over else 0
    if not nics:
        return None
    return f"software device (pplx_comm efa-soft, {nics} NIC{'s' if nics > 1 else ''}) under {', '.join(over)}: no NIC's figures"


def _may_be_efa(provider: str | None) -> bool:
    """True if the best available provider, which is used, may be efa."""
    return provider is None or provider.startswith("efa")


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _times(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1024:.1f}" if nbytes < 100 * 1024 else f"{nbytes / 1024:.0f}"


def sms(num_sms: int | None) -> str:
    return "all" if num_sms is None else str(num_sms)


def _point_rows(point: Point, results: Results, peers: list[str], columns: Columns) -> list[list[str]]:
    rows = []
    for i, phase in enumerate(FUSED):
        ours = point.phases[phase]
        row = [
            point.transport if i == 0 else "",
            str(point.tokens) if i == 0 else "",
            *([sms(point.num_sms) if i == 0 else ""] if columns.num_sms else []),
            str(ours.n) if i == 0 else "",
            phase,
        ]
        row += [_number(ours.p50), _number(ours.p90), _number(ours.p99)]
        row += _bare(point.floor, phase, point.ratio(phase))
        if columns.composite:
            row += _bare(point.composite, phase, point.ratio_to_composite(phase))
        for name in peers:
            peer = results.peer(name, point.tokens, point.num_sms)
            figure = peer.phases[phase] if peer else None
            row += ["off", ""] if figure is None else [_number(figure.p50), _times(figure.p50 / ours.p50)]
        sent = point.bytes_per_rank
        row.append(_size(sent[phase] if phase in sent else sum(sent.values())))
        rows.append(row)
    return rows


def _bare(bare: dict[str, Figure], phase: str, ratio: float | None) -> list[str]:
    return ["off", ""] if ratio is None else [_number(bare[phase].p50), _times(ratio)]


def _besides(point: Point) -> str:
    p50 = {phase: _number(figure.p50) for phase, figure in point.phases.items()}
    if "wall" in p50:
        last = [_number(point.phases[f"{phase}, last start"].p99) for phase in PHASES]
        ratio = _times(point.phases["wall"].p50 / point.phases["round trip"].p50)
        of_mapped = ", ".join(f"{phase} {_times(point.phases[phase].p50 / it.p50)}" for phase, it in point.beside.items())
        return (
            (f"in multiples of mapped: {of_mapped}; " if of_mapped else "")
            + f"a pair in the graph {p50['wall']} ({ratio} of its kernels), in halves {p50['halves']}, eagerly {p50['eager']}, "
            f"of which the host {p50['host']} (dispatch {p50['host dispatch']}, combine {p50['host combine']}); "
            f"p99 from the last rank's start: dispatch {last[0]}, combine {last[1]}"
        )
    return (
        f"halves: dispatch {p50['dispatch_send']} send + {p50['dispatch_recv']} recv, "
        f"combine {p50['combine_send']} send + {p50['combine_recv']} recv"
    )


def _layout(layout: Layout) -> str:
    return type(layout).__name__ if isinstance(layout, Compact) else f"{type(layout).__name__}(align={layout.align})"


def in_pieces(options: Options, world: World) -> list[int]:
    """Tokens of the steps whose blocks go in pieces."""
    return [tokens for tokens in options.tokens if Shape(options, tokens, 0, world.size).in_pieces]


def slots(options: Options, world: World) -> str:
    """Adds --slot-bytes to every table's title, if given."""
    if options.slot_bytes is None:
        return ""
    tokens = ", ".join(map(str, in_pieces(options, world)))
    return f", slots of {options.slot_bytes} bytes: {f'in pieces at {tokens}' if tokens else 'no step in pieces'}"


@dataclass(frozen=True)
class Columns:
    """Those that not every run has."""

    num_sms: bool
    composite: bool


def table(options: Options, results: Results, world: World) -> str:
    measured_peers = {point.peer for point in results.peers}  # also those that failed at a later size
    peers = [name for name in options.peers if name in measured_peers or name not in results.peers_off]
    columns = Columns(options.num_sms != (None,), any(point.composite for point in results.points))
    header = ["transport", "tokens", *(["SMs"] if columns.num_sms else []), "n", "us", "p50", "p90", "p99", "floor", "ours/floor"]
    header += ["composite", "/comp"] if columns.composite else []
    for name in peers:
        header += [name, "/ours"]
    header.append("KiB sent")
    measured = [point for point in results.points if point.off is None]
    rows = {id(point): _point_rows(point, results, peers, columns) for point in measured}
    widths = [max(len(row[i]) for row in [header, *(row for of in rows.values() for row in of)]) for i in range(len(header))]
    left = (0, header.index("us"))

    def line(cells: list[str]) -> str:
        aligned = [f"{cell:<{w}}" if i in left else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(aligned).rstrip()

    o = options
    device = software_device(options, world)
    lines = [
        f"pplx_comm {__version__}: {world.size} ranks, {world.threads} thread(s) each, {_machine_line()}",
        f"hidden {o.hidden}, {o.experts} experts, top-{o.top_k}, {str(o.dtype).removeprefix('torch.')}, wire {o.wire}, "
        f"{_layout(o.layout)}, {o.routing} routing{slots(o, world)}",
        f"microseconds {_what_time_is(options, world)}; KiB that a rank sends",
        *([device] if device else []),
        "",
    ]
    indent = sum(widths[: header.index("us")]) + 2 * header.index("us")
    for name in dict.fromkeys(point.transport for point in results.points):
        lines += [line(header), "-" * (sum(widths) + 2 * (len(widths) - 1))]
        for point in (point for point in results.points if point.transport == name):
            if point.off is not None:
                lines.append(f"{name}  {point.tokens} tokens{_with(point.num_sms)} off: {point.off}")
                continue
            lines += [line(row) for row in rows[id(point)]]
            lines.append(" " * indent + _besides(point))
            if point.floor_off:
                lines.append(" " * indent + f"floor off: {point.floor_off}")
        lines.append("")
    if len(o.schedules) > 1:
        lines += _schedules(results)
    if results.nothing:
        lines.append(_empty_call(results))
    lines += _peers_said(results)
    lines += [f"{name} off: {reason}" for name, reason in results.peers_off.items()]
    return "\n".join(lines).rstrip()


def _with(num_sms: int | None) -> str:
    return "" if num_sms is None else f" on {num_sms} SMs"


def _schedules(results: Results) -> list[str]:
    """The floor by order and way."""
    cells = [["tokens", "SMs", "phase", "order", *WAYS]]
    for point in results.points:
        for phase, by_name in point.schedules.items():
            for order in dict.fromkeys(name.partition(":")[0] for name in by_name):
                figures = [by_name.get(f"{order}:{way}") for way in WAYS]
                nbytes = point.bytes_per_rank[phase]
                said = ["" if f is None else f"{_number(f.p50)} us, {nbytes / f.p50 / 1000:.0f} GB/s" for f in figures]
                cells.append([str(point.tokens), sms(point.num_sms), phase, order, *said])
    return [*markdown(cells), ""]


def _peers_said(results: Results) -> list[str]:
    """How each peer was called, at which sizes."""
    tokens: dict[tuple[str, str], dict[str, None]] = {}
    for point in results.peers:
        if point.how:
            tokens.setdefault((point.peer, point.how), {})[str(point.tokens)] = None
    return [f"{name} at {', '.join(sizes)}: {how}" for (name, how), sizes in tokens.items()]


def _empty_call(results: Results) -> str:
    empty = ", ".join(f"{_number(figure.p50)} at {tokens}" for tokens, figure in results.nothing.items())
    return f"an empty call, measured the same way: p50 {empty} tokens"


def _what_time_is(options: Options, world: World) -> str:
    """See Clock.collect and gpu/measure.py."""
    if options.device == "cuda":
        return "of kernels, of the slowest rank; of calls to peers, likewise"
    return "from the first rank's entry to the last one's exit" if world.together else "of the slowest rank"


def _machine_line() -> str:
    m = machine()
    bound = f" of {os.cpu_count()}: this rank is bound (Open MPI: --bind-to none)"
    return f"{m['cpu']}, {m['cores_allowed']} cores{bound if m['cores_allowed'] < 3 <= (os.cpu_count() or 1) else ''}"


def origin(options: Options, world: World, arguments: list[str]) -> dict[str, Any]:
    """Describes the run: command, machine and version."""
    fabric = libfabric.status()
    libraries = {**versions(), "libfabric": fabric["version"]}
    if world.mpi is not None:
        libraries["mpi"] = " ".join(world.mpi.Get_library_version().replace("\0", "").strip().splitlines()[0].split())
    return {
        "schema": SCHEMA,
        "version": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join([Path(sys.argv[0]).name, *arguments]),
        "ranks": world.size,
        "threads_per_rank": world.threads,
        "one_host": world.together,
        "options": options.described(),
        "in_pieces": in_pieces(options, world),
        "machine": machine(),
        "software_device": software_device(options, world),
        "versions": libraries,
        "unit": "us",
    }


def record(options: Options, results: Results, world: World, arguments: list[str]) -> dict[str, Any]:
    return {
        **origin(options, world, arguments),
        "multiprocessors": results.multiprocessors,
        "points": [
            {
                **asdict(point),
                "ratio": {p: point.ratio(p) for p in point.phases if point.ratio(p)},
                "ratio_to_composite": {p: point.ratio_to_composite(p) for p in point.phases if point.ratio_to_composite(p)},
                "best_peer": {p: _best(results, point, p) for p in point.phases},
            }
            for point in results.points
        ],
        "peers": [asdict(peer) for peer in results.peers],
        "peers_off": results.peers_off,
        "nothing": {tokens: asdict(figure) for tokens, figure in results.nothing.items()},
        "routing_digest": results.routing_digest,
    }


def _best(results: Results, point: Point, phase: str) -> dict[str, Any] | None:
    best = results.best_peer(point.tokens, point.num_sms, phase)
    return {"peer": best.peer, "num_sms": best.num_sms, "p50": best.phases[phase].p50} if best else None


def write_json(path: str, what: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(what, indent=1) + "\n")
