"""Finds the ranks of a node: one kernel, one network and one IPC namespace, proved by reading each other's memory."""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pplx_comm.control.collectives import all_gather, share_fds
from pplx_comm.control.memfd import allocate
from pplx_comm.control.mesh import Mesh
from pplx_comm.errors import Error, PeerError

TOKEN = 32


@dataclass(frozen=True)
class Locality:
    """The part of a process's surroundings that decides which ranks can share memory and sockets with it."""

    boot_id: str
    net_namespace: int
    ipc_namespace: int

    @classmethod
    def here(cls) -> Locality:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(boot_id, os.stat("/proc/self/ns/net").st_ino, os.stat("/proc/self/ns/ipc").st_ino)

    def difference(self, other: Locality) -> str | None:
        """The reason why two ranks cannot share memory; None if they can."""
        if self.boot_id != other.boot_id:
            return "they run on different hosts"
        if self.net_namespace != other.net_namespace:
            return "they are in different network namespaces (containers without a shared network)"
        if self.ipc_namespace != other.ipc_namespace:
            return "they are in different IPC namespaces (containers without --ipc=host)"
        return None

    def same_sockets(self, other: Locality) -> bool:
        return self.boot_id == other.boot_id and self.net_namespace == other.net_namespace


def candidates(localities: Sequence[Locality], node_size: int | None) -> list[int]:
    """A node number for each rank, before anything is proved: by `node_size` if given, else by locality. Numbered by first
    rank.
    """
    if node_size is not None:
        claimed = [rank // node_size for rank in range(len(localities))]
        for rank, node in enumerate(claimed):
            first = node * node_size
            why = localities[first].difference(localities[rank])
            if why:
                raise Error(
                    f"node_size={node_size} puts ranks {first} and {rank} on one node, but {why}. Use a smaller node_size, or none"
                )
        return claimed
    numbers: dict[Locality, int] = {}
    return [numbers.setdefault(locality, len(numbers)) for locality in localities]


def partition(claimed: Sequence[int], shares: Sequence[set[int]], node_size: int | None) -> list[int]:
    """Returns the final node of each rank. `shares[r]`: the ranks whose memory r has read and that have read r's.

    A rank joins the first node in which it and every member have proved it both ways; so nodes are cliques, and the
    same everywhere.
    """
    nodes: list[list[int]] = []
    node_of = []
    for rank, claim in enumerate(claimed):
        for number, members in enumerate(nodes):
            if claimed[members[0]] == claim and all(rank in shares[member] and member in shares[rank] for member in members):
                members.append(rank)
                node_of.append(number)
                break
        else:
            if node_size is not None and rank % node_size:
                raise Error(
                    f"node_size={node_size} puts ranks {rank - rank % node_size} to {rank} on one node, but rank "
                    f"{rank} "
                    "cannot map the memory of all of them. Use a smaller node_size, or none"
                )
            nodes.append([rank])
            node_of.append(len(nodes) - 1)
    return node_of


def probe(mesh: Mesh, neighbours: Sequence[int], timeout: float) -> list[set[int]]:
    """Collective. Every rank maps a page of each neighbour, reads its token and writes its own answer into it."""
    rank = mesh.rank
    token = secrets.token_bytes(TOKEN)
    with contextlib.ExitStack() as cleanup:
        fd = allocate(TOKEN * (1 + mesh.world_size), "the probe of the node's memory")
        cleanup.callback(os.close, fd)
        mine = cleanup.enter_context(mmap.mmap(fd, TOKEN * (1 + mesh.world_size)))
        mine[:TOKEN] = token
        pages = _pages(mesh, fd, neighbours, timeout)
        read: dict[str, str] = {}
        for peer, (peer_fd,) in pages.items():
            cleanup.callback(os.close, peer_fd)
            with contextlib.suppress(OSError, ValueError), mmap.mmap(peer_fd, TOKEN * (1 + mesh.world_size)) as page:
                read[str(peer)] = page[:TOKEN].hex()
                page[TOKEN * (1 + rank) : TOKEN * (2 + rank)] = _answer(page[:TOKEN], rank)
        answers = all_gather(mesh, {"read": read}, "node probe", timeout)
        proved = [
            peer
            for peer in pages
            if _claims(answers[peer], rank) == token.hex() and mine[TOKEN * (1 + peer) : TOKEN * (2 + peer)] == _answer(token, peer)
        ]
    verdicts = all_gather(mesh, {"proved": proved}, "node probe verdict", timeout)
    return [set(verdict["proved"]) if verdict else set() for verdict in verdicts]


def _pages(mesh: Mesh, fd: int, neighbours: Sequence[int], timeout: float) -> dict[int, list[int]]:
    try:
        return share_fds(mesh, [fd], "node probe", neighbours, timeout)
    except PeerError:
        raise
    except Error:  # raised by all of them together: file descriptors do not pass here, so no ranks share memory
        return {}


def _answer(token: bytes, rank: int) -> bytes:
    return hmac.digest(token, f"read by rank {rank}".encode(), "sha256")


def _claims(answer: dict[str, Any] | None, rank: int) -> str | None:
    return (answer or {}).get("read", {}).get(str(rank))
