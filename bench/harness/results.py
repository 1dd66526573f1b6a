"""What a run has measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.harness.clock import Figure

PHASES = ("dispatch", "combine")
FUSED = (*PHASES, "round trip")
HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


@dataclass
class Point:
    """One transport at one number of tokens."""

    transport: str
    tokens: int
    off: str | None = None
    phases: dict[str, Figure] = field(default_factory=dict)
    floor: dict[str, Figure] = field(default_factory=dict)
    floor_parts: dict[str, dict[str, Figure]] = field(default_factory=dict)
    """By phase: the copies, and the bare writes where there are any."""
    floor_copy: dict[str, str] = field(default_factory=dict)
    """Which copy was the fastest, by phase."""
    floor_off: str | None = None
    bytes_per_rank: dict[str, float] = field(default_factory=dict)
    beside: dict[str, Figure] = field(default_factory=dict)
    """What transport mapped took in the same run, by phase, where kernels post to a network themselves."""

    def ratio(self, phase: str) -> float | None:
        return self.phases[phase].p50 / self.floor[phase].p50 if phase in self.floor else None


@dataclass
class PeerPoint:
    peer: str
    tokens: int
    phases: dict[str, Figure]
    bytes_per_rank: dict[str, float]
    how: str = ""
    """How it was called."""


@dataclass
class Results:
    points: list[Point] = field(default_factory=list)
    peers: list[PeerPoint] = field(default_factory=list)
    peers_off: dict[str, str] = field(default_factory=dict)
    nothing: dict[int, Figure] = field(default_factory=dict)
    """By tokens: an empty call, measured like the others. It is the clock's own share of every figure."""
    routing_digest: dict[int, str] = field(default_factory=dict)
    """By tokens: a digest of the first iteration's routing. Runs can be compared only where it is the same."""

    def peer(self, name: str, tokens: int) -> PeerPoint | None:
        return next((point for point in self.peers if (point.peer, point.tokens) == (name, tokens)), None)
