"""reset(): the survivors of a failure agree, take fresh endpoints, and start over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._carriers import Carriers
from ._setup import rewire

if TYPE_CHECKING:
    from .all_to_all import AllToAll

_DRAIN = 0.1  # seconds for writes under way: those to a dead peer never end


def reset(a2a: AllToAll) -> None:
    comm = a2a._comm
    survivors = comm._agree_survivors(a2a._request.patience)
    a2a._wiring.detach(_DRAIN)
    Carriers.of(comm).close_unused(comm._generation)
    a2a._alive = [rank in survivors for rank in range(comm.world_size)]
    # No survivor runs a phase now, so nobody stores into this rank's memory.
    a2a._core.reset(a2a._core.generation + 1, a2a._alive)
    a2a._failed = None
    rewire(comm, a2a._request, a2a._wiring, survivors)
