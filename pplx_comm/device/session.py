"""The facts and the state that all parts of one AllToAll share."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import ClassVar

import torch

import pplx_comm._core as _core
from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error
from pplx_comm.layouts import Compact, Padded, Ragged
from pplx_comm.wire import Wire
from pplx_comm.wiring.record import Wiring
from pplx_comm.wiring.request import Request


class Life:
    """Whether an AllToAll is closed, has failed, or was left behind by a fork."""

    _all: ClassVar[weakref.WeakSet[Life]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.usable = True
        """Neither closed nor in a fork. One look, since every call takes it."""
        self.closed = False
        self.failed: BaseException | None = None
        """The first failure of this generation."""
        self.lock = threading.Lock()
        """For failures and reset()."""
        self._pid = os.getpid()
        self._all.add(self)

    def close(self) -> bool:
        """False if somebody else did, or has to."""
        if not self.usable:
            return False  # in a fork nobody would ever unlock what another thread had locked
        with self.lock:
            mine, self.closed, self.usable = self.usable, True, False
            return mine

    def check(self, call: str) -> None:
        if self.closed:
            raise Error(f"{call}: this AllToAll is closed")
        if not self.usable:
            raise Error(f"{call}: this AllToAll belongs to process {self._pid}, of which this one was forked; make another here")

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
