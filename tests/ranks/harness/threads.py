"""Ranks that are threads of this process, each with a Communicator of its own. For what all of them must share, as a GPU's copy engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from harness.member import Member

LIMIT = 60.0


class _Board:
    """An allgather between threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=LIMIT)
        self._texts = [""] * size

    def gather(self, rank: int, text: str) -> list[str]:
        self._texts[rank] = text
        self._barrier.wait()
        texts = list(self._texts)
        self._barrier.wait()
        return texts


def run(world_size: int, call: Callable[[Member], Any], prepare: Callable[[int], None]) -> list[Any]:
    """Calls it on all ranks at once, each of which is prepared before any begins. What one of them raises first is raised here."""
    from pplx_comm.communicator import Communicator
    from pplx_comm.control.rendezvous import Gathered

    board = _Board(world_size)
    results: list[Any] = [None] * world_size
    problems: list[BaseException] = []

    def member(rank: int) -> None:
        try:
            prepare(rank)
            board.gather(rank, "")
            gathered = Gathered(rank, world_size, lambda text: board.gather(rank, text))
            with Communicator(gathered, timeout=30) as comm:
                results[rank] = call(Member(rank, world_size, comm=comm))
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for problem in problems:
        raise problem
    return results
