"""One rank of the benchmark with a library that is wrong on rank 1, in the way that the first argument names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pplx_comm
from bench.harness.rank import leave
from bench.latency import main


def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
    """A combine, or its receive half."""

    def combine(a2a: pplx_comm.AllToAll, *arguments: Any, **options: Any) -> Any:
        y = right(a2a, *arguments, **options)
        if a2a._comm.rank == 1:
            y[0, 0] += 1
        return y

    return combine


def wrong_dispatch(a2a: pplx_comm.AllToAll, d: pplx_comm.Dispatched) -> object:
    right_dispatch_recv(a2a, d)
    if a2a._comm.rank == 1:
        d.src_token.add_(1)
    return d


def dies(a2a: pplx_comm.AllToAll, d: pplx_comm.Dispatched) -> object:
    if a2a._comm.rank == 1 and d.step > 8:
        raise RuntimeError("planted")
    return right_dispatch_recv(a2a, d)


def peer_that_fails(who: str) -> None:
    """At three tokens, before anything is exchanged."""
    from bench.gpu.peers import AllToAllSingle

    right = AllToAllSingle.dispatch

    def dispatch(peer: AllToAllSingle, i: int) -> None:
        if len(peer._packed[i]) == 3 and (who == "all" or peer._world.rank == 1):
            raise RuntimeError("planted: too many experts\nand a stack of calls")
        right(peer, i)

    setattr(AllToAllSingle, "dispatch", dispatch)  # noqa: B010


right_dispatch_recv = pplx_comm.AllToAll.dispatch_recv

if __name__ == "__main__":
    plant = sys.argv.pop(1)
    if plant == "gpu" or plant.startswith("peer of "):
        import bench_on_cpu

        from bench.gpu import measure as gpu

        setattr(gpu, "opened", lambda rank: bench_on_cpu.Cpu())  # noqa: B010
    if plant.startswith("peer of "):
        peer_that_fails(plant.removeprefix("peer of "))
    elif plant in ("combine", "gpu"):
        for half in ("combine", "combine_recv"):
            setattr(pplx_comm.AllToAll, half, wrong(getattr(pplx_comm.AllToAll, half)))
    elif plant == "dispatch":
        setattr(pplx_comm.AllToAll, "dispatch_recv", wrong_dispatch)  # noqa: B010
    else:
        setattr(pplx_comm.AllToAll, "dispatch_recv", dies)  # noqa: B010
    leave(main())
