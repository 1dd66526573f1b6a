"""DeepEP's V1 `Buffer` over this library: what `import deep_ep` finds where `pplx_comm/compat/shadow/deep_ep` is on the path.

Names, arguments and results are DeepEP's, documented there. docs/migrate.md says, call by call, what differs and what is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from pplx_comm.all_to_all import AllToAll
from pplx_comm.communicator import Communicator
from pplx_comm.compat.deep_ep_handles import NO_EVENT, EventHandle, EventOverlap, LowLatencyHandle, NormalHandle
from pplx_comm.compat.shared import IN_FLIGHT, Lane, Pool, Routes, announce, refuse
from pplx_comm.device.cuda import raw_stream
from pplx_comm.errors import Error
from pplx_comm.gpus import cuda_module
from pplx_comm.layouts import Compact, Padded
from pplx_comm.wire import Wire

__version__ = "1.2.1+pplxcomm"

topk_idx_t = torch.int64

LEAST_TOKENS = 4096
"""Normal mode has room for this number of a rank's tokens, where no rank comes with more at first use."""
PACKED = 4 * Wire.FP8.scale_block
"""Elements whose four scales are the bytes of one int32."""
WIRES = (Wire.NATIVE, Wire.FP8, Wire.FP8_UE8M0)
MOST_CHOICES = 16
_Call = TypeVar("_Call", bound=Callable[..., Any])


