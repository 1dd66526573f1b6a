"""Cases of test_crew.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any


def number(me: Any) -> int:
    return int(me.rank)


def one_raises(me: Any, rank: int) -> None:
    """The others wait for it, for ever."""
    if me.rank == rank:
        raise ValueError("what went wrong")
    threading.Event().wait()


def stops_its_test(me: Any, test: int) -> str:
    if me.rank == 0:
        os.kill(test, signal.SIGVTALRM)
        threading.Event().wait()
    return "of before"


def hangs(me: Any) -> None:
    threading.Event().wait()


def dies_later(me: Any, rank: int) -> None:
    """After it has answered."""
    if me.rank == rank:
        parent = os.getpid()

        def die() -> None:
            time.sleep(1.0)
            os.kill(parent, 9)

        threading.Thread(target=die, daemon=True).start()
