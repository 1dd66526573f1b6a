"""Calls that all ranks make together: they exchange payloads, or file descriptors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pplx_comm.control.connection import FDS_PER_FRAME
from pplx_comm.control.frames import FrameError, Kind, decode, encode, frame
from pplx_comm.control.inbox import Call, Descriptors, close_fds
from pplx_comm.control.mesh import Mesh
from pplx_comm.control.sockets import remaining
from pplx_comm.control.waiting import Waiting
from pplx_comm.errors import Error, PeerError, StepTimeout


def all_gather(mesh: Mesh, payload: Any, tag: str, timeout: float, ranks: Iterable[int] | None = None) -> list[Any]:
    """Returns all payloads, by rank; None for ranks that do not take part.

    ranks: a subset, which all of them name alike.
    """
    body = encode(payload)
    call, others = _open(mesh, tag, ranks)
    try:
        mesh.send(others, frame(Kind.ALL_GATHER, call.pack() + body))
        with mesh.condition:
            inbox = mesh.inbox.payloads(call)
            _wait_for(mesh, others, inbox.__contains__, call, timeout)
            came = dict(inbox)
    finally:
        with mesh.condition:
            mesh.inbox.close(call)
    results: list[Any] = [None] * mesh.world_size
    results[mesh.rank] = decode(body)
    for peer, data in came.items():
        try:
            results[peer] = decode(data)
        except FrameError as problem:
            raise PeerError(
                f"rank {peer} sent {problem} in {tag!r}: install one version of pplx_comm everywhere",
                peer=peer,
                phase=tag,
            ) from None
    return results


def share_fds(mesh: Mesh, fds: Sequence[int], tag: str, peers: Iterable[int], timeout: float) -> dict[int, list[int]]:
    """Hand `fds` to every peer (same kernel, connected by AF_UNIX) and return theirs, which the caller closes.

    Fails on all of them or on none: whatever goes wrong on one is told to the others.
    """
    deadline = time.monotonic() + timeout
    call, others = _open(mesh, tag, [*peers, mesh.rank])
    received: dict[int, list[int]] = {}
    try:
        problem = _send_fds(mesh, others, call, fds)
        with mesh.condition:
            inbox = mesh.inbox.descriptors(call)
            _wait_for(mesh, others, lambda peer: peer in inbox and inbox[peer].complete, call, timeout)
            short = [peer for peer in others if inbox[peer].short]
            if short and not problem:
                problem = f"rank {mesh.rank} did not get all file descriptors of ranks {short}: raise `ulimit -n`"
            received = {peer: inbox.pop(peer).fds for peer in others}
        problems = all_gather(mesh, problem, f"{tag} arrived", remaining(deadline), [*others, mesh.rank])
        problem = "; ".join(text for text in problems if text)
        if problem:
            raise Error(f"cannot share file descriptors for {tag!r}: {problem}")
    except BaseException:
        for peer_fds in received.values():
            close_fds(peer_fds)
        raise
    finally:
        with mesh.condition:
            mesh.inbox.close(call)
    return received


def _send_fds(mesh: Mesh, others: Sequence[int], call: Call, fds: Sequence[int]) -> str:
    """The problem, if there was one. Then a message without descriptors tells the peer that they are missing."""
    problem = ""
    for start in range(0, len(fds) or 1, FDS_PER_FRAME):
        chunk = fds[start : start + FDS_PER_FRAME]
        message = frame(Kind.FDS, call.pack() + Descriptors.header(len(fds), len(chunk)))
        for rank in others:
            try:
                mesh.send([rank], message, chunk)
            except OSError as failure:
                problem = f"rank {mesh.rank} cannot send them: {failure.strerror}"
                mesh.send([rank], message)
    return problem


def _open(mesh: Mesh, tag: str, ranks: Iterable[int] | None) -> tuple[Call, list[int]]:
    """This call, and the other ranks in it, from our successor on: so no rank is written to by all at once."""
    with mesh.condition:
        mesh.check_usable()
        mesh.raise_if_failed()
        taking_part = mesh.members if ranks is None else mesh.members & frozenset(ranks)
        others = sorted(taking_part - {mesh.rank}, key=lambda rank: (rank - mesh.rank) % mesh.world_size)
        for rank in others:
            if rank in mesh.lost:
                raise PeerError(f"{tag!r} cannot begin: {mesh.lost[rank].message}", peer=rank, phase=tag)
        return mesh.inbox.open(mesh.generation, tag), others


def _wait_for(mesh: Mesh, others: Sequence[int], has_come: Callable[[int], bool], call: Call, timeout: float) -> None:
    """Returns when all have come. Messages from before a failure count: a rank may leave right after its last one."""
    deadline, busy = time.monotonic() + timeout, False
    with Waiting(mesh, call.tag) as waiting:
        while True:
            missing = [rank for rank in others if not has_come(rank)]
            if not missing:
                return
            waiting.tell(missing)
            mesh.check_usable()
            mesh.raise_if_failed()
            if mesh.generation != call.generation:
                raise Error(f"{call.tag!r} was cut off: another thread of this rank called reset()")
            for rank in missing:
                if rank in mesh.lost:
                    raise PeerError(f"{call.tag!r} cannot complete: {mesh.lost[rank].message}", peer=rank, phase=call.tag)
            busy, was_busy = mesh.someone_is_busy(), busy
            if busy or was_busy:  # the time begins when no rank is busy
                deadline = time.monotonic() + timeout
            if not remaining(deadline):
                raise StepTimeout(
                    f"rank {mesh.rank} waited {timeout:.3g} s in {call.tag!r} for "
                    f"{'; '.join(mesh.inbox.whereabouts(rank, call) for rank in missing[:16])}. "
                    "Every rank must make the same collective calls in the same order",
                    peer=missing[0],
                    phase=call.tag,
                    expected=sorted([*others, mesh.rank]),
                    seen=sorted([*set(others) - set(missing), mesh.rank]),
                )
            mesh.condition.wait(remaining(deadline))
