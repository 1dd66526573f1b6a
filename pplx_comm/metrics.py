"""The counters of Communicators as Prometheus reads them.

A program that serves its own metrics registers a collector:

    prometheus_client.REGISTRY.register(pplx_comm.metrics.Collector(comm))

Without a change to the program, PPLX_COMM_METRICS=DIR keeps a file of each Communicator in that folder, for a node exporter's
textfile collector. It is there as long as the Communicator is open.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error
from pplx_comm.log import log
from pplx_comm.settings import Watching, read

Labels = dict[str, str]
_PREFIX = "pplx_comm_"


class Counted(Protocol):
    """A Communicator, as far as metrics read it."""

    rank: int
    control: ControlPlane

    def stats(self) -> dict[str, Any]: ...


@dataclass
class Family:
    """A metric. Samples have the end of their name, labels and a value."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, Labels, float]] = field(default_factory=list)


class _Families:
    """Families by name, as samples come. Each sample has the labels `common`."""

    def __init__(self, common: Labels) -> None:
        self.found: dict[str, Family] = {}
        self._common = common

    def _family(self, name: str, kind: str, help: str) -> Family:
        return self.found.setdefault(name, Family(_PREFIX + name, kind, help))

    def counter(self, name: str, help: str, value: float, **labels: object) -> None:
        self._family(name, "counter", help).samples.append(("_total", self._labels(labels), value))

    def gauge(self, name: str, help: str, value: float, **labels: object) -> None:
        self._family(name, "gauge", help).samples.append(("", self._labels(labels), value))

    def histogram(self, name: str, help: str, times: dict[str, Any], **labels: object) -> None:
        family, own = self._family(name, "histogram", help), self._labels(labels)
        below = list(itertools.accumulate(times["buckets"]))
        for bucket, count in enumerate(below):
            bound = "+Inf" if bucket == len(below) - 1 else repr(2**bucket / 1e6)
            family.samples.append(("_bucket", {**own, "le": bound}, count))
        family.samples.append(("_count", own, below[-1]))
        family.samples.append(("_sum", own, times["seconds"]))

    def _labels(self, labels: dict[str, object]) -> Labels:
        return {**self._common, **{name: str(value) for name, value in labels.items()}}


def families(stats: dict[str, Any]) -> list[Family]:
    """stats: what `Communicator.stats` returns.

    The label `pplx_job` is the same on all ranks of a Communicator, and another one's is different. Prometheus itself sets `job`.
    """
    rank = int(stats["rank"])
    f = _Families({"pplx_job": stats["job"], "rank": str(rank)})
    f.gauge("job", "Always 1. The label node is the rank's node.", 1, node=stats["node"])
    f.gauge("world_size", "Ranks of the Communicator.", stats["world_size"])
    f.gauge("alive_ranks", "Ranks that neither died nor left, as far as this one knows.", len(stats["alive"]))
    f.counter("generations", "How often the ranks that are left have agreed, by reset().", stats["generation"])
    for kind, count in stats["failures"].items():
        f.counter("failures", "Failures of which this rank has heard.", count, kind=kind)
    for of in stats["all_to_alls"]:
        if not of["closed"]:  # another one may have its number
            _count_all_to_all(f, rank, of)
    for provider in sorted({proxy["provider"] for proxy in stats["proxies"]}):
        _count_proxies(f, provider, [proxy for proxy in stats["proxies"] if proxy["provider"] == provider])
    return list(f.found.values())


def _count_all_to_all(f: _Families, rank: int, of: dict[str, Any]) -> None:
    number = of["object"]
    f.counter("steps", "Steps that were combined or released.", of["steps"], object=number)
    f.gauge("open_steps", "Steps whose memory is held.", of["open_steps"], object=number)
    for phase, launches in (("dispatch", of["large_dispatches"]), ("combine", of["large_combines"])):
        f.counter("large_launches", "Launches of the kernels for many tokens.", launches, object=number, phase=phase)
    if not of["counted"]:
        return
    f.counter("tokens", "Tokens that this rank dispatched.", of["tokens"], object=number)
    for peer in range(len(of["rows_sent"])):
        if peer == rank:
            continue
        to: dict[str, object] = {"object": number, "peer": peer}
        f.counter("sent_rows", "Rows to another rank, of dispatches and combines.", of["rows_sent"][peer], **to)
        f.counter("received_rows", "Rows from another rank, of dispatches and combines.", of["rows_received"][peer], **to)
        f.counter("sent_bytes", "Bytes of rows and headers to another rank.", of["bytes_sent"][peer], **to)
        f.counter("received_bytes", "Bytes of rows and headers from another rank.", of["bytes_received"][peer], **to)
        for phase in ("dispatch", "combine"):
            waited = of[f"{phase}_wait_seconds"][peer]
            f.counter("wait_seconds", "How long this rank waited for the rows of another one.", waited, phase=phase, **to)
    for expert, rows in enumerate(of["expert_rows"]):
        f.counter("expert_rows", "Rows that a local expert got.", rows, object=number, expert=expert)
    for phase, times in of["phases"].items():
        f.histogram("phase_seconds", "Times of calls.", times, object=number, phase=phase)


