"""The CUDA device of an AllToAll: everything is launched on the caller's current stream, nothing synchronises."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import torch

import pplx_comm._core as _core
from pplx_comm import trace
from pplx_comm.device.arguments import ORDINARY, How, Returned, Rows, Sent
from pplx_comm.device.checks import Checks
from pplx_comm.device.parts import TENSORS, Tickets, parts_of
from pplx_comm.device.session import Session
from pplx_comm.errors import Error
from pplx_comm.handles import Combined, Combining, Dispatched, Owner, Plan
from pplx_comm.hooks import Hooks
from pplx_comm.layouts import Compact, Padded
from pplx_comm.wiring.record import CLOSED

if TYPE_CHECKING:
    import pplx_comm._cuda as _cuda

_ROW_ALIGN = 16  # bytes: what a kernel's vectors want of every row
_PLAN_ALIGN = 256  # bytes
_MOST_KNOWN = 4096  # looks of arguments

# torch.cuda.current_stream() makes an object, ten times as slow. A torch without CUDA has neither.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class DevicePlan(Plan):
    """A plan in device memory, where the kernel that makes it keeps the weights, too."""

    def __init__(
        self,
        owner: Owner,
        cuda: Cuda,
        generation: int,
        buffer: torch.Tensor,
        tokens: int,
        weighted: bool,
        weights: torch.Tensor | None = None,
    ) -> None:
        self.owner, self._cuda, self.generation = owner, cuda, generation
        self.buffer, self.tokens, self._weighted, self._weights = buffer, tokens, weighted, weights

    @property
    def topk_weights(self) -> torch.Tensor | None:
        if self._weights is None and self._weighted:
            at, shape = self._cuda.plan_layout.weights, (self.tokens, self._cuda.top_k)
            self._weights = self.buffer[at : at + 4 * math.prod(shape)].view(torch.float32).view(shape)
        return self._weights

    def with_weights(self, weights: torch.Tensor) -> Plan:
        return DevicePlan(self.owner, self._cuda, self.generation, self.buffer, self.tokens, True, weights.detach().clone())

    def rows(self, rank: int) -> int:
        """Waits for the dispatch that makes the plan."""
        return int(self.buffer.view(torch.int32)[self._cuda.plan_layout.rows // 4 + rank])


class _Tensor:
    """An attribute of a DeviceDispatched, made when it is first read. None where the layout or the wire has no such tensor."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, d: DeviceDispatched, kind: Any = None) -> torch.Tensor | None:
        part = d.cuda.parts.get(self._name)
        if part is None:
            made = None
        elif not torch._C._len_torch_function_stack():
            made = part.of(d.buffer)
        else:
            with torch._C.DisableTorchFunction():  # see steps.py
                made = part.of(d.buffer)
        return d.__dict__.setdefault(self._name, made)  # another thread may have been quicker


class DeviceDispatched(Dispatched):
    """Its tensors and its plan are parts of one buffer. Those that are not asked for are not made."""

    plan: DevicePlan
    step = -1
    inputs: tuple[Any, ...] = ()
    """The arguments of the receive half, where they are more than a count (in pieces those of the send half), and the tensors that
    they point to. Those live as long as the handle: a kernel may still read when the call returns."""
    weighted = False
    """True if a plan in the buffer has weights."""

    def __init__(
        self, owner: Owner, cuda: Cuda, generation: int, buffer: torch.Tensor, plan: DevicePlan | None, tokens: int
    ) -> None:
        """plan: None makes one in the buffer."""
        self.owner, self.cuda, self.generation, self.tokens = owner, cuda, generation, tokens
        self.buffer, self.at = buffer, buffer.data_ptr()
        if plan is None:
            self.plan_at = self.at + cuda.plan_begin
        else:
            self.plan, self.plan_at = plan, plan.buffer.data_ptr()

    def __getattr__(self, name: str) -> Any:
        if name == "plan":
            value: Any = self.cuda.plan_of(self)
        elif name == "receiving":
            value = threading.Lock()
        else:
            raise AttributeError(name)
        return self.__dict__.setdefault(name, value)


