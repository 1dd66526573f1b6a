"""Resources of a process beside its steps: descriptors, threads, forks, exits; see harness and rank_cases.py."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import re
import signal
import sys
import threading
import time
from typing import Any

from cases import Case
from outcomes import must, raised
from rank_cases import Good, end_of, open_all_to_all

import pplx_comm as pc
from pplx_comm.wiring.carriers import Carriers


class _MallocInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def held() -> dict[str, int]:
    """Counts what this process holds: descriptors, threads, mapped regions, and KiB: what malloc has lent out of its heaps, and
    what is resident elsewhere. How much freed memory the heaps keep moves by up to 20 MiB from one look to the next."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallocInfo
    maps, elsewhere, in_heap = 0, 0, False
    for line in open("/proc/self/smaps"):
        if head := re.match(r"([0-9a-f]+)-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)", line):
            maps += 1
            in_heap = head[2] == "[heap]" or (not head[2] and int(head[1], 16) % (64 << 20) == 0)  # heaps of threads begin there
        elif line.startswith("Rss:") and not in_heap:
            elsewhere += int(line.split()[1])
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": maps,
        "memory": elsewhere + libc.mallinfo2().uordblks // 1024,
    }


def cycles(me: Any, case: Case, times: int, what: str) -> dict[str, list[int]]:
    """Open, step, and close an AllToAll, or its Communicator too, or close nothing and drop it. What is held after each."""
    after: dict[str, list[int]] = {"fds": [], "threads": [], "maps": [], "memory": []}
    for n in range(times):
        a2a = open_all_to_all(me, case)
        if n % 5 == 0:
            Good(me, case, a2a).step()
        me.comm.barrier()
        if what != "drop":
            a2a.close()
        del a2a
        if what == "communicator":
            me.close()
        gc.collect()
        for name, value in held().items():
            after[name].append(value)
    return after


def leave_open(me: Any, case: Case, how: str) -> None:
    """The interpreter's end closes these. The test looks at the exit code and at how long it takes."""
    me.whole_end = True
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    if how == "step_open":
        d = good.dispatch()
        me.kept["d"] = d
    me.comm.barrier()
    me.kept["a2a"] = a2a
    if how == "slowly_dropped":  # a call of C++ that takes longer than the control thread's leave, behind the proxies' end
        carrier = next(iter(Carriers.of(me.comm.control).proxies.values()))
        me.comm.control.on_close(functools.partial(carrier.proxies[0].proxy.takes_turns, 1.33))
        del carrier
    if how == "cycle":
        me.kept["self"] = me.kept
    me._comm, me.kept["comm"] = None, me._comm
    if "dropped" not in how:
        sys.modules["__main__"].kept = me.kept  # type: ignore[attr-defined]
        me.kept = {}


def several_closes(me: Any, case: Case) -> None:
    """In every order, and as context managers."""
    with me.comm as comm:
        with open_all_to_all(me, case) as a2a:
            Good(me, case, a2a).step()
            me.comm.barrier()
            a2a.close()
        other = open_all_to_all(me, case)
        Good(me, case, other).step()
        comm.barrier()
    other.close()
    comm.close()
    r = raised(comm.barrier)
    must(bool(r.get("is_error")) and "close" in r["message"], "a closed Communicator says so:", r)
    r = raised(lambda: pc.AllToAll(comm, num_experts=1, top_k=1, hidden=8, max_tokens_per_rank=1, device="cpu"))
    must(bool(r.get("is_error")) and "close" in r["message"], "a closed Communicator says so:", r)
    me._comm = None
    with open_all_to_all(me, case) as again:
        Good(me, case, again).step()


def _wait_inside(thread: threading.Thread, function: str) -> None:
    """Until it is in that function for good, or has ended."""
    inside = 0
    while inside < 30 and thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        inside = inside + 1 if frame is not None and frame.f_code.co_name == function else 0
        time.sleep(0.001)


def opposite_orders(me: Any, case: Case) -> None:
    """A thread finishes one step, and waits in combine_recv while this one receives the other step. Ranks take them in either order."""
    with open_all_to_all(me, case, timeout=5.0) as a2a:
        good = Good(me, case, a2a)
        good.step()
        good.step()
        runner, first, second = good.runner, good.n + me.rank, good.n + 1 - me.rank
        opened = {n: runner.dispatch_send(n) for n in (good.n, good.n + 1)}
        problems: list[BaseException] = []

        def finish(n: int) -> None:
            try:
                c = runner.combine_send(n, runner.dispatch_recv(n, opened[n]))
                assert c is not None
                runner.combine_recv(n, c)
            except BaseException as problem:
                problems.append(problem)

        for n in (first, second):
            runner.steps[n].late_weights, runner.steps[n].how = None, ["halves"] * me.world_size
        thread = threading.Thread(target=finish, args=(first,))
        thread.start()
        _wait_inside(thread, "combine_recv")
        finish(second)
        thread.join()
        must(not problems, "steps end in any order:", problems)


