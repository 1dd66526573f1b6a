"""One rank, as the functions that it runs see it, and the loop in which it runs them."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def until(what: str, holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for something that is not announced, such as a counter of another thread's."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {seconds:g} s until {what}"
        time.sleep(0.001)


class Member:
    """`pipe` leads to the test; ranks that are threads, and those of other launchers, have none."""

    def __init__(self, rank: int, world_size: int, pipe: Connection | None = None, comm: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.kept: dict[str, Any] = {}
        """Objects that a function leaves for the next one."""
        self.whole_end = False
        """Set by functions whose subject is how a process ends: the interpreter takes itself apart as any program's does."""
        self._pipe = pipe
        self._comm = comm

    @property
    def comm(self) -> Any:
        """Made at first use, and kept."""
        if self._comm is None:
            self._comm = self.communicator(timeout=30)
        return self._comm

    def communicator(self, **arguments: Any) -> Any:
        """Another one, which the caller closes."""
        from pplx_comm.communicator import Communicator

        return Communicator.from_env(**{"timeout": 20, **arguments})

    def say(self, word: str, value: Any = None) -> None:
        """To the test, in the middle of a call: Crew.heard brings it."""
        assert self._pipe is not None
        self._pipe.send(("said", (word, value)))

    def hear(self) -> Any:
        """Receives what the test tells by Crew.tell, in the middle of a call."""
        assert self._pipe is not None
        kind, value = self._pipe.recv()
        assert kind == "told", (kind, value)
        return value

    def is_told(self) -> bool:
        """True once there is something to hear()."""
        assert self._pipe is not None
        return self._pipe.poll()

    def close(self) -> None:
        self.kept.clear()
        if self._comm is not None:
            self._comm.close()
            self._comm = None


def serve(pipe: Connection, rank: int, world_size: int) -> bool:
    """Runs what the test asks for, until it asks for no more, or is gone. Whether the process may just stop."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test that is killed leaves nothing running
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    # A shell starts what it puts into the background, and nohup everything, with SIGINT ignored. Python leaves it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    me = Member(rank, world_size, pipe)
    while True:
        try:
            kind, job = pipe.recv()
        except EOFError:
            return False
        if kind == "end":
            me.close()
            return not me.whole_end
        name, args, kwargs, last = job
        module, _, function = name.partition(":")
        try:
            answer = "returned", getattr(importlib.import_module(module), function)(me, *args, **kwargs)
        except SystemExit:  # raised in a child that the function forked, or the function's subject
            raise
        except BaseException:
            if last:
                raise
            answer = "raised", traceback.format_exc()
        with contextlib.suppress(BrokenPipeError):
            pipe.send(answer)
        if last:
            me.close()
            return not me.whole_end
