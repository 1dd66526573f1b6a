"""The Communicator on real processes: collectives, deaths, agreement, fork, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import signal
import socket
import threading
import time
from itertools import pairwise, permutations
from typing import Any

import pytest
from harness import RankFailed, started
from networks import Networks, enter

from pplx_comm.control.agreement import Agreement
from pplx_comm.control.failure import Failure
from pplx_comm.control.frames import FrameError, FrameReader, Kind, decode_object, json_frame
from pplx_comm.control.inbox import Call, Descriptors, Inbox
from pplx_comm.control.mesh import Mesh
from pplx_comm.control.probe import Locality, candidates, partition
from pplx_comm.errors import Error, PeerError, StepTimeout

CASES = "communicator_cases:"
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for namespaces")


def run(world_size: int, case: str, **arguments: Any) -> list[Any]:
    with started(world_size, CASES + case, **arguments) as crew:
        return crew.collect()


# ---- nodes


@pytest.mark.parametrize("node_size", [None, 1, 3])
def test_node_size(node_size: int | None) -> None:
    """Ranks of one claimed node share memory, all others are reached by TCP; the last node may be smaller."""
    size = node_size or 4
    for rank, seen in enumerate(run(4, "meet", node_size=node_size)):
        node_of = [other // size for other in range(4)]
        assert seen["node_of"] == node_of
        assert seen["node"] == [rank // size, node_of.count(rank // size), rank % size, rank]
        assert seen["same"] == [other // size == rank // size for other in range(4)]
        assert seen["tcp"] == [other for other in range(4) if node_of[other] != node_of[rank]]


@pytest.mark.parametrize(("node_size", "words"), [(0, "between 1"), (3, "between 1"), (-1, "between 1")])
def test_bad_node_size(node_size: int, words: str) -> None:
    for told in run(2, "fail_to_meet", node_size=node_size):
        assert told["kind"] == "Error"
        assert words in told["message"]


def test_node_size_must_agree() -> None:
    with started(1, CASES + "meet", node_size=2) as crew:
        with pytest.raises(RankFailed, match="node_size=2"):
            crew.collect()
        crew.ended(0, 1)


HERE = Locality("boot", 1, 1)


def test_candidates() -> None:
    places = [HERE, Locality("boot", 1, 2), HERE, Locality("other", 1, 1), Locality("boot", 2, 1)]
    assert candidates(places, None) == [0, 1, 0, 2, 3]
    assert candidates([HERE] * 5, 2) == [0, 0, 1, 1, 2]
    for bad, words in [(1, "IPC"), (3, "different hosts"), (4, "network")]:
        with pytest.raises(Error, match=words):
            candidates([HERE, places[bad]], 2)


def test_partition_is_an_equivalence() -> None:
    """Whatever pairs can share memory, nodes are disjoint groups in which all pairs can."""
    rng = random.Random(1)
    for _ in range(300):
        size = rng.randrange(1, 9)
        claimed = [rng.randrange(2) for _ in range(size)]
        shares = [{peer for peer in range(size) if rng.random() < 0.8} for _ in range(size)]
        node_of = partition(claimed, shares, None)
        for a in range(size):
            for b in range(size):
                if a != b and node_of[a] == node_of[b]:
                    assert claimed[a] == claimed[b]
                    assert b in shares[a]
                    assert a in shares[b]
        first = [node_of.index(node) for node in sorted(set(node_of))]
        assert first == sorted(first)
    everybody = [set(range(4))] * 4
    assert partition([0] * 4, everybody, 4) == [0] * 4
    with pytest.raises(Error, match=r"node_size=4.*cannot map"):
        partition([0] * 4, [{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 3}, {0, 1, 3}], 4)


@root
def test_ipc_namespaces_are_nodes() -> None:
    """Two of three ranks in an IPC namespace of their own each: three nodes, unless node_size claims otherwise."""
    wrap = {1: ["unshare", "-i"], 2: ["unshare", "-i"]}
    with started(3, CASES + "meet", wrap=wrap) as crew:
        for rank, seen in enumerate(crew.collect()):
            assert seen["node_of"] == [0, 1, 2]
            assert seen["tcp"] == [other for other in range(3) if other != rank]
            assert seen["node"][3] == rank
    with started(3, CASES + "fail_to_meet", node_size=3, timeout=10, wrap=wrap) as crew:
        for told in crew.collect():
            assert "node_size=3 puts ranks 0 and 1 on one node" in told["message"]
            assert "IPC namespaces" in told["message"]


# ---- collectives


def test_share_files() -> None:
    run(3, "share_files", count=3)


def test_share_more_files_than_one_message_takes() -> None:
    run(2, "share_files", count=300)


def test_out_of_descriptors() -> None:
    for told in run(2, "out_of_fds"):
        assert "rank 1 did not get all file descriptors of ranks [0]" in told["message"]
        assert "ulimit -n" in told["message"]


def test_threads() -> None:
    run(3, "threads", count=12, rounds=20)


def test_big_exchange() -> None:
    run(3, "big_exchange", nbytes=8 << 20)


def test_wrong_order_names_what_each_waits_for() -> None:
    with started(3, CASES + "wrong_order") as crew:
        for word in ("waits", "told"):
            crew.all_heard(word)
            for rank in range(3):
                crew.tell(rank)
        zero, one, two = crew.collect()
    assert zero["kind"] == one["kind"] == two["kind"] == "StepTimeout"
    assert (zero["phase"], zero["peer"]) == ("this", 1)
    assert "in 'this' for rank 1, which waits in 'that'; rank 2, which waits in 'that'" in zero["message"]
    assert "in 'that' for rank 0, which waits in 'this'" in one["message"]
    assert one["seen"] == [1, 2]


def test_leaving_after_the_last_barrier_disturbs_no_rank() -> None:
    run(3, "leave_after_barrier", rounds=15)


def test_world_of_one() -> None:
    seen = run(1, "meet", env={name: None for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")})
    assert seen[0]["node"] == [0, 1, 0, 0]


def test_inbox_gives_up_unwanted_messages() -> None:
    inbox = Inbox()
    call = inbox.open(0, "tag")
    inbox.receive(0, 1, call.pack() + b"1")
    assert inbox.payloads(call) == {1: b"1"}
    inbox.close(call)
    inbox.receive(0, 2, call.pack() + b"late")
    assert call not in inbox._payloads
    coming = Call(1, "tag", 0)
    inbox.receive(0, 2, coming.pack() + b"early")
    inbox.new_generation(1)
    assert inbox.payloads(inbox.open(1, "tag")) == {2: b"early"}
    reader, writer = os.pipe()
    inbox.receive_fds(1, 2, Call(0, "old", 0).pack() + Descriptors.header(1, 1), [writer])
    assert os.read(reader, 1) == b"", "a descriptor of an old call was kept"
    os.close(reader)


# ---- death and leave


@pytest.mark.parametrize("node_size", [None, 1])
@pytest.mark.parametrize("victim", [0, 2])
def test_kill(victim: int, node_size: int | None) -> None:
    """Over AF_UNIX and over TCP, rank 0 or another: every survivor's callback names it within a second."""
    with started(4, CASES + "wait_for_death", node_size=node_size, victim=victim) as crew:
        crew.all_heard("ready")
        at = crew.kill(victim)
        for told in crew.collect(ranks=[rank for rank in range(4) if rank != victim]):
            assert told["at"] - at < 1.0 + told["barrier"]["starved"]
            assert (told["kind"], told["rank"], told["calls"], told["known"]) == ("death", victim, 1, [victim])
            assert told["barrier"]["peer"] == told["later"]["peer"] == victim
            assert f"rank {victim} died" in told["later"]["message"]
            assert told["later"]["seconds"] < 5.0 + told["later"]["starved"]
            assert told["close_seconds"] < 10.0


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("close", "close() was called"),
        ("drop", "dropped without close()"),
        ("raise", "RuntimeError: a user's mistake"),
        ("sys.exit", "its process ends"),
        ("os._exit", "rank 1 died"),
    ],
)
def test_leave(how: str, words: str) -> None:
    """A clean leave is no failure, except to ranks that wait for it, and they hear why it left."""
    with started(4, CASES + "leave_early", how=how) as crew:
        crew.heard(1, "leaves")
        if how == "close":
            told = crew.collect(ranks=[1])[0]
            assert "is closed (close() was called)" in told["message"]
        for rank in (0, 2, 3):
            told = crew.collect(ranks=[rank])[0]
            assert told["kind"] == "PeerError"
            assert told["peer"] == 1
            assert words in told["message"]
            assert not told["alive"][1]
            assert how == "os._exit" or told["alive"] == [True, False, True, True]
            assert told["failure"] == ("death" if how == "os._exit" else None)
            assert told["heard"][0] == ["death" if how == "os._exit" else "closed", 1]
            assert told["seconds"] < 15
        crew.ended(1, {"raise": 1, "os._exit": 3}.get(how, 0))


