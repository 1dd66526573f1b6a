"""Sorts peers: those that share memory with this rank, and remote ones."""

from __future__ import annotations

from dataclasses import dataclass

from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error
from pplx_comm.wiring.compare import name_ranks
from pplx_comm.wiring.request import Request

_NO_COMMON_MEMORY = "they cannot map each other's memory: they run on different hosts, or in different network or IPC namespaces"


@dataclass(frozen=True)
class Peers:
    """The living, oneself left out."""

    mapped: list[int]
    remote: list[int]

    def apart_from(self, ranks: set[int]) -> Peers:
        """A copy in which those ranks are remote."""
        return Peers([rank for rank in self.mapped if rank not in ranks], sorted({*self.remote, *ranks}))

    def joined_by(self, ranks: set[int]) -> Peers:
        """A copy in which those ranks are mapped."""
        return Peers(sorted({*self.mapped, *ranks}), [rank for rank in self.remote if rank not in ranks])

    def of(self, survivors: list[int]) -> Peers:
        return Peers(*([rank for rank in ranks if rank in survivors] for ranks in (self.mapped, self.remote)))


def find_peers(request: Request, control: ControlPlane, alive: list[int]) -> Peers:
    mine = _node(request, control, control.rank)
    others = [rank for rank in alive if rank != control.rank]
    mapped = [rank for rank in others if _node(request, control, rank) == mine]
    remote = [rank for rank in others if rank not in mapped]
    _check_replicas(request, control, others)
    for peer in mapped:
        if not control.same_node(peer):
            raise Error(f"node_size={request.node_size} puts ranks {control.rank} and {peer} on one node, but {_NO_COMMON_MEMORY}")
    if request.transport == "mapped" and remote:
        raise Error(
            f"transport='mapped' reaches only ranks of one node, and {name_ranks(remote)} cannot share memory with "
            f"rank {control.rank}: use transport='auto'"
        )
    return Peers(mapped, remote)


def _node(request: Request, control: ControlPlane, rank: int) -> int:
    """The node of a rank, for this AllToAll."""
    if request.node_size is not None:
        return rank // request.node_size
    # Replicas share memory also where all other peers are to be reached by the proxy.
    return rank // request.config.replicas if request.transport == "proxy" else control.node_of[rank]


def _check_replicas(request: Request, control: ControlPlane, others: list[int]) -> None:
    replicas = request.config.replicas
    for peer in others:
        if peer // replicas != control.rank // replicas:
            continue
        if not control.same_node(peer):
            why = _NO_COMMON_MEMORY
        elif _node(request, control, peer) != _node(request, control, control.rank):
            why = f"node_size={request.node_size} puts them on different nodes"
        else:
            continue
        raise Error(f"replicas={replicas} makes ranks {control.rank} and {peer} hold the same tokens, and {why}")
