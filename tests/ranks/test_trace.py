"""Timelines, as Perfetto's own definitions read them: what nests, what joins, and clocks."""

from __future__ import annotations

import fcntl
import os
import resource
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trace_cases
from cases import Case
from harness import Crew, seed
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from pplx_comm import trace
from pplx_comm.control import deadlines
from pplx_comm.errors import Error

PHASES = ["combine_recv", "combine_send", "dispatch_recv", "dispatch_send"]


class Read:
    """A file: slices (rank, track, name, begin, end, said), instants and flows, by rank."""

    def __init__(self, *paths: Path) -> None:
        trace = Trace.FromString(b"".join(path.read_bytes() for path in paths))
        self.names: dict[int, str] = {}
        parents: dict[int, int] = {}
        self.slices: list[tuple[str, str, str, int, int, dict[str, int]]] = []
        self.posts: dict[int, tuple[str, int]] = {}
        self.arrivals: dict[int, tuple[str, int]] = {}
        open_on: dict[int, list[Any]] = defaultdict(list)
        last: dict[int, int] = defaultdict(int)
        for packet in trace.packet:
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                self.names[track.uuid] = track.name or track.process.process_name
                parents[track.uuid] = track.parent_uuid
                continue
            event, at = packet.track_event, packet.timestamp
            uuid = event.track_uuid
            rank, name = self.names[parents[uuid]], self.names[uuid]
            assert last[uuid] <= at, "a track goes on in time"
            last[uuid] = at
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                said = {each.name: each.int_value for each in event.debug_annotations}
                open_on[uuid].append((rank, name, event.name, at, said))
                for flow in event.flow_ids:
                    assert flow not in self.posts, "one post a flow"
                    self.posts[flow] = (rank, at)
            elif event.type == TrackEvent.TYPE_SLICE_END:
                *begun, said = open_on[uuid].pop()
                self.slices.append((*begun, at, said))
            else:
                for flow in event.flow_ids:
                    assert flow not in self.arrivals, "one arrival a flow"
                    self.arrivals[flow] = (rank, at)
        assert not any(open_on.values()), "all slices end"

    def ranks(self) -> set[str]:
        return {name.split(" on ")[0] for name in self.names.values() if name.startswith("rank ")}


@pytest.mark.parametrize(("transport", "slot_bytes"), [("mixed:tcp", None), ("proxy:tcp", None), ("proxy:tcp", 1024)])
def test_steps(tmp_path: Path, transport: str, slot_bytes: int | None) -> None:
    """Each step has its four phases, each write its post and its arrival, whose arrow goes forward in time."""
    file = tmp_path / "job.pftrace"
    case = Case(seed(), 4, transport=transport, slot_bytes=slot_bytes, max_tokens=20, steps=8)
    with Crew(4) as crew:
        results = crew.run("trace_cases:record", case, str(file))
    read = Read(file)
    assert read.ranks() == {f"rank {rank}" for rank in range(4)}
    for rank, result in enumerate(results):
        mine = [each for each in read.slices if each[0].startswith(f"rank {rank} ")]
        phases = Counter((each[2], each[5]["step"]) for each in mine if each[1].startswith("thread "))
        assert sorted({name for name, _ in phases} - {"weights"}) == PHASES, phases
        assert Counter(name for name, _ in phases)["dispatch_send"] == trace_cases.STEPS == result["steps"]
        posts = [each for each in mine if each[1].startswith("NIC ")]
        assert len(posts) == result["proxy"]["writes"], "each write is a slice"
        assert sum(each[5]["bytes"] for each in posts) == result["proxy"]["bytes"]
    assert read.posts.keys() == read.arrivals.keys()
    assert len(read.posts) > 0
    for flow, (rank, posted) in read.posts.items():
        other, came = read.arrivals[flow]
        assert other != rank and came >= posted, (flow, rank, other, came - posted)


def test_at_the_end(tmp_path: Path) -> None:
    with Crew(3, {"PPLX_COMM_TRACE": str(tmp_path / "%j.pftrace")}) as crew:
        [job] = set(crew.run("trace_cases:at_the_end", Case(11, 3, transport="mixed:tcp", steps=3)))
    assert Read(*tmp_path.glob(f"{job}.pftrace*")).ranks() == {"rank 0", "rank 1", "rank 2"}


@pytest.mark.parametrize("name", ["%j.pftrace", "one.pftrace"])
def test_two_communicators(tmp_path: Path, name: str) -> None:
    """The second takes nothing from the first, neither its spans nor its file."""
    with Crew(2, {"PPLX_COMM_TRACE": str(tmp_path / name)}) as crew:
        [jobs] = set(crew.run("trace_cases:two_communicators", Case(12, 2, transport="mixed:tcp", steps=3)))
    for job in jobs:
        named = [path for path in tmp_path.iterdir() if f"job {job}".encode() in path.read_bytes()]
        read = Read(*named)
        assert read.ranks() == {"rank 0", "rank 1"}
        assert "dispatch_send" in {each[2] for each in read.slices}, job


class Member(SimpleNamespace):
    """May be held weakly."""


