"""Functions that ranks run for test_dump.py."""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any

import rank_cases
import torch
from cases import DTYPES, Case
from outcomes import raised

LATE = 2


def dawdle(me: Any) -> None:
    """A function of the user's in which a rank stays until the test has looked."""
    me.hear()


def hold_python(fifo: str) -> None:
    """A call into C that keeps the interpreter's lock, until the test writes."""
    fd = os.open(fifo, os.O_RDWR)
    ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1)
    os.close(fd)


def step(a2a: Any, case: Case) -> None:
    """Every rank has rows for each other one."""
    x = torch.ones(case.max_tokens, case.hidden, dtype=DTYPES[case.dtype])
    ids = torch.arange(case.max_tokens * case.top_k).view(-1, case.top_k) % case.num_experts
    d = a2a.dispatch(x, ids)
    a2a.combine(torch.ones(d.x.shape, dtype=x.dtype), d)
    a2a.check()


def hangs(me: Any, case: Case, late: int, fifo: str | None) -> None:
    """After a step one rank is late to the next."""
    with rank_cases.open_all_to_all(me, case) as a2a:
        step(a2a, case)
        me.say("pid", (os.getpid(), me.comm.control.job))
        if me.rank == late:
            dawdle(me) if fifo is None else hold_python(fifo)
        step(a2a, case)


def waits_in(me: Any, case: Case, call: str) -> None:
    """All ranks but one are in a collective call, for which that one does not come."""
    me.say("pid", (os.getpid(), me.comm.control.job))
    if call == "reset":
        me.comm.control.abort("on purpose")
    if me.rank == LATE:
        dawdle(me)
    getattr(me.comm, call)(*([True] if call == "agree" else []))


def times_out(me: Any, case: Case, late: int, stopped: bool) -> dict[str, Any]:
    """One rank is late, or stands still. Returns what the others' exceptions and logs say."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pplx_comm").addHandler(handler)
    with rank_cases.open_all_to_all(me, case, timeout=1.0) as a2a:
        step(a2a, case)
        me.say("pid", (os.getpid(), me.comm.control.job))
        if me.rank == late:
            dawdle(me)
            return {}
        told = raised(lambda: step(a2a, case))
        me.say("told")
        me.hear()
    return {**told, "log": [line for line in heard if line.startswith("after a timeout")]}
