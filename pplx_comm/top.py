"""python -m pplx_comm top: the counters of a job's ranks, and which of them is in the way of the others."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pplx_comm import desks, metrics
from pplx_comm.errors import Error
from pplx_comm.settings import Watching, read

HELP = "what the ranks of a running job do, and which of them is slow"
DESCRIPTION = """\
Shows the ranks of a job: steps a second, how long they wait for each other, the expert with the most rows, the network. Under the
table it says what stands out. It asks the processes of this host, your own ones and for root all, and by their connections the
ranks on other hosts; or it reads the files of PPLX_COMM_METRICS, where all hosts share that folder. Waits are of a dispatch and a
combine, between two readings.
"""

LATE, HOT = 4.0, 8.0
"""A wait stands out that is longer than LATE usual ones, and an expert with more than HOT times the mean of rows."""
LEAST_MS = 0.02
"""Shorter waits of a step never stand out."""
BEHIND = 0.75
"""A rank is behind another one, not late itself, if it waits for that one at least this share of what the others wait for it."""
ALONE = 1.5
"""A rank waits this many times as long as the others for a rank that is behind it: the link between them is slow in both ways."""
LEAST_ROWS = 16
"""The mean of an object's experts from which one may be hot."""

MOST = 1e30
"""No counter is more: sums of them stay finite."""

SILENT = 120.0
"""Seconds in which not all ranks have written, after which it is an error."""
BETWEEN = 2.0
"""Seconds between two questions."""

