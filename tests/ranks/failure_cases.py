"""Cases in which a rank dies, stops, leaves or is interrupted, and of reset(); see harness and rank_cases.py."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import reference
import torch
from cases import DTYPES, Case, Step, make_steps
from harness import until
from outcomes import Failed, Starved, mistake, must, raised
from rank_cases import Good, attach_tails, check_dispatched, end_of, open_all_to_all, run_experts
from reference import Tokens, same_bits

import pplx_comm as pc

PLACES = (
    "before_dispatch", "after_dispatch_send", "in_dispatch_recv", "after_dispatch", "in_weights", "after_combine_send", "in_combine_recv",
    "after_combine",
)  # fmt: skip
LATE = ((2, "before_rows_come"), (3, "combine_send"), (2, "combine_recv"), (0, "dispatch_send"))
"""Ranks, and where they come late; rank 2 is then the relay of rank 0, and rank 3 the other rank of its node."""
AMID = ("amid_dispatch_recv", "amid_combine_recv")
"""Where blocks go in pieces: the first ones of all ranks have come, and one rank does not read them."""


def _die(path: str) -> None:
    with open(path, "w") as file:
        file.write(repr(time.monotonic()))
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def _hold_shm() -> None:
    """Acts as if shm of libfabric before 1.18 polled just now: it holds the lock of its own file, which writers to it wait for."""
    files = [name for name in os.listdir("/dev/shm") if f".{os.getpid()}." in name]
    must(len(files) > 0, "files in /dev/shm", files)
    for name in files:
        with open(f"/dev/shm/{name}", "r+b") as file, mmap.mmap(file.fileno(), 4096) as region:
            must(region[:1] == b"\x04", "the layout of struct smr_region that this test knows", region[:64])
            region[24:28] = bytes(4)  # pthread_spinlock_t: 1 is free


def _when_inside(function: str, then: Any) -> None:
    """Once the main thread stands still in that call of the library, in C++ without the GIL: in the call itself, or on a GPU where what it
    launched is waited for."""
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        seen, last = 0, None
        while seen < 30:
            innermost = sys._current_frames()[main]
            at = innermost.f_code, innermost.f_lasti
            inside = any(frame.f_code.co_name == function for frame, _ in traceback.walk_stack(innermost))
            seen, last = seen + 1 if inside and at == last else 0, at
            time.sleep(0.001)
        then()

    threading.Thread(target=watch, daemon=True).start()


def process_state(pid: int) -> str:
    """T: it stands still. Nothing: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def until_failure(me: Any, timeout: float = 20.0) -> None:
    """Waits until this rank, which is in no call, knows of the failure."""
    deadline = time.monotonic() + timeout
    while me.comm.failure is None:
        must(time.monotonic() < deadline, "this rank was told nothing")
        time.sleep(0.001)


def _latched(me: Any, a2a: pc.AllToAll, first: dict[str, Any], good: Good) -> None:
    """Every later call raises the first cause, at once."""
    mine = good.mine
    calls = [
        a2a.check, lambda: a2a.dispatch(mine.x, mine.ids, mine.weights), me.comm.barrier, lambda: open_all_to_all(me, good.runner.case),
        a2a.check, lambda: a2a.dispatch_send(mine.x, mine.ids, mine.weights),
    ]  # fmt: skip
    for call in calls:
        r = raised(call)
        must(bool(r.get("is_peer")), "a later call must raise PeerError, not", r["type"], r["message"])
        must(r["peer"] == first["peer"] and r["seconds"] < 5.0 + r["starved"], "the first cause, at once:", r, first)


