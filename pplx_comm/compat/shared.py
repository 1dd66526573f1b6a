"""The common part of the shadow packages: AllToAlls made at first use, their open steps, and the routing of a dispatch."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any

import torch

import pplx_comm._core as _core
from pplx_comm._version import __version__
from pplx_comm.all_to_all import AllToAll
from pplx_comm.communicator import Communicator
from pplx_comm.device.arguments import ORDINARY, How
from pplx_comm.errors import Error
from pplx_comm.handles import Combining, Dispatched
from pplx_comm.log import log
from pplx_comm.settings import Compat, read

IN_FLIGHT = 2
"""Steps of an AllToAll that may be open: DeepEP holds two low latency results."""
MOST_LANES = 8
"""AllToAlls that a Communicator has at once."""


@functools.cache
def announce(package: str) -> None:
    """Logs the provider, once."""
    log.info("%s is provided by pplx_comm %s: docs/migrate.md says what differs", package, __version__)


def refuse(call: str, argument: str, instead: str) -> Error:
    return Error(f"{call}: pplx_comm does not support {argument}: {instead}")


class Step:
    """A dispatch, until its combine is received.

    then: runs once, behind the receive half that comes next.
    """

    __slots__ = ("_combining", "captured", "d", "lane", "then")

    def __init__(self, lane: Lane, d: Dispatched) -> None:
        self.lane = lane
        self.captured = d.step < 0
        """True if a CUDA graph has its dispatch."""
        self.d: Dispatched | None = d
        self.then: Callable[[], None] | None = None
        self._combining: Combining | None = None

    @property
    def combinable(self) -> bool:
        return self.d is not None and self._combining is None

    def rows(self) -> Dispatched:
        """Raises an Error once the step is closed."""
        if self.d is None:
            raise Error("this handle was combined, or two later dispatches took its memory: read its elements before")
        return self.d

    def receive(self) -> None:
        """The receive half, and `then`. Does nothing the second time."""
        if self.d is not None and not self.d.received:
            self.lane.a2a.dispatch_recv(self.d)
        self._go_on()

    def combine(
        self,
        expert_out: torch.Tensor,
        *,
        send_only: bool = False,
        weights: torch.Tensor | None = None,
        weighted: bool = True,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> torch.Tensor:
        """send_only: finish() is the receive half; `out` must be given."""
        if self.lane.in_pieces:
            self.lane.end_older(self)
        returned = expert_out, self.rows(), weights, weighted, None, out, accumulate
        made: Any = self.lane.a2a.calls.combine(_core.SEND if send_only else _core.BOTH, returned)
        if send_only:
            self._combining, y = made, made.out
        else:
            self.d, y = None, made
        assert isinstance(y, torch.Tensor)
        return y

    def finish(self) -> None:
        """The receive half of a combine. Does nothing the second time."""
        combining, self._combining = self._combining, None
        if combining is not None:
            self.lane.a2a.combine_recv(combining)
            self.d = None
            self._go_on()

    def _go_on(self) -> None:
        then, self.then = self.then, None
        if then is not None:
            then()

    def end(self) -> None:
        """Closes the step, with all that its caller has not done."""
        if self.d is None:
            return
        if not self.captured and self.lane.capturing():
            raise Error("a dispatch from before this CUDA graph's capture is still open: combine it before the capture")
        self.finish()
        if self.d is not None:
            self.receive()
            self.d.release()
            self.d = None


class Lane:
    """An AllToAll and its latest steps. Its calls know no gradients: users of these packages write their own backward pass."""

    def __init__(self, a2a: AllToAll) -> None:
        self.a2a = a2a
        self.num_sms: int | None = None
        self.closed = False
        self.captured = False
        """True once a CUDA graph has a step: it keeps the memory."""
        self.steps: deque[Step] = deque()
        self._gpu = a2a.device.type == "cuda"
        self.in_pieces: bool = a2a.calls.session.config.in_pieces

    def dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        *,
        send_only: bool = False,
        totals: torch.Tensor | None = None,
    ) -> Step:
        """A step takes the memory of the one `IN_FLIGHT` before it, which ends first: on all ranks alike, since they make the same
        calls."""
        self._make_room()
        how = ORDINARY if totals is None else How(totals=totals)
        d = self.a2a.calls.dispatch(_core.SEND if send_only else _core.BOTH, (x, ids, weights, x_scale, None), how)
        return self._keep(d)

    def open_for_combine(self, ids: torch.Tensor) -> Step:
        """A step without rows."""
        self._make_room()
        return self._keep(self.a2a.open_for_combine(ids))

    def capturing(self) -> bool:
        """True while the current stream's calls go into a CUDA graph."""
        return self._gpu and torch.cuda.is_current_stream_capturing()

    def _make_room(self) -> None:
        if len(self.steps) == IN_FLIGHT:
            if self.steps[0].d is not None:
                self.steps[0].end()
            self.steps.popleft()

    def _keep(self, d: Dispatched) -> Step:
        step = Step(self, d)
        if step.captured:
            self.captured = True
        self.steps.append(step)
        return step

    def end_older(self, step: Step) -> None:
        """Blocks in pieces are combined in the order of their steps, so older steps end. Their handles open new ones."""
        for older in itertools.takewhile(lambda one: one is not step, self.steps):
            older.end()

    def set_num_sms(self, num_sms: int) -> None:
        if num_sms != self.num_sms:
            self.a2a.set_num_sms(num_sms)
            self.num_sms = num_sms

    def close(self) -> None:
        """Ends its steps."""
        while self.steps:
            self.steps.popleft().end()
        self.closed = True
        self.a2a.close()