@pytest.mark.parametrize("seconds", [1.2, pytest.param(6.0, marks=pytest.mark.slow)])
def test_stopped_is_not_dead(seconds: float) -> None:
    with started(2, CASES + "stopped", seconds=seconds) as crew:
        crew.all_heard("ready")
        crew.signal(1, signal.SIGSTOP)
        told = crew.heard(0, "waited")
        assert told["kind"] == "StepTimeout"
        assert told["peer"] == 1
        crew.tell(1)
        crew.signal(1, signal.SIGCONT)
        assert crew.collect() == [{"failure": False}] * 2


def test_abort_reaches_everybody_and_reset_clears_it() -> None:
    with started(4, CASES + "abort") as crew:
        crew.all_heard("ready")
        crew.tell(2)
        crew.all_heard("again")
        crew.tell(3)
        results = crew.collect()
    for told in results:
        assert told["failure"] == ["abort", 2, 0, "combine_recv", 7]
        for error in (told["waited"], told["raised"]):
            assert (error["message"], error["peer"], error["phase"]) == ("rank 2 waited for rank 0", 0, "combine_recv")
        assert told["survivors"] == [0, 1, 2, 3]
        assert told["again"]["kind"] == "StepTimeout"
        assert (told["calls"], told["generation"]) == (["abort", "timeout"], 1)