def survive(me: Any, case: Case, victim: int, place: str, path: str, close: bool = True) -> dict[str, Any]:
    """Two good steps; in the third the victim kills itself at that place. What the others saw."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    good.step()
    dying, runner, n = me.rank == victim, good.runner, good.n
    # Where the victim is to be inside a call, one rank holds back what that call waits for.
    holding = me.rank == (victim + 1) % me.world_size

    def hold(here: str) -> None:
        if not holding or place != here:
            return
        until_failure(me)

    def at(here: str) -> None:
        if dying and place == here:
            _die(path)

    def inside(here: str, function: str) -> None:
        if dying and place == here:
            _when_inside(function, lambda: _die(path))

    def step() -> None:
        me.comm.barrier()  # the last rank may hear of the death in it
        at("before_dispatch")
        hold("in_dispatch_recv")
        sent = runner.dispatch_send(n)
        at("after_dispatch_send")
        hold("amid_dispatch_recv")
        for where in ("in", "amid"):
            inside(f"{where}_dispatch_recv", "dispatch_recv")
        d = runner.dispatch_recv(n, sent)
        at("after_dispatch")
        runner.steps[n].late_weights = None
        if place == "in_weights":
            runner.steps[n].weighted = True
            runner.steps[n].late_weights = [t.effective_weights for t in runner.steps[n].tokens]
        hold("in_weights")
        hold("in_combine_recv")
        inside("in_weights", "combine")
        c = runner.combine_send(n, d)
        at("after_combine_send")
        hold("amid_combine_recv")
        for where in ("in", "amid"):
            inside(f"{where}_combine_recv", "combine_recv")
        assert c is not None
        runner.combine_recv(n, c)
        at("after_combine")
        runner.dispatch(n + 1)
        raise Failed("the next step worked without the victim")

    runner.steps[n].how = ["halves"] * me.world_size
    result = raised(step)
    if result.get("is_peer"):
        _latched(me, a2a, result, good)
        result["failure_kind"] = me.comm.failure.kind
    result["closing"] = end_of(me, a2a, close)
    return result


def endless(me: Any, case: Case, close: bool = True, doomed: tuple[int, ...] = ()) -> dict[str, Any]:
    """Steps until something goes wrong, which is said. doomed: ranks that become one process group, for one signal to all of them."""
    if doomed:
        pids = [there["pid"] for there in me.comm.control.all_gather({"pid": os.getpid()}, "pids")]
        if me.rank == doomed[0]:
            os.setpgid(0, 0)
        me.comm.barrier()
        if me.rank in doomed[1:]:
            os.setpgid(0, pids[doomed[0]])
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    me.say("running")

    def on() -> None:
        while True:
            if good.n == 60:
                good.n = 0
            starved.again()
            good.step()

    starved = Starved()
    result = raised(on, starved)
    if result.get("is_peer"):
        _latched(me, a2a, result, good)
    result["closing"] = end_of(me, a2a, close)
    return result


def two_causes(me: Any, case: Case) -> dict[str, Any]:
    """A neighbour blames rank 1 in rank 0's memory, while its control thread hears of rank 2. What the first call said."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    if me.rank == 0:
        a2a._steps.device.core.fail("death", 1, 1, 0, "rank 1 died")
        me.comm.control.abort("rank 2 died", kind="death", rank=2)
    result = raised(lambda: [good.step() for _ in range(60)])
    _latched(me, a2a, result, good)
    end_of(me, a2a, True)
    return result


def slow_rank(me: Any, case: Case, slow: int, timeout: float, phase: str, steps: int) -> dict[str, Any]:
    """In the fourth step one rank stops itself before that phase; the test wakes it up."""
    a2a = open_all_to_all(me, case, timeout=timeout)
    good = Good(me, case, a2a)

    def run() -> None:
        for step in good.runner.steps:
            step.late_weights, step.how = None, ["whole"] * me.world_size
        for n in range(steps):
            stopping = n == 3 and me.rank == slow
            if n == 3:
                me.comm.barrier()  # the slow rank's earlier messages have arrived
            if stopping and phase == "dispatch_send":
                os.kill(os.getpid(), signal.SIGSTOP)
            d = good.dispatch()
            if n == 3 and phase == "combine_send":
                me.comm.barrier()
            if stopping and phase == "combine_send":
                os.kill(os.getpid(), signal.SIGSTOP)
            good.combine(d)

    result = raised(run)
    result["last_step"] = good.last_step
    if result.get("is_peer"):
        _latched(me, a2a, result, good)
    result["closing"] = end_of(me, a2a, True)
    return result


