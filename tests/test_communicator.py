"""The Communicator on real processes: collectives, deaths, agreement, fork, and what it leaves behind."""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import pairwise
from typing import Any

import pytest
from multirank import Ranks, run_ranks
from networks import Networks

from pplx_comm._agreement import Agreement
from pplx_comm._inbox import Call, Descriptors, Inbox
from pplx_comm._probe import Place, candidates, partition
from pplx_comm.errors import Error, PeerError, StepTimeout

CASES = "communicator_cases:"
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for namespaces")


def run(world_size: int, case: str, expect_dead: set[int] | None = None, **args: Any) -> list[Any]:
    return run_ranks(world_size, CASES + case, args, expect_dead=expect_dead or set())


# ---- who shares a node


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
    with Ranks(1, CASES + "meet", {"node_size": 2}) as ranks, pytest.raises(AssertionError, match="node_size=2"):
        ranks.results()


HERE = Place("boot", 1, 1)


def test_candidates() -> None:
    places = [HERE, Place("boot", 1, 2), HERE, Place("other", 1, 1), Place("boot", 2, 1)]
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
    with Ranks(3, CASES + "meet", wrap=wrap) as ranks:
        for rank, seen in enumerate(ranks.results()):
            assert seen["node_of"] == [0, 1, 2]
            assert seen["tcp"] == [other for other in range(3) if other != rank]
            assert seen["node"][3] == rank
    with Ranks(3, CASES + "fail_to_meet", {"node_size": 3, "timeout": 10}, wrap=wrap) as ranks:
        for told in ranks.results():
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
    with Ranks(3, CASES + "wrong_order") as ranks:
        for word in ("waits", "told"):
            ranks.all_heard(word)
            for rank in range(3):
                ranks.tell(rank)
        zero, one, two = ranks.results()
    assert zero["kind"] == one["kind"] == two["kind"] == "StepTimeout"
    assert (zero["phase"], zero["peer"]) == ("this", 1)
    assert "in 'this' for rank 1, which waits in 'that'; rank 2, which waits in 'that'" in zero["message"]
    assert "in 'that' for rank 0, which waits in 'this'" in one["message"]
    assert one["seen"] == [1, 2]


def test_leaving_after_the_last_barrier_disturbs_nobody() -> None:
    run(3, "leave_after_barrier", rounds=15)