def test_an_honest_report_of_nonsense_blames_no_rank() -> None:
    """Devices read what peers could have damaged. A rank that passes it on is no liar, and stays in."""
    for told in run(3, "abort_with_nonsense"):
        assert told["failure"] == ["abort", 1, None, 7]
        assert "a damaged word" in told["message"]
        assert told["survivors"] == [0, 1, 2]


def test_failures_that_name_no_rank() -> None:
    fine = {"rank": 1, "peer": 2, "kind": "abort", "phase": "x", "step": 3, "message": "m"}
    assert Failure.from_json(fine, 3).peer == 2
    for peer in (3, -1, 1 << 40, True, "1", 1.0):
        assert Failure.from_json({**fine, "peer": peer}, 3).peer is None
        assert Failure("abort", 1, peer=peer, message="m" * 9999).checked(3).to_json()["peer"] is None  # type: ignore[arg-type]
    for rank in (3, -1, "1", None, True):
        with pytest.raises(FrameError):
            Failure.from_json({**fine, "rank": rank}, 3)


def test_timeouts_that_no_wait_can_take() -> None:
    """Rank 0 raised OverflowError inside of a wait, and told no peer."""
    timeouts = ["inf", "nan", "1e10", "-1", "5"]
    for told in run(2, "bad_timeouts", timeouts=timeouts):
        for messages in told:
            assert len(messages) == 6
            for message in messages:
                assert "must be a number of seconds, at most 1000000" in message


@pytest.mark.parametrize("inherited", ["default", "ignored"])
def test_interrupt(inherited: str) -> None:
    """Also where the tests themselves run in the background of a script, or under nohup, with SIGINT ignored."""
    without = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    with started(2, CASES + "interrupted", wrap={rank: without for rank in range(2) if inherited == "ignored"}) as crew:
        crew.heard(0, "ready")
        crew.signal(0, signal.SIGINT)
        assert crew.collect(ranks=[0])[0] < 2
        crew.tell(1)