def late_behind_relays(me: Any, case: Case, incidents: Sequence[tuple[int, str]] = LATE) -> list[dict[str, Any]]:
    """Returns what each rank saw, by incident: rank 2 stops before anybody's rows come; others are awake, and late."""
    pids = [there["pid"] for there in me.comm.control.all_gather({"pid": os.getpid()}, "pids")]
    told: list[dict[str, Any]] = []
    with open_all_to_all(me, case, timeout=2.0) as a2a:
        for number, (culprit, place) in enumerate(incidents):
            good = Good(me, replace(case, seed=case.seed + number), a2a)
            good.step()
            runner, n = good.runner, good.n
            runner.steps[n].late_weights, runner.steps[n].how = None, ["halves"] * me.world_size

            def late(here: str, culprit: int = culprit, place: str = place) -> None:
                if me.rank == culprit and place == here:
                    until_failure(me)

            def step(runner: Any = runner, n: int = n, place: str = place, late: Any = late) -> None:
                me.comm.barrier()
                if place == "before_rows_come" and me.rank != 2:  # all begin then: none is late for another
                    until("rank 2 stands still", lambda: process_state(pids[2]) == "T")
                late("dispatch_send")
                sent = runner.dispatch_send(n)
                if place == "before_rows_come" and me.rank == 2:
                    os.kill(os.getpid(), signal.SIGSTOP)
                d = runner.dispatch_recv(n, sent)
                late("combine_send")
                c = runner.combine_send(n, d)
                assert c is not None
                late("combine_recv")
                runner.combine_recv(n, c)
                runner.dispatch(n + 1)

            told.append(raised(step))
            if me.rank == 0:
                os.kill(pids[2], signal.SIGCONT)
            must(a2a.reset() == list(range(me.world_size)), "the survivors")
        Good(me, case, a2a).step()
        me.comm.barrier()
    return told


def heard_by_a_barrier_first(me: Any, case: Case, victim: int, path: str) -> dict[str, Any]:
    """Rank `victim` dies, and the control thread has not told the AllToAll when check() is called."""
    a2a = open_all_to_all(me, case)
    Good(me, case, a2a).step()
    a2a._steps._forget_failures()
    me.comm.barrier()
    if me.rank == victim:
        _die(path)
    until_failure(me)
    result = raised(a2a.check)
    result["closing"] = end_of(me, a2a, True)
    return result


def leaves(me: Any, case: Case, who: int, what: str) -> dict[str, Any]:
    """One rank closes while the others wait for its next step."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    if me.rank == who:
        me.comm.barrier()
        at = time.monotonic()
        if what == "all_to_all":
            a2a.close()
        me.close() if what != "nothing" else None
        return {"at": at}

    def step() -> None:
        me.comm.barrier()  # the last rank may hear in it that one has left
        good.step()

    result = raised(step)
    _latched(me, a2a, result, good)
    result["closing"] = end_of(me, a2a, True)
    return result


def leave_at_once(me: Any, case: Case, rounds: int) -> None:
    """A rank that is done goes, while others still receive what it sent. Nothing is wrong with that."""
    for n in range(rounds):
        a2a = open_all_to_all(me, replace(case, seed=case.seed + n))
        Good(me, replace(case, seed=case.seed + n), a2a).step()
        if n % 2:
            a2a.close()
        me.close()


def interrupted(me: Any, case: Case, who: int, place: str) -> dict[str, Any]:
    """The test sends SIGINT to a rank that waits."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    me.comm.barrier()
    runner, n = good.runner, good.n
    runner.steps[n].how = ["halves"] * me.world_size
    runner.steps[n].late_weights = None
    holding = me.rank == (who + 1) % me.world_size
    if me.rank == who:
        _when_inside(place, lambda: me.say("inside"))

    def step() -> None:
        if holding and place == "dispatch_recv":
            until_failure(me)
        d = runner.dispatch_recv(n, runner.dispatch_send(n))
        if holding and place == "combine_recv":
            until_failure(me)
        c = runner.combine_send(n, d)
        assert c is not None
        runner.combine_recv(n, c)

    result = raised(step)
    later = raised(a2a.check)
    result["later"] = later
    result["closing"] = end_of(me, a2a, True)
    return result


