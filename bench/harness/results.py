"""Results of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.harness.clock import Figure

PHASES = ("dispatch", "combine")
FUSED = (*PHASES, "round trip")
HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


@dataclass
class Point:
    """One transport at one number of tokens and of multiprocessors."""

    transport: str
    tokens: int
    num_sms: int | None = None
    """Multiprocessors that a launch may take; None: all."""
    off: str | None = None
    phases: dict[str, Figure] = field(default_factory=dict)
    floor: dict[str, Figure] = field(default_factory=dict)
    floor_parts: dict[str, dict[str, Figure]] = field(default_factory=dict)
    """Phase -> the copies, and the bare writes where there are any."""
    floor_copy: dict[str, str] = field(default_factory=dict)
    """Phase -> the fastest copy, or schedule."""
    schedules: dict[str, dict[str, Figure]] = field(default_factory=dict)
    """On GPUs inside a node: phase -> the bare stores by schedule. The fastest one is the floor."""
    floor_off: str | None = None
    composite: dict[str, Figure] = field(default_factory=dict)
    """On GPUs inside a node: bare kernels that read and store all that the step does, on the same number of multiprocessors."""
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)
    """Phase -> bytes that the composite of this rank reads, writes, and pushes to other ranks."""
    bytes_per_rank: dict[str, float] = field(default_factory=dict)
    beside: dict[str, Figure] = field(default_factory=dict)
    """Phase -> time of transport mapped in the same run, where kernels post to a network themselves."""

    def ratio(self, phase: str) -> float | None:
        return self._ratio(phase, self.floor)

    def ratio_to_composite(self, phase: str) -> float | None:
        return self._ratio(phase, self.composite)

    def _ratio(self, phase: str, bare: dict[str, Figure]) -> float | None:
        return self.phases[phase].p50 / bare[phase].p50 if phase in bare and phase in self.phases else None


@dataclass
class PeerPoint:
    peer: str
    tokens: int
    phases: dict[str, Figure]
    bytes_per_rank: dict[str, float]
    how: str = ""
    """How it was called."""
    num_sms: int | None = None
    """The setting of Point.num_sms that it was given; None, too, where a peer has no such setting and is measured once."""


@dataclass
class Results:
    multiprocessors: int | None = None
    """Multiprocessors of a GPU."""
    points: list[Point] = field(default_factory=list)
    peers: list[PeerPoint] = field(default_factory=list)
    peers_off: dict[str, str] = field(default_factory=dict)
    nothing: dict[int, Figure] = field(default_factory=dict)
    """Tokens -> an empty call, measured like the others. It is the clock's own share of every figure."""
    routing_digest: dict[int, str] = field(default_factory=dict)
    """Tokens -> a digest of the first iteration's routing. Runs can be compared only where it is the same."""

    def peer(self, name: str, tokens: int, num_sms: int | None = None) -> PeerPoint | None:
        """Beside that point of ours."""
        of_size = [point for point in self.peers if (point.peer, point.tokens) == (name, tokens)]
        return next((point for wanted in (num_sms, None) for point in of_size if point.num_sms == wanted), None)

    def best_peer(self, tokens: int, num_sms: int | None, phase: str) -> PeerPoint | None:
        """Returns the fastest baseline, with at most `num_sms` multiprocessors where they can be set."""
        found = [point for point in self.peers if point.tokens == tokens and phase in point.phases and self._may(point, num_sms)]
        return min(found, key=lambda point: point.phases[phase].p50, default=None)

    def _may(self, point: PeerPoint, num_sms: int | None) -> bool:
        if num_sms is None:
            return True
        if point.num_sms is not None:
            return point.num_sms <= num_sms
        return all(one.num_sms is None for one in self.peers if (one.peer, one.tokens) == (point.peer, point.tokens))