def _count_proxies(f: _Families, provider: str, proxies: list[dict[str, Any]]) -> None:
    for name, help in (
        ("again", "Posts that the NIC refused for the moment."), ("dropped", "Arrivals of no open step."),
        ("duplicates", "Arrivals that had come before."), ("errors", "Posts and writes that failed."),
    ):  # fmt: skip
        f.counter(f"network_{name}", help, sum(proxy[name] for proxy in proxies), provider=provider)
    deepest = max(proxy["deepest"] for proxy in proxies)
    f.gauge("network_deepest", "The most writes that were in flight.", deepest, provider=provider)
    nics = [nic for proxy in proxies for nic in proxy["nics"]]
    for name in sorted({nic["nic"] for nic in nics}):
        for what, help in (("writes", "Writes posted."), ("bytes", "Bytes of the writes posted.")):
            posted = sum(nic[what] for nic in nics if nic["nic"] == name)
            f.counter(f"network_{what}", help, posted, provider=provider, nic=name)


def text(of: Iterable[Family]) -> str:
    """In Prometheus's text format."""
    lines = []
    for family in of:
        name = family.name + ("_total" if family.kind == "counter" else "")
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        for suffix, labels, value in family.samples:
            shown = ",".join(f'{label}="{_escaped(named)}"' for label, named in labels.items())
            lines.append(f"{family.name}{suffix}{{{shown}}} {value:.17g}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Collector:
    """Reads the counters whenever prometheus_client asks. Holds its Communicators weakly."""

    def __init__(self, *communicators: Counted) -> None:
        self._communicators = [weakref.ref(each) for each in communicators]

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import Metric  # its own package's, if it is there

        merged: dict[str, Any] = {}
        for each in self._communicators:
            comm = each()
            for family in families(comm.stats()) if comm is not None else ():
                metric = merged.setdefault(family.name, Metric(family.name, family.help, family.kind))
                for suffix, labels, value in family.samples:
                    metric.add_sample(family.name + suffix, labels, value)
        yield from merged.values()


def watch(comm: Counted) -> Callable[[], None]:
    """Keeps a file of its counters, where PPLX_COMM_METRICS asks for that. Returns what ends it."""
    asked = read(Watching)
    if asked.folder is None:
        return lambda: None
    return _File(comm, Path(asked.folder), asked.seconds).close


def _remove_dead(folder: Path, host: str) -> None:
    """Removes the files of this host's killed processes: those that no process holds locked."""
    for path in folder.glob(f"{host}-*.prom"):
        with suppress(OSError), path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.lstat()):  # else its process has written it anew
                path.unlink()


class _File:
    """A thread that writes the counters of one Communicator.

    The process holds the file locked, and the kernel ends that with the process. Locks of another kernel may not show: so the name
    begins with the host's boot, and a process removes files of its own host alone.
    """

    def __init__(self, comm: Counted, folder: Path, seconds: float) -> None:
        self._comm = weakref.ref(comm)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:12]
        self._host = f"pplx_comm-{boot}"
        self._path = folder / f"{self._host}-{os.getpid()}-{comm.control.job}-{comm.rank}.prom"
        self._locked: IO[str] | None = None
        self._seconds = seconds
        self._ended = threading.Event()
        self._complained = False
        name = f"pplx_comm metrics of rank {comm.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            _remove_dead(self._path.parent, self._host)
            while self._write() and not self._ended.wait(self._seconds):
                pass
        finally:
            self._path.unlink(missing_ok=True)
            if self._locked is not None:
                self._locked.close()

    def _write(self) -> bool:
        """False if the Communicator is gone."""
        comm = self._comm()
        if comm is None:
            return False
        try:
            self._replace(text(families(comm.stats())))
            self._complained = False
        except (OSError, Error) as problem:
            if not self._complained:
                log.warning("PPLX_COMM_METRICS: %s; tried again every %g s", problem, self._seconds)
            self._complained = True
        return True

    def _replace(self, told: str) -> None:
        new, file = self._path.with_suffix(".new"), None
        try:
            file = new.open("x")  # follows no link of another user
            with suppress(OSError):  # a file system without locks: nothing is removed there
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(told)
            file.flush()
            new.replace(self._path)
            self._locked, file = file, self._locked
        finally:
            new.unlink(missing_ok=True)
            if file is not None:
                file.close()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)