for _name in TENSORS:
    setattr(DeviceDispatched, _name, _Tensor(_name))


class Waits:
    """Device memory of int64 numbers, as torch takes it."""

    def __init__(self, address: int, world_size: int) -> None:
        self.__cuda_array_interface__ = {"version": 3, "data": (address, True), "typestr": "<i8", "shape": (world_size,)}


class Cuda:
    """The phases of one AllToAll as launches."""

    def __init__(self, session: Session) -> None:
        self.core: _cuda.Exchange = session.wiring.exchange
        self.checks = Checks(session)
        self.top_k = session.top_k
        self._hidden, self._dtype = session.hidden, session.dtype
        self._device = session.device
        config = session.config
        module = session.wiring.kernels
        layout: _core.OutputLayout = module.output_layout(config)
        self.parts = parts_of(layout)
        self._weights = "topk_weights" if "topk_weights" in self.parts else "weights"
        self._ticket_bytes = self.parts[self._weights].at
        self.plan_layout: _cuda.PlanLayout = module.plan_layout(config)
        self._plan_bytes = self.plan_layout.nbytes
        self.plan_begin = -(-layout.nbytes // _PLAN_ALIGN) * _PLAN_ALIGN
        # All that a step leaves is one allocation, its plan at the end: empty_like() of this, which takes no memory, and
        # 0.1 us less than empty(). So is the result of a combine, of one that is expanded.
        self._step_memory = self._bytes(1).expand(self.plan_begin + self._plan_bytes)
        self._one = torch.empty(1, dtype=session.dtype, device=session.device)
        # Kept: looking a name up in the module takes as long as half of the call.
        self._make_launch: type[_cuda.Launch] = module.Launch
        self._make_result: type[_cuda.Result] = module.Result
        self._make_outputs: type[_cuda.Outputs] = module.Outputs
        self._make_event: type[_cuda.StreamEvent] = module.StreamEvent
        self._tokens: type[_cuda.Tokens] = module.Tokens
        self._expert_outputs: type[_cuda.ExpertOutputs] = module.ExpertOutputs
        self._index = session.device.index or 0  # under the emulation it has none
        self._in_pieces: bool = config.in_pieces
        self._padded = isinstance(session.layout, Padded)
        self._compact = isinstance(session.layout, Compact)
        self._y_stride = session.hidden * session.dtype.itemsize
        self._scale_size = session.wire.scale_dtype.itemsize
        self._known: dict[Any, Any] = {}
        self._hooks = _core.hook_layout(config) if session.request.hooks else None
        if self._hooks is not None:
            self.core.use_hooks()
        trace.add(self)

    def drain(self, seconds: float) -> None:
        """Stops running kernels, and waits for them; also for graph replays on the current stream."""
        self.core.drain(raw_stream(self._index), seconds)

    def renew(self, alive: list[bool]) -> None:
        """The core knows."""

    def set_num_sms(self, num_sms: int) -> None:
        self.core.set_num_sms(num_sms)

    def explain(self, tokens: int) -> list[dict[str, Any]]:
        launches: list[dict[str, Any]] = self.core.explain(tokens)
        return launches

    def stats(self) -> dict[str, Any]:
        return {**self.core.stats(), "large_tokens": self.core.large_tokens}

    def waits(self, half: str) -> torch.Tensor:
        counted = Waits(*self.core.waits(half == "combine"))
        return torch.as_tensor(counted, device=self._device).clone()

    def end_calls(self) -> None:
        """No call waits: each returns when it has launched."""
        self.core.follow(raw_stream(self._index))
        trace.drop(self)

    def note_kernels(self) -> None:
        self.core.note_kernels()

    def tell_kernels(self) -> None:
        self.core.tell_kernels()

    def close(self) -> None:
        self.core = CLOSED  # type: ignore[assignment]

    def _check_generation(self, call: str, d: DeviceDispatched) -> None:
        if d.generation != self.core.generation:
            raise Error(f"{call}: this dispatch is from before reset()")

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)

    @staticmethod
    def _rows_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """[rows, columns] as they are, or a copy whose rows begin and end where kernels want them; its stride in bytes."""
        size = tensor.element_size()
        width = tensor.shape[1] * size
        stride = tensor.stride(0) * size if tensor.shape[0] > 1 else width
        # Kernels read whole vectors: behind a last one that is a part of one there may be nothing.
        if width % _ROW_ALIGN == 0 and stride % _ROW_ALIGN == 0 and tensor.data_ptr() % _ROW_ALIGN == 0:
            return tensor, stride
        columns = -(-width // _ROW_ALIGN) * _ROW_ALIGN // size
        copy = torch.empty((tensor.shape[0], columns), dtype=tensor.dtype, device=tensor.device)
        copy[:, : tensor.shape[1]] = tensor
        return copy, columns * size

    # ---- dispatch ----------------------------------------------------------------------------------------------------

    def dispatch(self, owner: Owner, halves: int, sent: Sent, how: How = ORDINARY) -> Dispatched:
        """apart: the rows have memory of their own, and so has the plan. zeroed is for those only."""
        generation = self.core.generation
        apart, zeroed, unread, totals = how
        plan: Any
        x, topk_ids, weights, x_scale, plan = sent
        if plan is None:
            x, ids, weights, (tokens, stride, wide) = self._inputs(x, topk_ids, weights, x_scale)
            ids_at = ids.data_ptr() or self._step_memory.data_ptr()  # without tokens any address says that the plan is to be made
        else:
            plan = self.checks.plan(owner, sent, generation)
            assert isinstance(plan, DevicePlan)
            tokens, ids_at, wide, weights = plan.tokens, 0, False, plan.topk_weights
            x, stride = self._rows_of(x)
        weights_at = 0 if weights is None else weights.data_ptr()
        totals_at = 0 if totals is None else self.checks.totals(totals)
        if x_scale is None:
            given = self._tokens(
                count=tokens, x=x.data_ptr(), stride=stride, ids=ids_at, wide_ids=wide, weights=weights_at,
                unread=unread, totals=totals_at,
            )  # fmt: skip
        else:
            size, (row, column) = self._scale_size, x_scale.stride()
            given = self._tokens(
                count=tokens, x=x.data_ptr(), stride=stride, ids=ids_at, wide_ids=wide, weights=weights_at,
                scales=x_scale.data_ptr(), scale_row_stride=size * row, scale_stride=size * column, totals=totals_at,
            )  # fmt: skip
        if apart:
            rows, buffer = self._rows_apart(zeroed), self._bytes(self._ticket_bytes)
            if plan is None:
                plan = DevicePlan(owner, self, generation, self._bytes(self._plan_bytes), tokens, weights is not None)
            d = DeviceDispatched(owner, self, generation, buffer, plan, tokens)
            return self._dispatch_apart(halves, d, given, rows)
        d = DeviceDispatched(owner, self, generation, torch.empty_like(self._step_memory), plan, tokens)
        if halves & _core.RECV:
            d.received = True
        else:
            d.receiving = threading.Lock()  # wanted soon
            if self._in_pieces:
                d.inputs = given, x, weights, x_scale, totals
            elif totals is not None:
                d.inputs = self._tokens(count=tokens, totals=totals_at), totals
        if plan is None and weights is not None:
            d.weighted = True
        if self._hooks is not None:
            d.hooks = self._cleared_hooks()
            d.step = self.core.dispatch(self._hooked_launch(halves, d), given)
            return d
        launch = self._make_launch(stream=raw_stream(self._index), halves=halves, plan=d.plan_at, buffer=d.at)
        d.step = self.core.dispatch(launch, given)
        return d

    def _dispatch_apart(self, halves: int, d: DeviceDispatched, given: _cuda.Tokens, rows: dict[str, torch.Tensor]) -> Dispatched:
        d.received = bool(halves & _core.RECV)
        d.step = self.core.dispatch(self._launch(halves, d), given, self._addresses(rows))
        d.__dict__.update(rows)
        return d

    def rows(self, d: Dispatched) -> Rows:
        """Makes them anew: 1 us less than by their names, where each is read once."""
        assert isinstance(d, DeviceDispatched)
        parts, buffer = self.parts, d.buffer
        scale = parts.get("scale")
        return parts["x"].of(buffer), None if scale is None else scale.of(buffer), parts["counts"].of(buffer)

    def plan_of(self, d: DeviceDispatched) -> DevicePlan:
        """The one in its buffer."""
        buffer = d.buffer[self.plan_begin : self.plan_begin + self._plan_bytes]
        return DevicePlan(d.owner, self, d.generation, buffer, d.tokens, d.weighted)

    def _rows_apart(self, zeroed: bool) -> dict[str, torch.Tensor]:
        rows = {}
        for name in ("x", "scale", self._weights):
            if name in self.parts:
                _, dtype, shape, strides, _ = self.parts[name]
                rows[name] = torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
                if zeroed:
                    rows[name].zero_()
        return rows

    def _addresses(self, rows: dict[str, torch.Tensor]) -> _cuda.Outputs:
        scale = rows.get("scale")
        return self._make_outputs(
            x=rows["x"].data_ptr(), scales=0 if scale is None else scale.data_ptr(), weights=rows[self._weights].data_ptr()
        )

    def _launch(self, halves: int, d: DeviceDispatched) -> _cuda.Launch:
        return self._make_launch(stream=raw_stream(self._index), halves=halves, plan=d.plan_at, buffer=d.at)

    def _hooked_launch(self, halves: int, d: DeviceDispatched) -> _cuda.Launch:
        hooks = 0 if d.hooks is None else d.hooks.words.data_ptr()
        return self._make_launch(stream=raw_stream(self._index), halves=halves, plan=d.plan_at, buffer=d.at, hooks=hooks)

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _cleared_hooks(self) -> Hooks:
        """Work launched behind their event finds the words of this dispatch; the dispatch itself comes after it."""
        assert self._hooks is not None
        stream = raw_stream(self._index)
        hooks = Hooks(torch.empty(self._hooks.words, dtype=torch.uint32, device=self._device), self._hooks)
        self.core.clear_hooks(hooks.words.data_ptr(), stream)
        hooks.begun = self._make_event(self._index)
        hooks.begun.record(self._index, stream)
        return hooks

    def watch(self, d: Dispatched) -> None:
        assert d.hooks is not None
        d.hooks.begun.wait(self._index, raw_stream(self._index))

    def await_experts(self, owner: Owner, d: Dispatched, experts: range) -> None:
        assert isinstance(d, DeviceDispatched)
        self._check_generation("group", d)
        if not d.received:
            raise Error("group: the receive half of this dispatch was not launched yet: call wait() (or dispatch_recv) first")
        self.watch(d)
        self.core.await_experts(self._hooked_launch(_core.RECV, d), experts.start, len(experts))

    def _inputs(
        self, x: torch.Tensor, topk_ids: torch.Tensor | None, topk_weights: torch.Tensor | None, x_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[int, int, bool]]:
        """The tensors for the kernels, and (tokens, stride of x, whether ids are int64). Inputs that look like earlier ones are not
        checked again."""
        ids, weights = topk_ids, topk_weights
        key: Any
        try:
            # Strides take longer to get and to hash.
            if weights is None:
                key = (
                    x.shape, x.is_contiguous(), x.dtype, x.device,
                    ids.shape, ids.is_contiguous(), ids.dtype, ids.device,  # type: ignore[union-attr]
                )  # fmt: skip
            else:
                key = (
                    x.shape, x.is_contiguous(), x.dtype, x.device,
                    ids.shape, ids.is_contiguous(), ids.dtype, ids.device,  # type: ignore[union-attr]
                    weights.shape, weights.is_contiguous(), weights.dtype, weights.device,
                )  # fmt: skip
            if x_scale is not None:
                key = *key, x_scale.shape, x_scale.dtype, x_scale.device
        except AttributeError:
            key = None  # the checks will name an argument that is no tensor
        looks = self._known.get(key)
        if looks is not None and x.data_ptr() % _ROW_ALIGN == 0:
            return x, ids, weights, looks  # type: ignore[return-value]
        checks = self.checks
        tokens = checks.tokens(x, x_scale)
        ids, weights = checks.ids(topk_ids, tokens), checks.weights("topk_weights", topk_weights, tokens)
        rows, stride = self._rows_of(x)
        looks = tokens, stride, ids.dtype == torch.int64
        if rows is x and x.is_contiguous() and ids is topk_ids and weights is topk_weights:
            self._remember(key, looks)
        return rows, ids, weights, looks

    def _remember(self, key: Any, looks: Any) -> None:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = looks

    def dispatch_recv(self, d: Dispatched) -> None:
        assert isinstance(d, DeviceDispatched)
        self._check_generation("dispatch_recv", d)
        given = d.inputs[0] if d.inputs else self._tokens(count=d.tokens)
        self.core.dispatch(self._hooked_launch(_core.RECV, d), given)
        d.received = True

    # ---- combine -----------------------------------------------------------------------------------------------------

    def combine(self, halves: int, returned: Returned) -> Combining | Combined:
        d: Any  # a DeviceDispatched: Steps has seen whose it is
        expert_out, d, weights, weighted, tail, out, accumulate = returned
        checks = self.checks
        if not d.received or d.used:
            checks.received(d)
        if d.generation != self.core.generation:
            self._check_generation("combine", d)
        tokens = d.tokens
        at, stride, count, expert_out = self._expert_rows(expert_out)
        if weights is None and tail is None:
            given = self._expert_outputs(expert_out=at, stride=stride, rows=count, weighted=bool(weighted), uses_weights=False)
        else:
            weights, tail = checks.combine_weights(weights, weighted, tokens), checks.tail(tail)
            given = self._expert_outputs(
                expert_out=at, stride=stride, rows=count, weighted=bool(weighted), uses_weights=weights is not None,
                weights=0 if weights is None else weights.data_ptr(), tail=0 if tail is None else tail.data_ptr(),
                tail_rows=0 if tail is None else self._tail_rows(tail),
            )  # fmt: skip
        y, y_stride = self._out(out, accumulate, tokens)
        if out is None:
            out = y
        launch = self._make_launch(stream=raw_stream(self._index), halves=halves, plan=d.plan_at, buffer=d.at)
        if tail is None:
            tail_out, result = None, self._make_result(tokens=tokens, y=y.data_ptr(), stride=y_stride, accumulate=bool(accumulate))
        else:
            tail_out = torch.empty((tokens, self.top_k), dtype=torch.float32, device=self._device)
            result = self._result(tokens, y, y_stride, accumulate, tail_out)
        self.core.combine(launch, given, result)
        d.used = True
        if not halves & _core.RECV:
            c = DeviceCombining(d, out, accumulate, tail_out)
            c.y, c.y_stride, c.uses_weights = y, y_stride, weights is not None
            if self._in_pieces:
                c.inputs = given, expert_out, weights, tail
            return c
        if y is not out:
            out.copy_(y[:, : self._hidden])
        return out if tail_out is None else (out, tail_out)

    def _expert_rows(self, expert_out: torch.Tensor) -> tuple[int, int, int, torch.Tensor]:
        """Returns the address, stride and number of the rows that the kernels read, and their tensor."""
        try:
            key: Any = expert_out.shape, expert_out.is_contiguous(), expert_out.dtype, expert_out.device
            at = expert_out.data_ptr()
        except AttributeError:
            key, at = None, 1
        looks = self._known.get(key)
        if looks is not None and at % _ROW_ALIGN == 0:
            stride, count = looks
            return at, stride, count, expert_out
        self.checks.expert_rows(expert_out)
        rows, stride = self._rows_of(expert_out.reshape(-1, self._hidden) if self._padded else expert_out)
        if rows.data_ptr() == at and expert_out.is_contiguous():
            self._remember(key, (stride, rows.shape[0]))
        return rows.data_ptr(), stride, rows.shape[0], rows

    def _out(self, out: torch.Tensor | None, accumulate: bool, tokens: int) -> tuple[torch.Tensor, int]:
        """Returns what the kernels write for `out`, and its stride."""
        if out is None:
            if accumulate:
                raise Error("combine: accumulate=True needs out=")
            like = self._known.get(tokens)
            if like is None:
                like = self._one.expand(tokens, self._hidden)
                self._remember(tokens, like)
            return torch.empty_like(like), self._y_stride
        try:
            key: Any = tokens, out.shape, out.is_contiguous(), out.dtype, out.device
        except AttributeError:
            key = None
        if key in self._known and out.data_ptr() % _ROW_ALIGN == 0:
            return out, self._y_stride
        self.checks.out(out, accumulate, tokens)
        y, stride = self._rows_of(out)
        if y is out and stride == self._y_stride and out.is_contiguous():
            self._remember(key, stride)
        return y, stride

    def _tail_rows(self, tail: torch.Tensor) -> int:
        return tail.numel() // self.top_k if self._compact else tail.numel()

    def combine_recv(self, c: Combining) -> None:
        assert isinstance(c, DeviceCombining)
        d = c.dispatched
        assert isinstance(d, DeviceDispatched)
        self._check_generation("combine_recv", d)
        outputs = c.inputs[0] if c.inputs else self._expert_outputs(weighted=True, uses_weights=c.uses_weights)
        self.core.combine(self._launch(_core.RECV, d), outputs, self._result(d.tokens, c.y, c.y_stride, c.accumulate, c.tail))
        if c.y is not c.out:
            c.out.copy_(c.y[:, : self._hidden])
        c.done = True

    def _result(self, tokens: int, y: torch.Tensor, stride: int, accumulate: bool, tail: torch.Tensor | None) -> _cuda.Result:
        return self._make_result(
            tokens=tokens, y=y.data_ptr(), stride=stride, accumulate=bool(accumulate), has_tail=tail is not None,
            tail=0 if tail is None else tail.data_ptr(),
        )  # fmt: skip

    def release(self, d: Dispatched) -> None:
        assert isinstance(d, DeviceDispatched)
        self._check_generation("release", d)
        self.core.release(self._launch(_core.BOTH, d), d.tokens)
        d.used = True

    # ---- as tensors, for torch_ops -----------------------------------------------------------------------------------

    def tickets(self) -> Tickets:
        rows = self.parts[self._weights].shape
        words, plan = self._ticket_bytes // 4, (torch.uint8, self._plan_bytes)
        return Tickets(self.parts["x"].shape, self.parts, rows, words, plan, self.parts.get("scale"))

    def as_tensors(self, d: Dispatched) -> tuple[torch.Tensor, ...]:
        """Each has memory of its own if `d` was dispatched apart."""
        assert isinstance(d, DeviceDispatched)
        scale = torch.empty(0, device=self._device) if d.scale is None else d.scale
        return d.x, scale, getattr(d, self._weights), d.buffer[: self._ticket_bytes].view(torch.float32)

    def plan_ticket(self, plan: Plan) -> torch.Tensor:
        """Its memory is its own: torch takes a change of other tensors in it for one of the plan."""
        assert isinstance(plan, DevicePlan)
        return plan.buffer.clone() if plan.buffer.untyped_storage().nbytes() > self._plan_bytes else plan.buffer

    def of_plan_ticket(self, owner: Owner, ticket: torch.Tensor, tokens: int) -> DevicePlan:
        return DevicePlan(owner, self, self.core.generation, ticket, tokens, False)

    def of_ticket(self, owner: Owner, ticket: torch.Tensor, plan: torch.Tensor, tokens: int) -> Dispatched:
        known = self.of_plan_ticket(owner, plan, tokens)
        d = DeviceDispatched(owner, self, known.generation, ticket.view(torch.uint8), known, tokens)
        d.received = True
        return d


class DeviceCombining(Combining):
    y: torch.Tensor  # the kernels' output: out, or rows that start where they want them
    y_stride: int
    uses_weights: bool
    inputs: tuple[Any, ...] = ()
    """As of a dispatch."""