def closed_by_another_thread(me: Any, case: Case, call: str) -> dict[str, Any]:
    """Rank 0 closes while a thread of it waits for what rank 1 does not send."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    runner, n = good.runner, good.n
    runner.steps[n].late_weights, runner.steps[n].how = None, ["halves"] * me.world_size
    told: dict[str, Any] = {}

    def step() -> None:
        d = runner.dispatch_recv(n, runner.dispatch_send(n))
        c = runner.combine_send(n, d)
        assert c is not None
        runner.combine_recv(n, c)

    if me.rank == 0:
        thread = threading.Thread(target=lambda: told.update(raised(step)))
        thread.start()
        _wait_inside(thread, call)
        begin = time.monotonic()
        a2a.close()
        told["closing"] = time.monotonic() - begin
        thread.join()
        told["ended"] = time.monotonic() - begin
    elif call == "combine_recv":
        runner.dispatch_send(n).wait()
    me.comm.barrier()
    a2a.close()
    return told


def dropped_with_a_step(me: Any, case: Case, others: int, enough: float, tries: int) -> list[dict[str, float]]:
    """Returns the CPU time that this process's threads take after that."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    d = a2a.dispatch(good.mine.x, good.mine.ids)
    me.comm.barrier()
    del a2a, good, d
    gc.collect()
    me.comm.barrier()
    for _ in range(others):
        with open_all_to_all(me, case) as other:
            Good(me, case, other).step()
            me.comm.barrier()
    shares = []
    for _ in range(tries):
        time.sleep(1.2)  # the second after which the proxy sleeps more
        shares.append(cpu_of_threads(2.0))
        if me.comm.agree(min(max(share.values()) for share in shares) <= enough):
            break
    return shares


def fails_when_attached(me: Any, case: Case) -> list[int]:
    """Users of the carriers after a constructor that failed at its last agreement, after one that works, and at the end."""
    control = me.comm.control

    def users() -> int:
        return sum(carrier.users for carrier in Carriers.of(control).proxies.values())

    exchange, seen = control.all_gather, [users()]

    def fails(payload: Any, tag: str, *rest: Any) -> Any:
        return exchange({**payload, "error": "a test says so"} if tag == "AllToAll: ready" else payload, tag, *rest)

    control.all_gather = fails
    try:
        r = raised(lambda: open_all_to_all(me, case))
        must("a test says so" in r["message"], "it fails at the end:", r)
    finally:
        control.all_gather = exchange
    seen.append(users())
    with open_all_to_all(me, case) as a2a:
        Good(me, case, a2a).step()
        me.comm.barrier()
        seen.append(users())
    return [*seen, users()]


def fork_in_the_parent(me: Any, case: Case) -> dict[str, Any]:
    """A child that forks off in the middle of things is told so, disturbs nothing, and may end as it likes."""
    with open_all_to_all(me, case) as a2a:
        good = Good(me, case, a2a)
        good.step()
        d = good.dispatch()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            mine = good.mine
            told = [
                raised(call)["message"]
                for call in (
                    lambda: a2a.dispatch(mine.x, mine.ids),
                    lambda: a2a.combine(d.x, d),
                    a2a.check,
                    me.comm.barrier,
                    lambda: open_all_to_all(me, case),
                )  # fmt: skip
            ]
            a2a.close()
            me.comm.close()
            os.write(write, repr(told).encode())
            os.close(write)
            if me.rank == 0:
                os._exit(0)
            sys.exit(0)  # with everything that happens at an interpreter's end
        os.close(write)
        text = b""
        while chunk := os.read(read, 1 << 16):
            text += chunk
        os.close(read)
        _, status = os.waitpid(pid, 0)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            sys.exit(0)  # with everything alive
        _, alive_status = os.waitpid(pid, 0)
        good.combine(d)
        for _ in range(3):
            good.step()
        a2a.check()
        codes = [os.waitstatus_to_exitcode(s) for s in (status, alive_status)]
        return {"told": text.decode(), "codes": codes}


def cpu_of_threads(seconds: float) -> dict[str, float]:
    """Share of a core that each thread of this process took meanwhile."""

    def ticks() -> dict[str, int]:
        taken = {}
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it ended just now
                fields = open(f"/proc/self/task/{task}/stat").read()
                name, rest = fields[fields.index("(") + 1 : fields.rindex(")")], fields[fields.rindex(")") + 2 :].split()
                taken[f"{name} {task}"] = int(rest[11]) + int(rest[12])
        return taken

    before, begin = ticks(), time.monotonic()
    time.sleep(seconds)
    after, span = ticks(), time.monotonic() - begin
    return {name: (after[name] - before.get(name, 0)) / os.sysconf("SC_CLK_TCK") / span for name in after}


def idle(me: Any, case: Case, enough: float, tries: int) -> list[dict[str, float]]:
    """After a step: what the threads take while nothing is open. Looks until each rank has once taken no more than `enough`."""
    with open_all_to_all(me, case) as a2a:
        good = Good(me, case, a2a)
        good.step()
        shares = []
        for _ in range(tries):
            time.sleep(1.2)  # the second after which the proxy sleeps more
            shares.append(cpu_of_threads(2.0))
            if me.comm.agree(min(max(share.values()) for share in shares) <= enough):
                break
        me.comm.barrier()
        good.step()  # and it is awake again
        return shares


def stops_promptly(me: Any, case: Case) -> float:
    """Seconds that close() takes when nothing is wrong."""
    a2a = open_all_to_all(me, case)
    Good(me, case, a2a).step()
    me.comm.barrier()
    return end_of(me, a2a, True)


def big_step(me: Any, case: Case) -> None:
    """More memory between ranks than 64 MiB."""
    with open_all_to_all(me, case, max_tokens_per_rank=4096) as a2a:
        must(a2a._steps.session.config.heap_bytes > 128 << 20, "this test wants a large heap", a2a._steps.session.config.heap_bytes)
        Good(me, case, a2a).step()
