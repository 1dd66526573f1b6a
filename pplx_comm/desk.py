"""Tells what this process does: to `python -m pplx_comm dump` and `top`, on a signal, and to the log after a timeout."""

from __future__ import annotations

import atexit
import json
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import pplx_comm._core as _core
from pplx_comm import accounts
from pplx_comm.control import deadlines
from pplx_comm.control.failure import Failure
from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error
from pplx_comm.log import log
from pplx_comm.settings import Watching, read


class Watched(Protocol):
    """A Communicator."""

    control: ControlPlane

    def stats(self) -> dict[str, Any]: ...


_open: weakref.WeakSet[Watched] = weakref.WeakSet()
atexit.register(_core.leave_python_alone)


def watch(comm: Watched) -> Callable[[], None]:
    """This process tells of the Communicator until what is returned is called."""
    control = comm.control
    control.answer("account", accounts.own)
    control.answer("stats", comm.stats)
    main = threading.main_thread().ident or 0
    process = {"main": f"0x{main:016x}", "command": " ".join(sys.orig_argv)[:200]}
    if not _core.open_desk(json.dumps(process), _asked):
        log.warning("`python -m pplx_comm dump` will not find this process: it gets no socket")
    elif (signal := read(Watching).dump_signal) is not None:
        _core.dump_on(signal)
    _open.add(comm)
    weak = weakref.ref(comm)
    told = _core.Told(json.dumps({"job": control.job, "rank": control.rank, "world_size": control.world_size}))
    control.on_failure(_log_timeout(weakref.ref(control)))

    def end() -> None:
        told.end()
        if (comm := weak()) is not None:
            _open.discard(comm)

    return end


def _log_timeout(weak: weakref.ref[ControlPlane]) -> Callable[[Failure], None]:
    def hear(failure: Failure) -> None:
        control = weak()
        if control is None or failure.kind != "timeout":
            return
        # One rank does it, and not the one that is blamed.
        others = [rank for rank, alive in enumerate(control.alive()) if alive and rank != failure.peer]
        if others and control.rank == others[0]:  # the control thread, which reads the answers, must not wait for them
            threading.Thread(target=_log_job, args=(control,), name="pplx_comm dump", daemon=True).start()

    return hear


def _log_job(control: ControlPlane) -> None:
    try:
        found = _of_job(control, "account", accounts.own)
    except Error:  # it was closed
        return
    ranks = accounts.jobs(found).get(control.job, {})
    log.warning("after a timeout: %s", accounts.whole(ranks, control.world_size, control.job))


def _of_job(control: ControlPlane, what: str, own: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """This rank's answer, and those of all ranks that answer in time."""
    others = [rank for rank in range(control.world_size) if rank != control.rank]
    return [own(), *control.ask(others, what, deadlines.ASKED_JOB).values()]


def _asked(request: str) -> str:
    """A list of accounts or of stats, or with "job" before it those of all ranks of this process's jobs. "print" prints what this
    process does."""
    if request == "print":
        _print()
        return ""
    found = []
    for comm in list(_open):
        with suppress(Error):  # closed meanwhile, or the parent's of a fork
            what = request.removeprefix("job ")
            own = comm.stats if what == "stats" else accounts.own
            found += [own()] if what == request else _of_job(comm.control, what, own)
    return json.dumps(found)


def _print() -> None:
    account = accounts.own()
    found = [
        "\n".join([f"job {job}, rank {rank.number} of {rank.world_size}", *accounts.table(ranks, [rank.number])])
        for job, ranks in accounts.jobs([account]).items()
        for rank in ranks.values()
    ]
    print("\n".join(["pplx_comm dump:", *found, account["stacks"]]), file=sys.stderr, flush=True)
