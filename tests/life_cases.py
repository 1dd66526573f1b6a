"""What a process holds and does beside its steps: descriptors, threads, forks, exits; see crew.py and rank_cases.py."""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

from rank_cases import Case, Good, end_of, must, open_all_to_all, raised

import pplx_comm as pc


def held(pid: str = "self") -> dict[str, int]:
    """What a process holds: descriptors, threads, mapped regions, resident KiB."""
    status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status").read().splitlines())
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "maps": len(open(f"/proc/{pid}/maps").read().splitlines()),
        "rss": int(status["VmRSS"].split()[0]),
    }


def cycles(me: Any, case: Case, times: int, what: str) -> dict[str, list[int]]:
    """Open, step, and close an AllToAll, or its Communicator too, or close nothing and drop it. What is held after each."""
    after: dict[str, list[int]] = {"fds": [], "threads": [], "maps": [], "rss": []}
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
    """What the interpreter's end closes. The test looks at the exit code and at how long it takes."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    good.step()
    if how == "step_open":
        d = good.dispatch()
        me.kept["d"] = d
    me.comm.barrier()
    me.kept["a2a"] = a2a
    if how == "cycle":
        me.kept["self"] = me.kept
    me._comm, me.kept["comm"] = None, me._comm
    if how != "dropped":
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
    r = raised(lambda: pc.AllToAll(comm, num_experts=1, top_k=1, hidden=8, max_tokens_per_rank=1))
    must(bool(r.get("is_error")) and "close" in r["message"], "a closed Communicator says so:", r)
    me._comm = None
    with open_all_to_all(me, case) as again:
        Good(me, case, again).step()


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
        good.combine(d)
        for _ in range(3):
            good.step()
        a2a.check()
        return {"told": text.decode(), "code": os.waitstatus_to_exitcode(status)}


def cpu_of_threads(seconds: float) -> dict[str, float]:
    """Share of a core that each thread of this process took meanwhile."""

    def ticks() -> dict[str, int]:
        taken = {}
        for task in os.listdir("/proc/self/task"):
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
        must(a2a._config.heap_bytes > 128 << 20, "this test wants a large heap", a2a._config.heap_bytes)
        Good(me, case, a2a).step()