def test_close_waits_for_no_callback() -> None:
    with started(2, CASES + "held_up") as crew:
        crew.all_heard("ready")
        crew.kill(1)
        assert crew.collect(ranks=[0])[0] < 2.2


def test_a_callback_may_wait_for_other_ranks() -> None:
    with started(3, CASES + "waits_in_a_callback") as crew:
        crew.all_heard("ready")
        crew.kill(1)
        assert crew.collect(ranks=[0, 2]) == [[[0, 2]]] * 2


def test_close_waits_for_no_peer() -> None:
    with started(2, CASES + "close_beside_stopped") as crew:
        crew.all_heard("ready")
        crew.signal(1, signal.SIGSTOP)
        crew.tell(0)
        assert crew.collect(ranks=[0])[0] < 2.2
        crew.kill(1)


def test_callbacks_at_close() -> None:
    assert run(2, "on_close") == [["first", "second", "third"]] * 2
    assert run(1, "on_close") == [["first", "second", "third"]]


def test_listening_keeps_no_rank_alive() -> None:
    assert run(1, "weak_callback") == [True]


def test_a_cut_link_is_told_to_ranks_that_cannot_see_it() -> None:
    with started(3, CASES + "cut_link") as crew:
        crew.all_heard("ready")
        crew.tell(0)
        crew.all_heard("agreed")
        for rank in range(3):
            crew.tell(rank)
        results = crew.collect()
    assert "died" in results[2]["waited"]["message"]
    assert results[2]["waited"]["seconds"] < 15
    for rank, told in enumerate(results):
        if rank in results[2]["survivors"]:
            assert told["survivors"] == results[2]["survivors"]
        else:
            assert f"went on without rank {rank}" in told["excluded"]["message"]
    assert not {0, 1} <= set(results[2]["survivors"])


def test_a_goodbye_tells_the_failure_behind_it() -> None:
    told = run(2, "leave_with_a_reason")[0]
    assert (told["message"], told["peer"], told["phase"]) == ("the first cause", 1, "dispatch_recv")


def test_reset_ends_the_waits_of_other_threads() -> None:
    for rank, told in enumerate(run(2, "reset_beside_a_wait")):
        assert f"'of {rank}' was cut off" in told["message"]


# ---- agreement


