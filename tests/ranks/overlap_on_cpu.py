"""One rank of `bench/overlap.py` without a GPU, see bench_on_cpu.py. The first argument plants an error on rank 1: none, wrong, late."""

from __future__ import annotations

import sys
from typing import Any

import bench_on_cpu

from bench.gpu import measure as gpu
from bench.harness.rank import leave
from bench.overlap import main
from pplx_comm import AllToAll
from pplx_comm.errors import Error

RIGHT_ONES = 20
right_combine_recv, right_check = AllToAll.combine_recv, AllToAll.check
steps = 0


def combine_recv(a2a: AllToAll, c: Any) -> Any:
    global steps
    y = right_combine_recv(a2a, c)
    steps += 1
    if plant == "wrong" and a2a._comm.rank == 1 and steps > RIGHT_ONES:
        y[0, 0] += 1
    return y


def check(a2a: AllToAll) -> None:
    right_check(a2a)
    if plant == "late" and a2a._comm.rank == 1 and steps > RIGHT_ONES:
        raise Error("planted: a step timed out")


if __name__ == "__main__":
    plant = sys.argv.pop(1)
    setattr(gpu, "opened", lambda rank: bench_on_cpu.Cpu())  # noqa: B010
    setattr(AllToAll, "combine_recv", combine_recv)  # noqa: B010
    setattr(AllToAll, "check", check)  # noqa: B010
    leave(main())
