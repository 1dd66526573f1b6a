"""When each rank began and ended each call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from bench.harness.world import Span, World

T = TypeVar("T")
Key = tuple[str, str]
"""Backend and phase."""
Times = npt.NDArray[np.float64]
"""Microseconds, one per iteration."""


class Clock:
    def __init__(self, world: World) -> None:
        self.recording = False
        self._world = world
        self._spans: dict[Key, list[Span]] = defaultdict(list)
        self._origin = world.gather(world.timed(lambda: None)[1][0], "origin of time")[0] if world.together else 0

    def time(self, backend: str, phase: str, call: Callable[[], T]) -> T:
        """Runs it on all ranks at once."""
        result, span = self._world.timed(call)
        if self.recording:
            self._spans[backend, phase].append(span)
        return result

    def collect(self) -> dict[Key, Times]:
        """Returns the time of each iteration; clears the clock.

        On one host: from the first rank's entry to the last one's exit. Ranks that share cores take turns, and each
        one's own time would leave out the turns of the others. Between hosts, whose clocks differ: the slowest rank's
        own time.
        """
        keys = sorted(self._spans)
        mine = [[[begun - self._origin, ended - self._origin] for begun, ended in self._spans[key]] for key in keys]
        everybody = self._world.gather(mine, "times")
        self._spans.clear()
        times = {}
        for i, key in enumerate(keys):
            spans = np.array([rank[i] for rank in everybody], dtype=np.int64)
            if self._world.together:
                took = spans[:, :, 1].max(axis=0) - spans[:, :, 0].min(axis=0)
            else:
                took = (spans[:, :, 1] - spans[:, :, 0]).max(axis=0)
            times[key] = took / 1000.0
        return times


@dataclass(frozen=True)
class Figure:
    """Percentiles over iterations, microseconds."""

    n: int
    p50: float
    p90: float
    p99: float
    least: float

    @classmethod
    def of(cls, times: Times) -> Figure:
        p50, p90, p99 = np.percentile(times, (50, 90, 99))
        return cls(len(times), float(p50), float(p90), float(p99), float(times.min()))


def total(parts: Sequence[Figure]) -> Figure:
    """The figure of things that come one after the other: percentiles are added."""
    sums = [sum(getattr(part, name) for part in parts) for name in ("p50", "p90", "p99", "least")]
    return Figure(min(part.n for part in parts), *sums)


@dataclass
class Traffic:
    """Bytes that one rank sent to others."""

    steps: int = 0
    dispatch: int = 0
    combine: int = 0

    def count(self, dispatch: int, combine: int) -> None:
        self.steps += 1
        self.dispatch += dispatch
        self.combine += combine

    def add(self, other: Traffic) -> None:
        self.steps += other.steps
        self.dispatch += other.dispatch
        self.combine += other.combine