class Pool:
    """The AllToAlls of one Communicator. The least recently used one makes room for another, on all ranks alike."""

    def __init__(self, communicator: Callable[[int | None], Communicator]) -> None:
        """communicator: makes it, of this number of ranks per node."""
        self.settings = read(Compat)
        self.comm = communicator(self.settings.node_size)
        self._lanes: OrderedDict[Hashable, Lane] = OrderedDict()
        self._latest: tuple[Hashable, Lane | None] = None, None

    def known(self, key: Hashable) -> Lane | None:
        """The AllToAll of that key."""
        latest, lane = self._latest
        if key == latest:
            return lane
        lane = self._lanes.get(key)
        if lane is not None:
            self._lanes.move_to_end(key)
            self._latest = key, lane
        return lane

    def open(self, key: Hashable, arguments: dict[str, Any]) -> Lane:
        """Makes it: collective."""
        if torch.device(arguments["device"]).type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise Error("this shape was first used while a CUDA graph is captured, where nothing can be made: run it once before")
        if len(self._lanes) == MOST_LANES:
            old = next((key for key, lane in self._lanes.items() if not lane.captured), None)
            if old is None:
                raise Error(f"CUDA graphs hold all {MOST_LANES} AllToAlls of this buffer: use another buffer for further shapes")
            self._lanes.pop(old).close()
        settings = self.settings
        a2a = AllToAll(self.comm, in_flight=IN_FLIGHT, transport=settings.transport, timeout=settings.timeout, **arguments)
        lane = self._lanes[key] = Lane(a2a)
        self._latest = key, lane
        return lane

    def most(self, call: str, tokens: int) -> int:
        """Returns the most tokens of any rank. Collective."""
        answers = self.comm.control.all_gather({"tokens": tokens}, call)
        return max(answer["tokens"] for answer in answers if answer is not None)

    def dead(self) -> list[int]:
        """1 for each rank that is gone, or that this rank waited for in vain."""
        failure = self.comm.failure
        blamed = None if failure is None else failure.rank if failure.peer is None else failure.peer
        return [int(not there or rank == blamed) for rank, there in enumerate(self.comm.control.alive())]

    def reset(self) -> None:
        """After a failure the ranks that are left go on. Collective over them."""
        self.comm.reset()
        for lane in self._lanes.values():
            lane.steps.clear()

    def close(self) -> None:
        """Does not wait for peers."""
        for lane in self._lanes.values():
            lane.steps.clear()
            lane.close()
        self._lanes.clear()
        self._latest = None, None
        self.comm.close()


class Routes:
    """The routing of a dispatch, for further ones and for combines.

    It keeps the ids, not a Plan: a Plan on a GPU keeps the memory of its dispatch's rows.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        self.step: Step | None = None

    def dispatch(self, lane: Lane, x: torch.Tensor, *sent: torch.Tensor | None, send_only: bool = False) -> Step:
        """sent: weights and scales."""
        if self.step is not None:
            self._leave(self.step)
        self.step = step = lane.dispatch(x, self.ids, *sent, send_only=send_only)
        return step

    def open_step(self, lane: Lane) -> Step:
        """The step to combine on. Where it is closed, a new one."""
        step = self.step
        if step is None or step.lane is not lane or not step.combinable:
            if step is not None:
                self._leave(step)
            step = self.step = lane.open_for_combine(self.ids)
        return step

    @staticmethod
    def _leave(step: Step) -> None:
        """Ends the step that another one replaces, since no handle has it then. A reset or a close has ended those before it."""
        if step.combinable and step in step.lane.steps:
            step.end()