def quick(call: _Call) -> _Call:
    """Modes of torch, of which a default device is one, would see every function of it that is called in here: 2 us each."""

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._len_torch_function_stack():
            return call(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return call(*args, **kwargs)

    return cast("_Call", called)


class Config:
    """Only num_sms counts: this library has no chunks to tune."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes with which blocks of LEAST_TOKENS tokens are whole, on either device."""
        return max(
            AllToAll.required_bytes(
                world_size=num_ranks, num_experts=num_ranks, top_k=MOST_CHOICES, hidden=-(-hidden_bytes // 16) * 8,
                max_tokens_per_rank=LEAST_TOKENS, layout=Compact(), in_flight=IN_FLIGHT, device=device,
            )
            for device in ("cpu", "cuda")
        )  # fmt: skip

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """None of its own: the other number counts for both."""
        return 0


class Buffer:
    num_sms = 20
    """SMs of normal mode, where no Config says another number."""

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        """Collective, like each first call of a shape."""
        if enable_shrink:
            raise refuse(
                "Buffer", "enable_shrink=True", "a death raises pplx_comm.PeerError, then low_latency_clean_mask_buffer() goes on"
            )
        if group is None and comm is None:
            raise Error("Buffer: give group=, a torch process group, or comm=, an mpi4py communicator")

        def communicator(node_size: int | None) -> Communicator:
            if group is None:
                return Communicator.from_mpi(comm, node_size=node_size)
            return Communicator.from_torch(group, node_size=node_size)

        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy, self.enable_shrink = low_latency_mode, explicitly_destroy, enable_shrink
        self._pool = Pool(communicator)
        if not explicitly_destroy:
            weakref.finalize(self, self._pool.close).atexit = False
        self.rank, self.group_size = self._pool.comm.rank, self._pool.comm.world_size
        self._most_tokens = 0
        self._comm_stream: Any = None
        if self.rank == 0:
            announce("deep_ep")

    def destroy(self) -> None:
        self._pool.close()

    # ---- what there is -----------------------------------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: FP8 works everywhere."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        return AllToAll.required_bytes(
            world_size=num_ranks, num_experts=num_experts, top_k=MOST_CHOICES, hidden=hidden,
            max_tokens_per_rank=num_max_dispatch_tokens_per_rank, in_flight=IN_FLIGHT,
            layout=Padded(num_ranks * num_max_dispatch_tokens_per_rank),
        )  # fmt: skip

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    def get_comm_stream(self) -> Any:
        """That of calls with async_finish=True. CPU calls have none."""
        if self._comm_stream is None:
            self._comm_stream = torch.cuda.Stream() if torch.cuda.is_initialized() else torch.cpu.Stream()
        return self._comm_stream

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: Any = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        raise refuse("get_local_buffer_tensor", "access to its memory", "use what dispatch returns")

    # ---- streams -------------------------------------------------------------------------------------------------------------

    def _run(
        self,
        call: Callable[[], tuple[Any, ...]],
        previous: EventOverlap | None,
        asynchronous: bool,
        first: torch.Tensor,
        *read: torch.Tensor | None,
    ) -> tuple[tuple[Any, ...], EventOverlap]:
        """Calls on the current stream, or with async_finish=True on the communication stream. first, read: the caller's tensors."""
        event = None if previous is None else previous.event
        if not asynchronous or not first.is_cuda:
            if event is not None:
                event.current_stream_wait()
            return call(), EventOverlap(EventHandle()) if asynchronous else NO_EVENT
        current, own = torch.cuda.current_stream(), self.get_comm_stream()
        if event is None:
            own.wait_stream(current)
        with torch.cuda.stream(own):
            if event is not None:
                event.current_stream_wait()
            made = call()
            done = EventHandle()
        for tensors, stream in (((first, *read), own), (made, current)):
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(stream)
        return made, EventOverlap(done, (first, *read))

    # ---- low latency -----------------------------------------------------------------------------------------------------------

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing: the modes share no memory."""

    @quick
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        x_global_scale: torch.Tensor | None = None,
        use_nvfp4: bool = False,
    ) -> tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        if use_nvfp4 or x_global_scale is not None:
            raise refuse("low_latency_dispatch", "use_nvfp4=", "use use_fp8=True, or use_fp8=False and quantise what is received")
        if use_ue8m0 and not (use_fp8 and round_scale):
            raise Error("low_latency_dispatch: use_ue8m0=True needs use_fp8=True and round_scale=True")
        if use_ue8m0 and x.shape[1] % PACKED:
            raise Error(f"low_latency_dispatch: use_ue8m0=True needs a hidden size that is a multiple of {PACKED}")
        if async_finish and return_recv_hook:
            raise _one_of_both("low_latency_dispatch")
        shape = num_max_dispatch_tokens_per_rank, x.shape[1], num_experts
        lane = self._low_latency(shape, topk_idx.shape[1], x, 1 + round_scale if use_fp8 else 0)
        handle = LowLatencyHandle(topk_idx, self.group_size, shape)
        stats, waits = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        if async_finish:
            call = functools.partial(handle.receive, lane, x, False, stats, waits, use_ue8m0)
            (rows, scale, counts, _), event = self._run(call, None, True, x, topk_idx, stats, waits)
            return (rows, scale) if use_fp8 else rows, counts, handle, event, None
        rows, scale, counts, step = handle.receive(lane, x, return_recv_hook, stats, waits, use_ue8m0)
        return (rows, scale) if use_fp8 else rows, counts, handle, NO_EVENT, step.receive if return_recv_hook else None

    @quick
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        *,
        overlap: bool = False,
        **of_overlap: Any,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        if use_logfmt:
            raise refuse("low_latency_combine", "use_logfmt=True", "leave it out: rows return in their own dtype, one per rank")
        if overlap:
            raise refuse("low_latency_combine", "overlap=True", "leave it out, in SGLang --enable-single-batch-overlap")
        if async_finish and return_recv_hook:
            raise _one_of_both("low_latency_combine")
        if zero_copy:
            if handle.given is None:
                raise Error("low_latency_combine: zero_copy=True needs rows in get_next_low_latency_combine_buffer(handle)")
            x, handle.given = handle.given, None
        ids = handle.ids
        lane = handle.lane(x) or self._low_latency(handle.shape, ids.shape[1], x, 0)
        if topk_idx is not ids and topk_idx.data_ptr() != ids.data_ptr():
            topk_weights = topk_weights.masked_fill(topk_idx < 0, 0.0)  # choices that were dropped since the dispatch
        if async_finish:
            waits = combine_wait_recv_cost_stats
            call = functools.partial(handle.combine, lane, x, False, topk_weights, out, waits)
            (y, _), event = self._run(call, None, True, x, ids, topk_weights, out, waits, handle.open_rows())
            return y, event, None
        y, step = handle.combine(lane, x, return_recv_hook, topk_weights, out, combine_wait_recv_cost_stats)
        return y, NO_EVENT, step.finish if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Memory for the rows of the next combine on this handle, with zero_copy=True."""
        most, hidden, experts = handle.shape
        shape = experts // self.group_size, self.group_size * most, hidden
        handle.given = torch.empty(shape, dtype=torch.bfloat16, device=handle.ids.device)
        return handle.given

    def _low_latency(self, shape: tuple[int, int, int], top_k: int, x: torch.Tensor, wire: int) -> Lane:
        """wire: a number of WIRES."""
        key = shape, top_k, x.dtype, wire
        return self._pool.known(key) or self._pool.open(key, self._low_latency_arguments(shape, top_k, x, wire))

    def _low_latency_arguments(self, shape: tuple[int, int, int], top_k: int, x: torch.Tensor, wire: int) -> dict[str, Any]:
        (most, hidden, experts), device = shape, x.device
        self._check_experts("low_latency_dispatch", experts)
        return {
            "num_experts": experts, "top_k": top_k, "hidden": hidden, "max_tokens_per_rank": most, "dtype": x.dtype,
            "wire": WIRES[wire], "layout": Padded(self.group_size * most), "scale_layout": "tma", "device": device,
            # CPU results are there before the receive half only with hooks.
            "hooks": device.type == "cpu",
        }  # fmt: skip

    def _check_experts(self, call: str, experts: int) -> None:
        if experts % self.group_size:
            raise Error(f"{call}: num_experts={experts} must be a multiple of the {self.group_size} ranks")

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        if mask:
            raise refuse("low_latency_update_mask_buffer", "mask=True", "end that rank's process")

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """1 for each rank that is gone, or that this rank waited for in vain."""
        mask_status.copy_(torch.tensor(self._pool.dead(), dtype=mask_status.dtype, device="cpu"))

    def low_latency_clean_mask_buffer(self) -> None:
        """Goes on without the ranks that are gone: collective over those that are left. Handles from before are invalid."""
        self._pool.reset()

    # ---- normal mode -------------------------------------------------------------------------------------------------------------

    @property
    def _nodes(self) -> int:
        return self.group_size // self._pool.comm.node_size

    @quick
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        self._check_experts("get_dispatch_layout", num_experts)
        tokens, ranks, device = len(topk_idx), self.group_size, topk_idx.device

        def count() -> tuple[Any, ...]:
            """One kernel."""
            ids, nodes = topk_idx.contiguous(), self._nodes if self._nodes > 1 else 0
            wanted = torch.empty(tokens, ranks, dtype=torch.bool, device=device)
            counts = torch.empty(ranks + nodes + num_experts, dtype=torch.int32, device=device)
            cuda_module().count_routing(
                ids.data_ptr(), ids.dtype == torch.int64, tokens, ids.shape[1], ranks, nodes, num_experts,
                wanted.data_ptr(), counts.data_ptr(), device.index, raw_stream(device.index),
            )  # fmt: skip
            return counts[:ranks], counts[ranks : ranks + nodes] if nodes else None, counts[ranks + nodes :], wanted

        def call() -> tuple[Any, ...]:
            expert = topk_idx.to(torch.int64) % (num_experts + 1)  # a dropped choice's is behind the last
            owner = expert // (num_experts // ranks)
            wanted = torch.zeros(tokens, ranks + 1, dtype=torch.bool, device=device).scatter_(1, owner, True)
            wanted = wanted[:, :ranks].contiguous()
            per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
            per_expert.index_add_(0, expert.flatten(), torch.ones(1, dtype=torch.int32, device=device).expand(expert.numel()))
            by_node = wanted.view(tokens, self._nodes, ranks // self._nodes).any(2) if self._nodes > 1 else None
            per_node = None if by_node is None else by_node.sum(0, dtype=torch.int32)
            return wanted.sum(0, dtype=torch.int32), per_node, per_expert[:num_experts], wanted

        made, event = self._run(count if topk_idx.is_cuda else call, previous_event, async_finish, topk_idx)
        per_rank, per_node, per_expert, wanted = made
        return per_rank, per_node, per_expert, wanted, event

    @quick
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, list[int] | None, NormalHandle | None, EventOverlap]:
        rows, scale = x if isinstance(x, tuple) else (x, None)
        if scale is not None and scale.dtype != torch.float32:
            raise refuse("dispatch", f"scales of {scale.dtype}", "pass float32 scales, one for each 128 elements")
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise Error("dispatch: handle= replaces topk_idx and topk_weights: leave them out")
            return self._again(handle, rows, scale, config, previous_event, async_finish)
        if is_token_in_rank is None or num_tokens_per_expert is None:
            raise Error("dispatch: give handle=, or is_token_in_rank and num_tokens_per_expert of get_dispatch_layout()")
        counts, experts = None, num_tokens_per_expert.shape[0]
        self._check_experts("dispatch", experts)
        if topk_idx is None:
            # The layout is read here, on the current stream. Then the communication stream waits for that stream.
            if previous_event is not None and previous_event.event is not None:
                previous_event.event.current_stream_wait()
            previous_event = None
            counts = self._sum_counts(num_tokens_per_expert)
            topk_idx, experts = _as_choices(is_token_in_rank), self.group_size
        where = self.rank, self.group_size, self._nodes
        made = handle = NormalHandle(topk_idx, experts, is_token_in_rank, where)
        lane = self._normal(handle, rows, scale, num_worst_tokens, config)
        if not num_worst_tokens and lane.capturing():
            raise Error("dispatch: in a CUDA graph give num_worst_tokens= or handle=, else the host waits for how many rows came")

        def call() -> tuple[Any, ...]:
            d = made.dispatch(lane, rows, topk_weights, scale).rows()
            assert d.num_rows is not None
            assert d.topk_ids is not None
            ids = d.topk_ids.to(topk_idx_t)
            if num_worst_tokens:
                made.rows, numbers = num_worst_tokens, []
                beyond = torch.arange(len(ids), device=ids.device, dtype=torch.int32).unsqueeze(1) >= d.num_rows
                ids.masked_fill_(beyond, -1)
            else:
                made.rows, *numbers = torch.cat([d.num_rows, d.counts]).tolist()
            n = made.rows
            return _first(d.x, n), _first(d.scale, n), _first(ids, n, -1), _first(d.topk_weights, n), numbers

        read = scale, topk_idx, topk_weights, is_token_in_rank
        (recv_x, recv_scale, ids, weights, numbers), event = self._run(call, previous_event, async_finish, rows, *read)
        if counts is not None:
            ids, numbers = None, [] if num_worst_tokens else counts
        numbers = [-(-number // expert_alignment) * expert_alignment for number in numbers]
        received = recv_x if scale is None else (recv_x, recv_scale)
        return received, ids, None if topk_weights is None else weights, numbers, handle, event

    def _again(
        self, handle: NormalHandle, rows: torch.Tensor, scale: torch.Tensor | None, config: Config | None,
        previous: EventOverlap | None, asynchronous: bool,
    ) -> tuple[Any, None, None, None, None, EventOverlap]:  # fmt: skip
        lane = self._normal(handle, rows, scale, 0, config)

        def call() -> tuple[Any, ...]:
            d = handle.dispatch(lane, rows, None, scale).rows()
            return _first(d.x, handle.rows), _first(d.scale, handle.rows)

        made, event = self._run(call, previous, asynchronous, rows, scale, handle.ids)
        return made[0] if scale is None else made, None, None, None, None, event

    @quick
    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        numbers = None if topk_weights is None else self._numbers(handle, topk_weights)  # first: it may close the handle's lane
        lane = handle.lane(x) or self._normal(handle, x, None, 0, config)
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)

        def call() -> tuple[Any, ...]:
            onto = None
            if biases:
                onto = biases[0].clone() if len(biases) == 1 else (biases[0].float() + biases[1].float()).to(x.dtype)
            step = handle.open_step(lane)
            d = step.rows()
            y = step.combine(x, weighted=False, out=onto, accumulate=onto is not None)
            sums = None
            if numbers is not None:
                # Each rank's numbers of a token are a row of their own, which combine adds up.
                assert topk_weights is not None
                wide, choices = numbers.a2a.hidden, topk_weights.shape[1]
                given = torch.nn.functional.pad(topk_weights, (0, wide - choices))
                sums = Routes(handle.ids).open_step(numbers).combine(given, weighted=False)[:, :choices].contiguous()
            return y, sums, d.x

        read = handle.ids, topk_weights, *biases, handle.open_rows()
        (y, sums, _), event = self._run(call, previous_event, async_finish, x, *read)
        return y, sums, event

    internode_dispatch, internode_combine = dispatch, combine

    def _normal(self, handle: NormalHandle, x: torch.Tensor, scale: torch.Tensor | None, worst: int, config: Config | None) -> Lane:
        tokens, hidden, experts, top_k = len(handle.ids), x.shape[1], handle.experts, handle.ids.shape[1]
        dtype, wire = (x.dtype, Wire.NATIVE) if scale is None else (torch.bfloat16, Wire.FP8)

        def arguments() -> dict[str, Any]:
            most = self._room(max(tokens, -(-worst // self.group_size)))
            given = (self.num_nvl_bytes + self.num_rdma_bytes) // IN_FLIGHT if _takes_pieces(x.device) else 0
            arguments: dict[str, Any] = {
                "num_experts": experts, "top_k": top_k, "hidden": hidden, "dtype": dtype, "wire": wire, "layout": Compact(),
            }  # fmt: skip
            least = AllToAll.required_bytes(
                world_size=self.group_size, max_tokens_per_rank=256, device=x.device.type, **arguments
            )  # fmt: skip
            slot_bytes = max(given, least) if given else None
            return {**arguments, "max_tokens_per_rank": most, "slot_bytes": slot_bytes, "device": x.device}

        key = experts, top_k, hidden, dtype, wire
        lane = self._pool.known(key) or self._pool.open(key, arguments())
        if tokens > lane.a2a.max_tokens_per_rank:
            said = (
                f"dispatch: rank {self.rank} has {tokens} tokens, and its Buffer has room for {lane.a2a.max_tokens_per_rank}: set "
                "PPLX_COMM_COMPAT_MAX_TOKENS on all ranks"
            )
            self._pool.comm.control.abort(said, phase="dispatch")  # the others would wait
            raise Error(said)
        lane.set_num_sms(Buffer.num_sms if config is None else config.num_sms)
        return lane

    def _room(self, tokens: int) -> int:
        """Returns max_tokens_per_rank of all AllToAlls of normal mode."""
        if not self._most_tokens:
            most = self._pool.settings.max_tokens or max(LEAST_TOKENS, self._pool.most("deep_ep's first dispatch", tokens))
            self._most_tokens = 1 << (most - 1).bit_length()
        return self._most_tokens

    def _numbers(self, handle: NormalHandle, topk_weights: torch.Tensor) -> Lane:
        """The AllToAll of combined top-k weights: rows of float32 on the same routing."""
        padded = topk_weights.new_empty((0, -(-topk_weights.shape[1] // 4) * 4))
        return self._normal(handle, padded, None, 0, None)

    def _sum_counts(self, per_expert: torch.Tensor) -> list[int]:
        """Rows of each local expert. Without ids they are not in the dispatch, so the ranks tell each other."""
        given = self._pool.comm.control.all_gather({"counts": per_expert.tolist()}, "deep_ep's dispatch without topk_idx")
        local = len(per_expert) // self.group_size
        mine = slice(self.rank * local, (self.rank + 1) * local)
        return [sum(numbers) for numbers in zip(*(one["counts"][mine] for one in given if one is not None), strict=True)]


def _one_of_both(call: str) -> Error:
    return Error(f"{call}: give async_finish=True or return_recv_hook=True, not both")


def _takes_pieces(device: torch.device) -> bool:
    """See docs/limits.md, slot_bytes."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def _first(tensor: Any, count: int | None, fill: int = 0) -> Any:
    """The first rows; more than there are hold `fill`."""
    if tensor is None or count is None or count <= len(tensor):
        return None if tensor is None else tensor[:count]
    return torch.cat([tensor, tensor.new_full((count - len(tensor), *tensor.shape[1:]), fill)])


def _as_choices(wanted: torch.Tensor) -> torch.Tensor:
    """bool [tokens, ranks] as choices among experts of which each rank has one."""
    ranks = wanted.shape[1]
    if ranks <= MOST_CHOICES:
        return torch.where(wanted, torch.arange(ranks, device=wanted.device), -1)
    given, ids = wanted.to(torch.int32).topk(MOST_CHOICES, dim=1)
    return ids.masked_fill_(given == 0, -1)
