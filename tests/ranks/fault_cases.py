"""Cases of test_faults.py: ranks fall in the middle of a phase, go on without the fallen, come back."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import networks
from cases import Case
from failure_cases import Survivor, process_state
from outcomes import Starved, raised
from rank_cases import Good, open_all_to_all

import pplx_comm as pc
from pplx_comm.control import assemble, memfd
from pplx_comm.device import steps

HOW = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def _must_be(found: Any, wanted: Any, what: str) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {found!r}, not {wanted!r}")


class _Watched:
    """The exchange of an AllToAll, whose phase `name` is called through `around`."""

    def __init__(self, core: Any, name: str, around: Any) -> None:
        self._core, self._name, self._around = core, name, around

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._core, name)
        if name != self._name:
            return value
        return lambda *args, **kwargs: self._around(lambda: value(*args, **kwargs))


def join(me: Any, case: Case, timeout: float) -> dict[str, Any]:
    """All ranks: for the first time, or anew after one that fell is back. Full results at once."""
    starved = Starved()
    old = me.kept.pop("a2a", None)
    if old is not None:
        old.close()
    me.close()
    closing = starved.seconds_with_a_core()
    a2a = open_all_to_all(me, case, timeout=timeout)
    _steps(me, a2a, case, [True] * me.world_size, 3)
    me.comm.barrier()
    me.kept["a2a"] = a2a
    return {"pid": os.getpid(), "closing": closing}


def _steps(me: Any, a2a: pc.AllToAll, case: Case, alive: list[bool], count: int) -> None:
    survivor = Survivor(me, case, a2a, alive)
    for _ in range(count):
        survivor.step()
    a2a.check()


def fall(me: Any, case: Case, victim: int, pid: int, phase: str, how: str, delay: float, path: str) -> dict[str, Any]:
    """The victim is killed or stopped inside that phase. What each rank saw: the victim too, once it is awake again."""
    a2a = me.kept["a2a"]
    device = a2a._steps.device
    core = device.core
    inside, struck = threading.Event(), threading.Event()

    def strike() -> None:
        inside.wait()
        time.sleep(delay)
        Path(path).write_text(repr(time.monotonic()))
        os.kill(os.getpid(), HOW[how])
        struck.set()

    def fatal(call: Any) -> Any:
        inside.set()
        try:
            return call()
        finally:
            struck.wait()  # a short phase must not be left before

    def held_back(call: Any) -> Any:
        deadline = time.monotonic() + 20
        while process_state(pid) not in ("T", "Z", ""):
            if time.monotonic() > deadline:
                raise AssertionError("the victim did not fall")
            time.sleep(0.001)
        return call()

    if me.rank == victim:
        threading.Thread(target=strike, daemon=True).start()
        device.core = _Watched(core, phase, fatal)
    elif me.rank == (victim + 1) % me.world_size and phase.endswith("_recv"):  # so that the victim waits inside
        device.core = _Watched(core, phase.replace("recv", "send"), held_back)
    survivor = Survivor(me, case, a2a, [True] * me.world_size)
    # A rank that falls in combine_recv has given everything to this step: the next one shows it.
    result = raised(lambda: [survivor.step() for _ in range(3)])
    device.core = core
    result["later"] = raised(a2a.check)
    return result


def go_on(me: Any, case: Case, left: list[int], timeout: float | None) -> dict[str, Any]:
    """Those in `left` reset and take steps in which the others' experts answer nothing."""
    begin = time.monotonic()
    a2a = me.kept["a2a"]
    _must_be(a2a.reset(timeout), left, "the survivors")
    _steps(me, a2a, case, [rank in left for rank in range(me.world_size)], 3)
    me.comm.barrier()
    return {"seconds": time.monotonic() - begin}


def more_steps(me: Any, case: Case, left: list[int], seconds: float) -> int:
    """While something happens outside. All stop after the same step."""
    a2a, alive = me.kept["a2a"], [rank in left for rank in range(me.world_size)]
    end, count = time.monotonic() + seconds, 0
    while not me.comm.agree(time.monotonic() > end):
        _steps(me, a2a, case, alive, 2)
        count += 2
    return count


def reset_refused(me: Any) -> dict[str, Any]:
    return raised(me.kept["a2a"].reset)


def switch_over(me: Any, before: Case, case: Case, left: list[int]) -> dict[str, Any]:
    """The others come back while the survivors go on: a thread waits for all, as often as it takes, and steps go on until everybody
    has the new one."""
    old_comm, alive = me._comm, [rank in left for rank in range(me.world_size)]
    new: list[pc.Communicator] = []
    failed: list[str] = []

    def wait() -> None:
        while not new:
            try:
                new.append(pc.Communicator.from_env(timeout=30))
            except pc.PeerError as problem:
                failed.append(str(problem))

    waiting = threading.Thread(target=wait)
    waiting.start()
    me.say("waiting")
    old, count = me.kept.pop("a2a"), 0
    while not old_comm.agree(bool(new)):
        _steps(me, old, before, alive, 2)
        count += 2
    old.close()
    old_comm.close()
    waiting.join()
    me._comm = new[0]
    a2a = open_all_to_all(me, case)
    _steps(me, a2a, case, [True] * me.world_size, 3)
    me.comm.barrier()
    me.kept["a2a"] = a2a
    return {"steps": count, "failed": failed}