def interrupted_in_the_constructor(me: Any, case: Case, who: int, with_another: bool) -> dict[str, Any]:
    """One rank is interrupted while it waits for the others, which come later. Then they try again, and once more as the error
    says."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    other = open_all_to_all(me, case) if with_another else None
    me.comm.barrier()
    if me.rank == who:
        _when_inside("wait", lambda: me.say("inside"))
    else:
        until_failure(me)
    result = raised(lambda: open_all_to_all(me, case))
    result["again"] = raised(lambda: open_all_to_all(me, case))
    me.comm.reset()
    with open_all_to_all(me, case) as a2a:
        Good(me, case, a2a).step()
        me.comm.barrier()
    if other is not None:
        Good(me, case, other).step()
        me.comm.barrier()
        other.close()
    return result


def mismatch(me: Any, case: Case, kind: str) -> dict[str, Any]:
    """Rank 1 does something else than the others with the same step."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    d = good.dispatch()
    n = good.n
    other = me.rank == 1
    runner = good.runner
    runner.steps[n].late_weights = None
    runner.steps[n].weighted = True
    tails, runner.steps[n].tails = [torch.ones(t.ids.shape) for t in runner.steps[n].tokens], None

    def act() -> None:
        me.comm.barrier()  # the last rank may hear of another one's failure in it
        if kind == "release" and other:
            d.release()
        else:
            if kind in ("tail", "no_tail") and other == (kind == "tail"):
                runner.steps[n].tails = tails
            if kind == "weights" and other:
                runner.steps[n].late_weights = [t.effective_weights for t in runner.steps[n].tokens]
            if kind == "no_weights" and not other:
                runner.steps[n].late_weights = [t.effective_weights for t in runner.steps[n].tokens]
            c = runner.combine_send(n, d)
            assert c is not None
            runner.combine_recv(n, c)
        # A rank that saw nothing yet does now.
        good.n += 1
        good.last_step = None
        good.step()

    result = raised(act)
    result["closing"] = end_of(me, a2a, True)
    return result


