"""One rank of the benchmark with a library that is wrong on rank 1, in the way that the first argument names."""

from __future__ import annotations

import sys

import torch

import pplx_comm
from pplx_comm.bench.main import leave, main


def wrong_combine(a2a: pplx_comm.AllToAll, c: pplx_comm.Combining) -> object:
    y = right_combine_recv(a2a, c)
    if a2a._comm.rank == 1:
        y[0, 0] += 1
    return y


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
    from pplx_comm.bench.gpu_peers import Collective

    right = Collective.dispatch

    def dispatch(peer: Collective, x: torch.Tensor, *rest: torch.Tensor) -> None:
        if len(x) == 3 and (who == "all" or peer._world.rank == 1):
            raise RuntimeError("planted: too many experts\nand a stack of calls")
        right(peer, x, *rest)

    setattr(Collective, "dispatch", dispatch)  # noqa: B010


right_combine_recv, right_dispatch_recv = pplx_comm.AllToAll.combine_recv, pplx_comm.AllToAll.dispatch_recv

if __name__ == "__main__":
    plant = sys.argv.pop(1)
    if plant == "gpu" or plant.startswith("peer of "):
        import bench_on_cpu

        from pplx_comm.bench import gpu

        setattr(gpu, "opened", lambda rank: bench_on_cpu.Cpu())  # noqa: B010
    if plant.startswith("peer of "):
        peer_that_fails(plant.removeprefix("peer of "))
    elif plant in ("combine", "gpu"):
        setattr(pplx_comm.AllToAll, "combine_recv", wrong_combine)  # noqa: B010
    elif plant == "dispatch":
        setattr(pplx_comm.AllToAll, "dispatch_recv", wrong_dispatch)  # noqa: B010
    else:
        setattr(pplx_comm.AllToAll, "dispatch_recv", dies)  # noqa: B010
    leave(main())
