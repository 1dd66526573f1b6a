"""Functions that ranks run for test_trace.py."""

from __future__ import annotations

from typing import Any

import torch
from cases import Case
from harness import Member
from outcomes import must, raised
from rank_cases import Good, open_all_to_all

from pplx_comm import trace
from pplx_comm.moe import MoE

STEPS = 3


def record(me: Any, case: Case, path: str) -> dict[str, Any]:
    """Returns what the counters say of the steps that the file has."""
    with open_all_to_all(me, case) as a2a:
        good = Good(me, case, a2a)
        good.step()
        me.comm.barrier()
        before = a2a.stats()
        me.comm.barrier()
        trace.start()
        me.comm.barrier()
        for _ in range(STEPS):
            good.step()
        me.comm.barrier()  # all that this rank waits for is here, and the last writes of its peers
        after = a2a.stats()
        trace.stop()
        error = trace.write(me.comm, path)
        me.comm.barrier()  # rank 0's clock
        must(error == 0, "one host has one clock:", error)
        return {
            "steps": after["steps"] - before["steps"],
            "proxy": case.transport != "nvshmem" and {n: after["proxy"][n] - before["proxy"][n] for n in ("writes", "bytes")},
        }


def at_the_end(me: Any, case: Case) -> str:
    """PPLX_COMM_TRACE: a Communicator that closes has written. Returns its job."""
    comm = me.communicator()
    me.comm.barrier()
    with open_all_to_all(Member(me.rank, me.world_size, comm=comm), case) as a2a:
        Good(me, case, a2a).step()
    job: str = comm.control.job
    comm.close()
    me.comm.barrier()
    return job


def two_communicators(me: Any, case: Case) -> tuple[str, str]:
    """PPLX_COMM_TRACE: both are open when the first has done its steps. Returns their jobs."""
    with me.communicator() as first:
        with open_all_to_all(Member(me.rank, me.world_size, comm=first), case) as a2a:
            Good(me, case, a2a).step()
        with me.communicator() as second:
            return first.control.job, second.control.job


def other_clocks(me: Any) -> tuple[float, float]:
    """As on hosts of their own: their clocks are in truth one. Returns what rank 0's clock seems ahead, in seconds, and the error."""
    setattr(trace, "_boot", lambda: f"host {me.rank}")  # noqa: B010
    me.comm.barrier()
    found = trace._clock(me.comm.control, 3.0)
    assert found is not None
    me.comm.barrier()
    return found.offset / 1e9, found.error


def products(me: Any, path: str) -> None:
    layer = MoE(32, 32, 4, 2, me.comm, max_tokens_per_rank=16, dtype=torch.float32, all_to_all={"device": "cpu"})
    trace.start()
    layer(torch.ones(8, 32, requires_grad=True)).sum().backward()
    trace.write(me.comm, path)
    trace.stop()
    me.comm.barrier()


def no_file(me: Any, path: str) -> dict[str, Any]:
    trace.start()
    return raised(lambda: trace.write(me.comm, path))


def ranges(me: Any, case: Case) -> list[str]:
    with open_all_to_all(me, case) as a2a:
        good = Good(me, case, a2a)
        good.step()
        with torch.profiler.profile() as profile:
            good.step()
        return [event.key for event in profile.key_averages()]