def test_world_of_one() -> None:
    seen = run_ranks(1, CASES + "meet", env={name: None for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")})
    assert seen[0]["node"] == [0, 1, 0, 0]


def test_inbox_gives_up_what_nobody_wants() -> None:
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
    with Ranks(4, CASES + "wait_for_death", {"node_size": node_size, "victim": victim}) as ranks:
        ranks.all_heard("ready")
        at = ranks.kill(victim)
        for rank, told in enumerate(ranks.results(expect_dead={victim})):
            if rank != victim:
                assert told["at"] - at < 1.0
                assert (told["kind"], told["rank"], told["calls"], told["known"]) == ("death", victim, 1, [victim])
                assert told["barrier"]["peer"] == told["later"]["peer"] == victim
                assert f"rank {victim} died" in told["later"]["message"]
                assert told["later"]["seconds"] < 0.5
                assert told["close_seconds"] < 2.0


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
    """Who leaves cleanly is no failure, except to those who wait for it, and they hear why it left."""
    with Ranks(4, CASES + "leave_early", {"how": how}) as ranks:
        assert ranks.heard(1, "result") is None
        if how == "close":
            told = ranks.heard(1, "result")
            assert "is closed (close() was called)" in told["message"]
        for rank in (0, 2, 3):
            told = ranks.heard(rank, "result")
            assert told["kind"] == "PeerError"
            assert told["peer"] == 1
            assert words in told["message"]
            assert not told["alive"][1]
            assert how == "os._exit" or told["alive"] == [True, False, True, True]
            assert told["failure"] == ("death" if how == "os._exit" else None)
            assert told["heard"][0] == ["death" if how == "os._exit" else "closed", 1]
            assert told["seconds"] < 5


@pytest.mark.parametrize("seconds", [1.2, pytest.param(8.0, marks=pytest.mark.slow)])
def test_stopped_is_not_dead(seconds: float) -> None:
    with Ranks(2, CASES + "stopped", {"seconds": seconds}) as ranks:
        ranks.all_heard("ready")
        ranks.kill(1, signal.SIGSTOP)
        told = ranks.heard(0, "waited")
        assert told["kind"] == "StepTimeout"
        assert told["peer"] == 1
        ranks.tell(1)
        ranks.kill(1, signal.SIGCONT)
        assert ranks.results() == [{"failure": False}] * 2


def test_abort_reaches_everybody_and_reset_clears_it() -> None:
    with Ranks(4, CASES + "abort") as ranks:
        ranks.all_heard("ready")
        ranks.tell(2)
        ranks.all_heard("again")
        ranks.tell(3)
        results = ranks.results()
    for told in results:
        assert told["failure"] == ["abort", 2, 0, "combine_recv", 7]
        for error in (told["waited"], told["raised"]):
            assert (error["message"], error["peer"], error["phase"]) == ("rank 2 waited for rank 0", 0, "combine_recv")
        assert told["survivors"] == [0, 1, 2, 3]
        assert told["again"]["kind"] == "StepTimeout"
        assert (told["calls"], told["generation"]) == (["abort", "timeout"], 1)


def test_interrupt() -> None:
    with Ranks(2, CASES + "interrupted") as ranks:
        ranks.heard(0, "ready")
        ranks.kill(0, signal.SIGINT)
        assert ranks.heard(0, "result") < 2
        ranks.tell(1)


def test_close_waits_for_no_callback() -> None:
    with Ranks(2, CASES + "held_up") as ranks:
        ranks.all_heard("ready")
        ranks.kill(1)
        assert ranks.heard(0, "result") < 2.2


def test_close_waits_for_no_peer() -> None:
    with Ranks(2, CASES + "close_beside_stopped") as ranks:
        ranks.all_heard("ready")
        ranks.kill(1, signal.SIGSTOP)
        ranks.tell(0)
        assert ranks.heard(0, "result") < 2.2


def test_callbacks_at_close() -> None:
    assert run(2, "on_close") == [["first", "second", "third"]] * 2
    assert run(1, "on_close") == [["first", "second", "third"]]


def test_listening_keeps_nobody_alive() -> None:
    assert run(1, "weak_callback") == [True]


def test_a_cut_link_is_told_to_those_who_cannot_see_it() -> None:
    with Ranks(3, CASES + "cut_link") as ranks:
        ranks.all_heard("ready")
        ranks.tell(0)
        ranks.all_heard("agreed")
        for rank in range(3):
            ranks.tell(rank)
        results = ranks.results()
    assert "died" in results[2]["waited"]["message"]
    assert results[2]["waited"]["seconds"] < 5
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
    """A cut cable between 0 and 1: 2 and 3 go on with one of them at most, and who is dropped does not go on."""
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


@pytest.mark.parametrize("seed", range(3))
def test_survivors_of_kills(seed: int) -> None:
    doomed = random.Random(seed).sample(range(5), 2)
    results = run(5, "survivors", expect_dead=set(doomed), seed=seed, doomed=doomed)
    expected = sorted(set(range(5)) - set(doomed))
    for rank in expected:
        assert results[rank]["agreed"] == expected
        assert results[rank]["generation"] == results[expected[0]]["generation"]


def test_agreement_survives_a_timeout_of_one() -> None:
    with Ranks(3, CASES + "agree_late") as ranks:
        ranks.heard(0, "gave up")
        for rank in (1, 2):
            ranks.tell(rank)
        zero, one, two = ranks.results()
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
    with Ranks(3, CASES + "die_with_child") as ranks:
        child = ranks.heard(1, "child")
        try:
            ranks.heard(0, "child")
            ranks.heard(2, "child")
            at = ranks.kill(1)
            for told in (ranks.heard(0, "result"), ranks.heard(2, "result")):
                assert told["peer"] == 1
                assert told["at"] - at < 1.0
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
        with Ranks(3, CASES + "lost_cable", env=env, wrap={0: here, 1: here, 2: there}) as ranks:
            assert ranks.all_heard("ready") == [[0, 0, 1]] * 3
            cut = time.monotonic()
            networks.cut()
            zero, one, two = ranks.results()
    assert zero["survivors"] == one["survivors"] == [0, 1]
    assert two["survivors"] == [2]
    for told in (zero, one):
        kind, rank, at, message = told["heard"]
        assert (kind, rank) == ("death", 2), message
        assert at - cut < 9.0
    assert two["heard"][0] == "death"


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
