"""One rank of `bench/latency.py --device cuda` without a GPU: a device that runs what it would capture, and an AllToAll on the CPU.

What is measured means nothing. That every step is taken, what is checked, and what is written, does.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import composite_host
import torch

from bench.cpu import ours
from bench.gpu import measure as gpu
from bench.harness.rank import leave
from bench.latency import main


class Cpu:
    device = torch.device("cpu")
    name = "no GPU"
    multiprocessors = 132

    def capture(self, steps: Any) -> Any:
        return steps

    def time(self, run: Any) -> float:
        begun = time.perf_counter()
        run()
        return (time.perf_counter() - begun) * 1e6

    def synchronize(self) -> None: ...

    def stamps(self, a2a: Any, steps: int) -> torch.Tensor:
        """As kernels of 3 and 5 us, one after the other, would stamp."""
        return torch.arange(steps)[:, None] * 8000 + torch.tensor([1000, 4000])

    def no_stamps(self, a2a: Any) -> None: ...

    def ping(self, rounds: int) -> list[float]:
        return [2.0] * rounds

    @contextlib.contextmanager
    def using(self, address: int, nbytes: int) -> Iterator[Any]:
        used = []

        def use() -> None:
            used.append(ctypes.memset(address + nbytes, 1, nbytes))

        yield use
        assert len(used) == 2 * (gpu.BARE_TURNS + gpu.WARMING)

    @contextlib.contextmanager
    def pushing(self, world: Any, area_bytes: int) -> Iterator[Any]:
        assert len(set(world.gather(area_bytes, "test"))) == 1

        def push(bytes_to: list[int], num_sms: int | None) -> None:
            assert bytes_to[world.rank] == 0 and all(n % 16 == 0 and n <= area_bytes for n in bytes_to) and sum(bytes_to) > 0
            pushed.append(num_sms)

        pushed: list[int | None] = []
        yield push
        assert pushed and len(pushed) % (2 * gpu.PUSHES) == 0
        assert len(set(Counter(pushed).values())) == 1  # all settings alike

    @contextlib.contextmanager
    def sharing(self, world: Any, nbytes: int, what: str) -> Iterator[list[int]]:
        assert len(set(world.gather(nbytes, "test"))) == 1
        memory = world.share(nbytes, what)
        yield [memory.address(rank) for rank in range(world.size)]
        world.barrier()

    def composite(self, phase: str, work: Any, geometry: Any) -> Any:
        """Runs once, which finds addresses that are nobody's; later launches are as good."""
        done = []

        def launch(num_sms: int | None) -> None:
            if not done:
                composite_host.run(phase, work, geometry)
            done.append(num_sms)

        return launch

    # A stream is a name. What is launched on it runs at once.

    def streams(self, n: int, *, first: bool) -> list[str]:
        return [f"{'first' if first else 'last'} {i}" for i in range(n)]

    def on(self, stream: str) -> Any:
        return contextlib.nullcontext()

    def delay(self, microseconds: float) -> None:
        assert 0 < microseconds < 1000

    def gate(self, microseconds: float) -> Any:
        return SimpleNamespace(hold=lambda stream: None)

    def stopwatch(self, stream: str) -> Any:
        begun = time.perf_counter()
        ended = []
        return SimpleNamespace(
            stop=lambda: ended.append(time.perf_counter()), microseconds=lambda: (ended[0] - begun) * 1e6
        )  # fmt: skip

    def leaving(self, num_sms: int) -> Any:
        return contextlib.nullcontext()


def slots_seen(make: Any) -> Any:
    """Makes AllToAlls, and insists on the slots that the command line asks for."""
    given = sys.argv.index("--slot-bytes") if "--slot-bytes" in sys.argv else None

    def made(*arguments: Any, **options: Any) -> Any:
        assert given is None or options.get("slot_bytes") == int(sys.argv[given + 1]), options
        return make(*arguments, **options)

    return made


_open = gpu.Size.open


def opened(size: Any, comm: Any, transport: Any, *rest: Any) -> Any:
    """Mapped memory in the place of kernels that post."""
    if transport.transport == "nvshmem":
        transport = replace(transport, transport="mapped", node_size=None)
    return _open(size, comm, transport, *rest)


if __name__ == "__main__":
    setattr(gpu, "opened", lambda rank: Cpu())  # noqa: B010
    setattr(gpu.Size, "open", opened)  # noqa: B010
    for module in (gpu, ours.all_to_all):
        setattr(module, "AllToAll", slots_seen(module.AllToAll))  # noqa: B010
    leave(main())
