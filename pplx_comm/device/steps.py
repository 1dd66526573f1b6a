"""The calls that take steps, made by a user, a handle, autograd or compiled code. And the end of them."""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, ParamSpec, TypeVar

import torch

import pplx_comm._core as _core
from pplx_comm.control import deadlines
from pplx_comm.control.callbacks import Busy
from pplx_comm.control.failure import Failure
from pplx_comm.device.arguments import ORDINARY, How, Returned, Sent
from pplx_comm.device.device import Device
from pplx_comm.device.failing import Failing
from pplx_comm.device.session import Session
from pplx_comm.errors import Error, PeerError
from pplx_comm.handles import Combined, Combining, Dispatched
from pplx_comm.log import log
from pplx_comm.wiring.carriers import Carriers
from pplx_comm.wiring.record import CLOSED, Wiring
from pplx_comm.wiring.wire_up import core_generation, rewire

P = ParamSpec("P")
R = TypeVar("R")


def _ranged(call: Callable[P, R]) -> Callable[P, R]:
    """A range of torch.profiler, and so of NVTX where that is asked for. Modes of torch, of which a default device is one, do not
    see what is called in here: 2 us a function."""

    @functools.wraps(call)
    def ranged(*args: P.args, **kwargs: P.kwargs) -> R:
        profiled = torch.autograd._profiler_enabled()
        if not profiled and not torch._C._len_torch_function_stack():
            return call(*args, **kwargs)
        span = torch.profiler.record_function(f"pplx_comm.{call.__name__}") if profiled else contextlib.nullcontext()
        with torch._C.DisableTorchFunction(), span:
            return call(*args, **kwargs)

    return ranged


