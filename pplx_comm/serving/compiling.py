"""A rank that compiles says so: the others wait for it in a layer, for longer than they would wait for one that is stuck."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from pplx_comm.communicator import Communicator


def watch(comm: Communicator) -> Callable[[], None]:
    """While torch compiles anything in this process, the rank is busy. Returns what ends the watch."""
    from torch._dynamo.callback import callback_handler

    compiling = ExitStack()

    def begin(*_: Any) -> None:
        compiling.enter_context(comm.busy("compiling"))

    def end(*_: Any) -> None:
        compiling.close()

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)

    def stop() -> None:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)
        compiling.close()

    return stop