_SAMPLE = re.compile(r"^pplx_comm_(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass
class Reading:
    """The counters of a rank, when its file was written."""

    at: float
    job: str = ""
    rank: int = 0
    node: int = 0
    world_size: int = 0
    alive: int = 0
    steps: float = 0
    open_steps: float = 0
    waits: dict[int, float] = field(default_factory=dict)
    experts: dict[tuple[str, str], float] = field(default_factory=dict)
    nics: dict[str, float] = field(default_factory=dict)


@dataclass
class Rank:
    """The counts of a rank between two readings."""

    rank: int
    steps: float
    seconds: float
    open_steps: float
    alive: int
    waits: dict[int, float]
    """Milliseconds of a step, by peer."""
    experts: dict[tuple[str, str], float]
    """Rows, by object and local expert."""
    nics: dict[str, float]
    """Bytes."""
    node: int = 0


def parse(text: str, at: float) -> Reading:
    """A file of PPLX_COMM_METRICS."""
    r = Reading(at)
    for name, labelled, said in _SAMPLE.findall(text):
        labels, value = dict(_LABEL.findall(labelled)), float(said)
        if name == "job":
            r.job, r.rank, r.node = labels["pplx_job"], int(labels["rank"]), int(labels["node"])
        elif name == "world_size":
            r.world_size = int(value)
        elif name == "alive_ranks":
            r.alive = int(value)
        elif name == "steps_total":
            r.steps += value
        elif name == "open_steps":
            r.open_steps += value
        elif name == "wait_seconds_total":
            peer = int(labels["peer"])
            r.waits[peer] = r.waits.get(peer, 0.0) + value
        elif name == "expert_rows_total":
            r.experts[labels["object"], labels["expert"]] = value
        elif name == "network_bytes_total":
            r.nics[f"{labels['provider']} {labels['nic']}"] = value
    return r


Jobs = dict[str, dict[int, Reading]]
"""The last readings of all ranks, by job."""


@dataclass(frozen=True)
class Source:
    read: Callable[[], Jobs]
    pause: float
    """Seconds until it may have changed."""
    where: str


def read_folder(folder: Path) -> Jobs:
    if not folder.is_dir():
        raise Error(f"{folder} is no folder. It is that of PPLX_COMM_METRICS, with which the job was started")
    jobs: Jobs = {}
    for path in sorted(folder.glob("pplx_comm-*.prom")):
        try:
            reading = parse(path.read_text(), path.stat().st_mtime)
        except FileNotFoundError:  # its Communicator has closed
            continue
        if reading.job:
            jobs.setdefault(reading.job, {})[reading.rank] = reading
    return jobs


def read_processes(job: str | None) -> Jobs:
    """Those of this host, then by one of each job what others it reaches."""
    jobs: Jobs = {}

    def add(answer: desks.Answer) -> bool:
        """True if it is no rank of a job of which others are missing."""
        for reading in desks.understood(answer, _readings) or []:
            jobs.setdefault(reading.job, {}).setdefault(reading.rank, reading)
        return all(max(of.world_size for of in ranks.values()) == len(ranks) for ranks in jobs.values())

    found = desks.ask_all("stats", job=job)
    if not found:
        raise Error(f"no process of {'this host' if job is None else f'job {job} on this host'} tells this user anything")
    if not all([add(one) for one in found]):
        until = time.monotonic() + desks.PATIENCE
        any(add(answer) for one in found if (answer := desks.ask(one.desk, "job stats", until=until)) is not None)
    return jobs


def _readings(of: desks.Answer) -> list[Reading]:
    found = []
    for stats in of.value if isinstance(of.value, list) else []:  # else its Python is held up
        told = metrics.families(stats)
        if not all(0 <= value < MOST for family in told for _, _, value in family.samples):
            raise ValueError("a counter is no count")
        found.append(parse(metrics.text(told), time.time()))
    return found


def between(before: Reading, after: Reading) -> Rank:
    steps = after.steps - before.steps
    waits = {peer: 1e3 * (waited - before.waits.get(peer, 0.0)) / max(steps, 1.0) for peer, waited in after.waits.items()}
    experts = {of: rows - before.experts.get(of, 0.0) for of, rows in after.experts.items()}
    nics = {nic: nbytes - before.nics.get(nic, 0.0) for nic, nbytes in after.nics.items()}
    return Rank(after.rank, steps, after.at - before.at, after.open_steps, after.alive, waits, experts, nics, after.node)


def waited_for(ranks: Iterable[Rank]) -> dict[int, float]:
    """Milliseconds of a step for which a rank is waited for: the lower median of those that wait."""
    by_peer: dict[int, list[float]] = {}
    for rank in ranks:
        for peer, ms in rank.waits.items():
            by_peer.setdefault(peer, []).append(ms)
    return {peer: statistics.median_low(waits) for peer, waits in by_peer.items()}


def verdicts(ranks: list[Rank], world_size: int) -> list[str]:
    """A sentence for each thing that stands out."""
    said = [f"rank {r.rank} goes on without {world_size - r.alive} of {world_size} ranks" for r in ranks if r.alive < world_size]
    said += [
        f"rank {r.rank} has an open step and has ended none in {r.seconds:.0f} s" for r in ranks if r.open_steps and not r.steps
    ]
    moving = [r for r in ranks if r.steps]
    said += [*_late(moving), *_hot(moving), *_idle(moving)]
    return said


def _late(ranks: list[Rank]) -> Iterator[str]:
    """Ranks for which all others wait, then NICs, then links over which one rank waits for one other."""
    usual = waited_for(ranks)
    waits = {r.rank: r.waits for r in ranks}
    late: set[int] = set()
    behind: dict[int, int] = {}
    for rank, ms in usual.items():
        others = [each for other, each in usual.items() if other != rank]
        if not others or ms <= max(LEAST_MS, LATE * statistics.median(others)):
            continue
        source, most = max(waits.get(rank, {}).items(), key=lambda wait: wait[1], default=(rank, 0.0))
        if most >= BEHIND * ms:
            behind[rank] = source
            continue
        late.add(rank)
        each = statistics.median(others)
        yield f"rank {rank} is late: the others wait {ms:.3g} ms a step for it, and {each:.2g} for each other"
    slow: set[int] = set()
    for name, members, ms, each in _slow_nics([r for r in ranks if r.rank not in late]):
        if not members & slow:
            slow |= members
            yield f"NIC of {name} is slow: it and other nodes wait {ms:.3g} ms a step for each other, and those {each:.2g}"
    for r in ranks:
        own = {peer: ms for peer, ms in r.waits.items() if peer not in late}
        for peer, ms in own.items():
            limit = usual[peer] * (ALONE if behind.get(peer) == r.rank else LATE)
            if ms > max(LEAST_MS, limit, LATE * statistics.median_low(own.values())) and not {peer, r.rank} & slow:
                yield f"link {peer} -> {r.rank} is slow: {r.rank} waits {ms:.3g} ms a step for {peer}, others {usual[peer]:.2g}"


def _slow_nics(ranks: list[Rank]) -> Iterator[tuple[str, set[int], float, float]]:
    """Nodes, then ranks, that wait for all other nodes and all of them for these, while those do not wait for each other."""
    node = {r.rank: r.node for r in ranks}
    members_of = {n: {rank for rank, of in node.items() if of == n} for n in set(node.values())}
    between: dict[tuple[int, int, str], list[float]] = {}
    for r in ranks:
        for peer, ms in r.waits.items():
            if node.get(peer, r.node) != r.node:
                between.setdefault((r.rank, node[peer], "waits"), []).append(ms)
                between.setdefault((peer, r.node, "is waited for"), []).append(ms)
    usual = {of: statistics.median_low(waits) for of, waits in between.items()}
    named = {f"node {n}": members for n, members in members_of.items() if len(members) > 1} | {f"rank {r}": {r} for r in node}
    for name, members in named.items():
        least = min((ms for (rank, _, _), ms in usual.items() if rank in members), default=0.0)
        others = [ms for (rank, there, _), ms in usual.items() if rank not in members and not members_of[there] <= members]
        if others and least > max(LEAST_MS, LATE * statistics.median(others)):
            yield name, members, least, statistics.median(others)


def _hot(ranks: list[Rank]) -> Iterator[str]:
    by_object: dict[str, list[tuple[float, int, str]]] = {}
    for r in ranks:
        for (number, expert), rows in r.experts.items():
            by_object.setdefault(number, []).append((rows, r.rank, expert))
    for number, of in by_object.items():
        mean = statistics.fmean(rows for rows, _, _ in of)
        for rows, rank, expert in of:
            if mean >= LEAST_ROWS and rows > HOT * mean:
                yield f"expert {expert} of rank {rank} (AllToAll {number}) gets {rows / mean:.1f} times the mean"


def _idle(ranks: list[Rank]) -> Iterator[str]:
    for r in ranks:
        most = max(r.nics.values(), default=0.0)
        for nic, nbytes in r.nics.items():
            if nbytes == 0 and most > 0:
                yield f"NIC {nic} of rank {r.rank} carries nothing, while others of it do"


def table(ranks: list[Rank]) -> list[str]:
    usual = waited_for(ranks)
    names = ("rank", "steps/s", "waits ms", "most for", "waited for ms", "hot expert", "NIC MB/s", "open")
    lines = [" ".join(f"{name:>{width}}" for name, width in zip(names, (4, 9, 9, 8, 13, 16, 9, 4), strict=True))]
    for r in ranks:
        peer, hot = max(r.waits, key=r.waits.__getitem__, default=None), max(r.experts, key=r.experts.__getitem__, default=None)
        mean = statistics.fmean(r.experts.values()) if r.experts else 0.0
        expert = f"{hot[1]}: {r.experts[hot] / mean:.1f}x" if hot is not None and mean else "-"
        most = "-" if peer is None else str(peer)
        lines.append(
            f"{r.rank:>4} {r.steps / r.seconds:>9.1f} {sum(r.waits.values()):>9.3f} {most:>8} {usual.get(r.rank, 0.0):>13.3f}"
            f" {expert:>16} {sum(r.nics.values()) / r.seconds / 1e6:>9.1f} {r.open_steps:>4.0f}"
        )
    return lines


def matrix(ranks: list[Rank]) -> list[str]:
    """How long each rank (a row) waits for each other one (a column), the darker the longer."""
    shades = " .:-=+*#%@"
    numbers = sorted({r.rank for r in ranks} | {peer for r in ranks for peer in r.waits})
    most = max((ms for r in ranks for ms in r.waits.values()), default=0.0)
    lines = [f"rows wait for columns; {shades[-1]} is {most:.3g} ms a step", "     " + "".join(f"{n % 100:>3}" for n in numbers)]
    for r in ranks:
        cells = (shades[int(r.waits.get(n, 0.0) / most * (len(shades) - 1))] if most else " " for n in numbers)
        lines.append(f"{r.rank:>4} " + "".join(f"{cell * 2:>3}" for cell in cells))
    return lines


def picture(ranks: list[Rank], path: Path) -> None:
    """The matrix, as a heat map."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Error("--png needs matplotlib: pip install matplotlib") from None
    numbers = sorted({r.rank for r in ranks} | {peer for r in ranks for peer in r.waits})
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow([[r.waits.get(n, 0.0) for n in numbers] for r in ranks], cmap="magma_r", vmin=0.0)
    axes.set_xticks(range(len(numbers)), [str(n) for n in numbers])
    axes.set_yticks(range(len(ranks)), [str(r.rank) for r in ranks])
    axes.set_xlabel("for rank")
    axes.set_ylabel("rank that waits")
    figure.colorbar(shown, label="ms a step")
    figure.savefig(path, dpi=120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", metavar="DIR", help="read files there, not processes (that of PPLX_COMM_METRICS)")
    parser.add_argument("--job", help="the first letters of its name, where more than one is there")
    parser.add_argument("--matrix", action="store_true", help="also show how long each rank waits for each other one")
    parser.add_argument("--png", metavar="FILE", help="write that as a picture, each time anew (needs matplotlib)")
    parser.add_argument("--once", action="store_true", help="show it once, when all ranks have told twice, and exit")


def main(given: argparse.Namespace) -> int:
    folder = given.folder or read(Watching).folder
    source = Source(lambda: read_processes(given.job), BETWEEN, "on this host")
    if folder is not None:
        source = Source(lambda: read_folder(Path(folder)), 0.1, f"in {folder}")
    try:
        return _show(source, given)
    except KeyboardInterrupt:
        return 0
    except Error as problem:
        raise SystemExit(f"top: {problem}") from None


def _show(source: Source, given: argparse.Namespace) -> int:
    before: dict[int, Reading] = {}
    while True:
        job, readings = _await_all(source, given.job, before)
        silent = sorted(rank for rank in before if rank not in readings or readings[rank].at == before[rank].at)
        ranks = [between(before[rank], readings[rank]) for rank in sorted(readings.keys() - set(silent))]
        world_size = max(reading.world_size for reading in readings.values())
        here = f", {len(readings)} of them heard of" if len(readings) < world_size else ""
        lines = [f"job {job}: {world_size} ranks{here}", *table(ranks), *(["", *matrix(ranks)] if given.matrix else []), ""]
        said = [f"rank {rank} tells nothing any more: it is gone, or stands still" for rank in silent] + verdicts(ranks, world_size)
        if given.png:
            picture(ranks, Path(given.png))
        print("\n".join(lines + (said or ["nothing stands out"])), flush=True)
        if given.once:
            return 0
        print()
        before = readings


def _await_all(source: Source, wanted: str | None, before: dict[int, Reading]) -> tuple[str, dict[int, Reading]]:
    """The job, and its ranks once all have written since `before`, or some have thrice. New ranks are added to it."""
    written: dict[int, set[float]] = {}
    begun = time.monotonic()
    while True:
        job, readings = _chosen(source, wanted)
        for rank, reading in readings.items():
            before.setdefault(rank, reading)
            if reading.at > before[rank].at:
                written.setdefault(rank, set()).add(reading.at)
        if readings.keys() <= written.keys() or any(len(times) == 3 for times in written.values()):
            return job, readings
        if time.monotonic() - begun > SILENT:
            raise Error(f"no rank {source.where} has told anything for {SILENT:.0f} s: the job was killed, or stands still")
        time.sleep(source.pause)  # nothing announces what other processes do


def _chosen(source: Source, wanted: str | None) -> tuple[str, dict[int, Reading]]:
    jobs = source.read()
    found = [job for job in jobs if job.startswith(wanted or "")]
    if not found:
        have = f"but {', '.join(sorted(jobs))}" if jobs else "nor any other"
        raise Error(f"there is no job {wanted or ''} {source.where}, {have}: its counters are there while it runs")
    if len(found) > 1:
        raise Error(f"there are {len(found)} jobs {source.where}: name one with --job: {', '.join(sorted(found))}")
    return found[0], jobs[found[0]]
