from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

def bare_writes(
    fabric: Any,
    source: Any,
    writes: Sequence[tuple[int, Any, int, int, int]],
    expected_arrivals: int,
    *,
    rounds: int = 1,
    timeout: float = 30.0,
    early_arrivals: int = 0,
) -> tuple[list[float], int]: ...
def proxy_cost(
    *,
    peers: int,
    endpoints: int,
    rows: int,
    shard_bytes: int,
    in_flight: int = 1,
    objects: int = 1,
    proxies: int = 1,
    operations: int,
    threads: bool,
    cpu: int = -1,
) -> dict[str, Any]: ...
def quantise(isa: str, wire: Any, dtype: Any, x: int, rows: int, hidden: int, codes: int, scales: int) -> None: ...
def runs(isa: str) -> bool: ...

class Copier:
    def __init__(self, threads: int) -> None: ...
    def run(self, ops: npt.NDArray[np.int64], kernel: str) -> None: ...

class SpinBarrier:
    def __init__(self, memory: int, rank: int, world_size: int) -> None: ...
    def arrive(self) -> None: ...
    def wait(self, seconds: float, patient: bool) -> bool: ...
