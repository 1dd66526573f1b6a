"""The CPU device's memory: a heap on each rank, which the peers of its node map."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pplx_comm._core as _core
from pplx_comm.control import memfd
from pplx_comm.control.plane import ControlPlane
from pplx_comm.settings import Settings
from pplx_comm.wiring.compare import Attempts, agree
from pplx_comm.wiring.peers import Peers, nodes_of
from pplx_comm.wiring.request import Request


def make_exchange(control: ControlPlane, request: Request, peers: Peers, ranks_here: int, share: int) -> _core.Exchange:
    """Collective. ranks_here: how many ranks take their threads from this host's cores. share: bytes that this rank may take."""
    config, timeout = request.config, request.patience
    attempts = Attempts()
    theirs = dict.fromkeys(peers.mapped, int(config.mapped_bytes))
    heaps = _share(control, attempts, config.heap_bytes, theirs, ("the blocks", "AllToAll: memory"), timeout, share)

    def make() -> _core.Exchange:
        assert heaps is not None
        own = heaps.pop(control.rank)
        threads = threads_of_a_rank(ranks_here, request.settings)
        counts = request.settings.stats
        return _core.Exchange(config, own, heaps, nodes_of(request, control), threads, request.timeout, counts)

    exchange = attempts.run(make)
    agree(control, "AllToAll: mappings", {"error": attempts.error}, timeout)
    assert exchange is not None
    return exchange


def lay_relays(control: ControlPlane, request: Request, exchange: Any, peers: Peers, share: int | None) -> None:
    """Collective, anew in each generation: relays serve other sources then. All that goes between nodes lies in this memory.
    share: the most bytes for this rank; None: what is free."""
    attempts = Attempts()
    nbytes = {rank: exchange.relay_bytes(rank) for rank in [control.rank, *peers.mapped]}
    what = ("the rails", "AllToAll: memory of relays")
    relays = _share(control, attempts, nbytes.pop(control.rank), nbytes, what, request.patience, share)
    attempts.run(lambda: exchange.lay_relays(relays))
    agree(control, "AllToAll: relays", {"error": attempts.error}, request.patience)


def _share(
    control: ControlPlane,
    attempts: Attempts,
    nbytes: int,
    theirs: dict[int, int],
    what: tuple[str, str],
    timeout: float,
    share: int | None = None,
) -> dict[int, _core.Mapping] | None:
    """Collective: memory of this rank and of mapped peers, by rank. theirs: bytes of each peer's. what: a name and a tag."""
    name, tag = what
    with contextlib.ExitStack() as held:
        fd = attempts.run(lambda: memfd.allocate(nbytes, f"{name} of an AllToAll on rank {control.rank}", share))
        if fd is not None:
            held.callback(os.close, fd)
        agree(control, tag, {"error": attempts.error}, timeout)
        assert fd is not None
        return attempts.run(lambda: _map(control, fd, nbytes, theirs, tag))


def _map(control: ControlPlane, fd: int, nbytes: int, theirs: dict[int, int], tag: str) -> dict[int, _core.Mapping]:
    received = control.share_fds([fd], tag)
    with contextlib.ExitStack() as held:
        for fds in received.values():
            for one in fds:
                held.callback(os.close, one)
        for rank, least in theirs.items():
            memfd.check_of_peer(received[rank][0], least, rank)
        mapped = {rank: _core.Mapping(received[rank][0], least, touched=False) for rank, least in theirs.items()}
        return {**mapped, control.rank: _core.Mapping(fd, nbytes)}


def threads_of_a_rank(ranks_here: int, settings: Settings) -> int:
    """PPLX_COMM_THREADS, else this rank's share of the cores."""
    share = max(1, len(os.sched_getaffinity(0)) // max(1, ranks_here))
    return settings.threads or min(share, 8)