def replicas_apart(me: Any, case: Case, kind: str) -> dict[str, Any]:
    """The last rank passes something else than its replica."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    other = me.rank == me.world_size - 1
    mine = good.runner.steps[good.n].tokens[me.rank]
    ids, x = mine.ids.clone(), mine.x
    if other and kind == "ids":
        ids[-1, -1] = (ids[-1, -1] + 1) % case.num_experts
    if other and kind == "tokens":
        ids, x = ids[1:], x[1:]

    def act() -> None:
        me.comm.barrier()  # the last rank may hear of another one's failure in it
        d = a2a.dispatch(x, ids)
        out = torch.zeros(ids.shape[0], case.hidden, dtype=DTYPES[case.dtype])
        a2a.combine(torch.zeros_like(d.x), d, out=out, accumulate=other and kind == "accumulate")
        a2a.dispatch(x, ids)  # a rank that saw nothing yet does now

    result = raised(act)
    result["closing"] = end_of(me, a2a, True)
    return result


class Survivor:
    """Steps of the living, compared with a reference in which the dead have no tokens and their experts answer nothing."""

    def __init__(self, me: Any, case: Case, a2a: pc.AllToAll, alive: list[bool]) -> None:
        self.me, self.a2a, self.alive = me, a2a, alive
        self.case = replace(case, dead=tuple(rank for rank, lives in enumerate(alive) if not lives))
        self.steps = make_steps(replace(case, steps=12))
        self.n = 0
        for step in self.steps:
            self._fit(step)

    def _fit(self, step: Step) -> None:
        """Replicas that lost some of them send fewer tokens: a block holds a slice's, and no more."""
        replicas = self.case.replicas
        for rank, t in enumerate(step.tokens):
            first = rank - rank % replicas
            most = -(-self.case.max_tokens // replicas) * sum(self.alive[first : first + replicas])
            if t.ids.shape[0] > most:
                if rank == self.me.rank and replicas > 1:
                    mistake(lambda t=t: self.a2a.dispatch(t.x, t.ids, t.weights, x_scale=t.x_scale), "replicas .* that are left")
                scale = None if t.x_scale is None else t.x_scale[:most]
                step.tokens[rank] = Tokens(t.x[:most], t.ids[:most], None if t.weights is None else t.weights[:most], scale)
            if step.tails is not None:
                step.tails[rank] = step.tails[rank][:most]

    def send(self) -> pc.Dispatched:
        given = self.steps[self.n].tokens[self.me.rank]
        return self.a2a.dispatch_send(given.x, given.ids, given.weights, x_scale=given.x_scale)

    def step(self, when_sent: Callable[[], None] = lambda: None) -> pc.Dispatched:
        d = self.send()
        when_sent()
        step = self.steps[self.n]
        self.n += 1
        per_rank = self.case.shape.experts_per_rank
        step.tokens = [only_living(t, self.alive, per_rank, self.alive[rank]) for rank, t in enumerate(step.tokens)]
        d.wait()
        check_dispatched(self.case, step, self.me.rank, d)
        tails = step.tails or [torch.zeros(t.ids.shape) for t in step.tokens]
        step.tails = tails
        attached = attach_tails(self.case, step, self.me.rank, d)
        y, tail = self.a2a.combine(run_experts(self.case, self.me.rank, d, True), d, tail=attached)
        must(same_bits(y, reference.combine(self.case.shape, step.tokens, self.me.rank)), "y after reset")
        must(
            same_bits(tail, reference.tail(self.case.shape, step.tokens, self.me.rank, tails[self.me.rank])), "the tail after reset"
        )
        return d


def only_living(tokens: Tokens, alive: list[bool], per_rank: int, living: bool) -> Tokens:
    owner = tokens.ids.long() // per_rank
    lives = torch.tensor(alive)[owner.clamp(min=0)] & (tokens.ids >= 0)
    return replace(tokens, ids=torch.where(lives & living, tokens.ids, -1))


def _meet_and_step(me: Any, survivor: Survivor, held_shm: bool = False) -> None:
    """The victim may have left the barrier, and be dead, while this rank still waits there for another's word."""
    me.comm.barrier()
    if held_shm:
        survivor.step(when_sent=me.comm.barrier)
    else:
        survivor.step()


def reset_after(me: Any, case: Case, victims: list[int], paths: list[str], held_shm: bool = False) -> dict[str, Any]:
    """Ranks die one after the other; the others reset each time and go on."""
    me.whole_end = held_shm  # with the threads that were left behind
    a2a = open_all_to_all(me, case)
    alive = [True] * me.world_size
    survivor = Survivor(me, case, a2a, alive)
    old = survivor.step()

    def connected() -> list[int]:
        carrier = a2a._steps.session.wiring.carrier
        return [] if carrier is None else sorted(carrier.connected)

    result: dict[str, Any] = {"rounds": [], "connected": [connected()]}
    for victim, path in zip(victims, paths, strict=True):
        if me.rank == victim:
            if held_shm:
                _hold_shm()
            me.comm.barrier()
            if held_shm:
                me.comm.barrier()  # the others' writes to it have begun
            else:
                survivor.send()
            _die(path)
        r = raised(lambda: _meet_and_step(me, survivor, held_shm))
        must(r.get("peer") == victim, "the victim is named:", r)
        result["rounds"].append(r["at"] - r["starved"])
        a2a.reset()
        alive[victim] = False
        result["connected"].append(connected())
        survivor = Survivor(me, replace(case, seed=case.seed + victim + 1), a2a, alive)
        mistake(lambda: a2a.combine(torch.zeros(old.x.shape, dtype=DTYPES[case.dtype]), old), "reset|already")
        if case.wire == "native":
            mistake(
                lambda: a2a.dispatch(torch.zeros(old.plan.tokens, case.hidden, dtype=DTYPES[case.dtype]), plan=old.plan), "reset"
            )
        for _ in range(5):
            old = survivor.step()
        a2a.check()
    result["steps"] = a2a.stats()["steps"]
    me.comm.barrier()
    result["closing"] = end_of(me, a2a, True)
    return result


def anew_after_death(me: Any, case: Case, victim: int, path: str) -> None:
    """The survivors of a death make another AllToAll beside the one that they reset."""
    with open_all_to_all(me, case) as a2a:
        survivor = Survivor(me, case, a2a, [True] * me.world_size)
        survivor.step()
        if me.rank == victim:
            me.comm.barrier()
            _die(path)
        r = raised(lambda: _meet_and_step(me, survivor))
        must(r.get("peer") == victim, "the victim is named:", r)
        must(victim not in a2a.reset(), "the victim is left out")
        with open_all_to_all(me, case) as other:
            for both in (a2a, other, a2a, other):
                alive = [rank != victim for rank in range(me.world_size)]
                Survivor(me, replace(case, seed=case.seed + 1), both, alive).step()
            me.comm.barrier()


def anew_on_one_node(me: Any, case: Case, victims: list[int], path: str) -> None:
    """All ranks of the other nodes die. Those of one node are left, and make an AllToAll with the same arguments."""
    alive = [rank not in victims for rank in range(me.world_size)]
    with open_all_to_all(me, case) as a2a:
        Survivor(me, case, a2a, [True] * me.world_size).step()
        with contextlib.suppress(pc.PeerError):  # a rank that is further on may be dead
            me.comm.barrier()
        if me.rank in victims:
            _die(path)
        until("all deaths are known", lambda: me.comm.control.alive() == alive)
        must(a2a.reset() == [rank for rank, lives in enumerate(alive) if lives], "the survivors")
    with open_all_to_all(me, case) as a2a:
        survivor = Survivor(me, case, a2a, alive)
        survivor.step()
        survivor.step()
        me.comm.barrier()


def own_proxy_stands_still(me: Any, case: Case) -> dict[str, Any]:
    """Rank 0 waits in vain for rank 1, which does not come, while its own proxy thread is not there either."""
    me.whole_end = True  # with the thread that was left behind
    a2a = open_all_to_all(me, case, timeout=1.0)
    survivor = Survivor(me, case, a2a, [True] * me.world_size)
    survivor.step()
    me.comm.barrier()  # a write that was taken may need a thread that polls
    if me.rank == 1:
        until_failure(me)
    result = raised(survivor.step)
    result["closing"] = end_of(me, a2a, True)
    return result


def reset_after_timeout(me: Any, case: Case) -> None:
    """No rank died: after a timeout all reset and go on together."""
    with open_all_to_all(me, case, timeout=3.0) as a2a:
        good = Good(me, case, a2a)
        good.step()
        if me.rank == 0:
            until_failure(me)
        else:
            r = raised(good.step)
            must(bool(r.get("is_peer")), "a timeout:", r)
        a2a.reset()
        good = Good(me, replace(case, seed=case.seed + 1), a2a)
        for _ in range(5):
            good.step()
        a2a.check()
