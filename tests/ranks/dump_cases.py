"""Functions that ranks run for test_dump.py."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
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


def step(a2a: Any, case: Case, between: Callable[[str], None] | None = None) -> None:
    """Every rank has rows for each other one. `between` is called between halves, with the one that has ended."""
    x = torch.ones(case.max_tokens, case.hidden, dtype=DTYPES[case.dtype], device=a2a.device)
    ids = torch.arange(case.max_tokens * case.top_k, device=a2a.device).view(-1, case.top_k) % case.num_experts
    if between is None:
        d = a2a.dispatch(x, ids)
        a2a.combine(torch.ones(d.x.shape, dtype=x.dtype, device=x.device), d)
    else:
        d = a2a.dispatch_send(x, ids)
        between("dispatch_send")
        a2a.dispatch_recv(d)
        between("dispatch_recv")
        sums = a2a.combine_send(torch.ones(d.x.shape, dtype=x.dtype, device=x.device), d)
        between("combine_send")
        a2a.combine_recv(sums)
    a2a.check()


def stays_between_halves(me: Any, case: Case) -> None:
    """Each rank between others."""
    with rank_cases.open_all_to_all(me, case, timeout=100.0) as a2a:
        for _ in range(2):
            step(a2a, case)
        me.say("pid", (os.getpid(), me.comm.control.job))
        stay = ("dispatch_send", "dispatch_recv", "combine_send")[me.rank]
        step(a2a, case, lambda ended: me.hear() if ended == stay else None)


def hangs(me: Any, case: Case, late: int, fifo: str | None) -> None:
    """After a step one rank is late to the next."""
    with rank_cases.open_all_to_all(me, case, timeout=100.0) as a2a:
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
