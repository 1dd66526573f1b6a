"""The first failure of a Communicator, in the words in which every rank tells it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from pplx_comm.control.frames import FrameError, field
from pplx_comm.errors import PeerError, StepTimeout


@dataclass(frozen=True)
class Failure:
    """kind: "death" (rank's process or host is gone), "abort" or "timeout" (rank reported one), "closed" (rank left
    cleanly).

    rank: the rank that failed, or that reports; peer: the rank that it blames, if any.
    """

    kind: str
    rank: int
    peer: int | None = None
    phase: str | None = None
    step: int | None = None
    message: str = ""

    def error(self) -> PeerError:
        """A new exception each time: one that was raised before carries another caller's traceback."""
        kind = StepTimeout if self.kind == "timeout" else PeerError
        peer = self.rank if self.peer is None else self.peer
        return kind(self.message, peer=peer, phase=self.phase, step=self.step)

    def checked(self, world_size: int) -> Failure:
        """A copy that every peer accepts. A device's report comes from memory that peers can write, and the rank that passes
        it on must not be blamed for what stands in it.
        """
        return replace(
            self,
            peer=self.peer if is_rank(self.peer, world_size) else None,
            step=int(self.step) if isinstance(self.step, int) else None,
            phase=None if self.phase is None else str(self.phase)[:200],
            message=str(self.message)[:4000],
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any], world_size: int) -> Failure:
        rank = field(value, "rank", int)
        peer, step, phase = value.get("peer"), value.get("step"), value.get("phase")
        if not is_rank(rank, world_size):
            raise FrameError("a failure of a rank that does not exist")
        if not (step is None or isinstance(step, int)) or not (phase is None or isinstance(phase, str)):
            raise FrameError("a failure whose step or phase is of the wrong type")
        return cls(str(value.get("kind")), rank, peer, phase, step, str(value.get("message"))).checked(world_size)


def is_rank(value: Any, world_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < world_size
