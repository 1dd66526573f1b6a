"""The agreement on survivors over the mesh: who proposes what to whom, and the generation that begins with a decision."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pplx_comm._agreement import Agreement
from pplx_comm._frames import FrameError, Kind, field, json_frame
from pplx_comm._sockets import remaining
from pplx_comm.errors import PeerError, StepTimeout

if TYPE_CHECKING:
    from pplx_comm._mesh import Mesh


class Survivors:
    """All but `agree` under the mesh's condition."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._agreed: list[int] | None = None
        self._agreement = self._new_agreement()

    def agree(self, timeout: float, leave_out: bool) -> list[int]:
        """Collective over the ranks that live: one list of them, the same on each. Clears the failure, opens a new
        generation. Who lives and does not come in time fails the call, or is left out.
        """
        mesh = self._mesh
        deadline = time.monotonic() + timeout
        with mesh.condition:
            mesh.check_usable()
            if self._agreed is None:  # else a call that timed out here was completed by the others
                self._agreement.begin()
                self._moved()
            while self._agreed is None:
                mesh.check_usable()
                by = self._agreement.excluded_by
                if by is not None:
                    raise PeerError(_excluded(by, mesh.rank), peer=by, phase="reset")
                if not remaining(deadline) and leave_out and self._agreement.missing():
                    for rank in self._agreement.missing():
                        self._agreement.lost(rank)
                    deadline = time.monotonic() + timeout  # for those who came, to hear of it
                    self._moved()
                    continue
                if not remaining(deadline):
                    missing = self._agreement.missing() or sorted(self._agreement.view - {mesh.rank})
                    raise StepTimeout(
                        f"ranks {missing} have not come to agree on the survivors within {timeout:g} s: does every "
                        "rank call reset()?",
                        peer=missing[0],
                        phase="reset",
                        expected=sorted(self._agreement.view),
                    )
                mesh.condition.wait(remaining(deadline))
            agreed, self._agreed = self._agreed, None
        return agreed

    def lost(self, rank: int) -> None:
        self._agreement.lost(rank)
        self._moved()

    def excluded_by(self, rank: int) -> None:
        self._agreement.excluded_by = rank

    def receive(self, sender: int, kind: Kind, message: dict[str, Any]) -> None:
        ranks = field(message, "ranks", list)
        if not all(isinstance(rank, int) for rank in ranks) or not self._mesh.members.issuperset(ranks):
            raise FrameError("survivors that are not members")
        self._agreement.receive(sender, "decide" if kind == Kind.DECIDE else "propose", frozenset(ranks))
        self._moved()

    def renew(self) -> None:
        """For a new generation, among the mesh's members."""
        self._agreement = self._new_agreement()

    def _new_agreement(self) -> Agreement:
        mesh = self._mesh

        def send(what: str, ranks: frozenset[int]) -> None:
            kind = Kind.DECIDE if what == "decide" else Kind.PROPOSE
            audience = mesh.links.keys() & (self._agreement.view | ranks)
            mesh.send(sorted(audience), json_frame(kind, {"generation": mesh.generation, "ranks": sorted(ranks)}))

        return Agreement(mesh.rank, mesh.members, send)

    def _moved(self) -> None:
        mesh, decided = self._mesh, self._agreement.decided
        mesh.condition.notify_all()
        if decided is None:
            return
        for rank in mesh.links.keys() & (mesh.members - decided):
            mesh.links[rank].send(json_frame(Kind.GOODBYE, {"reason": _excluded(mesh.rank, rank), "excluded": True}))
            mesh.links[rank].finish_sending()
        self._agreed = sorted(decided)
        mesh.begin_generation(decided)


def _excluded(by: int, rank: int) -> str:
    return (
        f"rank {by} and others went on without rank {rank}: they lost their connection to it, or it did not come to reset() in "
        "time. A new Communicator, on all ranks, brings it back"
    )
