"""Dispatch and combine as vLLM's modular MoE kernels call them.

Three classes, for what experts take: `Tokens` and `LocalRows` in vLLM's Standard format, `Batches` in its BatchedExperts format.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input, normalize_batched_scales_shape
from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_enabled, dbo_maybe_run_recv_hook

from pplx_comm.errors import Error
from pplx_comm.handles import Dispatched
from pplx_comm.layouts import Compact, Padded, Ragged
from pplx_comm.serving.vllm.manager import All2AllManager, Shape
from pplx_comm.serving.vllm.placement import Placement
from pplx_comm.wire import Wire

MASKED_TILE = 128
"""Rows: DeepGEMM's masked kernels write whole tiles, of 128 rows where they expect more than 64."""


@dataclass(frozen=True)
class Layer:
    """Properties of a MoE layer."""

    placement: Placement
    num_local_experts: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    max_tokens: int
    """The most that a rank comes with."""
    replicas: int
    """Ranks that come with the same tokens."""
    in_flight: int


def make(moe: Any, *, round_robin: bool, manager: All2AllManager, monolithic: bool) -> PrepareAndFinalize:
    """Makes the object that serves layers of that configuration."""
    if monolithic:
        raise Error(
            "pplx_comm serves MoE kernels that take the router's choices, and this one routes by itself: "
            "choose another --moe-backend"
        )
    parallel = moe.moe_parallel_config
    layer = Layer(
        placement=Placement(int(moe.num_experts), manager.world_size, manager.rank, round_robin),
        num_local_experts=int(moe.num_local_experts),
        top_k=int(moe.experts_per_token),
        hidden=int(moe.hidden_dim),
        dtype=moe.in_dtype,
        max_tokens=math.ceil(int(moe.max_num_tokens) / int(parallel.sp_size)),
        # Without sequence parallelism the ranks of a tensor parallel group come with the same tokens.
        replicas=1 if parallel.is_sequence_parallel else manager.tensor_parallel,
        in_flight=manager.micro_batches,
    )
    if parallel.use_batched_activation_format:
        return Batches(layer, manager)
    # The CPU's experts know no expert map: they are given rows whose ids are local.
    return (LocalRows if manager.device.type == "cpu" else Tokens)(layer, manager)


class PrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """The common part of the three: a step is a dispatch, the experts, combine_send, what vLLM computes beside it, and
    combine_recv. Micro-batches dispatch in halves, between which another one computes; else nothing would be done there."""

    layout: Ragged | Padded | Compact
    scale_layout = "row"

    def __init__(self, layer: Layer, manager: All2AllManager) -> None:
        super().__init__()
        self.layer = layer
        self._manager = manager
        self._a2a: Any = None
        self._open: dict[int, Dispatched] = {}
        """The step of each micro-batch."""
        self._physical = layer.placement.physical(manager.device)

    # ---- what vLLM asks --------------------------------------------------------------------------------------------------

    @property
    def activation_format(self) -> Any:
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def num_dispatchers(self) -> int:
        return self._manager.world_size // self.layer.replicas

    def output_is_reduced(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return True

    # ---- life ------------------------------------------------------------------------------------------------------------

    def post_init_setup(self, fused_experts: Any) -> None:
        """Builds the AllToAll, when it is known what the experts take. All ranks make their layers in the same order."""
        self._a2a = self._manager.all_to_all(
            self._shape(_wire(fused_experts.quant_config, fused_experts.expects_unquantized_inputs))
        )

    def _shape(self, wire: Wire) -> Shape:
        layer = self.layer
        return Shape(
            num_experts=layer.placement.num_physical, top_k=layer.top_k, hidden=layer.hidden, dtype=layer.dtype,
            max_tokens_per_rank=layer.max_tokens, wire=wire.value, layout=self.layout, scale_layout=self.scale_layout,
            in_flight=layer.in_flight, replicas=layer.replicas,
        )  # fmt: skip

    # ---- dispatch --------------------------------------------------------------------------------------------------------

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The hook receives what was only sent, on the current stream of whichever thread runs it. The receiver says what the
        experts are given."""
        if self._a2a is None:
            raise Error("prepare: vLLM never said which experts this layer has (post_init_setup was not called)")
        weights = topk_weights if topk_weights.dtype == torch.float32 else topk_weights.float()
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise Error(
                    f"prepare: the router's weights can be applied to the input with one choice a token, not {topk_ids.shape[1]}"
                )
            a1 = a1 * weights.to(a1.dtype)
        ids = topk_ids if topk_ids.dtype in (torch.int32, torch.int64) else topk_ids.to(torch.int32)
        if self._physical is not None:
            ids = self._physical[ids]  # the last entry is for -1
        a2a = self._a2a
        d = (a2a.dispatch_send if dbo_enabled() else a2a.dispatch)(a1, ids, weights)
        self._open[dbo_current_ubatch_id()] = d
        receive = partial(a2a.dispatch_recv, d)

        def receiver() -> Any:
            receive()  # does nothing where that is done
            return self._received(d, quant_config, defer_input_quant)

        return receive, receiver

    def prepare(self, *arguments: Any, **more: Any) -> Any:
        _, receiver = self.prepare_async(*arguments, **more)
        return receiver()

    def _received(self, d: Dispatched, quant_config: Any, deferred: bool) -> Any:
        raise NotImplementedError

    # ---- combine ---------------------------------------------------------------------------------------------------------

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The hook receives, as above."""
        d = self._open.pop(dbo_current_ubatch_id())
        rows = self._answer(fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl)
        dbo_maybe_run_recv_hook()
        a2a = self._a2a
        c = a2a.combine_send(rows, d, weighted=not apply_router_weight_on_input, out=output)
        receive = partial(a2a.combine_recv, c)
        return receive, receive

    def finalize(self, *arguments: Any, **more: Any) -> None:
        _, receiver = self.finalize_async(*arguments, **more)
        receiver()

    def _answer(
        self, rows: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, weighted_already: bool, reduce: Any
    ) -> torch.Tensor:
        """The rows to send back."""
        return rows


class Tokens(PrepareAndFinalize):
    """Each token once, with the global ids of its choices: what Standard experts on GPUs take, with their expert map."""

    layout = Compact()

    def __init__(self, layer: Layer, manager: All2AllManager) -> None:
        super().__init__(layer, manager)
        self._global = layer.placement.global_of_local(manager.device)

    def _received(self, d: Dispatched, quant_config: Any, deferred: bool) -> Any:
        assert d.topk_ids is not None
        assert d.topk_weights is not None
        assert d.num_rows is not None
        rows = self._rows(d)
        x, ids = d.x[:rows], d.topk_ids[:rows]
        # Rows that no token fills hold anything.
        filled = torch.arange(rows, device=ids.device, dtype=torch.int32) < d.num_rows
        here = (ids >= 0) & filled[:, None]
        # vLLM's kernels want valid ids: one of another rank's, which the expert map turns into -1, stands for none.
        ids = torch.where(here, self._global[ids.clamp(0, self.layer.num_local_experts - 1)], self.layer.placement.elsewhere)
        weights = torch.where(here, d.topk_weights[:rows], 0.0)
        scale = None if d.scale is None else d.scale[:rows]
        if scale is None and not deferred:
            x, scale = _quantised(x, filled[:, None], quant_config)
        counts = mk.ExpertTokensMetadata(expert_num_tokens=d.counts[: self.layer.num_local_experts], expert_num_tokens_cpu=None)
        return x, scale, counts, ids, weights

    def _rows(self, d: Dispatched) -> int:
        """Returns an upper bound of the rows received. A GPU is not asked: all ranks together have no more tokens than that."""
        assert d.num_rows is not None
        if d.num_rows.device.type == "cpu":
            return int(d.num_rows)
        everything = self._manager.world_size * self.layer.max_tokens // self.layer.replicas
        metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
        if metadata is None:
            return min(everything, d.x.shape[0])
        tokens = metadata.num_tokens_across_dp_cpu
        if len(tokens) * self._manager.tensor_parallel != self._manager.world_size:
            return min(everything, d.x.shape[0])  # ranks of other kinds hold tokens too
        of_each = self._manager.tensor_parallel // self.layer.replicas
        # Parts of a sequence are rounded up to the same number of tokens.
        total = int((-(-tokens // of_each)).sum()) * of_each
        return min(total, everything, d.x.shape[0])

    def _answer(
        self, rows: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, weighted_already: bool, reduce: Any
    ) -> torch.Tensor:
        if rows.numel() == 0:
            return rows.view(0, self.layer.hidden)
        if isinstance(reduce, TopKWeightAndReduceDelegate):
            reduce = TopKWeightAndReduceContiguous()
        reduced: torch.Tensor = reduce.apply(
            output=None, fused_expert_output=rows, topk_weights=topk_weights, topk_ids=topk_ids,
            apply_router_weight_on_input=weighted_already,
        )  # fmt: skip
        return reduced


class LocalRows(PrepareAndFinalize):
    """A row for each token and local expert that it chose, each with one choice of weight one: what the CPU's experts take."""

    layout = Ragged(align=1)

    def __init__(self, layer: Layer, manager: All2AllManager) -> None:
        super().__init__(layer, manager)
        self._local = torch.arange(layer.num_local_experts, dtype=torch.int32, device=manager.device)

    def _received(self, d: Dispatched, quant_config: Any, deferred: bool) -> Any:
        counts = d.counts[: self.layer.num_local_experts]
        ids = self._local.repeat_interleave(counts)[:, None]
        x, scale = d.x[: ids.shape[0]], None if d.scale is None else d.scale[: ids.shape[0]]
        if scale is None and not deferred:
            x, scale = _quantised(x, None, quant_config)
        weights = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
        return x, scale, mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None), ids, weights


class Batches(PrepareAndFinalize):
    """A batch for each local expert."""

    scale_layout = "tma"

    def __init__(self, layer: Layer, manager: All2AllManager) -> None:
        if layer.num_local_experts * manager.world_size != layer.placement.num_physical:
            raise Error(
                "PPLX_COMM_VLLM_FORMAT=batched needs the same number of experts on every rank, but "
                f"{layer.placement.num_experts} experts on {manager.world_size} ranks are uneven: use the standard format"
            )
        super().__init__(layer, manager)
        dispatchers = self.num_dispatchers()
        multiple = MASKED_TILE // math.gcd(MASKED_TILE, dispatchers)
        self._most = -(-layer.max_tokens // multiple) * multiple
        self.layout = Padded(self._most * dispatchers, align=MASKED_TILE)

    @property
    def activation_format(self) -> Any:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int:
        return self._most

    def _received(self, d: Dispatched, quant_config: Any, deferred: bool) -> Any:
        x, scale = d.x, d.scale
        if scale is None and not deferred and quant_config.quant_dtype not in (None, "nvfp4"):
            experts, most, hidden = x.shape
            rows = torch.arange(most, device=x.device, dtype=torch.int32)
            filled = (rows < d.counts[:, None]).view(-1, 1)
            x, scale = _quantised(x.view(-1, hidden), filled, quant_config)
            x, scale = x.view(experts, most, -1), normalize_batched_scales_shape(scale, experts)
        return x, scale, mk.ExpertTokensMetadata(expert_num_tokens=d.counts, expert_num_tokens_cpu=None), None, None

    def _answer(
        self, rows: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, weighted_already: bool, reduce: Any
    ) -> torch.Tensor:
        if not isinstance(reduce, TopKWeightAndReduceDelegate):
            raise Error(f"finalize: combine adds up and weights, but these experts do it themselves ({type(reduce).__name__})")
        return rows


def _wire(quant_config: Any, deferred: bool) -> Wire:
    """Blocks of 128 travel quantised; everything else is quantised where it arrives."""
    block = quant_config.block_shape
    blocks = quant_config.quant_dtype == torch.float8_e4m3fn and block is not None and block[1] == Wire.FP8.scale_block
    if not blocks or deferred:
        return Wire.NATIVE
    return Wire.FP8_UE8M0 if _powers_of_two() else Wire.FP8


def _powers_of_two() -> bool:
    """True if vLLM gives DeepGEMM scales that are powers of two only."""
    from vllm.platforms import current_platform
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return current_platform.is_cuda() and bool(is_deep_gemm_e8m0_used())


def _quantised(x: torch.Tensor, filled: torch.Tensor | None, quant_config: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the experts want it. filled: the rows that hold a token, None for all."""
    dtype = quant_config.quant_dtype
    if dtype is None or x.numel() == 0:
        return x, None
    scale = quant_config.a1_gscale if dtype == "nvfp4" else quant_config.a1_scale
    if filled is not None and scale is None and not quant_config.per_act_token_quant and quant_config.block_shape is None:
        x = torch.where(filled, x, 0.0)  # a scale for all rows: those that hold anything must not decide it
    q, scales = moe_kernel_quantize_input(
        x, scale, dtype, quant_config.per_act_token_quant, quant_config.block_shape,
        is_scale_swizzled=getattr(quant_config, "is_scale_swizzled", True),
    )  # fmt: skip
    return q, scales
