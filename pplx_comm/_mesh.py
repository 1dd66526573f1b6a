"""The mesh: one control connection between every two ranks, one thread that reads them, and what is built on both.

State lives under one condition. Only the control thread touches the selector and closes links; any thread may send.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pplx_comm._agreement import Agreement
from pplx_comm._failure import Failure
from pplx_comm._frames import FrameError, Kind, decode, decode_object, encode, field, frame, json_frame
from pplx_comm._handshake import Door, Identity
from pplx_comm._inbox import Call, Descriptors, Inbox, close_fds
from pplx_comm._link import FDS_PER_FRAME, Link
from pplx_comm._sockets import remaining
from pplx_comm.errors import Error, PeerError, StepTimeout

log = logging.getLogger("pplx_comm")

# Together less than the 2 s that close() may take.
FLUSH_SECONDS = 1.0
LINGER_SECONDS = 0.25
JOIN_SECONDS = 1.8

Callback = Callable[[Failure], None]


class Mesh:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = 0
        self.failure: Failure | None = None
        """The first death or abort of this generation. A clean goodbye is none."""
        self.members = frozenset(range(world_size))
        """The ranks that collectives wait for: all, until `agree_survivors` says otherwise."""

        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._links: dict[int, Link] = {}
        self._lost: dict[int, Failure] = {}
        self._inbox = Inbox()
        self._callbacks: dict[int, Callable[[], Callback | None]] = {}
        self._handles = 0
        self._untold: list[tuple[int, Failure]] = []
        self._before_close: list[Callable[[], None]] = []
        self._agreement = self._new_agreement()
        self._agreed: list[int] | None = None
        self._early: list[tuple[int, Kind, dict[str, Any]]] = []
        self._closing: str | None = None

        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector | None = None
        self._wake_fd = -1
        self._work: list[Callable[[], None]] = []
        self._door: Door | None = None
        _meshes.add(self)

    # Building the mesh

    def start(self, listeners: Iterable[socket.socket], me: Identity) -> None:
        """Open the door to higher ranks. The control thread runs from here to close()."""
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._woken)
        self._door = Door(self._selector, listeners, me, may_come=self._may_come, came=self.adopt)
        self._thread = threading.Thread(target=self._run, name=f"pplx_comm rank {self.rank}", daemon=True)
        self._thread.start()

    def adopt(self, sock: socket.socket, rank: int) -> None:
        """A connection that is proved to lead to `rank`."""
        link = Link(
            rank,
            sock,
            lambda link: self._on_control_thread(lambda: self._watch(link, selectors.EVENT_READ | selectors.EVENT_WRITE)),
        )
        with self._condition:  # one piece: a request to watch for writing must come after this one
            self._links[rank] = link
            self._condition.notify_all()
            self._on_control_thread(lambda: self._watch(link, selectors.EVENT_READ))

    def wait_for_links(self, deadline: float) -> None:
        """Until every rank is linked; then the door closes for good."""
        with self._condition:
            while True:
                self._check_usable()
                self.raise_if_failed()
                for failure in self._lost.values():
                    raise failure.error()
                missing = [rank for rank in range(self.world_size) if rank != self.rank and rank not in self._links]
                if not missing:
                    break
                if not remaining(deadline):
                    raise StepTimeout(
                        f"start-up: ranks {missing} met rank 0 but have not connected to rank {self.rank}. "
                        "May their hosts connect to each other on any TCP port?",
                        peer=missing[0],
                        phase="rendezvous",
                        expected=list(range(self.world_size)),
                    )
                self._condition.wait(remaining(deadline))
            self._on_control_thread(self._shut_door)
            while self._door is not None:
                self._condition.wait()

    def _may_come(self, rank: int) -> str | None:
        with self._condition:
            if rank <= self.rank or rank in self._links or rank in self._lost:
                return f"rank {rank} is connected already, or is one that waits to be called"
        return None

    def _shut_door(self) -> None:
        if self._door is not None:
            self._door.close()
            with self._condition:
                self._door = None
                self._condition.notify_all()

    # Collectives

    def exchange(self, payload: Any, tag: str, timeout: float, ranks: Iterable[int] | None = None) -> list[Any]:
        """Everybody's payload, by rank; None for ranks that do not take part. `ranks`: a subset that all of them name
        alike.
        """
        body = encode(payload)
        call, others = self._open(tag, ranks)
        try:
            self._send(others, frame(Kind.EXCHANGE, call.pack() + body))
            with self._condition:
                inbox = self._inbox.payloads(call)
                self._wait_for(others, inbox.__contains__, call, timeout)
                came = dict(inbox)
        finally:
            with self._condition:
                self._inbox.close(call)
        results: list[Any] = [None] * self.world_size
        results[self.rank] = decode(body)
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

    def share_fds(self, fds: Sequence[int], tag: str, peers: Iterable[int], timeout: float) -> dict[int, list[int]]:
        """Hand `fds` to every peer (same kernel, linked by AF_UNIX) and return theirs, which the caller closes.

        Fails on all of them or on none: whatever goes wrong on one is told to the others.
        """
        deadline = time.monotonic() + timeout
        call, others = self._open(tag, [*peers, self.rank])
        received: dict[int, list[int]] = {}
        try:
            problem = self._send_fds(others, call, fds)
            with self._condition:
                inbox = self._inbox.descriptors(call)
                self._wait_for(others, lambda peer: peer in inbox and inbox[peer].complete, call, timeout)
                short = [peer for peer in others if inbox[peer].short]
                if short and not problem:
                    problem = f"rank {self.rank} did not get all file descriptors of ranks {short}: raise `ulimit -n`"
                received = {peer: inbox.pop(peer).fds for peer in others}
            problems = self.exchange(problem, f"{tag} arrived", remaining(deadline), [*others, self.rank])
            problem = "; ".join(text for text in problems if text)
            if problem:
                raise Error(f"cannot share file descriptors for {tag!r}: {problem}")
        except BaseException:
            for peer_fds in received.values():
                close_fds(peer_fds)
            raise
        finally:
            with self._condition:
                self._inbox.close(call)
        return received

    def _send_fds(self, others: Sequence[int], call: Call, fds: Sequence[int]) -> str:
        """What went wrong, if anything; a message without its descriptors tells the peer that they are missing."""
        problem = ""
        for start in range(0, len(fds) or 1, FDS_PER_FRAME):
            chunk = fds[start : start + FDS_PER_FRAME]
            message = frame(Kind.FDS, call.pack() + Descriptors.header(len(fds), len(chunk)))
            for rank in others:
                try:
                    self._send([rank], message, chunk)
                except OSError as failure:
                    problem = f"rank {self.rank} cannot send them: {failure.strerror}"
                    self._send([rank], message)
        return problem

    def agree_survivors(self, timeout: float, leave_out: bool = False) -> list[int]:
        """Collective over the ranks that live: one list of them, the same on each. Clears the failure, opens a new
        generation. Who lives and does not come in time fails the call, or is left out.
        """
        deadline = time.monotonic() + timeout
        with self._condition:
            self._check_usable()
            if self._agreed is None:  # else a call that timed out here was completed by the others
                self._agreement.begin()
                self._agreement_moved()
            while self._agreed is None:
                self._check_usable()
                by = self._agreement.excluded_by
                if by is not None:
                    raise PeerError(_excluded(by, self.rank), peer=by, phase="reset")
                if not remaining(deadline) and leave_out and self._agreement.missing():
                    for rank in self._agreement.missing():
                        self._agreement.lost(rank)
                    deadline = time.monotonic() + timeout  # for those who came, to hear of it
                    self._agreement_moved()
                    continue
                if not remaining(deadline):
                    missing = self._agreement.missing() or sorted(self._agreement.view - {self.rank})
                    raise StepTimeout(
                        f"ranks {missing} have not come to agree on the survivors within {timeout:g} s: does every "
                        "rank call reset()?",
                        peer=missing[0],
                        phase="reset",
                        expected=sorted(self._agreement.view),
                    )
                self._condition.wait(remaining(deadline))
            agreed, self._agreed = self._agreed, None
        self._tell()
        return agreed

    def _open(self, tag: str, ranks: Iterable[int] | None) -> tuple[Call, list[int]]:
        """This call, and its other ranks starting behind our own, so that nobody is written to by all at once."""
        with self._condition:
            self._check_usable()
            self.raise_if_failed()
            taking_part = self.members if ranks is None else self.members & frozenset(ranks)
            others = sorted(taking_part - {self.rank}, key=lambda rank: (rank - self.rank) % self.world_size)
            for rank in others:
                if rank in self._lost:
                    raise PeerError(f"{tag!r} cannot begin: {self._lost[rank].message}", peer=rank, phase=tag)
            return self._inbox.open(self.generation, tag), others

    def _send(self, ranks: Iterable[int], message: bytes, fds: Sequence[int] = ()) -> None:
        for rank in ranks:
            link = self._links.get(rank)
            if link is not None:
                link.send(message, fds)

    def _wait_for(self, others: Sequence[int], has_come: Callable[[int], bool], call: Call, timeout: float) -> None:
        """Until all have come. What came before a failure counts: a rank may leave right after its last message."""
        deadline = time.monotonic() + timeout
        while True:
            missing = [rank for rank in others if not has_come(rank)]
            if not missing:
                return
            self._check_usable()
            self.raise_if_failed()
            if self.generation != call.generation:
                raise Error(f"{call.tag!r} was cut off: another thread of this rank called reset()")
            for rank in missing:
                if rank in self._lost:
                    raise PeerError(f"{call.tag!r} cannot complete: {self._lost[rank].message}", peer=rank, phase=call.tag)
            if not remaining(deadline):
                raise StepTimeout(
                    f"rank {self.rank} waited {timeout:.3g} s in {call.tag!r} for "
                    f"{'; '.join(self._inbox.whereabouts(rank, call) for rank in missing[:16])}. "
                    "Every rank must make the same collective calls in the same order",
                    peer=missing[0],
                    phase=call.tag,
                    expected=sorted([*others, self.rank]),
                    seen=sorted([*set(others) - set(missing), self.rank]),
                )
            self._condition.wait(remaining(deadline))

    # Failures

    def alive(self) -> list[bool]:
        with self._condition:
            return [rank in self.members and rank not in self._lost for rank in range(self.world_size)]

    def raise_if_failed(self) -> None:
        failure = self.failure
        if failure is not None:
            raise failure.error()

    def abort(self, failure: Failure) -> None:
        """Only the first one counts, here and at every peer."""
        with self._condition:
            if self._latch(failure):
                self._spread(failure)
        self._tell()

    def on_failure(self, callback: Callback) -> Callable[[], None]:
        bound = hasattr(callback, "__self__") and hasattr(callback, "__func__")
        keep: Callable[[], Callback | None] = weakref.WeakMethod(callback) if bound else lambda: callback
        with self._condition:
            self._check_usable()
            self._handles += 1
            handle = self._handles
            self._callbacks[handle] = keep
            known = [failure for failure in self._lost.values() if failure.kind == "closed" and failure.rank in self.members]
            if self.failure is not None:
                known.append(self.failure)
            self._untold += [(handle, failure) for failure in known]
        self._tell()
        return lambda: self._forget_callback(handle)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Called once, before the goodbye, in the order of registration."""
        with self._condition:
            self._check_usable()
            self._before_close.append(callback)

    def _forget_callback(self, handle: int) -> None:
        with self._condition:
            self._callbacks.pop(handle, None)

    def _latch(self, failure: Failure) -> bool:
        """Under the condition; `_tell` follows outside it. True for the first failure."""
        if self.failure is not None or self._closing is not None:
            return False
        self.failure = failure
        self._announce(failure)
        return True

    def _announce(self, failure: Failure) -> None:
        self._untold += [(handle, failure) for handle in self._callbacks]
        self._condition.notify_all()

    def _tell(self) -> None:
        """Call back, outside the condition: a callback may call anything here."""
        while True:
            with self._condition:
                if not self._untold:
                    return
                handle, failure = self._untold.pop(0)
                keep = self._callbacks.get(handle)
                callback = keep() if keep is not None else None
            if callback is not None:
                try:
                    callback(failure)
                except Exception:
                    log.exception("a failure callback failed on rank %d", self.rank)

    def _spread(self, failure: Failure) -> None:
        """Tell everybody: a cut cable shows to two ranks only."""
        self._send(sorted(self._links.keys() & self.members), json_frame(Kind.ABORT, self._failure_report()))

    def _failure_report(self) -> dict[str, Any] | None:
        return {"generation": self.generation, **self.failure.to_json()} if self.failure is not None else None

    # The agreement on survivors; all of it under the condition

    def _new_agreement(self) -> Agreement:
        def send(what: str, ranks: frozenset[int]) -> None:
            kind = Kind.DECIDE if what == "decide" else Kind.PROPOSE
            audience = self._links.keys() & (self._agreement.view | ranks)
            self._send(sorted(audience), json_frame(kind, {"generation": self.generation, "ranks": sorted(ranks)}))

        return Agreement(self.rank, self.members, send)

    def _agreement_moved(self) -> None:
        decided = self._agreement.decided
        self._condition.notify_all()
        if decided is None:
            return
        for rank in self._links.keys() & (self.members - decided):
            self._links[rank].send(json_frame(Kind.GOODBYE, {"reason": _excluded(self.rank, rank), "excluded": True}))
            self._links[rank].finish_sending()
        self.members = decided
        self.generation += 1
        self.failure = None
        self._inbox.new_generation(self.generation)
        self._agreement = self._new_agreement()
        self._agreed = sorted(decided)
        for rank in sorted(self._lost.keys() & decided):  # lost since the decision: this generation's first failure
            self._agreement.lost(rank)
            if self._lost[rank].kind == "death":
                self._latch(self._lost[rank])
        early, self._early = self._early, []
        for sender, kind, message in early:
            self._handle(sender, kind, message)

    # The control thread

    def _run(self) -> None:
        assert self._selector is not None
        try:
            while self._closing is None:
                due = self._door.next_deadline() if self._door is not None else None
                for key, mask in self._selector.select(None if due is None else remaining(due)):
                    key.data(mask)
                if self._door is not None:
                    self._door.expire()
                self._tell()
        except BaseException as problem:
            log.exception("the control thread of rank %d failed", self.rank)
            with self._condition:
                self._latch(Failure("abort", self.rank, message=f"the control thread of rank {self.rank} failed: {problem!r}"))
                self._closing = self._closing or f"its control thread failed: {problem!r}"
                self._condition.notify_all()
            self._tell()
        finally:
            self._finish()

    def _on_control_thread(self, work: Callable[[], None]) -> None:
        with self._condition:
            self._work.append(work)
            self._wake()

    def _wake(self) -> None:
        """Under the condition: the descriptor must not be closed, and its number reused, in between."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _woken(self, _: int) -> None:
        os.eventfd_read(self._wake_fd)
        with self._condition:
            work, self._work = self._work, []
        for item in work:
            item()

    def _watch(self, link: Link, events: int) -> None:
        assert self._selector is not None
        if link.sock.fileno() < 0:
            return
        if link.sock.fileno() in self._selector.get_map():
            self._selector.modify(link.sock, events, lambda mask: self._ready(link, mask))
        else:
            self._selector.register(link.sock, events, lambda mask: self._ready(link, mask))

    def _ready(self, link: Link, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and not link.flush():
            self._watch(link, selectors.EVENT_READ)
        if not mask & selectors.EVENT_READ:
            return
        frames, end = link.receive()
        with self._condition:
            try:
                for kind, payload, fds in frames:
                    if link.rank in self._lost:
                        close_fds(fds)
                    elif kind == Kind.EXCHANGE:
                        self._inbox.receive(self.generation, link.rank, payload)
                    elif kind == Kind.FDS:
                        self._inbox.receive_fds(self.generation, link.rank, payload, fds)
                    else:
                        self._handle(link.rank, kind, decode_object(payload))
            except FrameError as problem:
                end = f"it sent what it should not ({problem})"
            self._condition.notify_all()
            if end is not None and link.rank not in self._lost:
                self._lose(Failure("death", link.rank, message=f"rank {link.rank} died: {end}"))
            if link.rank in self._lost:
                self._drop(link)

    def _handle(self, sender: int, kind: Kind, message: dict[str, Any]) -> None:
        """A message that is not part of a collective. One of a later generation waits until this rank is there too."""
        if kind == Kind.GOODBYE:
            reason = field(message, "reason", str)
            if isinstance(message.get("failure"), dict):  # why it left, before that it left
                self._handle(sender, Kind.ABORT, message["failure"])
            if message.get("excluded") is True:
                self._agreement.excluded_by = sender
                self._latch(Failure("abort", sender, self.rank, "reset", message=reason))
            self._lose(Failure("closed", sender, message=f"rank {sender} closed its Communicator ({reason})"))
            return
        generation = field(message, "generation", int)
        if generation > self.generation:
            self._early.append((sender, kind, message))
        elif generation < self.generation:
            return
        elif kind == Kind.ABORT:
            self._latch(Failure.from_json(message, self.world_size))
        else:
            ranks = field(message, "ranks", list)
            if not all(isinstance(rank, int) for rank in ranks) or not self.members.issuperset(ranks):
                raise FrameError("survivors that are not members")
            self._agreement.receive(sender, "decide" if kind == Kind.DECIDE else "propose", frozenset(ranks))
            self._agreement_moved()

    def _lose(self, failure: Failure) -> None:
        """Under the condition: one rank is gone, whether or not it took its leave."""
        self._lost[failure.rank] = failure
        if failure.rank in self.members:
            if failure.kind == "death":
                if self._latch(failure):
                    self._spread(failure)
            else:
                self._announce(failure)
        self._agreement.lost(failure.rank)
        self._agreement_moved()

    def _drop(self, link: Link) -> None:
        assert self._selector is not None
        self._links.pop(link.rank, None)
        if link.sock.fileno() >= 0:
            self._selector.unregister(link.sock)
        link.close()

    # The end

    def close(self, reason: str) -> None:
        """Take leave of everybody and wait for nobody: 2 s at most, whatever the peers do."""
        if os.getpid() != self._pid:
            return
        self._call_before_close()
        with self._condition:
            self._begin_closing(reason)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)
            if thread.is_alive():
                log.warning("rank %d: the control thread is held up in a failure callback; closing goes on behind it", self.rank)

    def abandon(self, reason: str) -> None:
        """close() for the garbage collector, which may run in the middle of anything: no waiting, and no lock that is
        taken.
        """
        if os.getpid() != self._pid:
            return
        if self._condition.acquire(blocking=False):
            try:
                self._begin_closing(reason)
            finally:
                self._condition.release()
        else:
            threading.Thread(target=self.close, args=(reason,), daemon=True).start()

    def _call_before_close(self) -> None:
        while True:
            with self._condition:
                if not self._before_close:
                    return
                callback = self._before_close.pop(0)
            try:
                callback()
            except Exception:
                log.exception("a callback before close failed on rank %d", self.rank)

    def _begin_closing(self, reason: str) -> None:
        if self._closing is None:
            self._closing = reason
        self._callbacks.clear()
        self._condition.notify_all()
        self._wake()

    def _finish(self) -> None:
        """The control thread's last act."""
        self._call_before_close()
        with self._condition:
            links = list(self._links.values())
        self._take_leave(links)
        self._shut_door()
        with self._condition:
            for link in links:
                link.close()
            self._links.clear()
            self._inbox.clear()
            if self._selector is not None:
                self._selector.close()
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _take_leave(self, links: Sequence[Link]) -> None:
        goodbye = json_frame(Kind.GOODBYE, {"reason": one_line(self._closing or ""), "failure": self._failure_report()})
        for link in links:
            link.send(goodbye)
        deadline = time.monotonic() + FLUSH_SECONDS
        unsent = [link for link in links if link.flush()]
        while unsent and remaining(deadline):
            _wait_until_ready(unsent, select.POLLOUT, deadline)
            unsent = [link for link in unsent if link.flush()]
        # Over TCP a close with unread data resets the connection, and the reset can overtake the goodbye:
        # read until the peer, which hears the goodbye, closes too.
        deadline = time.monotonic() + LINGER_SECONDS
        lingering = [link for link in links if link.is_tcp]
        for link in lingering:
            link.finish_sending()
        while lingering and remaining(deadline):
            _wait_until_ready(lingering, select.POLLIN, deadline)
            lingering = [link for link in lingering if link.receive()[1] is None]

    def close_in_child(self) -> None:
        """After fork: give up the copies of the parent's connections, so that its death shows, and tell nobody
        anything.
        """
        if self._thread is None or self._wake_fd < 0:
            return
        for link in list(self._links.values()):
            link.close_in_child()
        if self._door is not None:
            self._door.close_in_child()
        if self._selector is not None:
            self._selector.close()
        os.close(self._wake_fd)
        self._wake_fd = -1

    # Who may use it

    def _check_usable(self) -> None:
        self.check_owner()
        if self._closing is not None:
            raise Error(f"this Communicator is closed ({self._closing})")

    def check_owner(self) -> None:
        if os.getpid() != self._pid:
            raise Error(
                f"this Communicator belongs to process {self._pid}; this is process {os.getpid()}, forked from it. "
                "Use it only there; a worker that needs none of it may be forked, one that does must be a rank of its "
                "own"
            )


def one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:1000])


def _excluded(by: int, rank: int) -> str:
    return (
        f"rank {by} and others went on without rank {rank}: they lost their connection to it, or it did not come to reset() in "
        "time. A new Communicator, on all ranks, brings it back"
    )


def _wait_until_ready(links: Sequence[Link], event: int, deadline: float) -> None:
    poll = select.poll()
    for link in links:
        if link.sock.fileno() >= 0:
            poll.register(link.sock, event)
    poll.poll(remaining(deadline) * 1000)


_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _close_all_at_exit() -> None:
    problem = getattr(sys, "last_value", None)
    reason = f"its process ends with {type(problem).__name__}: {problem}" if problem is not None else "its process ends"
    for mesh in list(_meshes):
        mesh.close(reason)


def _close_all_in_child() -> None:
    for mesh in list(_meshes):
        with contextlib.suppress(OSError):
            mesh.close_in_child()


atexit.register(_close_all_at_exit)
os.register_at_fork(after_in_child=_close_all_in_child)
