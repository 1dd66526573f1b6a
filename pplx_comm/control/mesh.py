"""The mesh: one control connection between every two ranks, and the state of each rank.

State lives under one condition. One thread, the control thread, reads all connections and closes them; any thread may send.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pplx_comm.control.callbacks import Busy, Callback, Callbacks
from pplx_comm.control.connection import Connection
from pplx_comm.control.deadlines import BUSY, EXIT_SECONDS, JOIN_SECONDS
from pplx_comm.control.door import Door
from pplx_comm.control.failure import Failure
from pplx_comm.control.frames import FrameError, Kind, decode_object, field, json_frame
from pplx_comm.control.handshake import Identity
from pplx_comm.control.inbox import Inbox, close_fds
from pplx_comm.control.leave import open_meshes, take_leave
from pplx_comm.control.loop import READ, WRITE, Loop
from pplx_comm.control.sockets import remaining
from pplx_comm.control.survivors import Survivors
from pplx_comm.errors import Error, StepTimeout
from pplx_comm.log import log

Answer = Callable[[], dict[str, Any]]


class Mesh:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.job = secrets.token_hex(4)
        """A name that all ranks have, once it has started, and no other mesh."""
        self.condition = threading.Condition()
        self.generation = 0
        self.failure: Failure | None = None
        """The first death or abort of this generation. A clean goodbye is none."""
        self.members = frozenset(range(world_size))
        """The ranks that collectives wait for: all, until the survivors agree otherwise."""
        self.connections: dict[int, Connection] = {}
        self.lost: dict[int, Failure] = {}
        self.inbox = Inbox()
        self.busy_since: dict[int, float] = {}
        """The ranks that say that they are busy."""

        self._pid = os.getpid()
        self._callbacks: Callbacks[Failure] = Callbacks(self.condition, rank)
        """The library's own, which wait for no rank: the control thread runs them."""
        self._listeners: Callbacks[Failure] = Callbacks(self.condition, rank, apart=True)
        """The user's."""
        self._busy_callbacks: Callbacks[Busy] = Callbacks(self.condition, rank)
        self._busy_with: list[str] = []
        self.answers: dict[str, Callable[[], Answer | None]] = {}
        """To what other ranks may ask. Each runs in a thread of its own: it may have to wait for a proxy."""
        self._questions = 0
        self._told: dict[int, dict[int, dict[str, Any]]] = {}
        """Answers by question and rank."""
        self._survivors = Survivors(self)
        self._early: list[tuple[int, Kind, dict[str, Any]]] = []
        self._before_close: list[Callable[[], None]] = []
        self._leaving = threading.RLock()
        """Held by the thread that calls them."""
        self._closing: str | None = None
        self._loop: Loop | None = None
        self._thread: threading.Thread | None = None
        self._door: Door | None = None
        open_meshes.add(self)

    # Building the mesh

    def start(self, listeners: Iterable[socket.socket], me: Identity) -> None:
        """Open the door to higher ranks. The control thread runs from here to close()."""
        self.job = me.job_digest[:8]
        self._loop = Loop(self.condition)
        self._door = Door(self._loop.selector, listeners, me, may_come=self._may_come, came=self.adopt)
        self._thread = threading.Thread(target=self._run, name=f"pplx_comm rank {self.rank}", daemon=True)
        self._thread.start()

    def adopt(self, sock: socket.socket, rank: int) -> None:
        """Takes over a connection that is proved to lead to `rank`."""
        assert self._loop is not None
        loop = self._loop
        connection = Connection(rank, sock, lambda connection: loop.do(lambda: self._watch(connection, READ | WRITE)))
        with self.condition:  # one piece: a request to watch for writing must come after this one
            self.connections[rank] = connection
            self.condition.notify_all()
            loop.do(lambda: self._watch(connection, READ))

    def wait_for_connections(self, deadline: float) -> None:
        """Until every rank is linked; then the door closes for good."""
        assert self._loop is not None
        with self.condition:
            while True:
                self.check_usable()
                self.raise_if_failed()
                for failure in self.lost.values():
                    raise failure.error()
                missing = [rank for rank in range(self.world_size) if rank != self.rank and rank not in self.connections]
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
                self.condition.wait(remaining(deadline))
            self._loop.do(self._shut_door)
            while self._door is not None:
                self.condition.wait()

    def _may_come(self, rank: int) -> str | None:
        with self.condition:
            if rank <= self.rank or rank in self.connections or rank in self.lost:
                return f"rank {rank} is connected already, or is one that waits to be called"
        return None

    def _shut_door(self) -> None:
        if self._door is not None:
            self._door.close()
            with self.condition:
                self._door = None
                self.condition.notify_all()

    # Failures

    def alive(self) -> list[bool]:
        with self.condition:
            return [rank in self.members and rank not in self.lost for rank in range(self.world_size)]

    def raise_if_failed(self) -> None:
        failure = self.failure
        if failure is not None:
            raise failure.error()

    def abort(self, failure: Failure, generation: int | None = None) -> None:
        """Only the first one counts, here and at every peer; and none of a generation that is over."""
        with self.condition:
            if generation in (None, self.generation) and self._latch(failure):
                self._spread(failure)
        self._callbacks.tell()

    def on_failure(self, callback: Callback, apart: bool = False) -> Callable[[], None]:
        with self.condition:
            self.check_usable()
            known = [failure for failure in self.lost.values() if failure.kind == "closed" and failure.rank in self.members]
            if self.failure is not None:
                known.append(self.failure)
            remove = (self._listeners if apart else self._callbacks).add(callback, known)
        self._callbacks.tell()
        return remove

    def in_callback(self) -> bool:
        return threading.current_thread() is self._listeners.thread

    def _latch(self, failure: Failure) -> bool:
        """Under the condition; telling the callbacks follows outside it. True for the first failure."""
        if self.failure is not None or self._closing is not None:
            return False
        self.failure = failure
        self._announce(failure)
        return True

    def _announce(self, failure: Failure) -> None:
        self._callbacks.announce(failure)
        self._listeners.announce(failure)
        self.condition.notify_all()

    def _spread(self, failure: Failure) -> None:
        """Tells all ranks: only two of them notice a cut cable."""
        self.send(sorted(self.connections.keys() & self.members), json_frame(Kind.ABORT, self._failure_report()))

    def _failure_report(self) -> dict[str, Any] | None:
        return {"generation": self.generation, **self.failure.to_json()} if self.failure is not None else None

    # Ranks that are busy

    def begin_busy(self, what: str) -> None:
        if not isinstance(what, str):
            raise Error(f"busy: what={what!r} must be a string")
        with self.condition:
            self.check_usable()
            self._busy_with.append(what)
            self._say_busy()

    def end_busy(self, what: str) -> None:
        with self.condition:
            self._busy_with.remove(what)
            if self._closing is None:
                self._say_busy()

    def _say_busy(self) -> None:
        """Tells all ranks, also beyond a reset: it is about this process."""
        said = {"busy": bool(self._busy_with), "what": one_line(self._busy_with[-1])[:200] if self._busy_with else ""}
        self.send(sorted(self.connections), json_frame(Kind.BUSY, said))

    def on_busy(self, callback: Callable[[Busy], None]) -> Callable[[], None]:
        with self.condition:
            self.check_usable()
            remove = self._busy_callbacks.add(callback, [Busy(rank, True) for rank in self.busy_since])
        self._busy_callbacks.tell()
        return remove

    def someone_is_busy(self) -> bool:
        """True while any rank is busy: no rank is blamed for being late then. The caller holds the condition."""
        return any(time.monotonic() - since < BUSY for since in self.busy_since.values())

    def _hear_busy(self, said: Busy) -> None:
        if said.busy:
            if said.rank not in self.members:  # no rank waits for it
                return
            self.busy_since[said.rank] = time.monotonic()
            log.info("rank %d is busy: %s", said.rank, said.what)
        elif self.busy_since.pop(said.rank, None) is None:
            return
        self._busy_callbacks.announce(said)

    # Questions

    def ask(self, ranks: Iterable[int], what: str, seconds: float) -> dict[int, dict[str, Any]]:
        """The answers of those ranks that answer in time."""
        with self.condition:
            self.check_usable()
            self._questions += 1
            question = self._questions
            told = self._told[question] = {}
            asked = self.connections.keys() & set(ranks)
            self.send(sorted(asked), json_frame(Kind.ASK, {"question": question, "what": what}))
            self.condition.wait_for(
                lambda: self._closing is not None or not (asked & self.connections.keys()) - told.keys(), seconds
            )
            return self._told.pop(question)

    def _tell(self, rank: int, what: str, question: int) -> None:
        answer = self.answers.get(what, lambda: None)()
        try:
            told = None if answer is None else json_frame(Kind.TOLD, {"question": question, "told": answer()})
        except Exception as problem:
            log.debug("rank %d asked for %s: %s", rank, what, problem)
            return
        if told is not None:
            self.send([rank], told)

    # Generations

    def agree_survivors(self, after: int | None, timeout: float, leave_out: bool = False) -> list[int]:
        agreed = self._survivors.agree(self.generation if after is None else after, timeout, leave_out)
        self._callbacks.tell()
        self._busy_callbacks.tell()
        return agreed

    def begin_generation(self, members: frozenset[int]) -> None:
        """Under the condition, when the survivors have decided."""
        self.members = members
        self.generation += 1
        self.failure = None
        self.inbox.new_generation(self.generation)
        self._survivors.renew()
        for rank in sorted(self.busy_since.keys() - members):
            self._hear_busy(Busy(rank, False))
        for rank in sorted(self.lost.keys() & members):  # lost since the decision: this generation's first failure
            self._survivors.lost(rank)
            if self.lost[rank].kind == "death":
                self._latch(self.lost[rank])
        early, self._early = self._early, []
        for sender, kind, message in early:
            self._handle(sender, kind, message)

    # Messages

    def send(self, ranks: Iterable[int], message: bytes, fds: Sequence[int] = ()) -> None:
        for rank in ranks:
            connection = self.connections.get(rank)
            if connection is not None:
                connection.send(message, fds)

    def _run(self) -> None:
        """The control thread."""
        assert self._loop is not None
        try:
            while self._closing is None:
                self._loop.turn(self._door.next_deadline() if self._door is not None else None)
                if self._door is not None:
                    self._door.expire()
                self._callbacks.tell()
                self._busy_callbacks.tell()
        except BaseException as problem:
            log.exception("the control thread of rank %d failed", self.rank)
            with self.condition:
                self._latch(Failure("abort", self.rank, message=f"the control thread of rank {self.rank} failed: {problem!r}"))
                self._closing = self._closing or f"its control thread failed: {problem!r}"
                self.condition.notify_all()
            self._callbacks.tell()
        finally:
            self._finish(self._loop)

    def _watch(self, connection: Connection, events: int) -> None:
        assert self._loop is not None
        self._loop.watch(connection.sock, events, lambda mask: self._ready(connection, mask))

    def _ready(self, connection: Connection, mask: int) -> None:
        if mask & WRITE and not connection.flush():
            self._watch(connection, READ)
        if not mask & READ:
            return
        frames, end = connection.receive()
        with self.condition:
            try:
                for kind, payload, fds in frames:
                    if connection.rank in self.lost:
                        close_fds(fds)
                    elif kind == Kind.ALL_GATHER:
                        self.inbox.receive(self.generation, connection.rank, payload)
                    elif kind == Kind.FDS:
                        self.inbox.receive_fds(self.generation, connection.rank, payload, fds)
                    else:
                        self._handle(connection.rank, kind, decode_object(payload))
            except FrameError as problem:
                end = f"it sent an invalid message ({problem})"
            self.condition.notify_all()
            if end is not None and connection.rank not in self.lost:
                self._lose(Failure("death", connection.rank, message=f"rank {connection.rank} died: {end}"))
            if connection.rank in self.lost:
                self._drop(connection)

    def _handle(self, sender: int, kind: Kind, message: dict[str, Any]) -> None:
        """Handle a message outside of collectives. One of a later generation is kept until this rank is there, too."""
        if kind == Kind.GOODBYE:
            reason = field(message, "reason", str)
            if isinstance(message.get("failure"), dict):  # why it left, before that it left
                self._handle(sender, Kind.ABORT, message["failure"])
            if message.get("excluded") is True:
                self._survivors.excluded_by(sender)
                self._latch(Failure("abort", sender, self.rank, "reset", message=reason))
            self._lose(Failure("closed", sender, message=f"rank {sender} closed its Communicator ({reason})"))
            return
        if kind == Kind.BUSY:
            self._hear_busy(Busy(sender, field(message, "busy", bool), field(message, "what", str)))
            return
        if kind == Kind.ASK:
            asked = sender, field(message, "what", str), field(message, "question", int)
            try:
                threading.Thread(target=self._tell, args=asked, name="pplx_comm answer", daemon=True).start()
            except RuntimeError as problem:  # no thread is to be had
                log.debug("rank %d asked, and gets no answer: %s", sender, problem)
            return
        if kind == Kind.TOLD:
            if (told := self._told.get(field(message, "question", int))) is not None:  # else it comes too late
                told[sender] = field(message, "told", dict)
            return
        generation = field(message, "generation", int)
        if generation > self.generation:
            self._early.append((sender, kind, message))
        elif generation < self.generation:
            return
        elif kind == Kind.ABORT:
            self._latch(Failure.from_json(message, self.world_size))
        else:
            self._survivors.receive(sender, kind, message)

    def _lose(self, failure: Failure) -> None:
        """Under the condition: one rank is gone, whether or not it took its leave."""
        self.lost[failure.rank] = failure
        self._hear_busy(Busy(failure.rank, False))
        if failure.rank in self.members:
            if failure.kind == "death":
                if self._latch(failure):
                    self._spread(failure)
            else:
                self._announce(failure)
        self._survivors.lost(failure.rank)

    def _drop(self, connection: Connection) -> None:
        assert self._loop is not None
        self.connections.pop(connection.rank, None)
        self._loop.forget(connection.sock)
        connection.close()

    # The end

    def on_close(self, callback: Callable[[], None]) -> None:
        """Called once, before the goodbye, in the order of registration."""
        with self.condition:
            self.check_usable()
            self._before_close.append(callback)

    def close(self, reason: str, patience: float = JOIN_SECONDS) -> None:
        """Tells all peers that this rank leaves. Does not wait for peers; returns within 2 s if no other thread closes.

        patience: seconds to wait for another thread that closes, and again for the control thread and the user's callbacks.
        """
        if os.getpid() != self._pid:
            return
        self._call_before_close(patience)
        with self.condition:
            self._begin_closing(reason)
            threads = self._thread, self._listeners.thread
        deadline = time.monotonic() + patience
        for thread in threads:
            if thread is not None and thread is not threading.current_thread():
                thread.join(remaining(deadline))
                if thread.is_alive():
                    log.warning("rank %d: thread %r is held up; closing goes on behind it", self.rank, thread.name)

    def abandon(self, reason: str) -> None:
        """close() for the garbage collector, which may run at any moment: it does not wait, not even for a lock."""
        if os.getpid() != self._pid:
            return
        if self.condition.acquire(blocking=False):
            try:
                self._begin_closing(reason)
            finally:
                self.condition.release()
        else:
            threading.Thread(target=self.close, args=(reason,), daemon=True).start()

    def _call_before_close(self, patience: float) -> None:
        if not self._leaving.acquire(timeout=patience):
            log.warning("rank %d: another thread that closes is held up; closing goes on beside it", self.rank)
            return
        try:
            while True:
                with self.condition:
                    if not self._before_close:
                        return
                    callback = self._before_close.pop(0)
                try:
                    callback()
                except Exception:
                    log.exception("a callback before close failed on rank %d", self.rank)
        finally:
            self._leaving.release()

    def _begin_closing(self, reason: str) -> None:
        if self._closing is None:
            self._closing = reason
        for callbacks in (self._callbacks, self._listeners, self._busy_callbacks):
            callbacks.clear()
        self.condition.notify_all()
        if self._loop is not None:
            self._loop.wake()

    def _finish(self, loop: Loop) -> None:
        """The control thread's last act."""
        self._call_before_close(EXIT_SECONDS)
        with self.condition:
            connections = list(self.connections.values())
        take_leave(
            connections, json_frame(Kind.GOODBYE, {"reason": one_line(self._closing or ""), "failure": self._failure_report()})
        )
        self._shut_door()
        with self.condition:
            for connection in connections:
                connection.close()
            self.connections.clear()
            self.inbox.clear()
            loop.close()

    def close_in_child(self) -> None:
        """After fork: closes the copies of the parent's connections, so that peers notice its death. Sends nothing."""
        if self._loop is None or self._loop.closed:
            return
        for connection in list(self.connections.values()):
            connection.close_in_child()
        if self._door is not None:
            self._door.close_in_child()
        self._loop.close()

    # Guards

    def check_usable(self) -> None:
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
