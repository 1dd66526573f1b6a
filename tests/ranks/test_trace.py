"""Timelines, as Perfetto's own definitions read them: what nests, what joins, and clocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import trace_cases
from cases import Case
from harness import Crew, seed
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

PHASES = ["combine_recv", "combine_send", "dispatch_recv", "dispatch_send"]


class Read:
    """A file: slices (rank, track, name, begin, end, said), instants and flows, by rank."""

    def __init__(self, path: Path) -> None:
        trace = Trace.FromString(path.read_bytes())
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
    file.write_bytes(b"of another job")
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
    assert Read(tmp_path / f"{job}.pftrace").ranks() == {"rank 0", "rank 1", "rank 2"}


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