def member(rank: int, job: str = "aaaaaaaa") -> Any:
    """A Communicator, as far as a timeline asks one."""
    told = {"boot": trace._boot(), "ns": 0}
    control = SimpleNamespace(rank=rank, job=job, ask=lambda *_: {0: told}, answer=lambda *_: None)
    return Member(rank=rank, control=control)


def test_what_is_no_timeline(tmp_path: Path) -> None:
    """It stays as it is. So does the file that a link leads to."""
    for there in (b"of another program", b"\n"):
        file = tmp_path / "weights.bin"
        file.write_bytes(there)
        with pytest.raises(Error, match="something else than a timeline"):
            trace.write(member(0), file)
        assert file.read_bytes() == there
    (tmp_path / "link").symlink_to(tmp_path / "new")
    with pytest.raises(Error, match="symbolic links"):
        trace.write(member(0), tmp_path / "link")
    assert not (tmp_path / "new").exists()


def test_another_job(tmp_path: Path) -> None:
    """It replaces an earlier job's timeline, but not that of a job that runs beside it."""
    trace.start()
    trace.stop()
    file = tmp_path / "job.pftrace"
    trace.write(member(0), file)
    os.utime(file, (1, 1))
    trace.write(member(1, "bbbbbbbb"), file)
    assert Read(file).ranks() == {"rank 1"}
    trace.write(member(2, "cccccccc"), file)
    assert Read(file).ranks() == {"rank 1"}
    assert Read(tmp_path / "job.pftrace.cccccccc.2").ranks() == {"rank 2"}


def test_a_torn_packet(tmp_path: Path) -> None:
    """A rank was killed while it wrote: the others are read, and what it had written goes."""
    file = tmp_path / "job.pftrace"
    trace.write(member(0), file)
    first = len(file.read_bytes())
    trace.write(member(1), file)
    for end in (first + 1, first + 20):
        file.write_bytes(file.read_bytes()[:end])
        trace.write(member(2), file)
        assert Read(file).ranks() == {"rank 0", "rank 2"}


def test_a_full_disk(tmp_path: Path) -> None:
    """The file loses a part that was written."""
    file = tmp_path / "job.pftrace"
    trace.write(member(0), file)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(file.read_bytes()) + 10, before[1]))
    try:
        with pytest.raises(Error, match="File too large"):
            trace.write(member(1), file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    trace.write(member(2), file)
    assert Read(file).ranks() == {"rank 0", "rank 2"}


def test_a_file_that_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is stopped while it writes holds up no other one."""
    monkeypatch.setattr(deadlines, "ASKED_JOB", 0.01)
    file = tmp_path / "job.pftrace"
    with file.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        trace.write(member(1), file)
    assert file.read_bytes() == b""
    assert Read(tmp_path / "job.pftrace.aaaaaaaa.1").ranks() == {"rank 1"}


class Slow:
    """A clock, and rank 0's answers, each of which takes nearly as long as it may."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answers = True

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)

    def time(self) -> float:
        return self.now

    def ask(self, ranks: Iterable[int], what: str, seconds: float) -> dict[int, Any]:
        self.now += 0.9 * seconds
        return {0: {"boot": "another", "ns": 5e9 + self.now * 1e9}} if self.answers else {}


@pytest.mark.parametrize("answers", [True, False])
def test_the_clock_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    """Slow answers, or a rank 0 that is stopped, hold up close() no longer than is promised. Then the clock from the start serves."""
    monkeypatch.setenv("PPLX_COMM_TRACE", str(tmp_path / "job.pftrace"))
    slow, comm = Slow(), member(1)
    comm.control.ask = slow.ask
    monkeypatch.setattr(trace, "time", slow)
    end = trace.watch(comm)
    for thread in threading.enumerate():
        if thread.name == "pplx_comm clock":
            thread.join()
    slow.answers, before = answers, slow.now
    end()
    trace.stop()
    assert slow.now - before <= deadlines.CLOSE_TIMELINE
    [name] = [name for name in Read(tmp_path / "job.pftrace").names.values() if name.startswith("rank 1")]
    assert ", within" in name


def test_clocks() -> None:
    """Whatever the way of a question takes: a clock that is the same seems wrong by no more than the error that is told."""
    with Crew(3) as crew:
        for offset, error in crew.run("trace_cases:other_clocks")[1:]:
            assert 0 < error < 3 and abs(offset) <= error, (offset, error)


def test_products(tmp_path: Path) -> None:
    with Crew(2) as crew:
        crew.run("trace_cases:products", str(tmp_path / "moe.pftrace"))
    names = {each[2] for each in Read(tmp_path / "moe.pftrace").slices}
    assert {"product forward", "product dgrad", "product wgrad", "dispatch_send"} <= names, names


def test_no_file(tmp_path: Path) -> None:
    with Crew(1) as crew:
        [r] = crew.run("trace_cases:no_file", str(tmp_path / "absent" / "x"))
    assert r["is_error"] and "absent/x: No such file" in r["message"], r


def test_ranges_of_the_profiler() -> None:
    with Crew(1) as crew:
        [names] = crew.run("trace_cases:ranges", Case(13, 1, steps=3))
    assert {"pplx_comm.dispatch", "pplx_comm.combine"} <= set(names), names
