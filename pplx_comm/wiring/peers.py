"""Sorts peers: those that share memory with this rank, and remote ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error
from pplx_comm.wiring.compare import name_ranks
from pplx_comm.wiring.request import Request


class NoRelays(Error):
    """dedup="node" cannot be had, which all ranks know alike."""


_NO_COMMON_MEMORY = "they cannot map each other's memory: they run on different hosts, or in different network or IPC namespaces"


@dataclass(frozen=True)
class Peers:
    """The living, oneself left out."""

    mapped: list[int]
    remote: list[int]

    def with_remote(self, ranks: set[int]) -> Peers:
        """A copy in which those ranks are remote, and no others."""
        return Peers([rank for rank in sorted([*self.mapped, *self.remote]) if rank not in ranks], sorted(ranks))

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


def nodes_of(request: Request, control: ControlPlane) -> list[int]:
    """Returns the node of each rank. A combine's sums depend on it, so it depends on no transport."""
    if request.node_size is None:
        return control.node_of
    return [rank // request.node_size for rank in range(control.world_size)]


def mapped_range(request: Request, control: ControlPlane) -> tuple[int, int]:
    """Returns this node's first rank, and the most ranks from the first to the last of any node. They all have slots: dead ranks,
    too, and those whose memory cannot be mapped."""
    nodes = [_node(request, control, rank) for rank in range(control.world_size)]
    last = {node: rank for rank, node in enumerate(nodes)}
    return nodes.index(nodes[control.rank]), max(last[node] + 1 - nodes.index(node) for node in last)


def remote_of_all(
    request: Request, control: ControlPlane, alive: list[int], apart: Iterable[tuple[int, int]]
) -> dict[int, set[int]]:
    """Returns each rank's remote peers. apart: ranks of a node of which one cannot map the other's memory."""
    remote = {a: {b for b in alive if _node(request, control, a) != _node(request, control, b)} for a in alive}
    for a, b in apart:
        remote[a].add(b)
        remote[b].add(a)
    return remote


def node_ranks(request: Request, control: ControlPlane, peers: Peers | None) -> int:
    """Returns the most ranks of a node, where rows go once to each node; else 0, also where one node is left."""
    nodes = nodes_of(request, control)
    most = max(Counter(nodes).values())
    if request.dedup == "rank" or peers is None:
        return 0
    apart = [rank for rank in peers.remote if nodes[rank] == nodes[control.rank]]
    if most == 1 or not peers.remote:
        return 0
    if apart:
        why_not = (
            f"needs ranks that share the memory of their node, and transport={request.transport!r} keeps ranks "
            f"{control.rank} and {apart[0]} apart: use transport='auto', or node_size= beside 'proxy'"
        )
    elif most > 32:
        why_not = f"is for nodes of up to 32 ranks, and one has {most}: use dedup='rank'"
    elif most * request.config.experts_per_rank > 4096:
        why_not = f"is for up to 4096 experts on a node, and there are {most * request.config.experts_per_rank}"
    else:
        return most
    if request.dedup == "node":
        raise Error(f"dedup='node' {why_not}")
    return 0


def _node(request: Request, control: ControlPlane, rank: int) -> int:
    """Returns the number of the group of ranks that share memory for this AllToAll."""
    # Replicas share memory also where all other peers are to be reached by the proxy.
    by_proxy = request.transport == "proxy" and request.node_size is None
    return rank // request.config.replicas if by_proxy else nodes_of(request, control)[rank]


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
