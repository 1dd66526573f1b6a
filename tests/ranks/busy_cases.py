"""Cases in which one rank says that it is busy; see harness."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from harness import until

import pplx_comm as pc

TIMEOUT = 1.0
SLOWER = {"cpu": 1.0, "cuda": 3.0}
"""Times as much for a device: kernels may be emulated."""
LATE = 2.95 * TIMEOUT
"""Shortly before a time that began anew at each timeout would end: it must begin at the end of the busy time."""


def _all_to_all(me: Any, transport: str, device: str = "cpu", times: float = 1.0, **more: Any) -> pc.AllToAll:
    provider = transport.partition(":")[2] or None
    more = {"node_size": 1, **more} if transport == "nvshmem" else more
    a2a = pc.AllToAll(
        me.comm, num_experts=4, top_k=1, hidden=16, max_tokens_per_rank=4, dtype=torch.float32,
        timeout=TIMEOUT * SLOWER[device] * times,
        transport=transport.partition(":")[0], provider=provider, device=device, **more,
    )  # fmt: skip
    a2a.warmup()  # the first step has more time
    return a2a


def _step(a2a: pc.AllToAll) -> float:
    x = torch.ones(4, 16)
    d = a2a.dispatch(x, torch.arange(4)[:, None])
    return float((a2a.combine(d.x, d) - x).abs().max())


def late_step(me: Any, transport: str, late: int, busy: bool, device: str = "cpu", times: float = 1.0) -> dict[str, Any]:
    """times: that much longer, where a step itself takes long."""
    a2a = _all_to_all(me, transport, device, times)
    begun = time.monotonic()
    try:
        if me.rank != late:
            me.say("waits")
            worst = _step(a2a)
        elif busy:
            with me.comm.busy("compiling"), me.comm.busy("and more"):
                me.say("busy")
                me.hear()
                time.sleep(LATE * SLOWER[device] * times)  # being late is the subject
            worst = _step(a2a)
        else:
            me.say("busy")
            me.hear()
            until("the others blame this rank", lambda: me.comm.failure is not None)
            worst = _step(a2a)
    except pc.PeerError as problem:
        return {"type": type(problem).__name__, "peer": problem.peer, "seconds": time.monotonic() - begun}
    finally:
        a2a.close()
    return {"worst": worst, "seconds": time.monotonic() - begun}


def late_barrier(me: Any, late: int) -> float:
    me.comm.barrier()
    begun = time.monotonic()
    if me.rank == late:
        with me.comm.busy():
            me.say("busy")
            me.hear()
            time.sleep(LATE)  # being late is the subject
    else:
        me.hear()  # that the other says it
    me.comm.barrier(TIMEOUT)
    return time.monotonic() - begun


def late_reset(me: Any, late: int) -> list[int]:
    """One rank says that it is busy, and comes to the agreement when the patience of the others is long over."""
    me.comm.barrier()
    if me.rank == late:
        with me.comm.busy("compiling"):
            me.say("busy")
            me.hear()
            time.sleep(LATE)  # being late is the subject
            return list(me.comm.control.agree_survivors(30))
    me.hear()  # that the other says it
    return list(me.comm.control.agree_survivors(TIMEOUT, leave_out=True))


def dies_busy(me: Any, late: int) -> dict[str, Any]:
    a2a = _all_to_all(me, "mapped")
    if me.rank == late:
        with me.comm.busy("dying"):
            me.say("busy")
            me.hear()
            os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        me.say("waits")
        _step(a2a)
    except pc.PeerError as problem:
        return {"peer": problem.peer, "message": str(problem), "seconds": time.monotonic() - begun}
    return {}


def stops_after(me: Any, late: int) -> dict[str, Any]:
    """It was busy, and is no longer: it is blamed again."""
    a2a = _all_to_all(me, "mapped")
    with me.comm.busy():
        pass
    me.comm.barrier()
    if me.rank == late:
        me.say("idle")
        me.hear()
        return {}
    try:
        _step(a2a)
    except pc.StepTimeout as problem:
        return {"peer": problem.peer}
    return {}


def fewer_sms(me: Any, device: str) -> list[float]:
    """Steps on few SMs and on many, where the number changes between a dispatch and its combine, too."""
    with _all_to_all(me, "mapped", device, num_sms=8) as a2a:
        worst = []
        for before, between in ((1, 1), (1000, 1), (2, 8), (1, 1000)):
            a2a.set_num_sms(before)
            x = torch.ones(4, 16)
            d = a2a.dispatch(x, torch.arange(4)[:, None])
            a2a.set_num_sms(between)
            worst.append(float((a2a.combine(d.x, d) - x).abs().max()))
            worst.append(_step(a2a))
        return worst
