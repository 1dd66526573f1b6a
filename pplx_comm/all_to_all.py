"""The two collectives of a Mixture-of-Experts layer."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ._checks import Checks
from ._config import Arguments, integer, make_config, seconds
from ._cpu import Cpu
from ._failing import Failing
from ._failure import Failure
from ._gpu import Gpu
from ._graph import Graph, GraphDispatched, GraphPlan
from ._halves import BOTH, SEND
from ._reset import reset
from ._setup import wire_up
from .errors import Error
from .handles import Combining, Dispatched, Plan
from .layouts import Compact, Padded, Ragged
from .wire import Wire

if TYPE_CHECKING:
    from .communicator import Communicator

log = logging.getLogger("pplx_comm")

_CLOSE_TIMEOUT = 1.0  # seconds for what is still in the network

_process = os.getpid()
"""Kept, since asking takes longer than all other checks of a call together."""


def _forked() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_forked)


class AllToAll:
    """Dispatch and combine over the ranks of a Communicator. Making one is collective; one serves all layers of a shape.

    num_experts: physical experts of all ranks together; expert e lives on rank e // ceil(num_experts / world_size).
    top_k: choices per token, 1 to 16.
    hidden: elements of a token; a row must be a multiple of 16 bytes.
    max_tokens_per_rank: the most tokens that any rank dispatches in a step; with replicas, that a group of them holds.
    dtype: what dispatch takes and combine returns: bfloat16, float16 or float32.
    wire: what travels in dispatch: "native", or e4m3 codes with scales: "fp8", "fp8_ue8m0", "mxfp8"; see Wire.
    layout: what d.x looks like: Ragged(align=128), Padded() or Compact().
    device: "cpu", the default, or "cuda": torch's current GPU, or "cuda:1". Several ranks may share a GPU; all must be of one node.
    transport: "auto" maps memory inside a node and uses the proxy between nodes; "mapped" or "proxy" insists.
    provider: the libfabric provider of the proxy; None takes the best there is.
    nics: names of the NICs (or interfaces, for tcp) of this rank's proxy, a list or "a,b"; an endpoint each. None takes those of
        PPLX_COMM_NICS, else the nearest.
    proxy_threads: 2 splits the peers that the proxy carries to between two threads of each rank; both drive all of its NICs.
    placement: where the blocks of peers of other nodes lie with device="cuda": "host", pinned memory that kernels write and read;
        "device", GPU memory that the NIC does; "auto" takes the GPU's where the provider does and what it writes there is seen in
        order. None takes PPLX_COMM_PLACEMENT, else "auto". `python -m pplx_comm doctor` says what that would be.
    node_size: overrides who shares a node: ranks 0 to node_size - 1 do, and so on.
    in_flight: steps that may be open at once: 1, 2, 4 or 8.
    replicas: ranks 0 to replicas - 1 hold the same tokens, and so on, as the lanes of tensor parallelism do. They must pass the
        same to every call (accumulate's out too): each sends and adds up a part of the tokens, and in combine_recv gives the
        others the finished rows, so that with several steps in flight replicas receive them in the same order. Replicas share
        a node.
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
        proxy_threads: int = 1,
        node_size: int | None = None,
        in_flight: int = 1,
        replicas: int = 1,
        num_sms: int | None = None,
        timeout: float = 100.0,
        scale_layout: str = "row",
        placement: str | None = None,
    ) -> None:
        self._closed = False
        self._failed: BaseException | None = None
        self._lock = threading.Lock()
        self._failure_lock = threading.Lock()
        self._pid = _process
        self._comm = comm
        arguments = Arguments(
            num_experts=num_experts, top_k=top_k, hidden=hidden, max_tokens_per_rank=max_tokens_per_rank, dtype=dtype, wire=wire,
            layout=Ragged() if layout is None else layout, device=device, transport=transport, provider=provider, nics=nics,
            proxy_threads=proxy_threads, node_size=node_size, in_flight=in_flight, replicas=replicas, num_sms=num_sms,
            timeout=timeout, scale_layout=scale_layout, placement=placement,
        )  # fmt: skip
        begun = time.monotonic()
        self._request = arguments.request(comm.world_size, comm.rank)
        self._wiring, self._number = wire_up(comm, self._request, {a2a._number for a2a in _live(comm)})
        self._core, self._config = self._wiring.exchange, self._request.config
        self.dtype, self.wire, self.layout = dtype, Wire.of(wire), arguments.layout
        self.hidden, self.top_k, self.num_experts = hidden, top_k, num_experts
        self.max_tokens_per_rank = max_tokens_per_rank
        self.num_local_experts: int = self._config.local_experts
        gpu = self._request.gpu
        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        self._checks, self._checking = Checks(self), Failing(self, "check")
        self._phases: Cpu | Gpu = Cpu(self) if gpu is None else Gpu(self, self._core, self.device)
        self._graph = Graph(self)
        self._alive = [bool(alive) for alive in comm._peek_alive]
        _live(comm).add(self)
        self._forget_failures = comm._on_failure(self._on_failure)
        if comm.rank == 0:
            self._log_topology(time.monotonic() - begun)

    def _log_topology(self, seconds: float) -> None:
        w = self._wiring
        groups = [f"{len(w.mapped)} mapped"] if w.mapped else []
        if w.remote and w.carrier:
            groups.append(
                f"{len(w.remote)} by proxy over {w.carrier.name}" + (", from and to GPU memory" if w.blocks_on_gpu else "")
            )
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
        if self._graph.wanted(x, topk_weights) or isinstance(plan, GraphPlan):
            if async_op:
                self._graph.refuse("dispatch")
            return self._graph.dispatch(x, topk_ids, topk_weights, x_scale, plan)
        self._check_usable("dispatch", notices=True)
        return self._phases.dispatch(SEND if async_op else BOTH, x, topk_ids, topk_weights, x_scale, plan)

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
        if self._graph.wanted(x, topk_weights) or isinstance(plan, GraphPlan):
            self._graph.refuse("dispatch_send")
        self._check_usable("dispatch", notices=True)
        return self._phases.dispatch(SEND, x, topk_ids, topk_weights, x_scale, plan)

    def dispatch_recv(self, d: Dispatched) -> Dispatched:
        """The receive half of dispatch: fills d's tensors."""
        self._checks.handle("dispatch_recv", d, Dispatched)
        with self._lock:
            if d._received is None:
                self._check_usable("dispatch_recv")
                self._phases.dispatch_recv(d)
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
        if self._graph.wanted(expert_out, weights, tail, out) or isinstance(d, GraphDispatched):
            if async_op:
                self._graph.refuse("combine")
            return self._graph.combine(expert_out, d, weights, weighted, tail, out, accumulate)
        c = self._combine(SEND if async_op else BOTH, expert_out, d, weights, weighted, tail, out, accumulate)
        return c if async_op else c._result

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
        if self._graph.wanted(expert_out, weights, tail, out) or isinstance(d, GraphDispatched):
            self._graph.refuse("combine_send")
        return self._combine(SEND, expert_out, d, weights, weighted, tail, out, accumulate)

    def _combine(
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
        self._checks.handle("combine", d, Dispatched)
        self._check_usable("combine")
        return self._phases.combine(halves, expert_out, d, weights, weighted, tail, out, accumulate)

    def combine_recv(self, c: Combining) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The receive half of combine."""
        self._checks.handle("combine_recv", c, Combining)
        with self._lock:
            if not c._done:
                self._check_usable("combine_recv")
                self._phases.combine_recv(c)
        return c._result

    def _release(self, d: Dispatched) -> None:
        if isinstance(d, GraphDispatched):
            self._graph.release(d)
            return
        self._checks.handle("release", d, Dispatched)
        if d._used:
            raise Error("release: this dispatch was combined or released already")
        self.dispatch_recv(d)
        self._check_usable("release")
        self._phases.release(d)

    def _check_usable(self, call: str, notices: bool = False) -> None:
        if self._closed:
            raise Error(f"{call}: this AllToAll is closed")
        if _process != self._pid:
            raise Error(f"{call}: this AllToAll belongs to process {self._pid}, of which this one was forked; make another here")
        if notices:
            try:
                self._core.raise_trouble()
            except BaseException:
                with self._checking:
                    raise

    # ---- failure -----------------------------------------------------------------------------------------------------

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
        generator = torch.Generator().manual_seed(self._comm.rank // self._config.replicas)
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
        if timeout is not None:
            seconds("reset: timeout", timeout)
        with Failing(self, "reset"):
            if isinstance(self._phases, Gpu):
                self._phases.drain(self._request.patience if timeout is None else timeout)
            return reset(self, timeout)

    def stats(self) -> dict[str, Any]:
        """Counters since construction: steps, rows and bytes to and from other ranks, seconds by phase; the proxy's own."""
        self._check_usable("stats")
        stats: dict[str, Any] = {"steps": self._core.steps} if self.device.type == "cuda" else self._core.stats()
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
        replicas: int = 1,
        remote_peers: int = 0,
    ) -> int:
        """Bytes that a rank reserves at construction; remote_peers of its peers are carried by the proxy."""
        c = make_config(
            integer("world_size", world_size, 1, 1024), 0, num_experts=num_experts, top_k=top_k, hidden=hidden,
            max_tokens_per_rank=max_tokens_per_rank, dtype=dtype, wire=wire,
            layout=Ragged() if layout is None else layout, in_flight=in_flight, scale_layout="row",
            replicas=replicas,
        )  # fmt: skip
        c.remote_peers = integer("remote_peers", remote_peers, 0, world_size - 1)
        staging = in_flight * max_tokens_per_rank * c.row_bytes(0) if Wire.of(wire).quantised else 0
        return int(c.heap_bytes) + staging

    def close(self) -> None:
        """Gives back everything. Idempotent; talks to nobody, and returns within 2 s also when peers are dead."""
        if self._closed or _process != self._pid:
            return
        self._closed = True
        self._forget_failures()
        _live(self._comm).discard(self)
        failed = self._failed is not None or self._comm.failure is not None
        self._wiring.detach(0.1 if failed else _CLOSE_TIMEOUT)
        self._phases.close()
        del self._core, self._wiring

    def __enter__(self) -> AllToAll:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
