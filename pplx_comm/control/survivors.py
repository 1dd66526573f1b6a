"""Runs the agreement on survivors over the mesh, and begins a new generation when it is decided."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

from pplx_comm.control.agreement import Agreement
from pplx_comm.control.connection import Connection
from pplx_comm.control.frames import FrameError, Kind, field, json_frame
from pplx_comm.control.sockets import remaining
from pplx_comm.control.waiting import Waiting
from pplx_comm.errors import PeerError, StepTimeout


class Group(Protocol):
    """The ranks that agree, and how to reach them: the mesh."""

    job: str
    rank: int
    world_size: int
    condition: threading.Condition
    generation: int
    members: frozenset[int]
    connections: dict[int, Connection]

    def check_usable(self) -> None: ...

    def someone_is_busy(self) -> bool: ...

    def send(self, ranks: Iterable[int], message: bytes) -> None: ...

    def begin_generation(self, members: frozenset[int]) -> None: ...


class Survivors:
    """Call everything but `agree` under the group's condition."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._agreement = self._new_agreement()

    def agree(self, after: int, timeout: float, leave_out: bool) -> list[int]:
        """Collective over the living ranks. Returns the ranks left of generation `after`, the same list on each. Clears the failure
        and opens a new generation. A rank that lives and does not come in time fails the call, or is left out. The time begins
        when no rank is busy.
        """
        group = self._group
        deadline, busy = time.monotonic() + timeout, False
        with group.condition, Waiting(group, "reset") as waiting:
            self.begin(after)
            while (agreed := self.agreed(after)) is None:
                busy, was_busy = group.someone_is_busy(), busy
                if busy or was_busy:
                    deadline = time.monotonic() + timeout
                if not remaining(deadline) and leave_out and self._agreement.missing():
                    for rank in self._agreement.missing():
                        self._agreement.lost(rank)
                    deadline = time.monotonic() + timeout  # so that the ranks that came hear of it
                    self._moved()
                    continue
                if not remaining(deadline):
                    missing = self._agreement.missing() or sorted(self._agreement.view - {group.rank})
                    raise StepTimeout(
                        f"ranks {missing} have not come to agree on the survivors within {timeout:g} s: does every "
                        "rank call reset()?",
                        peer=missing[0],
                        phase="reset",
                        expected=sorted(self._agreement.view),
                    )
                waiting.tell(self._agreement.missing())
                group.condition.wait(remaining(deadline))
        return agreed

    def begin(self, after: int) -> None:
        """This rank takes part in the agreement that ends generation `after`, if that has not ended: a call that timed out here, or
        another thread's, may have been completed by the other ranks.
        """
        self._group.check_usable()
        if self._group.generation == after and self._agreement.begin():
            self._moved()

    def agreed(self, after: int) -> list[int] | None:
        """None until it is decided. The same for all threads that ask."""
        self._group.check_usable()
        if self._group.generation > after:
            return sorted(self._group.members)
        by = self._agreement.excluded_by
        if by is not None:
            raise PeerError(_excluded(by, self._group.rank), peer=by, phase="reset")
        return None

    def lost(self, rank: int) -> None:
        self._agreement.lost(rank)
        self._moved()

    def excluded_by(self, rank: int) -> None:
        self._agreement.excluded_by = rank

    def receive(self, sender: int, kind: Kind, message: dict[str, Any]) -> None:
        ranks = field(message, "ranks", list)
        if not all(isinstance(rank, int) for rank in ranks) or not self._group.members.issuperset(ranks):
            raise FrameError("survivors that are not members")
        self._agreement.receive(sender, "decide" if kind == Kind.DECIDE else "propose", frozenset(ranks))
        self._moved()

    def renew(self) -> None:
        """Starts a new generation among the mesh's members."""
        self._agreement = self._new_agreement()

    def _new_agreement(self) -> Agreement:
        group = self._group

        def send(what: str, ranks: frozenset[int]) -> None:
            kind = Kind.DECIDE if what == "decide" else Kind.PROPOSE
            audience = group.connections.keys() & (self._agreement.view | ranks)
            group.send(sorted(audience), json_frame(kind, {"generation": group.generation, "ranks": sorted(ranks)}))

        return Agreement(group.rank, group.members, send)

    def _moved(self) -> None:
        group, decided = self._group, self._agreement.decided
        group.condition.notify_all()
        if decided is None:
            return
        for rank in group.connections.keys() & (group.members - decided):
            group.connections[rank].send(json_frame(Kind.GOODBYE, {"reason": _excluded(group.rank, rank), "excluded": True}))
            group.connections[rank].finish_sending()
        group.begin_generation(decided)


def _excluded(by: int, rank: int) -> str:
    return (
        f"rank {by} and others went on without rank {rank}: they lost their connection to it, or it did not come to reset() in "
        "time. A new Communicator, on all ranks, brings it back"
    )