class _World:
    """Agreements of all ranks, with messages in order per pair and losses at any time, driven by a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.size = self.rng.randrange(2, 7)
        self.queues: dict[tuple[int, int], list[Any]] = {}
        self.dead: set[int] = set()
        self.agreements = [self._agreement(rank) for rank in range(self.size)]

    def _agreement(self, rank: int) -> Agreement:
        def send(what: str, ranks: frozenset[int]) -> None:
            if rank in self.dead:
                return
            # A rank may die in the middle of telling.
            for peer in sorted((self.agreements[rank].view | ranks) - {rank}):
                if rank in self.mortal and self.rng.random() < 0.05:
                    self.dead.add(rank)
                if rank in self.dead:
                    return
                self.queues.setdefault((rank, peer), []).append((what, ranks))

        return Agreement(rank, range(self.size), send)

    def run(self) -> None:
        self.mortal = set(self.rng.sample(range(self.size), self.rng.randrange(self.size)))
        waiting = list(range(self.size))
        noticed: set[tuple[int, int]] = set()
        for _ in range(5000):
            moves: list[Any] = [("begin", rank) for rank in waiting if rank not in self.dead]
            moves += [("deliver", pair) for pair, queue in self.queues.items() if queue and pair[1] not in self.dead]
            moves += [
                ("notice", (dead, rank))
                for dead in self.dead
                for rank in range(self.size)
                if rank not in self.dead and (dead, rank) not in noticed and not self.queues.get((dead, rank))
            ]
            mortal = sorted(self.mortal - self.dead)
            if mortal and self.rng.random() < 0.03:
                moves.append(("die", self.rng.choice(mortal)))
            if not moves:
                return
            what, where = self.rng.choice(moves)
            if what == "begin":
                waiting.remove(where)
                self.agreements[where].begin()
            elif what == "die":
                self.dead.add(where)
            elif what == "notice":
                noticed.add(where)
                self.agreements[where[1]].lost(where[0])
            else:
                message, ranks = self.queues[where].pop(0)
                self.agreements[where[1]].receive(where[0], message, ranks)
        raise AssertionError("it never ends")


@pytest.mark.parametrize("part", range(4))
def test_agreement_under_any_deaths(part: int) -> None:
    """Thousands of seeds: every survivor decides, all the same, and none that lives is left out."""
    for seed in range(part * 1500, (part + 1) * 1500):
        world = _World(seed)
        world.run()
        living = [agreement for agreement in world.agreements if agreement.rank not in world.dead]
        decisions = {agreement.decided for agreement in living}
        assert len(decisions) == 1, f"seed {seed}: {decisions}"
        (decision,) = decisions
        assert decision is not None, f"seed {seed}: nothing decided"
        assert decision >= {agreement.rank for agreement in living}, f"seed {seed}: {decision}"


def test_agreement_drops_a_rank_that_only_some_lost() -> None:
    """A cut cable between 0 and 1: 2 and 3 go on with one of them at most, and the dropped rank does not go on."""
    queues: list[tuple[int, int, str, frozenset[int]]] = []

    def sender(rank: int) -> Any:
        return lambda what, ranks: queues.extend(
            (rank, peer, what, ranks) for peer in (agreements[rank].view | ranks) - {rank} if {rank, peer} != {0, 1}
        )

    agreements = [Agreement(rank, range(4), sender(rank)) for rank in range(4)]
    agreements[0].lost(1)
    agreements[1].lost(0)
    for agreement in agreements:
        agreement.begin()
    while queues:
        rank, peer, what, ranks = queues.pop(0)
        agreements[peer].receive(rank, what, ranks)
    assert agreements[2].decided == agreements[3].decided
    decided = agreements[2].decided
    assert decided is not None
    assert not {0, 1} <= decided
    for rank in {0, 1} - decided:
        assert agreements[rank].decided is None


class _Wire:
    """One end of a connection between two meshes: frames wait in a queue until the test delivers them."""

    def __init__(self, rank: int, frames: list[bytes]) -> None:
        self.rank, self._frames = rank, frames

    def send(self, message: bytes, fds: Any = ()) -> None:
        self._frames.append(message)

    def finish_sending(self) -> None: ...


class _Generations:
    """Meshes of all ranks without threads or sockets, each with several callers that recover from failure after failure.

    A caller knows the generation in which it works, and ends it when a failure has come. Rank by rank it hears of the agreement early or
    late, and once more reports the failure that it has recovered from.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.size = self.rng.randrange(2, 6)
        self.queues: dict[tuple[int, int], list[bytes]] = {}
        self.meshes = [Mesh(rank, self.size) for rank in range(self.size)]
        for rank, peer in permutations(range(self.size), 2):
            frames = self.queues[rank, peer] = []
            self.meshes[rank].connections[peer] = _Wire(peer, frames)  # type: ignore[assignment]
        self.dead: set[int] = set()
        self.mortal = set(self.rng.sample(range(self.size), self.rng.randrange(self.size)))
        self.noticed: set[tuple[int, int]] = set()
        self.callers = [(rank, caller) for rank in range(self.size) for caller in range(self.rng.randrange(1, 4))]
        self.works_in = dict.fromkeys(self.callers, 0)
        self.asking: set[tuple[int, int]] = set()
        self.answers: dict[int, set[tuple[int, ...]]] = {}
        self.failures = self.rng.randrange(1, 6)

    def run(self) -> None:
        for _ in range(20000):
            moves: list[Any] = [(self._deliver, pair) for pair, queue in self.queues.items() if queue and pair[1] not in self.dead]
            moves += [
                (self._notice, pair)
                for pair, queue in self.queues.items()
                if pair[0] in self.dead and pair[1] not in self.dead and not queue and pair not in self.noticed
            ]
            moves += [(self._call, caller) for caller in self.callers if caller[0] not in self.dead and self._has_work(caller)]
            if self.failures:
                moves += [(self._fail, rank) for rank in range(self.size) if rank not in self.dead]
            if self.mortal - self.dead and self.rng.random() < 0.03:
                moves.append((self._die, self.rng.choice(sorted(self.mortal - self.dead))))
            if not moves:
                return
            move, where = self.rng.choice(moves)
            move(where)
        raise AssertionError("it never ends")

    def _has_work(self, caller: tuple[int, int]) -> bool:
        mesh = self.meshes[caller[0]]
        return mesh.generation > self.works_in[caller] or (mesh.failure is not None and caller not in self.asking)

    def _call(self, caller: tuple[int, int]) -> None:
        """As control.recovery does, but that threads may overtake each other."""
        mesh, after = self.meshes[caller[0]], self.works_in[caller]
        with mesh.condition:
            mesh._survivors.begin(after)
            agreed = mesh._survivors.agreed(after)
        self.asking.add(caller)
        if agreed is not None:
            self.answers.setdefault(mesh.generation, set()).add(tuple(agreed))
            self.asking.discard(caller)
            self.works_in[caller] = mesh.generation
            before = mesh.failure
            mesh.abort(Failure("abort", caller[0], message="of a generation that is over"), after)
            assert mesh.failure is before

    def _deliver(self, pair: tuple[int, int]) -> None:
        mesh, reader = self.meshes[pair[1]], FrameReader(frozenset(Kind))
        for kind, payload in reader.feed(self.queues[pair].pop(0)):
            with mesh.condition:
                mesh._handle(pair[0], kind, decode_object(payload))

    def _fail(self, rank: int) -> None:
        self.failures -= 1
        self.meshes[rank].abort(Failure("abort", rank, message="it failed"))

    def _die(self, rank: int) -> None:
        self.dead.add(rank)

    def _notice(self, pair: tuple[int, int]) -> None:
        self.noticed.add(pair)
        mesh = self.meshes[pair[1]]
        with mesh.condition:
            mesh._lose(Failure("death", pair[0], message=f"rank {pair[0]} died"))


