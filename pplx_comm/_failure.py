"""The first thing that went wrong in a Communicator, as every rank tells it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pplx_comm._frames import FrameError, field
from pplx_comm.errors import PeerError, StepTimeout


@dataclass(frozen=True)
class Failure:
    """kind: "death" (rank's process or host is gone), "abort" or "timeout" (rank reported one), "closed" (rank left
    cleanly).

    rank: who failed, or where the report comes from; peer: whom that rank blames, if anybody.
    """

    kind: str
    rank: int
    peer: int | None = None
    phase: str | None = None
    step: int | None = None
    message: str = ""

    def error(self) -> PeerError:
        """A fresh exception each time: one that was raised before carries another caller's traceback."""
        kind = StepTimeout if self.kind == "timeout" else PeerError
        peer = self.rank if self.peer is None else self.peer
        return kind(self.message, peer=peer, phase=self.phase, step=self.step)

    def to_json(self) -> dict[str, Any]:
        phase = None if self.phase is None else self.phase[:200]
        return {**asdict(self), "phase": phase, "message": self.message[:4000]}

    @classmethod
    def from_json(cls, value: dict[str, Any], world_size: int) -> Failure:
        rank = field(value, "rank", int)
        peer, step, phase = value.get("peer"), value.get("step"), value.get("phase")
        if not 0 <= rank < world_size or not (peer is None or (isinstance(peer, int) and 0 <= peer < world_size)):
            raise FrameError("a failure of a rank that does not exist")
        if not (step is None or isinstance(step, int)) or not (phase is None or isinstance(phase, str)):
            raise FrameError("a failure whose step or phase is of the wrong type")
        return cls(str(value.get("kind")), rank, peer, phase, step, str(value.get("message")))
