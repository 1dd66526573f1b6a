"""One rank of the benchmark with a library that is wrong on rank 1, in the way that the first argument names."""

from __future__ import annotations

import sys

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


right_combine_recv, right_dispatch_recv = pplx_comm.AllToAll.combine_recv, pplx_comm.AllToAll.dispatch_recv

if __name__ == "__main__":
    plant = sys.argv.pop(1)
    if plant == "gpu":
        import bench_on_cpu

        from pplx_comm.bench import gpu

        setattr(gpu, "opened", lambda rank: bench_on_cpu.Cpu())  # noqa: B010
        plant = "combine"
    if plant == "combine":
        setattr(pplx_comm.AllToAll, "combine_recv", wrong_combine)  # noqa: B010
    elif plant == "dispatch":
        setattr(pplx_comm.AllToAll, "dispatch_recv", wrong_dispatch)  # noqa: B010
    else:
        setattr(pplx_comm.AllToAll, "dispatch_recv", dies)  # noqa: B010
    leave(main())