@pytest.mark.parametrize("part", range(2))
def test_generations_of_several_callers(part: int) -> None:
    """All callers of all ranks hear one list for a generation. In the end all that live are in the same one, and it has not failed."""
    for seed in range(part * 400, (part + 1) * 400):
        world = _Generations(seed)
        world.run()
        assert all(len(lists) == 1 for lists in world.answers.values()), f"seed {seed}: {world.answers}"
        living = [mesh for mesh in world.meshes if mesh.rank not in world.dead]
        members = frozenset(mesh.rank for mesh in living)
        assert len({mesh.generation for mesh in living}) == 1 and living[0].generation > 0, f"seed {seed}"
        assert all(mesh.failure is None and mesh.members == members for mesh in living), f"seed {seed}"
        assert {world.works_in[rank, 0] for rank in members} == {living[0].generation}, f"seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_survivors_of_kills(seed: int) -> None:
    doomed = random.Random(seed).sample(range(5), 2)
    expected = sorted(set(range(5)) - set(doomed))
    with started(5, CASES + "survivors", seed=seed, doomed=doomed) as crew:
        results = crew.collect(ranks=expected)
    for told in results:
        assert told["agreed"] == expected
        assert told["generation"] == results[0]["generation"]


def test_agreement_survives_a_timeout_of_one() -> None:
    with started(3, CASES + "agree_late") as crew:
        crew.heard(0, "gave up")
        for rank in (1, 2):
            crew.tell(rank)
        zero, one, two = crew.collect()
        assert zero["agreed"] == one["agreed"] == two["agreed"] == [0, 1, 2]
        assert zero["first"]["kind"] == "StepTimeout"
        assert "ranks [1, 2] have not come" in zero["first"]["message"]


# ---- processes


def test_fork() -> None:
    for told in run(3, "fork_child"):
        # The test's own channel is the one socket that is left.
        assert told["sockets"] == 1
        assert "Error: this Communicator belongs to process" in told["text"]
        assert "forked from it" in told["text"]
        assert told["status"] == 0


