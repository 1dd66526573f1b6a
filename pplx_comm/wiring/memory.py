"""The CPU device's memory: a heap on each rank, which the peers of its node map."""

from __future__ import annotations

import contextlib
import os

import pplx_comm._core as _core
from pplx_comm.control import memfd
from pplx_comm.control.plane import ControlPlane
from pplx_comm.settings import Settings
from pplx_comm.wiring.compare import Attempts, agree
from pplx_comm.wiring.peers import Peers
from pplx_comm.wiring.request import Request


def make_exchange(control: ControlPlane, request: Request, peers: Peers, ranks_here: int, share: int) -> _core.Exchange:
    """Collective. ranks_here: how many ranks take their threads from this host's cores. share: bytes that this rank may take."""
    config, timeout = request.config, request.patience
    attempts = Attempts()
    with contextlib.ExitStack() as held:
        what = f"the blocks of an AllToAll on rank {control.rank}"
        fd = attempts.run(lambda: memfd.allocate(config.heap_bytes, what, share))
        if fd is not None:
            held.callback(os.close, fd)
        agree(control, "AllToAll: memory", {"error": attempts.error}, timeout)
        assert fd is not None
        exchange = attempts.run(lambda: _map(control, request, fd, peers.mapped, ranks_here))
    agree(control, "AllToAll: mappings", {"error": attempts.error}, timeout)
    assert exchange is not None
    return exchange


def _map(control: ControlPlane, request: Request, fd: int, mapped: list[int], ranks_here: int) -> _core.Exchange:
    config = request.config
    received = control.share_fds([fd], "AllToAll: memory")
    with contextlib.ExitStack() as held:
        for fds in received.values():
            for theirs in fds:
                held.callback(os.close, theirs)
        own = _core.Mapping(fd, config.heap_bytes)
        for rank in mapped:
            memfd.check_of_peer(received[rank][0], config.shared_bytes, rank)
        heaps = {rank: _core.Mapping(received[rank][0], config.shared_bytes, touched=False) for rank in mapped}
    return _core.Exchange(config, own, heaps, threads_of_a_rank(ranks_here, request.settings), request.timeout)


def threads_of_a_rank(ranks_here: int, settings: Settings) -> int:
    """PPLX_COMM_THREADS, else this rank's share of the cores."""
    share = max(1, len(os.sched_getaffinity(0)) // max(1, ranks_here))
    return settings.threads or min(share, 8)
