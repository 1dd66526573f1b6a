"""reset(): the survivors of a failure agree, take fresh endpoints, and start over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._carriers import Carriers
from ._setup import rewire

if TYPE_CHECKING:
    from .all_to_all import AllToAll

_DRAIN = 0.1  # seconds for writes under way: those to a dead peer never end


def reset(a2a: AllToAll, timeout: float | None) -> list[int]:
    comm = a2a._comm
    survivors = comm._agree_survivors(a2a._request.patience if timeout is None else timeout, leave_out=True)
    a2a._wiring.detach(_DRAIN)
    Carriers.of(comm).close_unused(comm._generation)
    a2a._alive = [rank in survivors for rank in range(comm.world_size)]
    with a2a._failure_lock:
        # No survivor runs a phase now, so nobody stores into this rank's memory.
        a2a._core.reset(a2a._core.generation + 1, a2a._alive)
        a2a._graph.renew()
        a2a._failed = None
    try:
        rewire(comm, a2a._request, a2a._wiring, survivors)
    except BaseException as problem:
        # The first cause may have come before the core was reset, and a core that nothing carries for must not take steps.
        peer = getattr(problem, "peer", None)
        a2a._core.fail("abort", comm.rank, comm.rank if peer is None else peer, 0, f"reset() failed: {problem}")
        raise
    return survivors
