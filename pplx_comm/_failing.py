"""How a failed call becomes everybody's failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import Error, PeerError, StepTimeout

if TYPE_CHECKING:
    from .all_to_all import AllToAll


class Failing:
    """Around every call that may fail for a reason other ranks must hear of: the first failure is told to all."""

    def __init__(self, owner: AllToAll, call: str) -> None:
        self._owner = owner
        self._call = call

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None or (isinstance(error, Error) and not isinstance(error, PeerError)):
            return
        owner = self._owner
        if owner._failed is None:
            owner._failed = error
            if owner._comm.failure is None:  # else everybody knows
                self._explain(error)
                self._tell(error)
        first = owner._comm.failure
        if first is None or not isinstance(error, PeerError) or self._call == "reset":
            return
        # Of two ranks that die at once, neighbours may blame one and the control connections the other: one cause for all calls.
        said = first.error()
        if said.peer != error.peer:
            raise said from error

    def _explain(self, error: BaseException) -> None:
        """Who waited in vain is not always innocent."""
        owner = self._owner
        carrier = owner._wiring.carrier
        if isinstance(error, StepTimeout) and carrier is not None and carrier.stands_still():
            rank, network = owner._comm.rank, carrier.name
            but = (
                f"But rank {rank}'s own proxy thread stands still, inside of {network} or without a core: see to rank {rank} first."
            )
            error.args = (f"{error} {but}",)

    def _tell(self, error: BaseException) -> None:
        comm = self._owner._comm
        if isinstance(error, PeerError):
            kind = "timeout" if isinstance(error, TimeoutError) else "abort"
            comm._abort({"kind": kind, "peer": error.peer, "phase": error.phase, "step": error.step, "message": str(error)})
        else:
            message = f"rank {comm.rank} was interrupted: {error!r}"
            comm._abort({"kind": "abort", "peer": comm.rank, "phase": self._call, "message": message})
