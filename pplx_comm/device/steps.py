"""The calls that take steps, whoever makes them: a user, a handle, autograd or compiled code. And the end of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

import pplx_comm._core as _core
from pplx_comm.control import deadlines
from pplx_comm.control.callbacks import Busy
from pplx_comm.control.failure import Failure
from pplx_comm.device.device import Device
from pplx_comm.device.failing import Failing
from pplx_comm.device.session import Session
from pplx_comm.errors import Error
from pplx_comm.handles import Combined, Combining, Dispatched, Plan
from pplx_comm.wiring.carriers import Carriers
from pplx_comm.wiring.record import Wiring
from pplx_comm.wiring.wire_up import rewire


class Steps:
    """The calls of one AllToAll. Its handles keep this object alive; close() gives everything back, else the garbage collector."""

    def __init__(self, session: Session, device: Device) -> None:
        self.session = session
        self.device = device
        self._life = session.life
        self._checks = device.checks
        self._checking, self._resetting = Failing(session, "check"), Failing(session, "reset")
        self._finish = weakref.finalize(self, _give_back, session, session.wiring)
        self._finish.atexit = False
        self._forget_failures = session.control.on_failure(self._hear)
        self._forget_busy = session.control.on_busy(self._hear_busy)

    # ---- the calls -------------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        halves: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        x_scale: torch.Tensor | None,
        plan: Plan | None,
        apart: bool = False,
        zeroed: bool = False,
    ) -> Dispatched:
        """See Device.dispatch."""
        device = self.device
        if not self._life.usable:
            self._life.check("dispatch")
        try:
            device.core.raise_trouble()
        except BaseException:
            with self._checking:
                raise
        d = device.dispatch(self, halves, x, topk_ids, topk_weights, x_scale, plan, apart, zeroed)
        return d if d.received or not halves & _core.RECV else self.dispatch_recv(d)

    def dispatch_recv(self, d: Dispatched) -> Dispatched:
        self._checks.handle("dispatch_recv", d, Dispatched, self)
        if d.received:
            return d
        with d.receiving:
            if not d.received:
                self._life.check("dispatch_recv")
                self.device.dispatch_recv(d)
        return d

    def combine(
        self,
        halves: int,
        expert_out: torch.Tensor,
        d: Dispatched,
        weights: torch.Tensor | None,
        weighted: bool,
        tail: torch.Tensor | None,
        out: torch.Tensor | None,
        accumulate: bool,
        ready: torch.Tensor | None = None,
        ready_value: int = 1,
    ) -> Combining | Combined:
        """See Device.combine. With the receive half, the result."""
        if not isinstance(d, Dispatched) or d.owner is not self:
            self._checks.handle("combine", d, Dispatched, self)
        if not self._life.usable:
            self._life.check("combine")
        c = self.device.combine(halves, expert_out, d, weights, weighted, tail, out, accumulate, ready, ready_value)
        return self.combine_recv(c) if halves & _core.RECV and isinstance(c, Combining) else c

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
            control.abort(said, peer=control.rank, phase=phase, step=None if d.step < 0 else d.step)

    def _hear(self, failure: Failure) -> None:
        """From the control thread: somebody died, aborted or left."""
        core = self.device.core
        if not self._life.usable:
            return
        if failure.kind == "closed":
            core.peer_left(failure.rank)
            return
        peer = failure.rank if failure.peer is None else failure.peer
        with self._life.lock:
            if self.session.control.failure is not None:  # else a reset has ended it before this thread came here
                core.fail(failure.kind, failure.rank, peer, failure.step or 0, failure.message)

    def _hear_busy(self, said: Busy) -> None:
        """From the control thread."""
        if self._life.usable:
            self.device.core.peer_busy(said.rank, said.busy)

    def reset(self, timeout: float | None, renewed: Callable[[], None]) -> list[int]:
        """The survivors of a failure agree, take fresh endpoints, and start over. Returns who they are. renewed: called when this
        rank's generation has changed."""
        session, device = self.session, self.device
        control, request, wiring, life = session.control, session.request, session.wiring, session.life
        patience = request.patience if timeout is None else timeout
        life.check("reset")
        with self._resetting:
            device.drain(patience)
            survivors = control.agree_survivors(patience, leave_out=True)
            wiring.detach(deadlines.CLOSE_FAILED)
            Carriers.of(control).close_unused(control.generation)
            alive = [rank in survivors for rank in range(control.world_size)]
            core = device.core
            with life.lock:
                # No survivor runs a phase now, so nobody stores into this rank's memory.
                core.reset(core.generation + 1, alive)
                device.renew(alive)
                renewed()
                life.failed = None
            try:
                rewire(control, request, wiring, survivors)
            except BaseException as problem:
                # The first cause may have come before the core was reset, and a core that nothing carries for must take no steps.
                peer = getattr(problem, "peer", None)
                core.fail("abort", control.rank, control.rank if peer is None else peer, 0, f"reset() failed: {problem}")
                raise
            return survivors

    def stats(self) -> dict[str, Any]:
        """See AllToAll.stats."""
        self._life.check("stats")
        stats = self.device.stats()
        stats["open_steps"] = self.device.core.open_steps
        carrier = self.session.wiring.carrier
        if carrier is not None:
            stats["proxy"] = carrier.stats()
        return stats

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Idempotent; talks to nobody. Calls in which other threads wait raise an Error that says so."""
        life = self._life
        if not life.close():
            return
        self.device.end_calls()
        self._forget_failures()
        self._forget_busy()
        failed = life.failed is not None or self.session.control.failure is not None
        self.session.wiring.close(deadlines.CLOSE_FAILED if failed else deadlines.CLOSE_STEPS, failed)
        self.device.close()


def _give_back(session: Session, wiring: Wiring) -> None:
    """The end of an AllToAll that was dropped without close(): its proxy would wait for the answers of open steps for ever."""
    if session.life.usable:
        wiring.close(deadlines.CLOSE_FAILED)
