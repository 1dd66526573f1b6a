"""The CUDA device of an AllToAll: everything is launched on the caller's current stream, nothing synchronises."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from . import _core
from ._halves import RECV
from ._parts import Links, Part
from .errors import Error
from .handles import Combining, Dispatched, Plan
from .layouts import Compact, Padded
from .wire import Wire

if TYPE_CHECKING:
    from . import _cuda
    from .all_to_all import AllToAll

_ROW_ALIGN = 16  # bytes: what a kernel's vectors want of every row
_MOST_KNOWN = 4096  # looks of arguments


def built() -> Any:
    """pplx_comm._cuda, or an Error that says why there is none."""
    try:
        from . import _cuda
    except ImportError as problem:
        raise Error(f"device='cuda': this build has no CUDA module ({problem}); build with an nvcc at hand") from None
    return _cuda


def cuda_module() -> Any:
    """The same where there is a GPU."""
    if built().device_count() == 0:
        raise Error("device='cuda': this process sees no GPU")
    return built()


def device_index(device: torch.device) -> int:
    """The GPU that `device` names; "cuda" alone is torch's current one."""
    count = cuda_module().device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise Error(f"device='cuda:{index}': this process sees {count} GPUs")
    return int(index)


def allocate(config: _core.Config, device: int, what: str) -> _cuda.SharedMemory:
    memory = cuda_module().SharedMemory(device, config.shared_bytes, what)
    with torch.cuda.device(device):  # which need not be the current one; only it can write there
        built().leave_blank(config, memory)
    return memory


def describe(memory: _cuda.SharedMemory) -> dict[str, Any]:
    """What a peer needs besides the descriptor, if there is one."""
    return {"nbytes": memory.nbytes, "ipc": None if memory.has_descriptor else memory.ipc_handle().hex()}


def open_peer(device: int, description: dict[str, Any], fds: list[int]) -> _cuda.SharedMemory:
    shared = cuda_module().SharedMemory
    if description["ipc"] is not None:
        return shared.from_ipc(device, bytes.fromhex(description["ipc"]), description["nbytes"])
    return shared.from_descriptor(device, fds[0], description["nbytes"])


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _raw_stream(device: int) -> int:
    """torch.cuda.current_stream() makes an object, ten times as slow."""
    return torch._C._cuda_getCurrentRawStream(device)


