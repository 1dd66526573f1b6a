"""The facts and the state that all parts of one AllToAll share."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

import torch

import pplx_comm._core as _core
from pplx_comm.control.failure import Failure
from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error
from pplx_comm.layouts import Compact, Padded, Ragged
from pplx_comm.wire import Wire
from pplx_comm.wiring.record import Wiring
from pplx_comm.wiring.request import Request


class Life:
    """Tracks if an AllToAll takes calls: it may be closed, stopped by reset(), or left behind by a fork.

    A context manager around calls that store into other ranks' memory: reset() waits until they have ended.
    """

    _all: ClassVar[weakref.WeakSet[Life]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.usable = True
        """Neither closed, nor stopped, nor in a fork. One look, since every call takes it."""
        self.closed = False
        self.generation = 0
        """The Communicator's when this AllToAll was made or last reset. A failure of its calls is one of that generation."""
        self.lock = threading.Condition()
        """Guards failures and reset(). Notified when a call ends that found the AllToAll not usable."""
        self._stopped_by: Failure | None = None
        self._told = threading.local()
        """Its `generation`: of the last failure that calls of this thread raised. None once the thread has called reset()."""
        self.callers: set[int] = set()
        """The threads that have dispatched."""
        self._calls: deque[None] = deque()
        """An element for each running call; append() and pop() are atomic."""
        self._pid = os.getpid()
        self._all.add(self)

    @property
    def may_close(self) -> bool:
        """False if it was closed, or the process that this one was forked from has to."""
        return not (self.closed or self._forked)

    def close(self) -> bool:
        """False if another thread did, or the process that this one was forked from has to."""
        if self._forked:
            return False  # no thread would ever unlock what another one had locked
        with self.lock:
            mine, self.closed, self.usable = not self.closed, True, False
            return mine

    def check(self, call: str) -> None:
        self.check_open(call)
        failure = self._stopped_by
        if failure is not None:
            self.told()
            raise failure.error()

    def check_open(self, call: str) -> None:
        if self.closed:
            raise Error(f"{call}: this AllToAll is closed")
        if self._forked:
            raise Error(f"{call}: this AllToAll belongs to process {self._pid}, of which this one was forked; make another here")

    # ---- reset() -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        while True:
            self._calls.append(None)
            if self.usable:
                return
            self.__exit__()
            self.check("a call")  # returns if go_on() came in between

    def __exit__(self, *_: object) -> None:
        self._calls.pop()
        if not self.usable:
            with self.lock:
                self.lock.notify_all()

    def stop(self, failure: Failure) -> None:
        """Calls raise `failure` until go_on()."""
        with self.lock:
            self._stopped_by, self.usable = failure, False

    def await_calls(self, seconds: float) -> None:
        with self.lock:
            if not self.lock.wait_for(lambda: not self._calls, seconds):
                count = len(self._calls)
                raise Error(
                    f"reset: {count} calls of other threads have not ended within {seconds:g} s; let them end, then try again"
                )

    @property
    def stopped(self) -> bool:
        return self._stopped_by is not None

    def told(self) -> None:
        """This thread's call raises a failure of this generation."""
        self._told.generation = self.generation

    def heard(self) -> int | None:
        """See control.recovery.Resettable."""
        told: int | None = getattr(self._told, "generation", None)
        self._told.generation = None
        return told

    def go_on(self) -> None:
        with self.lock:
            self._stopped_by, self.usable = None, not self.closed

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._pid

    @classmethod
    def forked(cls) -> None:
        for life in list(cls._all):
            life.usable = False


os.register_at_fork(after_in_child=Life.forked)


@dataclass(frozen=True)
class Session:
    """One AllToAll. Everything that changes is inside wiring and life."""

    config: _core.Config
    dtype: torch.dtype
    wire: Wire
    layout: Ragged | Padded | Compact
    device: torch.device
    request: Request
    control: ControlPlane
    wiring: Wiring
    life: Life = field(default_factory=Life)

    @property
    def hidden(self) -> int:
        return int(self.config.hidden)

    @property
    def top_k(self) -> int:
        return int(self.config.top_k)