def die_in_the_start(me: Any) -> None:
    """Once all ranks have met."""
    setattr(assemble, "probe", lambda *_: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010
    me.communicator()


def move_to(me: Any, network: str) -> None:
    networks.enter(network)


def until_failure(me: Any, case: Case) -> dict[str, Any]:
    me.say("running")
    return raised(lambda: [_steps(me, me.kept["a2a"], case, [True] * me.world_size, 2) for _ in range(10**6)])


def timed_step(me: Any, case: Case) -> dict[str, Any]:
    """One step, how long it took, and how many bytes of it went through the proxy."""
    a2a = me.kept["a2a"]
    before = a2a.stats()["proxy"]["bytes"]
    me.comm.barrier()
    begin = time.monotonic()
    _steps(me, a2a, case, [True] * me.world_size, 1)
    me.comm.barrier()
    return {"seconds": time.monotonic() - begin, "bytes": a2a.stats()["proxy"]["bytes"] - before}


def reset_and_die(me: Any, case: Case, left: list[int], dying: int, place: str, path: str) -> dict[str, Any]:
    """One more dies while the survivors of the first death are in reset(). They hear its rank, and the next reset() is good."""
    a2a = me.kept["a2a"]

    def die(*_: Any, **__: Any) -> None:
        Path(path).write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if me.rank == dying:
        if place == "before it agrees":
            me.comm.control.agree_survivors = die
        elif place == "agreed":
            steps.rewire = die
        else:
            exchange = me.comm.control.all_gather
            me.comm.control.all_gather = lambda payload, tag, *rest: die() if tag == place else exchange(payload, tag, *rest)
    result = raised(a2a.reset)
    if not result["type"]:  # it was gone before this rank had to agree with it
        return result
    result["later"] = raised(lambda: _steps(me, a2a, case, [True] * me.world_size, 1))
    _must_be(a2a.reset(), left, "the survivors")
    _steps(me, a2a, case, [rank in left for rank in range(me.world_size)], 3)
    return result


def hand_over_bad_memory(me: Any, bad: int, how: str) -> dict[str, Any]:
    """One rank hands over memory that its peers must not rely on. A good one works afterwards."""
    good = memfd.allocate

    def allocate(nbytes: int, what: str, share: int) -> int:
        if how == "too small":
            return good(4096, what, share)
        fd = os.memfd_create("unsealed")
        os.ftruncate(fd, nbytes)
        return fd

    case = Case(1, me.world_size)
    if me.rank == bad:
        setattr(memfd, "allocate", allocate)  # noqa: B010
    try:
        result = raised(lambda: open_all_to_all(me, case))
    finally:
        setattr(memfd, "allocate", good)  # noqa: B010
    with open_all_to_all(me, case) as a2a:
        _steps(me, a2a, case, [True] * me.world_size, 1)
    return result


def open_under_a_limit(me: Any, of_a_heap: float, **changes: Any) -> dict[str, Any]:
    """All ranks together may take so much, and each of them so much at any time, since no rank sees what the others are about to take."""
    shape = {"num_experts": 8, "top_k": 2, "hidden": 1024, "max_tokens_per_rank": 64}
    remote = {"remote_peers": me.world_size - changes["node_size"], "dedup": "node"} if changes else {}
    limit = int(of_a_heap * pc.AllToAll.required_bytes(world_size=me.world_size, **shape, **remote))
    setattr(memfd, "available_bytes", lambda: (limit, "a test's limit"))  # noqa: B010
    return raised(lambda: pc.AllToAll(me.comm, device="cpu", **shape, **changes).close())


def no_memory_for_outputs(me: Any, call: str) -> dict[str, Any]:
    """Rank 0 may map nothing more for one call, in which the other rank waits for it."""
    case = Case(1, me.world_size, max_tokens=64, hidden=8192, rows=4096)  # 64 MiB
    before = resource.getrlimit(resource.RLIMIT_AS)
    told: dict[str, Any] = {}
    with open_all_to_all(me, case) as a2a:
        good = Good(me, case, a2a)
        good.step()
        if me.rank == 0:
            mine = good.mine
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            taken = a2a._steps.device._outputs.reserve()  # memory that the pool keeps from the first step
            resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), before[1]))
            try:
                told = raised(lambda: getattr(a2a, call)(mine.x, mine.ids, mine.weights))
            finally:
                resource.setrlimit(resource.RLIMIT_AS, before)
            del taken
        good.step()
    return told


def out_of_address_space(me: Any, poor: int) -> dict[str, Any]:
    """One rank may not map what the AllToAll needs. All are told which rank and how much; a smaller one is fine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    _ = me.comm
    if me.rank == poor:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), before[1]))
    try:
        result = raised(lambda: open_all_to_all(me, Case(1, me.world_size, max_tokens=1024, hidden=8192)))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    with open_all_to_all(me, Case(1, me.world_size)) as a2a:
        _steps(me, a2a, Case(1, me.world_size), [True] * me.world_size, 1)
    return result
