"""Tells at this process's desk for which ranks a collective call waits: `python -m pplx_comm dump` shows it."""

from __future__ import annotations

import json
import time
from typing import Protocol

import pplx_comm._core as _core


class Member(Protocol):
    job: str
    rank: int
    world_size: int


class Waiting:
    """with Waiting(mesh, "barrier") as waiting: ... waiting.tell([2, 3])"""

    def __init__(self, of: Member, call: str) -> None:
        begun = time.monotonic_ns() // 1000
        self._facts = {"job": of.job, "rank": of.rank, "world_size": of.world_size, "call": call, "begun": begun}
        self._peers: list[int] = []
        self._told: _core.Told | None = None

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        self.tell([])

    def tell(self, peers: list[int]) -> None:
        if peers == self._peers:
            return
        before, self._peers = self._told, list(peers)
        self._told = _core.Told(json.dumps({**self._facts, "peers": self._peers})) if peers else None
        if before is not None:
            before.end()
