"""One rank of `bench/crossover.py` without a GPU, see bench_on_cpu.py. Times are planted: see took(). A first argument of `deaf` plants
an AllToAll that does not heed the setting."""

from __future__ import annotations

import os
import sys
from typing import Any

import bench_on_cpu
import torch

from bench import crossover
from bench.gpu import measure as gpu
from bench.harness.rank import leave

Opened = tuple[bool, int, int | None]
"""Whether by bulk copies; tokens; multiprocessors."""
opened: dict[int, Opened] = {}
right_open = gpu.Size.open


def took(by_bulk: bool, tokens: int, num_sms: int | None) -> tuple[int, int]:
    """Nanoseconds of a dispatch and of a combine. By bulk copies, both take 4 and 3 us whatever there is to carry; else a dispatch
    takes 1 us a token, and a combine half, on 8 multiprocessors twice as long."""
    if by_bulk:
        return 4000, 3000
    scale = 2 if num_sms == 8 else 1
    return 1000 * tokens * scale, 500 * tokens * scale


class Cpu(bench_on_cpu.Cpu):
    def stamps(self, a2a: Any, steps: int) -> torch.Tensor:
        dispatch, combine = took(*opened[id(a2a)])
        return torch.arange(steps)[:, None] * (dispatch + combine) + torch.tensor([1000, 1000 + dispatch])

    def bulk_launches(self, a2a: Any) -> int:
        return int(opened[id(a2a)][0]) * 7


def noted(size: Any, comm: Any, transport: Any, num_sms: int | None) -> Any:
    a2a = right_open(size, comm, transport, num_sms)
    opened[id(a2a)] = (
        (plant != "deaf" and int(os.environ[crossover.VARIABLE]) <= a2a.max_tokens_per_rank),
        a2a.max_tokens_per_rank,
        num_sms,
    )
    return a2a


if __name__ == "__main__":
    plant = sys.argv.pop(1)
    setattr(gpu, "opened", lambda rank: Cpu())  # noqa: B010
    setattr(gpu.Size, "open", noted)  # noqa: B010
    leave(crossover.main())
