"""A rank is killed or stopped inside each phase, on every transport: the others name it, go on without it, and take it back.

One story a crew, and several crews side by side, since most of it is waiting: fall, reset, steps without the rank, the rank comes
back, full steps, and the next one falls. Nothing but its own timeouts waits for a clock: a phase is entered before the blow falls.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import Case
from harness import Crew, seed
from test_failure import CLOSED, NOTICED, left_in_shm

TRANSPORTS = ["mapped", "proxy:shm", "proxy:tcp", "relayed:tcp"]
PHASES = ["dispatch_send", "dispatch_recv", "combine_send", "combine_recv"]
RANKS = 3
TIMEOUT = 3.0  # seconds of a step, where a rank is stopped
LEAVE_OUT = 1.0  # seconds of reset() for a rank that does not come
LATE = 1.0  # seconds after its timeout in which a rank has said so
BLAMED = {  # waits for a rank that stopped there
    "dispatch_send": {"dispatch_recv", "combine_recv"},  # its block may have gone to one and not to the other
    "dispatch_recv": {"combine_recv"},
    "combine_send": {"combine_recv", "dispatch_recv"},  # or to both, just before
    "combine_recv": {"dispatch_recv"},
}


class Story:
    """One crew, and what befalls it."""

    def __init__(self, transport: str, folder: Path, timeout: float = 10.0, env: Mapping[str, str] | None = None) -> None:
        self.transport, self.folder, self.timeout = transport, folder, timeout
        self.crew = Crew(RANKS, env)
        self.number = 0
        self.pids: list[int] = []

    @property
    def case(self) -> Case:
        wire = ("native", "fp8")[self.number % 2]
        return Case(
            1000 + self.number, RANKS, transport=self.transport, max_tokens=48, hidden=1024, num_experts=8, top_k=3, wire=wire,
            in_flight=2, crowd=("full", "uneven")[self.number // 2 % 2],
        )  # fmt: skip

    def join(self) -> None:
        """All ranks, with another AllToAll than the last one."""
        self.number += 1
        self.crew.start("fault_cases:join", self.case, self.timeout)

    def joined(self) -> None:
        results = self.crew.collect(60)
        self.pids = [r["pid"] for r in results]
        for r in results:
            assert r["closing"] < CLOSED, (self.transport, r)

    def fall(self, victim: int, phase: str, how: str, delay: float) -> None:
        self.victim, self.phase, self.how = victim, phase, how
        self.others = [rank for rank in range(RANKS) if rank != victim]
        self.path = self.folder / f"{self.transport} {self.number}"
        self.crew.start("fault_cases:fall", self.case, victim, self.pids[victim], phase, how, delay, str(self.path))

    def fallen(self) -> None:
        """Every survivor has named the rank in time, and goes on doing so."""
        results = self.crew.collect(30, self.others)
        assert self.path.exists(), results
        fell = float(self.path.read_text())
        where = (self.transport, self.phase, self.how, self.victim)
        for r in results:
            assert r.get("is_peer") and r["peer"] == self.victim and f"rank {self.victim}" in r["message"], (where, str(r))
            assert r["later"].get("is_peer") and r["later"]["peer"] == self.victim, (where, str(r))
            late = r["at"] - fell
            if self.how == "kill":
                assert not r["is_timeout"] and late < NOTICED + r["starved"], (where, late, str(r))
                assert r["phase"] in PHASES or r["phase"] == "between steps", (where, str(r))
            else:
                # It may have begun to wait a little before the rank fell.
                assert r["is_timeout"] and "gave up" in r["message"], (where, str(r))
                assert late < TIMEOUT + LATE + r["starved"], (where, late, str(r))
                # A proxy that stopped with its rank may still have had the block of the phase before.
                blamed = BLAMED[self.phase] if self.transport == "mapped" else {"dispatch_recv", "combine_recv"}
                assert r["phase"] in blamed, (where, str(r))

    def go_on(self, left: Sequence[int], timeout: float | None) -> None:
        self.crew.start("fault_cases:go_on", self.case, list(left), timeout, ranks=left)

    def end(self) -> None:
        codes = self.crew.leave()
        assert codes == [0] * RANKS, [self.crew.output(rank) for rank in range(RANKS)]
        assert left_in_shm(self.crew) == []


def tell(stories: Iterable[Story], incidents: Iterable[tuple[int, str, str]], r: random.Random) -> None:
    """All stories take the same incidents, in step."""
    stories = list(stories)
    for s in stories:
        s.join()
    for s in stories:
        s.joined()
    for victim, phase, how in incidents:
        for s in stories:
            # Phases that wait are entered for good after this long; the others last about as long.
            s.fall(victim, phase, "stop" if how != "kill" else "kill", 0.005 if phase.endswith("_recv") else r.random() * 3e-4)
        for s in stories:
            s.fallen()
        if how == "kill":
            come_back_from_death(stories)
        elif how == "stop":
            awake_in_time(stories)
        else:
            awake_too_late(stories)
    for s in stories:
        s.end()


def come_back_from_death(stories: list[Story]) -> None:
    for s in stories:
        s.go_on(s.others, None)
    for s in stories:
        for r in s.crew.collect(30, s.others):
            assert r["seconds"] < 15, (s.transport, r)
        s.crew.restart(s.victim)
        s.join()
    for s in stories:
        s.joined()


def awake_in_time(stories: list[Story]) -> None:
    """It hears that it was given up, comes to reset() like all others, and no rank is missing."""
    for s in stories:
        s.crew.signal(s.victim, signal.SIGCONT)
        (told,) = s.crew.collect(10, [s.victim])
        assert told.get("is_peer") and told["peer"] == s.victim, (s.transport, str(told))
        s.go_on(range(RANKS), None)
    for s in stories:
        s.crew.collect(30)
        s.join()
    for s in stories:
        s.joined()


def awake_too_late(stories: list[Story]) -> None:
    """It was left out. Awake in the middle of the others' steps it disturbs nothing, is told, and joins anew."""
    for s in stories:
        s.go_on(s.others, LEAVE_OUT)
    for s in stories:
        s.crew.collect(30, s.others)
        s.crew.start("fault_cases:more_steps", s.case, s.others, 0.3, ranks=s.others)
    for s in stories:
        s.crew.signal(s.victim, signal.SIGCONT)
        (told,) = s.crew.collect(10, [s.victim])
        assert told.get("is_peer"), (s.transport, str(told))
        (told,) = s.crew.run("fault_cases:reset_refused", ranks=[s.victim])
        assert told.get("is_peer") and f"went on without rank {s.victim}" in told["message"], (s.transport, str(told))
    for s in stories:
        assert all(steps > 0 for steps in s.crew.collect(30, s.others))
        s.join()
    for s in stories:
        s.joined()


