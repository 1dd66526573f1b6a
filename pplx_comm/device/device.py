"""The interface of a device: steps.py and the operators of torch_ops run the phases through it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from pplx_comm.device.arguments import ORDINARY, How, Returned, Rows, Sent
from pplx_comm.device.checks import Checks
from pplx_comm.device.parts import Tickets
from pplx_comm.handles import Combined, Combining, Dispatched, Owner, Plan


class Device(Protocol):
    """The phases of one AllToAll."""

    core: Any
    """_core.Exchange or _cuda.Exchange."""
    checks: Checks

    def dispatch(self, owner: Owner, halves: int, sent: Sent, how: How = ORDINARY) -> Dispatched:
        """The send half, and with `halves` the receive half where one launch does both: d.received says so."""

    def dispatch_recv(self, d: Dispatched) -> None: ...

    def rows(self, d: Dispatched) -> Rows:
        """Those of a dispatch of this device."""

    def combine(self, halves: int, returned: Returned) -> Combining | Combined:
        """Like dispatch: where one launch does both halves, the result."""

    def combine_recv(self, c: Combining) -> None: ...

    def release(self, d: Dispatched) -> None: ...

    # ---- hooks -----------------------------------------------------------------------------------------------------------

    def watch(self, d: Dispatched) -> None:
        """See Dispatched."""

    def await_experts(self, owner: Owner, d: Dispatched, experts: range) -> None:
        """See ExpertGroup.wait()."""

    # ---- life ------------------------------------------------------------------------------------------------------------

    def drain(self, seconds: float) -> None:
        """Stops running work, and waits for it."""

    def renew(self, alive: list[bool]) -> None:
        """After a reset."""

    def set_num_sms(self, num_sms: int) -> None:
        """Limits the grid of further launches."""

    def stats(self) -> dict[str, Any]: ...

    def waits(self, half: str) -> torch.Tensor: ...

    def explain(self, tokens: int) -> list[dict[str, Any]]: ...

    def end_calls(self) -> None:
        """Calls in which other threads wait raise that the AllToAll was closed."""

    def close(self) -> None: ...

    # ---- as tensors, for torch_ops ---------------------------------------------------------------------------------------

    def tickets(self) -> Tickets: ...

    def as_tensors(self, d: Dispatched) -> tuple[torch.Tensor, ...]:
        """x, scale, weights and ticket, each its own memory."""

    def plan_ticket(self, plan: Plan) -> torch.Tensor: ...

    def of_plan_ticket(self, owner: Owner, ticket: torch.Tensor, tokens: int) -> Plan: ...

    def of_ticket(self, owner: Owner, ticket: torch.Tensor, plan: torch.Tensor, tokens: int) -> Dispatched: ...
