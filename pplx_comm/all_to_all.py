"""The two collectives of a Mixture-of-Experts layer."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import _core
from ._carriers import named_nics
from ._failure import Failure
from ._gpu import BOTH, SEND, Gpu, device_index
from ._outputs import Outputs
from ._reset import reset
from ._setup import Request, wire_up
from .errors import Error, PeerError
from .handles import Combining, Dispatched, Plan
from .layouts import Compact, Padded, Ragged
from .wire import Wire

if TYPE_CHECKING:
    from .communicator import Communicator

log = logging.getLogger("pplx_comm")

_DTYPES = {
    torch.bfloat16: _core.Dtype.BFLOAT16,
    torch.float16: _core.Dtype.FLOAT16,
    torch.float32: _core.Dtype.FLOAT32,
}
_WORST_CASE_LIMIT = 1 << 30  # bytes of d.x that the library takes without being asked
_CLOSE_TIMEOUT = 1.0  # seconds for what is still in the network


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Error(f"{name} must be an integer, not {value!r}")
    if not low <= value <= high:
        raise Error(f"{name}={value} must be {low} to {high}")
    return value


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB ({nbytes:,} bytes)"


def _config(
    world_size: int,
    rank: int,
    *,
    num_experts: int,
    top_k: int,
    hidden: int,
    max_tokens_per_rank: int,
    dtype: torch.dtype,
    wire: Wire | str,
    layout: Ragged | Padded | Compact,
    in_flight: int,
    scale_layout: str,
) -> _core.Config:
    """The plain struct that the C++ side works from; says what is wrong with the arguments."""
    c = _core.Config()
    c.world, c.rank = world_size, rank
    c.num_experts = _integer("num_experts", num_experts, 1, 1 << 20)
    c.top_k = _integer("top_k", top_k, 1, 16)
    c.hidden = _integer("hidden", hidden, 1, 1 << 20)
    c.max_tokens = _integer("max_tokens_per_rank", max_tokens_per_rank, 1, 1 << 20)
    c.in_flight = _integer("in_flight", in_flight, 1, 8)
    if dtype not in _DTYPES:
        raise Error(f"dtype={dtype} is not supported: torch.bfloat16, torch.float16 and torch.float32 are")
    c.dtype = _DTYPES[dtype]
    if hidden * dtype.itemsize % 16:
        raise Error(f"hidden={hidden} of {dtype} is {hidden * dtype.itemsize} bytes: a row must be a multiple of 16 bytes")
    c.wire = _core.Wire.__members__[Wire.of(wire).name]
    if scale_layout not in ("row", "tma"):
        raise Error(f"scale_layout={scale_layout!r} must be 'row' or 'tma'")
    c.scale_tma = scale_layout == "tma"
    _fill_layout(c, layout, c.payload_bytes)
    first_step = os.environ.get("PPLX_COMM_FIRST_STEP", "1")
    if not first_step.isdigit():
        raise Error(f"PPLX_COMM_FIRST_STEP={first_step!r} must be a number")
    c.first_step = int(first_step) & 0xFFFFFFFF
    if c.invalid:
        raise Error(c.invalid)
    return c


def _fill_layout(c: _core.Config, layout: Ragged | Padded | Compact, row_bytes: int) -> None:
    experts = c.experts_per_rank
    tokens = c.world * c.max_tokens
    if isinstance(layout, Ragged):
        c.layout = _core.LayoutKind.RAGGED
        c.align, c.zero_pad = layout.align, layout.zero_pad
        choices = tokens * c.top_k
        worst = choices + min(experts, choices) * (layout.align - 1)
        worst = (worst + layout.align - 1) // layout.align * layout.align
        if layout.max_rows is None and worst * row_bytes > _WORST_CASE_LIMIT:
            even = -(-tokens * c.top_k // c.world) + experts * (layout.align - 1)
            raise Error(
                f"the worst case, all tokens to one rank, needs {worst} rows, {_gib(worst * row_bytes)}, above the "
                f"1 GiB that is taken without asking; an even load needs about {even} rows, {_gib(even * row_bytes)}. Say which: "
                f"layout=pc.Ragged(align={layout.align}, max_rows=...)"
            )
        c.max_rows = layout.max_rows if layout.max_rows is not None else worst
    elif isinstance(layout, Padded):
        c.layout = _core.LayoutKind.PADDED
        c.max_per_expert = layout.max_tokens_per_expert if layout.max_tokens_per_expert is not None else tokens
        rows = experts * c.max_per_expert
        if layout.max_tokens_per_expert is None and rows * row_bytes > _WORST_CASE_LIMIT:
            raise Error(
                f"the worst case, every token to each expert, needs {rows} rows, {_gib(rows * row_bytes)}, above the "
                "1 GiB that is taken without asking. Say how many: layout=pc.Padded(max_tokens_per_expert=...)"
            )
    elif isinstance(layout, Compact):
        c.layout = _core.LayoutKind.COMPACT
        c.max_rows = tokens
    else:
        raise Error(f"layout={layout!r} must be pc.Ragged(...), pc.Padded(...) or pc.Compact()")


class AllToAll:
    """Dispatch and combine over the ranks of a Communicator. Making one is collective; one serves all layers of a shape.

    num_experts: physical experts of all ranks together; expert e lives on rank e // ceil(num_experts / world_size).
    top_k: choices per token, 1 to 16.
    hidden: elements of a token; a row must be a multiple of 16 bytes.
    max_tokens_per_rank: the most tokens that any rank dispatches in a step.
    dtype: what dispatch takes and combine returns: bfloat16, float16 or float32.
    wire: what travels in dispatch: "native", or e4m3 codes with scales: "fp8", "fp8_ue8m0", "mxfp8"; see Wire.
    layout: what d.x looks like: Ragged(align=128), Padded() or Compact().
    device: "cpu", the default, or "cuda": torch's current GPU, or "cuda:1". Several ranks may share a GPU; all must be of one node.
    transport: "auto" maps memory inside a node and uses the proxy between nodes; "mapped" or "proxy" insists.
    provider: the libfabric provider of the proxy; None takes the best there is.
    nics: names of the NICs (or interfaces, for tcp) of this rank's proxy, a list or "a,b"; an endpoint each. None takes those of
        PPLX_COMM_NICS, else the nearest.
    node_size: overrides who shares a node: ranks 0 to node_size - 1 do, and so on.
    in_flight: steps that may be open at once: 1, 2, 4 or 8.
    num_sms: bounds the grid of CUDA kernels; the CPU device has PPLX_COMM_THREADS.
    timeout: seconds to wait for a slow peer; the first step gets three times as long. A dead peer is noticed at once.
    scale_layout: of d.scale: "row", or "tma" for column-major scales with 16-byte aligned columns. x_scale may have any strides.
    """

    _number: int

    def __init__(
        self,
        comm: Communicator,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        wire: Wire | str = Wire.NATIVE,
        layout: Ragged | Padded | Compact | None = None,
        device: str | torch.device | None = None,
        transport: str = "auto",
        provider: str | None = None,
        nics: str | Sequence[str] | None = None,
        node_size: int | None = None,
        in_flight: int = 1,
        num_sms: int | None = None,
        timeout: float = 100.0,
        scale_layout: str = "row",
    ) -> None:
        self._closed = False
        self._failed: BaseException | None = None
        self._lock = threading.Lock()
        self._failure_lock = threading.Lock()
        self._pid = os.getpid()
        self._comm = comm
        layout = Ragged() if layout is None else layout
        config, error = _core.Config(), None
        names: tuple[str, ...] = ()
        where = torch.device("cpu")
        try:
            names = named_nics(nics)
            where = torch.device("cpu" if device is None else device)
            if where.type not in ("cpu", "cuda"):
                raise Error(f"device={str(device)!r} must be 'cpu' or 'cuda'")
            if where.type == "cuda":
                where = torch.device("cuda", device_index(where))
            if transport == "nvshmem":
                raise Error("transport='nvshmem' is not built yet: 'auto', 'mapped' and 'proxy' are")
            if transport not in ("auto", "mapped", "proxy"):
                raise Error(f"transport={transport!r} must be 'auto', 'mapped' or 'proxy'")
            if not (isinstance(timeout, (int, float)) and math.isfinite(timeout) and timeout > 0):
                raise Error(f"timeout={timeout!r} must be a positive number of seconds")
            if node_size is not None:
                _integer("node_size", node_size, 1, comm.world_size)
            if num_sms is not None:
                _integer("num_sms", num_sms, 1, 1 << 20)
            config = _config(
                comm.world_size, comm.rank, num_experts=num_experts, top_k=top_k, hidden=hidden,
                max_tokens_per_rank=max_tokens_per_rank, dtype=dtype, wire=wire, layout=layout, in_flight=in_flight,
                scale_layout=scale_layout,
            )  # fmt: skip
            wire = Wire.of(wire)
        except (Error, TypeError, ValueError, RuntimeError) as reason:  # torch's own words for a device that is none
            error = str(reason)
        compared = {
            "num_experts": num_experts, "top_k": top_k, "hidden": hidden, "max_tokens_per_rank": max_tokens_per_rank,
            "dtype": str(dtype), "wire": wire.value if isinstance(wire, Wire) else repr(wire), "layout": repr(layout),
            "transport": transport, "device": where.type,
            "provider": provider,
            "node_size": node_size, "in_flight": in_flight, "timeout": timeout, "scale_layout": scale_layout,
            "first_step": config.first_step,
        }  # fmt: skip
        compared = {
            name: value if isinstance(value, (int, float, str, type(None))) else repr(value) for name, value in compared.items()
        }
        begun = time.monotonic()
        self._request = Request(
            config, compared, transport, provider, node_size, 100.0 if error else float(timeout), error, nics=names,
            gpu=where.index, num_sms=num_sms or 0,
        )  # fmt: skip
        self._wiring, self._number = wire_up(comm, self._request, {a2a._number for a2a in _live(comm)})
        self.dtype, self.wire, self.layout = dtype, Wire.of(wire), layout
        self.hidden, self.top_k, self.num_experts = hidden, top_k, num_experts
        self.max_tokens_per_rank = max_tokens_per_rank
        self.num_local_experts: int = config.local_experts
        self._config = config
        self.device = where
        self._core = self._wiring.exchange
        self._gpu = Gpu(self, self._core, where) if where.type == "cuda" else None
        self._outputs = Outputs(config, layout, dtype, self.wire)
        self._alive = [bool(alive) for alive in comm._peek_alive]
        _live(comm).add(self)
        self._forget_failures = comm._on_failure(self._on_failure)
        if comm.rank == 0:
            self._log_topology(time.monotonic() - begun)

    def _log_topology(self, seconds: float) -> None:
        w = self._wiring
        groups = [f"{len(w.mapped)} mapped"] if w.mapped else []
        if w.remote and w.carrier:
            groups.append(f"{len(w.remote)} by proxy over {w.carrier.name}")
        log.info(
            "AllToAll %d: %d ranks, peers of rank 0: %s; %d experts, top-%d, hidden %d, %s, wire %s, %s; "
            "%.1f MiB shared per rank; ready in %.2f s",
            self._number, self._comm.world_size, " and ".join(groups) or "none", self.num_experts, self.top_k,
            self.hidden,
            str(self.dtype).removeprefix("torch."), self.wire.value, self.layout, self._config.heap_bytes / 2**20, seconds,
        )  # fmt: skip

    # ---- dispatch ----------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        x_scale: torch.Tensor | None = None,
        plan: Plan | None = None,
        async_op: bool = False,
    ) -> Dispatched:
        """Sends every token to the ranks that own its experts.

        x: [tokens, hidden] of this AllToAll's dtype, or float8_e4m3fn together with x_scale.
        topk_ids: int32 or int64 [tokens, top_k]; -1 drops a choice, a repeated id is two choices.
        topk_weights: float32 [tokens, top_k]; None means ones, or with plan= that plan's.
        x_scale: x is quantised already, and these are its scales as d.scale has them on this wire: float32 [tokens,
            ceil(hidden / 128)], with FP8_UE8M0 powers of two; with MXFP8 uint8 (or float8_e8m0fnu) [tokens, ceil(hidden / 32)].
            By row, by column ("tma") or with any other strides.
        plan: the plan of an earlier dispatch, in place of topk_ids: the same routing for other tokens, as a backward pass needs it.
        async_op: returns after the send half; d.wait() is the receive half.
        """
        if self._gpu is not None:
            return self._gpu.dispatch(SEND if async_op else BOTH, x, topk_ids, topk_weights, x_scale, plan)
        d = self._dispatch_send(x, topk_ids, topk_weights, x_scale, plan, keep_own_rows=not async_op)
        return d if async_op else self.dispatch_recv(d)

    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        x_scale: torch.Tensor | None = None,
        plan: Plan | None = None,
    ) -> Dispatched:
        """The send half of dispatch. When it returns, x may be overwritten."""
        if self._gpu is not None:
            return self._gpu.dispatch(SEND, x, topk_ids, topk_weights, x_scale, plan)
        return self._dispatch_send(x, topk_ids, topk_weights, x_scale, plan, keep_own_rows=False)

    def _dispatch_send(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        x_scale: torch.Tensor | None,
        plan: Plan | None,
        keep_own_rows: bool,
    ) -> Dispatched:
        self._check_usable("dispatch", notices=True)
        tokens = self._check_tokens(x, x_scale)
        if plan is None:
            if topk_ids is None:
                raise Error("dispatch: give topk_ids, or plan= of an earlier dispatch")
            plan = self._make_plan(topk_ids, self._check_weights("topk_weights", topk_weights, tokens), tokens)
        else:
            plan = self._check_plan(plan, topk_ids, topk_weights, tokens)
        weights = plan.topk_weights
        size = self.wire.scale_dtype.itemsize
        scales = (0, 0, 0) if x_scale is None else (x_scale.data_ptr(), size * x_scale.stride(0), size * x_scale.stride(1))
        with self._failing("dispatch_send"):
            step = self._core.dispatch_send(
                plan._core,
                x.data_ptr(),
                x.stride(0) * x.element_size(),
                *scales,
                0 if weights is None else weights.data_ptr(),
                keep_own_rows,
            )
        return Dispatched(self, plan, step, (x, weights))

    def dispatch_recv(self, d: Dispatched) -> Dispatched:
        """The receive half of dispatch: fills d's tensors."""
        self._check_handle("dispatch_recv", d, Dispatched)
        with self._lock:
            if d._received is not None:
                return d
            self._check_usable("dispatch_recv")
            if self._gpu is not None:
                return self._gpu.dispatch_recv(d)
            arguments = self._outputs.allocate(d)
            with self._failing("dispatch_recv"):
                d._received = self._core.dispatch_recv(d.step, **arguments)
            d._inputs = ()
        return d

    # ---- combine -----------------------------------------------------------------------------------------------------

    def combine(
        self,
        expert_out: torch.Tensor,
        d: Dispatched,
        *,
        weights: torch.Tensor | None = None,
        weighted: bool = True,
        tail: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        async_op: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | Combining:
        """Brings the expert outputs back: y[t] = sum over t's choices of weight * expert_out.

        expert_out: this AllToAll's dtype, shaped like d.x (Ragged and Compact may leave out unused rows at the end).
        weights: float32 [tokens, top_k] of this rank's tokens, in place of the dispatch's; on all ranks or on none.
        weighted: False adds without weights.
        tail: float32, one number per received choice, shaped like d.weights (Compact: like d.topk_weights; numbers of choices that
            live elsewhere are ignored); unused rows at the end may be left out; on all ranks or on none. Each rides behind its row
            and comes back as it is to its token: combine then returns (y, [tokens, top_k]), in which dropped choices have 0.
        out: where to write, [tokens, hidden]; accumulate adds to what is there.
        async_op: returns after the send half; .wait() returns the result.

        The backward pass of y = combine(out, d) where out = experts(d.x), with gradients dY of y:
            g = dispatch(dY, plan=d.plan); d_out = g.weights[:, None] * g.x; dw = (g.x * out).sum(1); dX = experts' backward(d_out)
            dx, dw = combine(dX, g, weighted=False, tail=dw)
        """
        if self._gpu is not None:
            self._check_combine(d)
            c = self._gpu.combine(SEND if async_op else BOTH, expert_out, d, weights, weighted, tail, out, accumulate)
            return c if async_op else c._result
        c = self.combine_send(expert_out, d, weights=weights, weighted=weighted, tail=tail, out=out, accumulate=accumulate)
        return c if async_op else self.combine_recv(c)

    def combine_send(
        self,
        expert_out: torch.Tensor,
        d: Dispatched,
        *,
        weights: torch.Tensor | None = None,
        weighted: bool = True,
        tail: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> Combining:
        """The send half of combine. When it returns, expert_out may be overwritten."""
        self._check_combine(d)
        if self._gpu is not None:
            return self._gpu.combine(SEND, expert_out, d, weights, weighted, tail, out, accumulate)
        received = d._require_received("combine")
        if d._used:
            raise Error("combine: this dispatch was combined or released already; a step is combined once")
        stride = self._check_expert_out(expert_out, received)
        weights = self._check_combine_weights(weights, weighted, d.plan.tokens)
        tail = self._check_tail(tail, received)
        out = self._check_out(out, accumulate, d.plan.tokens)
        tail_out = None if tail is None else self._outputs.tensor((d.plan.tokens, self.top_k), torch.float32)
        d._used = True
        with self._failing("combine_send"):
            self._core.combine_send(
                d.step, received, expert_out.data_ptr(), stride, weighted, weights is not None,
                0 if weights is None else weights.data_ptr(), d.plan._core,
                tail is not None, 0 if tail is None else tail.data_ptr(),
            )  # fmt: skip
        return Combining(self, d, out, accumulate, tail_out)

    def combine_recv(self, c: Combining) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The receive half of combine."""
        self._check_handle("combine_recv", c, Combining)
        with self._lock:
            if not c._done:
                self._check_usable("combine_recv")
                if self._gpu is not None:
                    return self._gpu.combine_recv(c)
                with self._failing("combine_recv"):
                    self._core.combine_recv(
                        c._dispatched.step, c._out.data_ptr(), c._out.stride(0) * c._out.element_size(), c._accumulate,
                        0 if c._tail is None else c._tail.data_ptr(),
                    )  # fmt: skip
                c._done = True
        return c._result

    def _release(self, d: Dispatched) -> None:
        self._check_handle("release", d, Dispatched)
        if d._used:
            raise Error("release: this dispatch was combined or released already")
        self.dispatch_recv(d)
        self._check_usable("release")
        if self._gpu is not None:
            self._gpu.release(d)
            return
        d._used = True
        with self._failing("release"):
            self._core.release(d.step)

    # ---- checks: all before anything is sent -------------------------------------------------------------------------

    def _check_combine(self, d: Dispatched) -> None:
        self._check_handle("combine", d, Dispatched)
        self._check_usable("combine")

    def _check_usable(self, call: str, notices: bool = False) -> None:
        if self._closed:
            raise Error(f"{call}: this AllToAll is closed")
        if os.getpid() != self._pid:
            raise Error(f"{call}: this AllToAll belongs to process {self._pid}, of which this one was forked; make another here")
        if notices:
            self._raise_failure()
            self._core.raise_notice()

    def _raise_failure(self) -> None:
        with self._failing("check"):
            self._core.raise_failure()

    def _check_handle(self, call: str, handle: Dispatched | Combining, kind: type[Dispatched] | type[Combining]) -> None:
        if not isinstance(handle, kind):
            wanted = "what dispatch returned" if kind is Dispatched else "what combine_send returned"
            raise Error(f"{call} takes {wanted}, not {type(handle).__name__}")
        if handle._owner is not self:
            raise Error(f"{call}: this handle belongs to another AllToAll")

    def _check_tokens(self, x: torch.Tensor, x_scale: torch.Tensor | None) -> int:
        if not isinstance(x, torch.Tensor):
            raise Error(f"dispatch: x must be a tensor, not {type(x).__name__}")
        wanted = self.dtype if x_scale is None else torch.float8_e4m3fn
        if x_scale is not None and not self.wire.quantised:
            raise Error("dispatch: x_scale= needs wire='fp8', 'fp8_ue8m0' or 'mxfp8'")
        if x.dtype != wanted:
            hint = " (float8_e4m3fn goes with x_scale=)" if x.dtype == torch.float8_e4m3fn else ""
            raise Error(f"dispatch: x is {x.dtype}, this AllToAll takes {wanted}{hint}")
        self._check_tensor("dispatch: x", x, (None, self.hidden))
        if x.shape[0] > self.max_tokens_per_rank:
            raise Error(f"dispatch: {x.shape[0]} tokens are more than max_tokens_per_rank={self.max_tokens_per_rank}")
        if x_scale is not None:
            self._check_scale(x_scale, (x.shape[0], self._config.scales_per_row))
        return int(x.shape[0])

    def _check_scale(self, x_scale: torch.Tensor, shape: tuple[int, int]) -> None:
        wanted = self.wire.scale_dtype
        each = f"{wanted} {list(shape)}, a scale per {self.wire.scale_block} elements of a row on wire={self.wire.value!r}"
        if not isinstance(x_scale, torch.Tensor):
            raise Error(f"dispatch: x_scale must be a tensor, {each}, not {type(x_scale).__name__}")
        if x_scale.dtype != wanted and not (self.wire is Wire.MXFP8 and x_scale.dtype == torch.float8_e8m0fnu):
            raise Error(f"dispatch: x_scale is {x_scale.dtype}, must be {each}")
        if tuple(x_scale.shape) != shape:
            raise Error(f"dispatch: x_scale has shape {tuple(x_scale.shape)}, must be {each}")
        if x_scale.device != self.device:
            raise Error(f"dispatch: x_scale is on {x_scale.device}, this AllToAll works on {self.device}")

    def _check_tensor(self, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
        have = tensor.shape
        alike = have == shape or (shape[0] is None and len(have) == len(shape) and have[1:] == shape[1:])
        if alike and tensor.device == self.device and tensor.is_contiguous():
            return  # nearly always, and quickly
        if tensor.device != self.device:
            raise Error(f"{name} is on {tensor.device}, this AllToAll works on {self.device}")
        good = tensor.dim() == len(shape) and all(
            want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
        )
        if not good:
            wanted = ", ".join("tokens" if n is None else str(n) for n in shape)
            raise Error(f"{name} has shape {tuple(tensor.shape)}, must be [{wanted}]")
        if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise Error(f"{name} must be contiguous in its last dimension; call .contiguous()")

    def _check_weights(self, name: str, weights: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
        if weights is None:
            return None
        if not isinstance(weights, torch.Tensor) or weights.dtype != torch.float32:
            raise Error(f"{name} must be a float32 tensor, not {getattr(weights, 'dtype', type(weights).__name__)}")
        weights = weights.contiguous()
        self._check_tensor(name, weights, (tokens, self.top_k))
        return weights

    def _check_ids(self, topk_ids: torch.Tensor, tokens: int) -> torch.Tensor:
        if not isinstance(topk_ids, torch.Tensor) or topk_ids.dtype not in (torch.int32, torch.int64):
            raise Error(f"topk_ids must be int32 or int64, not {getattr(topk_ids, 'dtype', type(topk_ids).__name__)}")
        ids = topk_ids.contiguous()
        self._check_tensor("topk_ids", ids, (tokens, self.top_k))
        return ids

    def _make_plan(self, topk_ids: torch.Tensor, weights: torch.Tensor | None, tokens: int) -> Plan:
        ids = self._check_ids(topk_ids, tokens)
        core = _core.make_plan(self._config, ids.data_ptr(), ids.dtype == torch.int64, tokens, self._alive)
        return Plan(self, core, weights, self._core.generation)

    def _check_plan(self, plan: Plan, topk_ids: torch.Tensor | None, topk_weights: torch.Tensor | None, tokens: int) -> Plan:
        if not isinstance(plan, Plan):
            raise Error(f"dispatch: plan= takes d.plan of an earlier dispatch, not {type(plan).__name__}")
        if plan._owner is not self:
            raise Error("dispatch: this plan belongs to another AllToAll")
        if topk_ids is not None:
            raise Error("dispatch: plan= replaces topk_ids; give one of them")
        if plan._generation != self._core.generation:
            raise Error("dispatch: this plan is from before reset()")
        if plan.tokens != tokens:
            raise Error(f"dispatch: x has {tokens} tokens, the plan is for {plan.tokens}")
        if topk_weights is None:
            return plan
        return Plan(self, plan._core, self._check_weights("topk_weights", topk_weights, tokens), plan._generation)

    def _check_expert_rows(self, expert_out: torch.Tensor) -> int:
        """What holds on every device. Returns the bytes from row to row."""
        if not isinstance(expert_out, torch.Tensor):
            raise Error(f"combine: expert_out must be a tensor, not {type(expert_out).__name__}")
        if expert_out.dtype != self.dtype:
            raise Error(f"combine: expert_out is {expert_out.dtype}, must be {self.dtype}")
        if isinstance(self.layout, Padded):
            group = self._config.max_per_expert
            self._check_tensor("combine: expert_out", expert_out, (self.num_local_experts, group, self.hidden))
            if expert_out.numel() and expert_out.stride(0) != group * expert_out.stride(1):
                raise Error("combine: the rows of expert_out must be evenly spaced; call .contiguous()")
            return expert_out.stride(1) * expert_out.element_size()
        self._check_tensor("combine: expert_out", expert_out, (None, self.hidden))
        return expert_out.stride(0) * expert_out.element_size()

    def _check_expert_out(self, expert_out: torch.Tensor, received: _core.Received) -> int:
        stride = self._check_expert_rows(expert_out)
        if received.generation != self._core.generation:
            raise Error("combine: this dispatch is from before reset()")
        needed = min(received.needed_rows, self._config.max_rows)
        if not isinstance(self.layout, Padded) and expert_out.shape[0] < needed:
            raise Error(f"combine: expert_out has {expert_out.shape[0]} rows, this dispatch filled {needed}")
        return stride

    def _check_combine_weights(self, weights: torch.Tensor | None, weighted: bool, tokens: int) -> torch.Tensor | None:
        if weights is None:
            return None
        if not weighted:
            raise Error("combine: weights= and weighted=False contradict each other")
        if isinstance(self.layout, Compact):
            raise Error("combine: with Compact the caller weights its rows itself, so weights= has no meaning")
        return self._check_weights("combine: weights", weights, tokens)

    def _check_tail_shape(self, tail: torch.Tensor | None) -> torch.Tensor | None:
        """What holds on every device. Returns it contiguous."""
        if tail is None:
            return None
        if not isinstance(tail, torch.Tensor) or tail.dtype != torch.float32:
            raise Error(f"combine: tail must be a float32 tensor, not {getattr(tail, 'dtype', type(tail).__name__)}")
        if isinstance(self.layout, Padded):
            self._check_tensor("combine: tail", tail.contiguous(), (self.num_local_experts, self._config.max_per_expert))
            return tail.contiguous()
        shape = (None, self.top_k) if isinstance(self.layout, Compact) else (None,)
        self._check_tensor("combine: tail", tail.contiguous(), shape)
        return tail.contiguous()

    def _check_tail(self, tail: torch.Tensor | None, received: _core.Received) -> torch.Tensor | None:
        tail = self._check_tail_shape(tail)
        needed = min(received.needed_rows, self._config.max_rows)
        if tail is not None and not isinstance(self.layout, Padded) and tail.shape[0] < needed:
            raise Error(f"combine: tail has {tail.shape[0]} rows, this dispatch filled {needed}")
        return tail

    def _check_out(self, out: torch.Tensor | None, accumulate: bool, tokens: int) -> torch.Tensor:
        if out is None:
            if accumulate:
                raise Error("combine: accumulate=True needs out=")
            return self._outputs.tensor((tokens, self.hidden), self.dtype)
        if not isinstance(out, torch.Tensor) or out.dtype != self.dtype:
            raise Error(f"combine: out must be a {self.dtype} tensor, not {getattr(out, 'dtype', type(out).__name__)}")
        self._check_tensor("combine: out", out, (tokens, self.hidden))
        if tokens > 1 and out.stride(0) < self.hidden:
            raise Error("combine: the rows of out overlap in memory (an expanded tensor?); give it rows of its own")
        return out

    # ---- failure -----------------------------------------------------------------------------------------------------

    def _failing(self, call: str) -> _Failing:
        return _Failing(self, call)

    def _on_failure(self, failure: Failure) -> None:
        """From the control thread: somebody died, aborted or left."""
        if self._closed:
            return
        if failure.kind == "closed":
            self._core.peer_left(failure.rank)
            return
        peer = failure.rank if failure.peer is None else failure.peer
        with self._failure_lock:
            if self._comm.failure is not None:  # else a reset has ended it before this thread came here
                self._core.fail(failure.kind, failure.rank, peer, failure.step or 0, failure.message)

    def check(self) -> None:
        """Raises what went wrong since the last call, if anything did."""
        self._check_usable("check", notices=True)

    def warmup(self) -> None:
        """Takes one step of random tokens, so that the first real one finds everything in place. Collective."""
        tokens = self.max_tokens_per_rank
        generator = torch.Generator().manual_seed(self._comm.rank)
        ids = torch.randint(0, self.num_experts, (tokens, self.top_k), generator=generator)
        d = self.dispatch(torch.zeros(tokens, self.hidden, dtype=self.dtype, device=self.device), ids.to(self.device))
        self.combine(torch.zeros(d.x.shape, dtype=self.dtype, device=self.device), d)

    def reset(self, timeout: float | None = None) -> list[int]:
        """After a failure: the survivors agree on who is left and go on with them, from a fresh first step. Returns who.

        Collective over the survivors. The experts of the others answer nothing; handles and plans of before are invalid.
        After a timeout in which nobody died, all ranks go on together, if all come. With device="cuda" it waits until what was
        launched on the streams of earlier calls has ended; graphs that were captured before must be captured anew.
        timeout: seconds for a rank that lives to come here too; one that is stopped, or stuck elsewhere, is then left out
        like a dead one, and hears of it when it next calls anything. None: three times this AllToAll's, at least 30 s.
        To take a rank back, all make a new Communicator and a new AllToAll on it: see `Communicator.from_env`.
        """
        self._check_usable("reset")
        if timeout is not None and not (isinstance(timeout, (int, float)) and math.isfinite(timeout) and timeout > 0):
            raise Error(f"reset: timeout={timeout!r} must be a positive number of seconds")
        with self._failing("reset"):
            if self._gpu is not None:
                self._gpu.drain(self._request.patience if timeout is None else timeout)
            return reset(self, timeout)

    def stats(self) -> dict[str, Any]:
        """Counters since construction: steps, rows and bytes to and from other ranks, seconds by phase; the proxy's own."""
        self._check_usable("stats")
        if self._gpu is not None:
            return {"steps": self._core.steps, "open_steps": self._core.open_steps}
        stats: dict[str, Any] = self._core.stats()
        stats["open_steps"] = self._core.open_steps
        if self._wiring.carrier is not None:
            stats["proxy"] = self._wiring.carrier.stats()
        return stats

    # ---- life --------------------------------------------------------------------------------------------------------

    @staticmethod
    def required_bytes(
        *,
        world_size: int,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        wire: Wire | str = Wire.NATIVE,
        layout: Ragged | Padded | Compact | None = None,
        in_flight: int = 1,
        remote_peers: int = 0,
    ) -> int:
        """Bytes that a rank reserves at construction; remote_peers of its peers are carried by the proxy."""
        c = _config(
            _integer("world_size", world_size, 1, 1024), 0, num_experts=num_experts, top_k=top_k, hidden=hidden,
            max_tokens_per_rank=max_tokens_per_rank, dtype=dtype, wire=wire,
            layout=Ragged() if layout is None else layout, in_flight=in_flight, scale_layout="row",
        )  # fmt: skip
        c.remote_peers = _integer("remote_peers", remote_peers, 0, world_size - 1)
        staging = in_flight * max_tokens_per_rank * c.row_bytes(0) if Wire.of(wire).quantised else 0
        return int(c.heap_bytes) + staging

    def close(self) -> None:
        """Gives back everything. Idempotent; talks to nobody, and returns within 2 s also when peers are dead."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._forget_failures()
        _live(self._comm).discard(self)
        failed = self._failed is not None or self._comm.failure is not None
        self._wiring.detach(0.1 if failed else _CLOSE_TIMEOUT)
        self._outputs.close()
        if self._gpu is not None:
            self._gpu.close()
        del self._core, self._wiring

    def __enter__(self) -> AllToAll:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Failing:
    """Around every call that may fail for a reason other ranks must hear of: the first failure is told to all."""

    def __init__(self, owner: AllToAll, call: str) -> None:
        self._owner = owner
        self._call = call

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None or (isinstance(error, Error) and not isinstance(error, PeerError)):
            return
        owner = self._owner
        if owner._failed is None:
            owner._failed = error
            if owner._comm.failure is None:  # else everybody knows
                self._tell(error)
        first = owner._comm.failure
        if first is None or not isinstance(error, PeerError) or self._call == "reset":
            return
        # Of two ranks that die at once, neighbours may blame one and the control connections the other: one cause for all calls.
        said = first.error()
        if said.peer != error.peer:
            raise said from error

    def _tell(self, error: BaseException) -> None:
        comm = self._owner._comm
        if isinstance(error, PeerError):
            kind = "timeout" if isinstance(error, TimeoutError) else "abort"
            comm._abort({"kind": kind, "peer": error.peer, "phase": error.phase, "step": error.step, "message": str(error)})
        else:
            message = f"rank {comm.rank} was interrupted: {error!r}"
            comm._abort({"kind": "abort", "peer": comm.rank, "phase": self._call, "message": message})


_live_of: weakref.WeakKeyDictionary[Communicator, weakref.WeakSet[AllToAll]] = weakref.WeakKeyDictionary()


def _live(comm: Communicator) -> weakref.WeakSet[AllToAll]:
    if comm not in _live_of:
        live: weakref.WeakSet[AllToAll] = weakref.WeakSet()
        _live_of[comm] = live

        def close_all() -> None:
            for a2a in list(live):
                a2a.close()

        comm._on_close(close_all)
    return _live_of[comm]