class Steps:
    """The calls of one AllToAll. Its handles keep this object alive; close() gives everything back, else the garbage collector."""

    def __init__(self, session: Session, device: Device) -> None:
        self.session = session
        self.device = device
        self._life = session.life
        self._life.generation = session.control.generation
        self._checks = device.checks
        self._checking = Failing(session, "check")
        self._last_stats: dict[str, Any] | None = None
        """As they were when it was closed."""
        facts = {
            "job": session.control.job,
            "rank": session.control.rank,
            "world_size": session.control.world_size,
            "what": self.what,
        }
        self._told = _core.Told(json.dumps(facts), session.wiring.exchange.teller)
        self._renewed: weakref.WeakMethod[Callable[[], None]] | None = None
        self._finish = weakref.finalize(self, _give_back, session, session.wiring)
        self._finish.atexit = False
        self._forget_failures = session.control.on_failure(self._hear)
        self._forget_busy = session.control.on_busy(self._hear_busy)

    # ---- the calls -------------------------------------------------------------------------------------------------------

    @_ranged
    def dispatch(self, halves: int, sent: Sent, how: How = ORDINARY) -> Dispatched:
        """See Device.dispatch."""
        device = self.device
        life = self._life
        life.callers.add(get_ident())
        if not life.usable:
            life.check("dispatch")
        try:
            device.core.raise_trouble()
        except BaseException:
            with self._checking:
                raise
        d = device.dispatch(self, halves, sent, how)
        return d if d.received or not halves & _core.RECV else self.dispatch_recv(d)

    def open_for_combine(self, topk_ids: torch.Tensor) -> Dispatched:
        """See AllToAll.open_for_combine."""
        session = self.session
        x = torch.empty((len(topk_ids), session.hidden), dtype=session.dtype, device=session.device)
        return self.dispatch(_core.BOTH, (x, topk_ids, None, None, None), How(unread=True))

    @_ranged
    def dispatch_recv(self, d: Dispatched) -> Dispatched:
        self._checks.handle("dispatch_recv", d, Dispatched, self)
        if d.received:
            return d
        with d.receiving:
            if not d.received:
                self._life.check("dispatch_recv")
                self.device.dispatch_recv(d)
        return d

    @_ranged
    def combine(self, halves: int, returned: Returned) -> Combining | Combined:
        """See Device.combine. With the receive half, the result."""
        d = returned[1]
        if not isinstance(d, Dispatched) or d.owner is not self:
            self._checks.handle("combine", d, Dispatched, self)
        if not self._life.usable:
            self._life.check("combine")
        c = self.device.combine(halves, returned)
        return self.combine_recv(c) if halves & _core.RECV and isinstance(c, Combining) else c

    @_ranged
    def combine_recv(self, c: Combining) -> Combined:
        self._checks.handle("combine_recv", c, Combining, self)
        if c.done:
            return c.result
        with c.receiving:
            if not c.done:
                self._life.check("combine_recv")
                self.device.combine_recv(c)
        return c.result

    def release(self, d: Dispatched) -> None:
        self._checks.handle("release", d, Dispatched, self)
        if d.used:
            raise Error("release: this dispatch was combined or released already")
        self.dispatch_recv(d)
        self._life.check("release")
        self.device.release(d)

    def watch(self, d: Dispatched) -> None:
        self._life.check("watch")
        self.device.watch(d)

    def await_experts(self, d: Dispatched, experts: range) -> None:
        self._life.check("group")
        self.device.await_experts(self, d, experts)

    def check(self, call: str) -> None:
        """Raises what went wrong since the last call, if anything did."""
        if not self._life.usable:
            self._life.check(call)
        failure = self.session.control.failure
        if failure is not None:
            self._hear(failure)  # the control thread may have told a barrier of it, and not yet this AllToAll
        try:
            self.device.core.raise_trouble()
        except BaseException:
            with self._checking:
                raise

    # ---- failure ---------------------------------------------------------------------------------------------------------

    def strand(self, d: Dispatched, phase: str, why: str) -> None:
        """Tells all ranks that this one will not end d's step: what runs between its calls has failed."""
        control = self.session.control
        if self._life.usable and d.plan.generation == self.device.core.generation:
            said = f"rank {control.rank} left a step open in {phase} ({why}; after reset() on every rank it can go on)"
            step = None if d.step < 0 else d.step
            control.abort(said, peer=control.rank, phase=phase, step=step, generation=self._life.generation)

    def _hear(self, failure: Failure) -> None:
        """From the control thread: somebody died, aborted or left."""
        core = self.device.core
        if self._life.closed:
            return
        if failure.kind == "closed":
            core.peer_left(failure.rank)
            return
        with self._life.lock:
            if self.session.control.failure is failure:  # else a reset has ended it before this thread came here
                self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        peer = failure.rank if failure.peer is None else failure.peer
        self.device.core.fail(failure.kind, failure.rank, peer, failure.step or 0, failure.message)

    def _hear_busy(self, said: Busy) -> None:
        """From the control thread."""
        if not self._life.closed:
            self.device.core.peer_busy(said.rank, said.busy)

    # ---- reset(): see control.recovery.Resettable ------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        return self.session.wiring.exchange is not CLOSED

    @property
    def number(self) -> int:
        return int(self.session.config.object)

    @property
    def what(self) -> str:
        c = self.session.config
        return f"AllToAll {c.object} (num_experts={c.num_experts}, hidden={c.hidden}, max_tokens_per_rank={c.max_tokens})"

    @property
    def patience(self) -> float:
        return self.session.request.patience

    def check_open(self, call: str) -> None:
        self._life.check_open(call)

    def on_renew(self, renewed: Callable[[], None]) -> None:
        """`renewed`, a bound method held weakly, is called when reset() has changed this rank's generation."""
        self._renewed = weakref.WeakMethod(renewed)

    @property
    def open_steps(self) -> int:
        core = self.device.core
        return 0 if core is CLOSED else int(core.open_steps)

    @property
    def generation(self) -> int:
        return self._life.generation

    @property
    def stopped(self) -> bool:
        return self._life.stopped

    @property
    def called(self) -> bool:
        return not self._life.callers or get_ident() in self._life.callers

    def heard(self) -> int | None:
        return self._life.heard()

    def notice(self) -> None:
        try:
            self.check("reset")
        except PeerError:
            self.heard()  # reset() has seen it: this call of it is not late for that
        except Error as mistake:  # in a step that reset() gives up
            log.warning("reset: %s", mistake)

    def stop(self, failure: Failure) -> None:
        self._life.stop(failure)
        self._fail(failure)

    def drain(self, seconds: float) -> None:
        self._life.await_calls(seconds)
        self.device.drain(seconds)

    def renew(self, generation: int, alive: list[bool]) -> None:
        session, device, life = self.session, self.device, self._life
        session.wiring.detach(deadlines.CLOSE_FAILED)
        Carriers.of(session.control).close_unused(generation)
        with life.lock:
            # No survivor runs a phase now, so none stores into this rank's memory.
            device.core.reset(core_generation(generation), alive)
            device.renew(alive)
            if self._renewed is not None and (renewed := self._renewed()) is not None:
                renewed()
            life.generation = generation

    def rewire(self, survivors: list[int]) -> None:
        rewire(self.session.control, self.session.request, self.session.wiring, survivors)

    def fail(self, problem: BaseException) -> None:
        peer = problem.peer if isinstance(problem, PeerError) else None
        self._fail(Failure("abort", self.session.control.rank, peer, message=f"reset() failed: {problem}"))

    def go_on(self) -> None:
        self._life.go_on()

    def explain(self, tokens: int) -> list[dict[str, Any]]:
        """See AllToAll.explain."""
        self._life.check("explain")
        return self.device.explain(tokens)

    def waits(self, half: str) -> torch.Tensor:
        """See AllToAll.waits."""
        if half not in ("dispatch", "combine"):
            raise Error(f"waits: half must be 'dispatch' or 'combine', not {half!r}")
        self._life.check_open("waits")
        return self.device.waits(half)

    def stats(self, fresh: bool) -> dict[str, Any]:
        """See AllToAll.stats."""
        if self._last_stats is not None:
            return self._last_stats
        self._life.check_open("stats")
        return self._counters(fresh)

    def _counters(self, fresh: bool) -> dict[str, Any]:
        stats = {"object": self.number, "closed": False, **self.device.stats(), "open_steps": self.open_steps}
        carrier = self.session.wiring.carrier
        return stats if carrier is None else {**stats, "proxy": carrier.stats(fresh)}

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Idempotent. Does not wait for peers. Calls in which other threads wait raise an Error that says so."""
        life = self._life
        if not life.close():
            return
        self._told.end()
        try:
            self._last_stats = {**self._counters(False), "closed": True}  # the proxy may stand still
            self.device.end_calls()
        except Error as problem:  # CUDA's, of any kernel's fault before
            log.warning("%s closes without its last counters: %s", self.what, problem)
        self._forget_failures()
        self._forget_busy()
        failed = self.session.control.failure is not None
        self.session.wiring.close(deadlines.CLOSE_FAILED if failed else deadlines.CLOSE_STEPS, failed)
        self.device.close()


def _give_back(session: Session, wiring: Wiring) -> None:
    """The end of an AllToAll that was dropped without close(): its proxy would wait for the answers of open steps for ever."""
    if session.life.may_close:
        wiring.close(deadlines.CLOSE_FAILED)
