"""The mesh as the rest of the library sees it: collectives, failures, and the ranks that are left."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pplx_comm.control.callbacks import Busy, Callback
from pplx_comm.control.collectives import all_gather, share_fds
from pplx_comm.control.deadlines import checked_timeout
from pplx_comm.control.failure import Failure, is_rank
from pplx_comm.control.mesh import Answer, Mesh


class ControlPlane:
    """The control connections of one rank to all others. Usable from several threads.

    rank, world_size: as the launcher or group numbers them.
    node_of: the node of each rank, by rank.
    one_network: whether all ranks have one loopback interface.
    """

    def __init__(self, mesh: Mesh, node_of: Sequence[int], timeout: float, *, one_network: bool) -> None:
        """timeout: seconds for collectives that name none."""
        self._mesh = mesh
        self._timeout = timeout
        weakref.finalize(self, mesh.abandon, "its Communicator was dropped without close()").atexit = False
        self.node_of = list(node_of)
        self.one_network = one_network
        self.job = mesh.job
        self.rank = mesh.rank
        self.world_size = mesh.world_size

    def same_node(self, rank: int) -> bool:
        return self.node_of[rank] == self.node_of[self.rank]

    # ---- collectives -----------------------------------------------------------------------------------------------------

    def all_gather(self, payload: dict[str, Any] | None, tag: str, timeout: float | None = None) -> list[Any]:
        """Collective: returns all JSON-able payloads, by rank; None for ranks that `agree_survivors` found dead.

        Calls are matched by tag and by how often the tag was used. A failure latched here or anywhere ends it with that
        cause.
        """
        return all_gather(self._mesh, payload, tag, self._seconds(timeout))

    def share_fds(self, fds: Sequence[int], tag: str, timeout: float | None = None) -> dict[int, list[int]]:
        """Collective among the live ranks of this node: theirs by rank, this rank not among them. The caller closes all
        of them.

        The caller keeps its own and may close them as soon as this returns. Raises on all of the node or on none.
        """
        peers = [rank for rank in range(self.world_size) if rank != self.rank and self.same_node(rank)]
        return share_fds(self._mesh, fds, tag, peers, self._seconds(timeout))

    def agree_survivors(self, timeout: float | None = None, *, after: int | None = None, leave_out: bool = False) -> list[int]:
        """Collective over the survivors: the same list on each. Clears the failure and opens the next generation.

        after: the generation to end; None takes the present one. If it has ended, the ranks that are left now are returned at once:
            all threads of a rank that name one generation share one agreement.
        leave_out: a rank that lives and does not come within `timeout` is out, too; else that is a StepTimeout.
        """
        return self._mesh.agree_survivors(after, self._seconds(timeout), leave_out)

    # ---- failures --------------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> Failure | None:
        """The first death or abort since the start or the last `agree_survivors`."""
        self._mesh.check_owner()
        return self._mesh.failure

    @property
    def generation(self) -> int:
        """How often the survivors have agreed."""
        return self._mesh.generation

    def members(self) -> list[int]:
        """The ranks that collectives wait for: all, until `agree_survivors` leaves some out. Raises after close()."""
        self._mesh.check_usable()
        return sorted(self._mesh.members)

    def alive(self) -> list[bool]:
        """True for each rank that is neither dead nor gone, as far as this rank knows now."""
        self._mesh.check_owner()
        return self._mesh.alive()

    def raise_if_failed(self) -> None:
        self._mesh.check_owner()
        self._mesh.raise_if_failed()

    def abort(
        self,
        message: str = "",
        *,
        kind: str = "abort",
        rank: int | None = None,
        peer: int | None = None,
        phase: str | None = None,
        step: int | None = None,
        generation: int | None = None,
    ) -> None:
        """Latches the first failure here and at every peer. Never blocks. See Failure; `rank` is this one by default. A
        `peer` that is no rank counts as none.

        generation: the one that failed. If it is over, nothing happens. None: the present one.
        """
        self._mesh.check_owner()
        rank = rank if rank is not None and is_rank(rank, self.world_size) else self.rank
        message = message or f"rank {rank} aborted{f' in {phase}' if phase else ''}"
        self._mesh.abort(Failure(kind, rank, peer, phase, step, message).checked(self.world_size), generation)

    def on_failure(self, callback: Callback, apart: bool = False) -> Callable[[], None]:
        """Calls back once for the first failure of each generation, and once for each rank that leaves cleanly (kind
        "closed").

        At once if it has happened already. Runs in the control thread, or in the thread that aborts or registers: it must not
        wait for other ranks. A bound method is held weakly. Returns what unregisters it.

        apart: runs in a thread for such callbacks, where it may wait.
        """
        return self._mesh.on_failure(callback, apart)

    def in_callback(self) -> bool:
        """True in the thread of callbacks that are `apart`."""
        return self._mesh.in_callback()

    # ---- ranks that are busy ---------------------------------------------------------------------------------------------

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Tells the other ranks that this one lives and comes later. See Communicator.busy."""
        self._mesh.begin_busy(what)
        try:
            yield
        finally:
            self._mesh.end_busy(what)

    def on_busy(self, callback: Callable[[Busy], None]) -> Callable[[], None]:
        """Calls back when a rank says that it is busy, or no longer; at once for those that are. As on_failure does."""
        return self._mesh.on_busy(callback)

    # ---- questions -------------------------------------------------------------------------------------------------------

    def answer(self, what: str, answer: Answer) -> None:
        """Sets the answer to other ranks that ask for it: JSON-able. A bound method is held weakly."""
        self._mesh.answers[what] = weakref.WeakMethod(answer) if hasattr(answer, "__self__") else lambda: answer

    def ask(self, ranks: Iterable[int], what: str, seconds: float) -> dict[int, dict[str, Any]]:
        """The answers of those ranks that answer in time. Raises after close()."""
        return self._mesh.ask(ranks, what, seconds)

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls back once when the connections close, by any way but fork, before the goodbye; in order of registration."""
        self._mesh.on_close(callback)

    def close(self, reason: str) -> None:
        """Leaves the mesh and tells peers the reason. Idempotent. Does not wait for peers; returns within 2 s."""
        self._mesh.close(reason)

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else checked_timeout(timeout)
