"""How a failed call becomes everybody's failure."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pplx_comm.accounts import first_lines
from pplx_comm.control import deadlines
from pplx_comm.device.session import Session
from pplx_comm.errors import Error, PeerError, StepTimeout


class Failing:
    """Around every call that may fail for a reason other ranks must hear of: the first failure is told to all. It keeps nothing of
    a call, so one serves many, also at once."""

    def __init__(self, session: Session, call: str) -> None:
        self._session = session
        self._call = call

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None or (isinstance(error, Error) and not isinstance(error, PeerError)):
            return
        control = self._session.control
        self._session.life.told()
        if control.failure is None:  # else all ranks know
            self._blame_proxy(error)
            self._tell(error)
            self._ask(error)
        first = control.failure
        if first is None or not isinstance(error, PeerError):
            return
        # If two ranks die at once, neighbours may blame one and the control connections the other. All calls name one cause.
        said = first.error()
        if said.peer != error.peer:
            raise said from error

    def _blame_proxy(self, error: BaseException) -> None:
        """A timeout says so if this rank's own proxy is stuck."""
        carrier, rank = self._session.wiring.carrier, self._session.control.rank
        if isinstance(error, StepTimeout) and carrier is not None and carrier.stands_still():
            but = (
                f"But rank {rank}'s own proxy thread stands still, inside of {carrier.name} or without a core: "
                f"see to rank {rank} first."
            )
            error.args = (f"{error} {but}",)

    def _ask(self, error: BaseException) -> None:
        """A timeout says what the rank does that it blames. Once all ranks know of it, lest another one be blamed meanwhile."""
        control = self._session.control
        if isinstance(error, StepTimeout) and error.peer not in (None, control.rank):
            with suppress(Error):  # closed meanwhile
                told = control.ask([error.peer], "account", deadlines.ASKED_RANK)
                error.args = (f"{error}\n{first_lines(error.peer, told.get(error.peer), control.job)}",)

    def _tell(self, error: BaseException) -> None:
        control, generation = self._session.control, self._session.life.generation
        if isinstance(error, PeerError):
            kind = "timeout" if isinstance(error, TimeoutError) else "abort"
            control.abort(str(error), kind=kind, peer=error.peer, phase=error.phase, step=error.step, generation=generation)
        else:
            what = f"rank {control.rank} was interrupted: {error!r}"
            control.abort(what, peer=control.rank, phase=self._call, generation=generation)