class DevicePlan(Plan):
    """A plan in device memory, where the kernel that makes it keeps the weights, too."""

    def __init__(self, gpu: Gpu, buffer: torch.Tensor, tokens: int, weighted: bool, weights: torch.Tensor | None = None) -> None:
        self._owner, self._gpu, self._generation = gpu._owner, gpu, gpu._core.generation
        self._buffer, self._tokens, self._weighted, self._weights = buffer, tokens, weighted, weights

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def topk_weights(self) -> torch.Tensor | None:
        if self._weights is None and self._weighted:
            shape = self._tokens, self._owner.top_k
            self._weights = Part.contiguous(self._gpu.plan_layout["weights"], torch.float32, shape).of(self._buffer)
        return self._weights

    def _with_weights(self, weights: torch.Tensor | None) -> Plan:
        assert weights is not None
        return DevicePlan(self._gpu, self._buffer, self._tokens, True, weights.detach().clone())

    def rows(self, rank: int) -> int:
        """Waits for the dispatch that makes the plan."""
        return int(self._buffer.view(torch.int32)[self._gpu.plan_layout["rows"] // 4 + rank])


class DeviceDispatched(Dispatched):
    """Its tensors are views of one buffer, made when they are asked for."""

    plan: DevicePlan
    _inputs: tuple[Any, ...] = ()
    _used = False

    def __init__(self, owner: AllToAll, gpu: Gpu, plan: DevicePlan, step: int, buffer: torch.Tensor, received: Any) -> None:
        self._owner, self._gpu, self.plan, self.step = owner, gpu, plan, step
        self._buffer, self._received = buffer, received

    def __getattr__(self, name: str) -> Any:
        gpu = self.__dict__.get("_gpu")
        if gpu is None or (name not in gpu.parts and name not in gpu.absent):
            raise AttributeError(name)
        view = None if name in gpu.absent else gpu.parts[name].of(self._buffer)
        self.__dict__[name] = view
        return view


class Gpu:
    """The phases of one AllToAll as launches."""

    def __init__(self, owner: AllToAll, core: _cuda.Exchange, device: torch.device) -> None:
        self._owner = owner
        self._core = core
        self._device = device
        config = owner._config
        self._config = config
        layout = built().buffer_layout(config)
        self._buffer_bytes: int = layout["bytes"]
        self._weights = "topk_weights" if "topk_weights" in layout else "weights"
        self._link_bytes = layout[self._weights]
        self.plan_layout: dict[str, int] = built().plan_layout(config)
        self._plan_bytes = self.plan_layout["bytes"]
        self._index = device.index
        self._padded = isinstance(owner.layout, Padded)
        self._y_stride = owner.hidden * owner.dtype.itemsize
        self._scale_size = owner.wire.scale_dtype.itemsize
        self._known: dict[Any, Any] = {}
        self._rows: int = layout["rows"]
        self.parts = self._parts(layout)
        optional = ("scale", "offsets", "weights", "topk_ids", "topk_weights", "num_rows")
        self.absent = {name for name in optional if name not in self.parts}  # what this layout and wire do not have

    def close(self) -> None:
        del self._core

    def drain(self, seconds: float) -> None:
        """Stops the kernels under way, and waits for them; also for graph replays on the current stream."""
        self._core.drain(_raw_stream(self._index), seconds)

    def _check_generation(self, call: str, d: DeviceDispatched) -> None:
        if d.plan._generation != self._core.generation:
            raise Error(f"{call}: this dispatch is from before reset()")

    def _parts(self, layout: dict[str, int]) -> dict[str, Part]:
        config, owner = self._config, self._owner
        experts, top_k, scales = config.local_experts, owner.top_k, config.scales_per_row
        padded = isinstance(owner.layout, Padded)
        rows = (experts, config.max_per_expert) if padded else (self._rows,)
        payload = owner.dtype if owner.wire is Wire.NATIVE else torch.float8_e4m3fn
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "x": (payload, (*rows, owner.hidden)),
            "counts": (torch.int32, (experts,)),
            "offsets": (torch.int32, (experts + 1,)),
            "weights": (torch.float32, rows),
            "src_rank": (torch.int32, rows),
            "src_token": (torch.int32, rows),
            "topk_ids": (torch.int32, (*rows, top_k)),
            "topk_weights": (torch.float32, (*rows, top_k)),
            "num_rows": (torch.int32, (1,)),
        }
        parts = {}
        for name, (dtype, shape) in shapes.items():
            if name in layout:
                parts[name] = Part.contiguous(layout[name], dtype, shape)
        if "scale" in layout:
            dtype = owner.wire.scale_dtype
            aligned = _ROW_ALIGN // dtype.itemsize
            columns = -(-rows[-1] // aligned) * aligned
            strides = (1, columns) if config.scale_tma else (scales, 1)
            if padded:
                strides = ((columns if config.scale_tma else rows[-1]) * scales, *strides)
            parts["scale"] = Part(layout["scale"], dtype, (*rows, scales), strides)
        return parts

    @staticmethod
    def _rows_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The tensor, or a copy whose rows start where kernels want them, and its stride in bytes. `tensor` is [rows, columns]."""
        size = tensor.element_size()
        stride = tensor.stride(0) * size if tensor.shape[0] > 1 else -(-tensor.shape[1] * size // _ROW_ALIGN) * _ROW_ALIGN
        if stride % _ROW_ALIGN == 0 and tensor.data_ptr() % _ROW_ALIGN == 0:
            return tensor, stride
        columns = -(-tensor.shape[1] * size // _ROW_ALIGN) * _ROW_ALIGN // size
        copy = torch.empty((tensor.shape[0], columns), dtype=tensor.dtype, device=tensor.device)
        copy[:, : tensor.shape[1]] = tensor
        return copy, columns * size

    # ---- dispatch ----------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        halves: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        x_scale: torch.Tensor | None,
        plan: Plan | None,
        *,
        apart: bool = False,
        zeroed: bool = False,
    ) -> Dispatched:
        """apart: the rows have memory of their own. zeroed, with it: those of d.x and d.weights that no token fills are zero."""
        if plan is None:
            x, ids, weights, looks = self._inputs(x, topk_ids, topk_weights, x_scale)
            tokens, stride, wide = looks
            device_plan = DevicePlan(
                self, torch.empty(self._plan_bytes, dtype=torch.uint8, device=self._device), tokens, weights is not None
            )
            # Without tokens any address says that the plan is to be made.
            ids_at = ids.data_ptr() or device_plan._buffer.data_ptr()
        else:
            checks = self._owner._checks
            tokens, ids_at, wide = checks.tokens(x, x_scale), 0, False
            known = checks.plan(plan, self._core.generation, topk_ids, topk_weights, tokens)
            assert isinstance(known, DevicePlan)
            device_plan, weights = known, known.topk_weights
            x, stride = self._rows_of(x)
        rows = self._rows_apart(zeroed) if apart else None
        buffer = torch.empty(self._buffer_bytes if rows is None else self._link_bytes, dtype=torch.uint8, device=self._device)
        size = self._scale_size
        scales = (0, 0, 0) if x_scale is None else (x_scale.data_ptr(), size * x_scale.stride(0), size * x_scale.stride(1))
        step = self._core.dispatch(
            _raw_stream(self._index), halves, tokens, x.data_ptr(), stride, ids_at, wide,
            0 if weights is None else weights.data_ptr(), *scales, device_plan._buffer.data_ptr(), buffer.data_ptr(),
            *((0, 0, 0) if rows is None else self._addresses(rows)),
        )  # fmt: skip
        d = DeviceDispatched(self._owner, self, device_plan, step, buffer, self._core if halves & RECV else None)
        if rows is not None:
            d.__dict__.update(rows)
        return d

    def _rows_apart(self, zeroed: bool) -> dict[str, torch.Tensor]:
        rows = {}
        for name in ("x", "scale", self._weights):
            if name in self.parts:
                _, dtype, shape, strides = self.parts[name]
                rows[name] = torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
                if zeroed:
                    rows[name].zero_()
        return rows

    def _addresses(self, rows: dict[str, torch.Tensor]) -> tuple[int, int, int]:
        return rows["x"].data_ptr(), rows["scale"].data_ptr() if "scale" in rows else 0, rows[self._weights].data_ptr()

    def _inputs(
        self, x: torch.Tensor, topk_ids: torch.Tensor | None, topk_weights: torch.Tensor | None, x_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[int, int, bool]]:
        """What kernels take; tokens, stride of x, and whether ids are wide. Who looks like earlier inputs is not checked again."""
        ids, weights = topk_ids, topk_weights
        try:
            # Strides take longer to get and to hash.
            key: Any = (
                x.shape, x.is_contiguous(), x.dtype, x.device,
                ids.shape, ids.is_contiguous(), ids.dtype, ids.device,  # type: ignore[union-attr]
            )  # fmt: skip
            if weights is not None:
                key = *key, weights.shape, weights.is_contiguous(), weights.dtype, weights.device
        except AttributeError:
            key = None  # what is no tensor, the checks will name
        looks = self._known.get(key) if x_scale is None else None
        if looks is not None and x.data_ptr() % _ROW_ALIGN == 0:
            return x, ids, weights, looks  # type: ignore[return-value]
        checks = self._owner._checks
        tokens = checks.tokens(x, x_scale)
        ids, weights = checks.ids(topk_ids, tokens), checks.weights("topk_weights", topk_weights, tokens)
        rows, stride = self._rows_of(x)
        looks = tokens, stride, ids.dtype == torch.int64
        if x_scale is None and rows is x and x.is_contiguous() and ids is topk_ids and weights is topk_weights:
            self._remember(key, looks)
        return rows, ids, weights, looks

    def _remember(self, key: Any, looks: Any) -> None:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = looks

    def dispatch_recv(self, d: Dispatched) -> None:
        assert isinstance(d, DeviceDispatched)
        self._check_generation("dispatch_recv", d)
        plan = d.plan
        self._core.dispatch(
            _raw_stream(self._index), RECV, plan._tokens, 0, 0, 0, False, 0, 0, 0, 0, plan._buffer.data_ptr(), d._buffer.data_ptr(),
            0, 0, 0,
        )  # fmt: skip
        d._received = self._core

    # ---- combine -----------------------------------------------------------------------------------------------------

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
    ) -> Combining:
        owner, checks = self._owner, self._owner._checks
        if d._received is None or d._used:
            checks.received(d)
        assert isinstance(d, DeviceDispatched)
        self._check_generation("combine", d)
        plan = d.plan
        tokens = plan._tokens
        try:
            key: Any = expert_out.shape, expert_out.is_contiguous(), expert_out.dtype, expert_out.device
            at = expert_out.data_ptr()
        except AttributeError:
            key, at = None, 1
        looks = self._known.get(key)
        if looks is not None and at % _ROW_ALIGN == 0:
            rows, (stride, count) = expert_out, looks
        else:
            checks.expert_rows(expert_out)
            rows, stride = self._rows_of(expert_out.reshape(-1, owner.hidden) if self._padded else expert_out)
            count = rows.shape[0]
            if rows.data_ptr() == at and expert_out.is_contiguous():
                self._remember(key, (stride, count))
            at = rows.data_ptr()
        if weights is not None:
            weights = checks.combine_weights(weights, weighted, tokens)
        tail_out = None
        if tail is not None:
            tail = checks.tail(tail)
            tail_out = torch.empty((tokens, owner.top_k), dtype=torch.float32, device=self._device)
        if out is None:
            if accumulate:
                raise Error("combine: accumulate=True needs out=")
            y = out = torch.empty((tokens, owner.hidden), dtype=owner.dtype, device=self._device)
            y_stride = self._y_stride
        else:
            checks.out(out, accumulate, tokens)
            y, y_stride = self._rows_of(out)
        c = DeviceCombining(owner, d, out, accumulate, tail_out)
        c._y, c._y_stride, c._uses_weights = y, y_stride, weights is not None
        d._used = True
        self._core.combine(
            _raw_stream(self._index), halves, tokens, at, stride, count, weighted, weights is not None,
            0 if weights is None else weights.data_ptr(),
            *((False, 0, 0) if tail is None else (True, tail.data_ptr(), self._tail_rows(tail))),
            y.data_ptr(), y_stride, accumulate, c._tail_address, plan._buffer.data_ptr(), d._buffer.data_ptr(),
        )  # fmt: skip
        if halves & RECV:
            c._finish()
        return c

    def _tail_rows(self, tail: torch.Tensor) -> int:
        return tail.numel() // self._owner.top_k if isinstance(self._owner.layout, Compact) else tail.numel()

    def combine_recv(self, c: Combining) -> None:
        assert isinstance(c, DeviceCombining)
        d = c._dispatched
        assert isinstance(d, DeviceDispatched)
        self._check_generation("combine_recv", d)
        self._core.combine(
            _raw_stream(self._index), RECV, d.plan._tokens, 0, 0, 0, True, c._uses_weights, 0, c._tail is not None, 0, 0,
            c._y.data_ptr(), c._y_stride, c._accumulate, c._tail_address, d.plan._buffer.data_ptr(), d._buffer.data_ptr(),
        )  # fmt: skip
        c._finish()

    def release(self, d: Dispatched) -> None:
        assert isinstance(d, DeviceDispatched)
        self._check_generation("release", d)
        d._used = True
        self._core.release(_raw_stream(self._index), d.plan.tokens, d.plan._buffer.data_ptr(), d._buffer.data_ptr())

    # ---- as tensors, for _ops.py -----------------------------------------------------------------------------------------

    def links(self) -> Links:
        rows = self.parts[self._weights].shape
        words, plan = self._link_bytes // 4, (torch.uint8, self._plan_bytes)
        return Links(self.parts["x"].shape, self.parts, rows, words, plan, self.parts.get("scale"))

    def linked(self, d: Dispatched) -> tuple[torch.Tensor, ...]:
        """x, scale, weights and link: each its own memory, if `d` was dispatched apart."""
        assert isinstance(d, DeviceDispatched)
        scale = torch.empty(0, device=self._device) if d.scale is None else d.scale
        return d.x, scale, getattr(d, self._weights), d._buffer[: self._link_bytes].view(torch.float32)

    def plan_link(self, plan: Plan) -> torch.Tensor:
        assert isinstance(plan, DevicePlan)
        return plan._buffer

    def of_plan_link(self, link: torch.Tensor, tokens: int) -> DevicePlan:
        return DevicePlan(self, link, tokens, False)

    def of_link(self, link: torch.Tensor, plan: torch.Tensor, tokens: int) -> Dispatched:
        return DeviceDispatched(self._owner, self, self.of_plan_link(plan, tokens), -1, link.view(torch.uint8), self._core)


class DeviceCombining(Combining):
    _y: torch.Tensor  # what the kernels write: _out, or rows that start where they want them
    _y_stride: int
    _uses_weights: bool

    @property
    def _tail_address(self) -> int:
        return 0 if self._tail is None else self._tail.data_ptr()

    def _finish(self) -> None:
        if self._y is not self._out:
            self._out.copy_(self._y[:, : self._out.shape[1]])
        self._done = True
