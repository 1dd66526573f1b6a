"""The two collectives of a Mixture-of-Experts layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

import pplx_comm._core as _core
from pplx_comm.communicator import Communicator
from pplx_comm.control import deadlines
from pplx_comm.control.plane import ControlPlane
from pplx_comm.device.arguments import Sent
from pplx_comm.device.cpu import Cpu
from pplx_comm.device.cuda import Cuda
from pplx_comm.device.session import Session
from pplx_comm.device.steps import Steps
from pplx_comm.errors import PeerError
from pplx_comm.handles import Combining, Dispatched, Plan
from pplx_comm.layouts import Compact, Padded, Ragged
from pplx_comm.log import log
from pplx_comm.torch_ops.graph import Graph, GraphDispatched, GraphPlan
from pplx_comm.wire import Wire
from pplx_comm.wiring.carriers import Carriers
from pplx_comm.wiring.compare import raised_by_all
from pplx_comm.wiring.config import WHOLE, Arguments, integer, is_by_node, make_config
from pplx_comm.wiring.wire_up import wire_up


class AllToAll:
    """Dispatch and combine over the ranks of a Communicator. Making one is collective; one serves all layers of a shape.

    num_experts: physical experts of all ranks together; expert e lives on rank e // ceil(num_experts / world_size).
    top_k: choices per token, 1 to 16.
    hidden: elements of a token; a row must be a multiple of 16 bytes.
    max_tokens_per_rank: the most tokens that any rank dispatches in a step; with replicas, the most that a group of them holds.
    dtype: dtype of dispatch's input and combine's output: bfloat16, float16 or float32.
    wire: the format of dispatched rows: "native", or e4m3 codes with scales: "fp8", "fp8_ue8m0", "mxfp8"; see Wire.
    layout: the shape of d.x: Ragged(align=128), Padded() or Compact().
    device: "cpu"; "cuda" for torch's current GPU, or "cuda:1". None is "cuda" where torch sees a GPU, else "cpu". A build without
        kernels raises an Error there, since steps on the CPU would only be slow; so do ranks of which only some see a GPU. Ranks
        of one node may share a GPU.
    transport: "auto" maps memory inside a node and uses the proxy between nodes; "mapped" or "proxy" insists. "nvshmem" maps memory
        inside a node, and what NVSHMEM maps across nodes; else kernels post to a ConnectX themselves; device="cuda" only.
    provider: the libfabric provider of the proxy; None takes the best there is.
    nics: names of the NICs (or interfaces, for tcp) of this rank's proxy, a list or "a,b"; an endpoint each. None takes
        PPLX_COMM_NICS, else the nearest.
    proxy_threads: 2 gives each rank two proxy threads, with half of the remote peers each; both drive all NICs of the rank.
    placement: where blocks for other nodes lie with device="cuda": "host", pinned memory that kernels write and read; "device", GPU
        memory that the NIC writes and reads; "auto", GPU memory where the provider reaches it and its writes there are seen in
        order. None takes PPLX_COMM_PLACEMENT, else "auto". `python -m pplx_comm doctor` says what "auto" would choose.
    node_size: overrides which ranks share a node: ranks 0 to node_size - 1 do, and so on. The bits of a combine depend on it: see
        docs/design.md, Sums by node.
    dedup: "node" sends a row once to each other node whose ranks want it, and one sum comes back; "rank" sends it to each rank.
        The bits are the same. With "node" blocks are whole, and a receive call may wait until other ranks make it, too: all ranks
        make them in one order, that of the steps, and with several AllToAlls across these. Not with transport="nvshmem". "auto"
        is "node" with in_flight=1 and whole blocks; else "rank". See docs/across-nodes.md.
    combine_wire: with dedup="node", sums of other nodes come back in the dtype, "native", or as e4m3 with a scale per 128 numbers,
        "fp8": half the bytes, an error of up to 1/16 of each number, and no gradients. See docs/across-nodes.md.
    in_flight: steps that may be open at once: 1, 2, 4 or 8.
    replicas: ranks 0 to replicas - 1 hold the same tokens, and so on, as ranks of one tensor parallel group do. Replicas share a
        node, and pass the same to every call (accumulate's out too). Each sends and adds up a part of the tokens, and in
        combine_recv gives the finished rows to the others: with several steps in flight they must receive them in the same order.
    slot_bytes: the most bytes for the dispatch and combine blocks of a step that a rank receives. If blocks of max_tokens_per_rank
        rows do not fit, those of more rows than fit go in pieces; steps of up to 256 tokens a rank never do. Then inputs must
        stay unchanged until the receive half returns, and all ranks make their receive calls in the same order, each kind in the
        order of the steps. On a GPU replicas need whole blocks. None: no limit.
    hooks: dispatches have d.planned and d.arrived, for kernels that begin on rows before all have come, and take expert_groups=.
        On a GPU that costs a small launch per dispatch, and its kernels leave 4 multiprocessors free.
    num_sms: limits the grid of CUDA kernels; for the CPU device PPLX_COMM_THREADS limits the threads. AllToAlls on streams that
        nothing orders share a GPU's multiprocessors: together they must not want more than it has, or ranks that begin with
        different ones wait for each other.
    timeout: seconds to wait for a slow peer; the first step gets three times as long. A death is noticed within 1 s.
    symmetric_memory: with transport="nvshmem" a tensor of NVSHMEM's symmetric memory, the same on all ranks, for what ranks of
        other nodes write; needed where these ranks are a part of NVSHMEM's PEs. None: this library makes it.
    scale_layout: layout of d.scale: "row", or "tma": column-major, columns at multiples of 16 bytes. x_scale may have any strides.
    """

    _number: int
    _first_step = 1
    """The number of its first step. Step numbers have 32 bits, and a test that begins near their end takes a subclass."""

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
        dedup: str = "auto",
        combine_wire: str = "native",
        in_flight: int = 1,
        replicas: int = 1,
        slot_bytes: int | None = None,
        num_sms: int | None = None,
        hooks: bool = False,
        timeout: float = 100.0,
        scale_layout: str = "row",
        placement: str | None = None,
        symmetric_memory: torch.Tensor | None = None,
    ) -> None:
        self._comm = comm
        arguments = Arguments(
            num_experts=num_experts, top_k=top_k, hidden=hidden, max_tokens_per_rank=max_tokens_per_rank, dtype=dtype, wire=wire,
            layout=Ragged() if layout is None else layout, device=device, transport=transport, provider=provider, nics=nics,
            proxy_threads=proxy_threads, node_size=node_size, dedup=dedup, combine_wire=combine_wire, in_flight=in_flight,
            replicas=replicas, slot_bytes=slot_bytes, num_sms=num_sms, hooks=hooks,
            timeout=timeout, scale_layout=scale_layout, placement=placement, first_step=self._first_step,
            symmetric_memory=symmetric_memory,
        )  # fmt: skip
        begun = time.monotonic()
        self._steps = _open(comm, arguments)
        self._graph = Graph(self._steps)
        session = self._steps.session
        self.dtype, self.wire, self.layout, self.device = session.dtype, session.wire, session.layout, session.device
        self.hidden, self.top_k, self.num_experts = hidden, top_k, num_experts
        self.max_tokens_per_rank, self.world_size = max_tokens_per_rank, comm.world_size
        self.num_local_experts: int = session.config.local_experts
        self.hooks, self.num_sms = hooks, num_sms
        if comm.rank == 0:
            self._log_topology(time.monotonic() - begun)

    def _log_topology(self, seconds: float) -> None:
        session, config = self._steps.session, self._steps.session.config
        w = session.wiring
        where = " in NVSHMEM's memory" if w.symmetric and w.symmetric.segment.near else ""
        groups = [f"{len(w.peers.mapped)} mapped{where}"] if w.peers.mapped else []
        if w.peers.remote and w.symmetric:
            groups.append(f"{len(w.peers.remote)} by NVSHMEM's puts")
        if w.peers.remote and w.carrier:
            groups.append(
                f"{len(w.peers.remote)} by proxy over {w.carrier.name}" + (", from and to GPU memory" if w.blocks_on_gpu else "")
            )
        log.info(
            "AllToAll %d: %d ranks, peers of rank 0: %s; %d experts, top-%d, hidden %d, %s, wire %s, %s; "
            "%.1f MiB shared per rank; ready in %.2f s",
            config.object, self._comm.world_size, " and ".join(groups) or "none", self.num_experts, self.top_k,
            self.hidden,
            str(self.dtype).removeprefix("torch."), self.wire.value, self.layout, config.heap_bytes / 2**20, seconds,
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
        expert_groups: int | None = None,
        async_op: bool = False,
    ) -> Dispatched:
        """Sends every token to the ranks that own its experts.

        x: [tokens, hidden] of this AllToAll's dtype, or float8_e4m3fn together with x_scale.
        topk_ids: int32 or int64 [tokens, top_k]; -1 drops a choice, a repeated id is two choices.
        topk_weights: float32 [tokens, top_k]; None means ones, or with plan= that plan's.
        x_scale: the scales of an x that is quantised already, as d.scale has them on this wire: float32 [tokens,
            ceil(hidden / 128)], powers of two with FP8_UE8M0; with MXFP8 uint8 (or float8_e8m0fnu) [tokens, ceil(hidden / 32)].
            With any strides.
        plan: the plan of an earlier dispatch, in place of topk_ids: the same routing for other tokens, as in a backward pass.
        expert_groups: for Ragged and Padded, with hooks=True: d.group(i) is the i-th of `expert_groups` equal parts of the local
            experts, and d.group(i).wait() waits for their rows alone, so that a GEMM of any kind begins while rows of others
            travel.
        async_op: returns after the send half; d.wait() is the receive half.
        """
        if self._graph.wanted(x, topk_weights) or isinstance(plan, GraphPlan):
            if async_op:
                self._graph.refuse("dispatch")
            if expert_groups is not None:
                self._graph.refuse_hooks("dispatch", "expert_groups")
            return self._graph.dispatch(x, topk_ids, topk_weights, x_scale, plan)
        halves, sent = _core.SEND if async_op else _core.BOTH, (x, topk_ids, topk_weights, x_scale, plan)
        return self._steps.dispatch(halves, sent) if expert_groups is None else self._in_groups(halves, sent, expert_groups)

    @property
    def calls(self) -> Steps:
        """The calls that take steps, without gradients: for the library's own use."""
        return self._steps

    def _in_groups(self, halves: int, sent: Sent, groups: int) -> Dispatched:
        self._steps.device.checks.expert_groups(groups)
        d = self._steps.dispatch(halves, sent)
        d.expert_groups = groups
        return d

    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        x_scale: torch.Tensor | None = None,
        plan: Plan | None = None,
        expert_groups: int | None = None,
    ) -> Dispatched:
        """The send half of dispatch. When it returns, x may be overwritten; with slot_bytes, after dispatch_recv."""
        if self._graph.wanted(x, topk_weights) or isinstance(plan, GraphPlan):
            self._graph.refuse("dispatch_send")
        sent = x, topk_ids, topk_weights, x_scale, plan
        return self._steps.dispatch(_core.SEND, sent) if expert_groups is None else self._in_groups(_core.SEND, sent, expert_groups)

    def dispatch_recv(self, d: Dispatched) -> Dispatched:
        """The receive half of dispatch: fills d's tensors."""
        return self._steps.dispatch_recv(d)

    # ---- combine -----------------------------------------------------------------------------------------------------

    def open_for_combine(self, topk_ids: torch.Tensor) -> Dispatched:
        """A dispatch without rows, for a further combine on that routing. All ranks make this call together; d.x and d.scale mean
        nothing. Between mapped GPUs little more than headers travels; elsewhere it takes as long as a dispatch."""
        return self._steps.open_for_combine(topk_ids)

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

        expert_out: of this AllToAll's dtype, shaped like d.x; with Ragged and Compact unused rows at the end may be missing.
        weights: float32 [tokens, top_k] of this rank's tokens, in place of the dispatch's; on all ranks or on none.
        weighted: False adds without weights.
        tail: one float32 per received choice, shaped like d.weights (Compact: like d.topk_weights, where numbers of choices that
            live elsewhere are ignored); unused rows at the end may be missing; on all ranks or on none. Each travels behind its row
            and returns unchanged to its token: combine then returns (y, [tokens, top_k]), with 0 for dropped choices.
        out: [tokens, hidden], the tensor to write.
        accumulate: adds to what out holds.
        async_op: returns after the send half; .wait() returns the result.

        The backward pass of y = combine(out, d) where out = experts(d.x), with gradients dY of y:
            g = dispatch(dY, plan=d.plan); d_out = g.weights[:, None] * g.x; dw = (g.x * out).sum(1); dX = experts' backward(d_out)
            dx, dw = combine(dX, g, weighted=False, tail=dw)
        """
        if self._graph.wanted(expert_out, weights, tail, out) or isinstance(d, GraphDispatched):
            if async_op:
                self._graph.refuse("combine")
            return self._graph.combine(expert_out, d, weights, weighted, tail, out, accumulate)
        halves = _core.SEND if async_op else _core.BOTH
        return self._steps.combine(halves, (expert_out, d, weights, weighted, tail, out, accumulate))

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
        """The send half of combine. When it returns, expert_out may be overwritten; with slot_bytes, after
        combine_recv."""
        if self._graph.wanted(expert_out, weights, tail, out) or isinstance(d, GraphDispatched):
            self._graph.refuse("combine_send")
        c = self._steps.combine(_core.SEND, (expert_out, d, weights, weighted, tail, out, accumulate))
        assert isinstance(c, Combining)
        return c

    def combine_recv(self, c: Combining) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The receive half of combine."""
        return self._steps.combine_recv(c)

    # ---- failure -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises the first failure or mistake since the last call, if there was one."""
        self._steps.check("check")

    def set_num_sms(self, num_sms: int) -> None:
        """Limits the grid of CUDA kernels from the next launch on, to what num_sms= allowed at most. On the CPU nothing changes.

        Results stay the same bits. A captured graph keeps what it was captured with.
        """
        self._steps.device.set_num_sms(integer("set_num_sms: num_sms", num_sms, 1, 1 << 20))
        self.num_sms = num_sms

    def warmup(self) -> None:
        """Takes one step of random tokens, so that the first real one finds everything in place. Collective."""
        tokens = self.max_tokens_per_rank
        generator = torch.Generator().manual_seed(self._comm.rank // self._steps.session.config.replicas)
        ids = torch.randint(0, self.num_experts, (tokens, self.top_k), generator=generator)
        d = self.dispatch(torch.zeros(tokens, self.hidden, dtype=self.dtype, device=self.device), ids.to(self.device))
        self.combine(torch.zeros(d.x.shape, dtype=self.dtype, device=self.device), d)

    def reset(self, timeout: float | None = None) -> list[int]:
        """As `Communicator.reset`, which resets all AllToAlls of this one's Communicator. But calls of those that only other
        threads have called go on to raise the failure until their own reset(), so that a thread between two calls hears of it.
        """
        self._steps.check_open("reset")
        return self._comm.recovery.reset(timeout, self._steps)

    def stats(self) -> dict[str, Any]:
        """Counters since construction, the same keys on both devices; after close() as they were then.

        object: the AllToAll's number among those that are open, the same on all ranks. A later one may get it after close().
        closed: True after close().
        counted: False with PPLX_COMM_STATS=0. Then `steps`, `open_steps`, `large_dispatches`, `large_combines` and `proxy` are all
            that is known, of the host's own calls. Else all is counted, on a GPU as kernels do it, replays of graphs among them.
        steps, open_steps: those that were combined or released, and, of the host's own calls, those whose memory is held.
        tokens: of this rank, in those steps; on a CPU of a step from its dispatch on, as its rows are.
        rows_sent, rows_received, bytes_sent, bytes_received: lists by rank, of dispatches and combines; nothing for oneself. Bytes
            are those of rows and headers.
        expert_rows: a list by local expert of the rows that it got.
        dispatch_wait_seconds, combine_wait_seconds: lists by rank of how long this one waited for its rows: on a CPU with nothing
            to do, on a GPU until the first word of them was there.
        phases: for `dispatch_send`, `dispatch_recv`, `combine_send` and `combine_recv`, on GPUs also for `dispatch` and `combine`,
            launches that do both halves: `seconds`, and `buckets`, a list. Bucket i has the times of less than 2^i microseconds
            that are in no bucket before it, the last one all others.
        large_dispatches, large_combines: launches of the kernels for many tokens; on CPUs 0.
        large_tokens: combines from this number of tokens on take those, inside a node dispatches from twice that; only on GPUs.
        proxy: only where there is one: its `provider`, `writes`, `bytes`, `again` (posts that the NIC refused for the moment),
            `dropped` and `duplicates` (of what arrived), `errors`, `deepest` (the most writes in flight), and `nics`, with the
            `writes` and `bytes` of each. AllToAlls of one Communicator share proxies.
        """
        return self._steps.stats(True)

    def waits(self, half: str) -> torch.Tensor:
        """int64 [world_size], on the device of this AllToAll: for how many nanoseconds this rank has waited for each rank's rows so
        far, in `half`, "dispatch" or "combine". On a GPU as the current stream finds it; it can be captured.
        """
        return self._steps.waits(half)

    def explain(self, tokens: int) -> list[dict[str, Any]]:
        """The launches of a step in which this rank has `tokens` tokens: a dispatch and a combine, each in one launch.

        call, kernel, grid, block, shared_bytes: the kernel, its thread blocks, the threads and the dynamic shared memory of each.
        why: the facts that chose it. Empty on CPUs.
        """
        return self._steps.explain(tokens)

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
        slot_bytes: int | None = None,
        remote_peers: int = 0,
        dedup: str = "auto",
        device: str = "cpu",
    ) -> int:
        """Bytes that a rank reserves at construction. device="cuda": of blocks and their words alone. remote_peers: how many of its
        peers the proxy carries to; with dedup="node", and "auto" that is it, nodes have equal numbers of ranks."""
        c = make_config(
            world_size, 0, num_experts=num_experts, top_k=top_k, hidden=hidden,
            max_tokens_per_rank=max_tokens_per_rank, dtype=dtype, wire=wire,
            layout=Ragged() if layout is None else layout, in_flight=in_flight, scale_layout="row",
            replicas=replicas, slot_bytes=slot_bytes, dedup=dedup,
            on_gpu=device == "cuda",
        )  # fmt: skip
        c.remote_peers = integer("remote_peers", remote_peers, 0, world_size - 1)
        if remote_peers and remote_peers < world_size - 1 and is_by_node(c, dedup):
            c.node_ranks = world_size - remote_peers
            if c.on_gpu:
                c.remote_peers = -(-remote_peers // c.node_ranks)  # one on each other node
        c.remote_slots = c.remote_peers
        if c.on_gpu:
            c.mapped_slots, c.part_bytes = world_size - remote_peers, WHOLE
            return int(c.mapped_bytes + (c.heap_bytes if remote_peers else 0) + c.relay_bytes)
        staging = in_flight * max_tokens_per_rank * c.row_bytes(0) if Wire.of(wire).quantised else 0
        return int(c.heap_bytes) + staging + int(c.relay_bytes)

    def close(self) -> None:
        """Releases all memory and threads. Idempotent. Does not wait for peers; returns within 2 s even if they are dead.

        Calls in which other threads wait raise an Error that says so.
        """
        self._steps.close()

    def __enter__(self) -> AllToAll:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(comm: Communicator, arguments: Arguments) -> Steps:
    with comm.recovery.alone("AllToAll()"):
        steps = _wired(comm.control, arguments, {one.number for one in comm.recovery.open()})
        comm.recovery.add(steps)
        comm.recovery.proxies = Carriers.of(comm.control).stats
        return steps


def _wired(control: ControlPlane, arguments: Arguments, used_numbers: set[int]) -> Steps:
    """Collective. Where it is cut short on this rank alone, the others are told, for they would wait."""
    request, generation = arguments.request(control.world_size, control.rank), control.generation
    wiring = None
    try:
        wiring = wire_up(control, request, used_numbers)
        gpu = request.gpu
        device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        wire = Wire.of(arguments.wire)
        session = Session(request.config, arguments.dtype, wire, arguments.layout, device, request, control, wiring)
        return Steps(session, Cpu(session) if gpu is None else Cuda(session))
    except BaseException as problem:
        if wiring is not None:
            wiring.close(deadlines.CLOSE_FAILED)
        if wiring is not None or not raised_by_all(problem):
            tell(control, problem, "AllToAll()", generation)
        raise


def tell(control: ControlPlane, problem: BaseException, call: str, generation: int) -> None:
    """Ends the other ranks' constructors, which wait for this one's."""
    what = str(problem) if isinstance(problem, PeerError) else f"rank {control.rank} was interrupted in {call}: {problem!r}"
    peer = problem.peer if isinstance(problem, PeerError) else control.rank
    kind = "timeout" if isinstance(problem, TimeoutError) else "abort"
    control.abort(f"{what}. {_GO_ON}", kind=kind, peer=peer, phase=call, generation=generation)


_GO_ON = "To make it after all, call reset() of this Communicator on all ranks, then AllToAll() again"