def all_told(folder: Path, incidents: Sequence[tuple[int, str, str]], timeout: float) -> None:
    r = random.Random(f"{seed()} {incidents}")
    stories: list[Story] = []
    try:
        stories += [Story(transport, folder, timeout) for transport in TRANSPORTS]
        tell(stories, incidents, r)
    finally:
        for s in stories:
            s.crew.close()


def test_killed(tmp_path: Path) -> None:
    all_told(tmp_path, [(number % RANKS, phase, "kill") for number, phase in enumerate(PHASES)], 10.0)


def test_stopped(tmp_path: Path) -> None:
    all_told(tmp_path, [(2, "dispatch_recv", "stop"), (0, "combine_send", "left out")], TIMEOUT)


@pytest.mark.slow
def test_killed_anywhere(tmp_path: Path) -> None:
    """Each phase once more, with another victim than in test_killed."""
    all_told(tmp_path, [(victim, phase, "kill") for victim, phase in zip((1, 0, 0, 1), PHASES, strict=True)], 10.0)


@pytest.mark.slow
def test_stopped_anywhere(tmp_path: Path) -> None:
    ends = itertools.cycle(["left out", "stop"])
    all_told(tmp_path, [(victim, phase, next(ends)) for victim, phase in zip((0, 1, 1, 0), PHASES, strict=True)], TIMEOUT)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("transport", "place"),
    [
        pytest.param("mapped", "before it agrees", marks=slow),
        ("mapped", "agreed"),
        ("proxy:shm", "AllToAll: regions"),
        pytest.param("proxy:tcp", "agreed", marks=slow),
    ],
)
def test_another_death_during_reset(transport: str, place: str, tmp_path: Path) -> None:
    case, died = Case(1, 4, transport=transport, max_tokens=16), tmp_path / "died"
    with Crew(4) as crew:
        crew.run("fault_cases:join", case, 10.0)
        crew.start("fault_cases:until_failure", case)
        for rank in range(4):
            crew.heard(rank, "running")
        crew.kill(3)
        for told in crew.collect(30, [0, 1, 2]):
            assert told["peer"] == 3, told
        crew.start("fault_cases:reset_and_die", case, [0, 1], 2, place, str(died), ranks=[0, 1, 2])
        for told in crew.collect(30, [0, 1]):
            if place == "before it agrees" and not told["type"]:
                continue
            assert told.get("is_peer") and told["peer"] == 2 and "rank 2" in told["message"], told
            assert told["at"] - float(died.read_text()) < NOTICED + told["starved"], told
            assert told["later"].get("is_peer") and told["later"]["seconds"] < 5.0 + told["later"]["starved"], told
        assert crew.leave() == [0, 0, -signal.SIGKILL, -signal.SIGKILL]
        assert left_in_shm(crew) == []