def test_death_shows_while_a_forked_child_lives() -> None:
    with started(3, CASES + "die_with_child") as crew:
        child = crew.heard(1, "child")
        try:
            crew.heard(0, "child")
            crew.heard(2, "child")
            at = crew.kill(1)
            for told in crew.collect(ranks=[0, 2]):
                assert told["peer"] == 1
                assert told["at"] - at < 1.0 + told["starved"]
            os.kill(child, 0)  # it still lives
        finally:
            os.kill(child, signal.SIGKILL)


def test_nothing_is_left_behind() -> None:
    """200 times open and close: no descriptor, no thread, no memory that grows."""
    for told in run(2, "cycles", times=200):
        assert told["after"][:2] == told["before"][:2], told
        assert told["after"][2] - told["before"][2] < 8 << 20, told


# ---- networks


def test_two_hosts_and_a_cut_cable() -> None:
    """Two network namespaces joined by one cable stand for two hosts: TCP between them, and its loss is noticed."""
    with Networks() as networks:
        here, there = (["ip", "netns", "exec", name] for name in networks.names)
        env = {
            "PPLX_COMM_ADDR": f"{networks.addresses[0]}:29999",
            "PPLX_COMM_SECRET": "0123456789abcdef0123456789abcdef",
            "LOCAL_WORLD_SIZE": "2",
        }
        with started(3, CASES + "lost_cable", env=env, wrap={0: here, 1: here, 2: there}) as crew:
            assert crew.all_heard("ready") == [[0, 0, 1]] * 3
            cut = time.monotonic()
            networks.cut()
            zero, one, two = crew.collect()
    assert zero["survivors"] == one["survivors"] == [0, 1]
    assert two["survivors"] == [2]
    for told in (zero, one):
        kind, rank, at, message = told["heard"]
        assert (kind, rank) == ("death", 2), message
        assert at - cut < 9.0
    assert two["heard"][0] == "death"


class _Strangers:
    """Listens at an address of a network on every port of a range, and refuses callers as another job's rank does."""

    def __init__(self, network: str, address: str, ports: range) -> None:
        self.met = 0
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(network, address, ports))
        self._thread.start()
        assert self._ready.wait(10)

    def _serve(self, network: str, address: str, ports: range) -> None:
        enter(network)
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as cleanup:
            for port in ports:
                listener = cleanup.enter_context(socket.create_server((address, port)))
                selector.register(listener, selectors.EVENT_READ)
            self._ready.set()
            while not self._stop.is_set():
                for key, _ in selector.select(0.05):
                    sock, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    with sock, contextlib.suppress(OSError):
                        sock.settimeout(5)
                        sock.recv(4096)
                        self.met += 1
                        sock.sendall(json_frame(Kind.REJECT, {"reason": "planted", "final": True}))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def test_an_address_that_both_hosts_have() -> None:
    """It leads each caller to the listener on its own host, here a rank of another job: only that call may fail."""
    with Networks() as networks, contextlib.ExitStack() as cleanup:
        here, there = (["ip", "netns", "exec", name] for name in networks.names)
        networks.share("172.17.0.1")
        networks.ports(0, 40000, 40031)
        strangers = _Strangers(networks.names[1], "172.17.0.1", range(40000, 40032))
        cleanup.callback(strangers.close)
        env = {
            "PPLX_COMM_ADDR": f"{networks.addresses[0]}:29999",
            "PPLX_COMM_SECRET": "0123456789abcdef0123456789abcdef",
            "LOCAL_WORLD_SIZE": "2",
        }
        with started(4, CASES + "meet", env=env, wrap={0: here, 1: here, 2: there, 3: there}) as crew:
            assert [seen["node_of"] for seen in crew.collect()] == [[0, 0, 1, 1]] * 4
        assert strangers.met >= 1


# ---- errors


def test_errors_are_what_they_say() -> None:
    problem = StepTimeout("late", peer=3, phase="combine_recv", step=7, expected=1, seen=2)
    assert isinstance(problem, PeerError)
    assert isinstance(problem, TimeoutError)
    assert isinstance(problem, Error)
    assert (str(problem), problem.peer, problem.phase, problem.step, problem.expected, problem.seen) == (
        "late",
        3,
        "combine_recv",
        7,
        1,
        2,
    )
    assert all(issubclass(low, high) for low, high in pairwise([StepTimeout, PeerError, Error, Exception]))