@pytest.mark.parametrize(
    ("how", "why"), [("too small", "has 4096 bytes, fewer than"), ("unsealed", "not sealed against shrinking")]
)
def test_memory_of_a_peer_that_could_fault(how: str, why: str) -> None:
    """No rank maps it: touching what is not there is the end of an honest rank."""
    with Crew(3) as crew:
        for told in crew.run("fault_cases:hand_over_bad_memory", 1, how):
            assert told.get("is_error"), told
            assert "memory that rank 1 shares" in told["message"] and why in told["message"], told


@pytest.mark.parametrize("call", ["dispatch", "dispatch_send"])
def test_no_memory_for_outputs(call: str) -> None:
    """A rank without memory for what it is to receive has sent nothing: it takes no step, and its next call joins the others."""
    with Crew(2) as crew:
        (told, _) = crew.run("fault_cases:no_memory_for_outputs", call)
        assert told["type"] == "MemoryError", told


def test_no_room_for_all_at_once() -> None:
    """The kernel would grant each of them what is there, and then kill one."""
    with Crew(3) as crew:
        for told in crew.run("fault_cases:open_under_a_limit", 2.9):
            assert told.get("is_error"), told
            assert "bytes of shared memory" in told["message"] and "this rank's share; a test's limit" in told["message"], told
        assert [told["type"] for told in crew.run("fault_cases:open_under_a_limit", 3.1)] == [""] * 3


def test_no_room_for_all_relays() -> None:
    """They count beside the blocks: no rank that found room for those takes what its mates need for theirs."""
    relayed = {"node_size": 2, "dedup": "node", "provider": "tcp"}
    with Crew(4) as crew:
        for told in crew.run("fault_cases:open_under_a_limit", 3.9, **relayed):
            assert told.get("is_error"), told
            assert "the rails" in told["message"] and "this rank's share; a test's limit" in told["message"], told
        assert [told["type"] for told in crew.run("fault_cases:open_under_a_limit", 4.1, **relayed)] == [""] * 4


def test_no_room_to_map() -> None:
    with Crew(2) as crew:
        for rank, told in enumerate(crew.run("fault_cases:out_of_address_space", 1)):
            assert told.get("is_error"), told
            assert "bytes" in told["message"] and "Cannot allocate memory" in told["message"], told
            assert rank == 1 or "rank 1" in told["message"], told


@pytest.mark.parametrize(("transport", "deaths"), [pytest.param("mapped", 0, marks=slow), ("mapped", 2), ("proxy:tcp", 0)])
def test_back_without_a_pause(transport: str, deaths: int, tmp_path: Path) -> None:
    """The survivors take steps until the restarted rank is there, and change over together. deaths: of its processes in their start."""
    story = Story(transport, tmp_path)
    with story.crew as crew:
        story.join()
        story.joined()
        story.fall(0, "combine_send", "kill", 0.0)
        story.fallen()
        story.go_on(story.others, None)
        crew.collect(30, story.others)
        before = story.case
        story.number += 1
        crew.start("fault_cases:switch_over", before, story.case, story.others, ranks=story.others)
        for rank in story.others:
            crew.heard(rank, "waiting")
        time.sleep(0.3)  # the survivors take steps meanwhile; that they do is checked below
        for _ in range(deaths):
            crew.restart(0)
            crew.start("fault_cases:die_in_the_start", ranks=[0])
        crew.restart(0)
        crew.start("fault_cases:join", story.case, 10.0, ranks=[0])
        results: list[Any] = crew.collect(60)
        assert all(len(results[rank]["failed"]) == deaths for rank in story.others), results
        assert all(results[rank]["steps"] > 0 for rank in story.others), results
        story.end()
