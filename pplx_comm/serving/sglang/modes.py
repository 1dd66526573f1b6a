"""Converts rows for the experts and back, in each of SGLang's two modes.

Low latency, for decoding: a batch for each local expert, for DeepGEMM's masked kernels; combine applies the router's weights.
Normal, for prefill: each token once, with the local ids of its choices; the experts apply the weights and add up, and combine adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLDispatchOutput, DeepEPNormalDispatchOutput
from sglang.srt.layers.moe.utils import DeepEPMode, DispatcherOutputDtype, get_deepep_output_dtype
from sglang.srt.runtime_context import get_exec, get_schedule

import pplx_comm
from pplx_comm.errors import Error
from pplx_comm.handles import Combining, Dispatched
from pplx_comm.layouts import Compact, Padded
from pplx_comm.serving.sglang.manager import Manager, Shape
from pplx_comm.wire import Wire

MASKED_TILE = 128
"""Rows: DeepGEMM's masked kernels write whole tiles, of 128 rows where they expect more than 64."""
CONTIGUOUS_TILE = 128
"""Rows: in DeepGEMM's contiguous kernels each expert's rows begin at a multiple of it."""
PACKED = 4 * Wire.FP8.scale_block
"""Elements whose four scales SGLang has in one int32, where DeepGEMM wants powers of two."""


@dataclass(frozen=True)
class Layer:
    """Properties of a MoE layer."""

    num_experts: int
    """Includes redundant ones and slots of shared ones; the same on each rank."""
    top_k: int
    hidden: int
    dtype: torch.dtype
    in_flight: int
    num_sms: int | None


@dataclass
class Step:
    """A dispatch that was not combined yet."""

    dispatched: Dispatched
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    """As SGLang gave them."""
    tokens: int


class Mode:
    """The common part of both modes."""

    dispatch_mode: Any
    scale_layout = "row"

    def __init__(self, layer: Layer, manager: Manager, runner_backend: Any) -> None:
        self.layer = layer
        self.runner_backend = runner_backend
        self.quant_config: dict[str, Any] = {}
        self._manager = manager
        self._a2a: pplx_comm.AllToAll | None = None
        if get_exec().moe.deepep_dispatcher_output_dtype != "auto":
            self.build()  # nothing that is heard later changes how tokens travel

    # ---- life ------------------------------------------------------------------------------------------------------------

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        """SGLang calls this when it has loaded a layer's weights, in the same order on all ranks."""
        self.quant_config = quant_config
        self.build()

    def build(self) -> pplx_comm.AllToAll:
        self._wire = self._wire_wanted()
        powers = self._wire is Wire.FP8_UE8M0
        if powers and self.layer.hidden % PACKED:
            raise Error(
                f"DeepGEMM wants the scales of {PACKED} elements in one int32 on this GPU, and a token has {self.layer.hidden}: "
                "use --deepep-dispatcher-output-dtype bf16"
            )
        layer = self.layer
        shape = Shape(
            num_experts=layer.num_experts, top_k=layer.top_k, hidden=layer.hidden, max_tokens_per_rank=self.max_tokens,
            dtype=layer.dtype, wire=self._wire.value, layout=self.layout, in_flight=layer.in_flight, num_sms=layer.num_sms,
            scale_layout="row" if powers else self.scale_layout,
        )  # fmt: skip
        self._a2a = self._manager.all_to_all(shape)
        return self._a2a

    def _wire_wanted(self) -> Wire:
        dtype = get_deepep_output_dtype(self)
        if dtype is DispatcherOutputDtype.BF16:
            return Wire.NATIVE
        # SGLang takes FP8 for INT8 on GPUs.
        if dtype not in (DispatcherOutputDtype.FP8, DispatcherOutputDtype.INT8):
            raise Error(
                f"pplx_comm sends tokens to experts as bf16 or fp8, and this layer wants {dtype.value}: start SGLang with "
                "--deepep-dispatcher-output-dtype bf16 if its experts can quantise themselves, or with another --moe-a2a-backend"
            )
        return Wire.FP8_UE8M0 if deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 else Wire.FP8

    layout: Padded | Compact

    @property
    def max_tokens(self) -> int:
        """The most that a rank comes with."""
        raise NotImplementedError

    how_to_take_more: str

    # ---- dispatch --------------------------------------------------------------------------------------------------------

    def dispatch(self, call: str, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Step:
        """Dispatches by that call of AllToAll: "dispatch_send", or "dispatch" where nothing is done before dispatch_recv."""
        a2a = self._a2a or self.build()
        if x.shape[0] > a2a.max_tokens_per_rank:
            raise Error(
                f"{self.dispatch_mode.value} dispatch: {x.shape[0]} tokens on a rank, and there is room for "
                f"{a2a.max_tokens_per_rank}: {self.how_to_take_more}"
            )
        ids, weights = self._choices(topk_ids, topk_weights)
        return Step(getattr(a2a, call)(x, ids, weights), topk_ids, topk_weights, x.shape[0])

    def dispatch_recv(self, step: Step) -> Any:
        """Returns the experts' input in SGLang's form."""
        raise NotImplementedError

    def _receive(self, step: Step) -> Dispatched:
        assert self._a2a is not None
        return self._a2a.dispatch_recv(step.dispatched)

    def _choices(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ranks without tokens, and layers without shared experts, may come with fewer choices than others."""
        missing = self.layer.top_k - ids.shape[1]
        if missing < 0:
            raise Error(f"dispatch: {ids.shape[1]} choices of each token, and this layer was made for {self.layer.top_k}")
        if ids.dtype not in (torch.int32, torch.int64):
            ids = ids.to(torch.int32)
        weights = weights.float()
        if missing:
            pad = torch.nn.functional.pad
            ids, weights = pad(ids, (0, missing), value=-1), pad(weights, (0, missing))
        return ids, weights

    # ---- combine ---------------------------------------------------------------------------------------------------------

    def combine(self, call: str, rows: torch.Tensor, step: Step, topk_weights: torch.Tensor) -> Any:
        """As above: "combine_send" or "combine", what they return."""
        assert self._a2a is not None
        rows, weights = self._answers(rows, step, topk_weights)
        return getattr(self._a2a, call)(rows, step.dispatched, weights=weights)

    def _answers(self, rows: torch.Tensor, step: Step, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the rows to send back, and their weights if they are not the dispatch's."""
        raise NotImplementedError

    def combine_recv(self, c: Combining) -> torch.Tensor:
        assert self._a2a is not None
        y = self._a2a.combine_recv(c)
        assert isinstance(y, torch.Tensor)
        return y


class LowLatency(Mode):
    dispatch_mode = DeepEPMode.LOW_LATENCY
    layout = Padded(align=MASKED_TILE)
    scale_layout = "tma"
    how_to_take_more = "set SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK higher, or take --deepep-mode auto if this was a prefill"

    @property
    def max_tokens(self) -> int:
        return int(envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get())

    def dispatch_recv(self, step: Step) -> Any:
        d = self._receive(step)
        get_global_expert_distribution_recorder().on_deepep_dispatch_low_latency(d.counts)
        layer = self.layer
        choices = step.tokens * self._manager.world_size * step.topk_ids.shape[1]
        scale = packed(d.scale) if d.scale is not None and self._wire is Wire.FP8_UE8M0 else d.scale
        # Experts dispose of what they were given, but combine still asks d.
        return DeepEPLLDispatchOutput(
            d.x.view(d.x.shape), scale, step.topk_ids.to(torch.int64), step.topk_weights, d.counts,
            (choices + layer.num_experts) // layer.num_experts,
        )  # fmt: skip

    def _answers(self, rows: torch.Tensor, step: Step, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if topk_weights is step.topk_weights:
            return rows, None
        _, other = self._choices(step.topk_ids, topk_weights)
        return rows, other


class Normal(Mode):
    dispatch_mode = DeepEPMode.NORMAL
    layout = Compact()
    how_to_take_more = "set PPLX_COMM_SGLANG_MAX_TOKENS higher, or --chunked-prefill-size lower"

    @property
    def max_tokens(self) -> int:
        if self._manager.settings.max_tokens is not None:
            return self._manager.settings.max_tokens
        schedule = get_schedule()
        most = schedule.chunked_prefill_size if (schedule.chunked_prefill_size or 0) > 0 else schedule.max_prefill_tokens
        # A rank that decodes may come to a step in which others prefill.
        return max(int(most), int(envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()))

    def _wire_wanted(self) -> Wire:
        # Experts without DeepGEMM quantise for themselves in this mode.
        wire = super()._wire_wanted()
        return wire if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM else Wire.NATIVE

    def dispatch(self, call: str, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Step:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise Error(
                "normal dispatch asks the GPU how many rows came, and a CUDA graph cannot: use --deepep-mode auto or "
                "low_latency under capture"
            )
        return super().dispatch(call, x, topk_ids, topk_weights)

    def dispatch_recv(self, step: Step) -> Any:
        d = self._receive(step)
        assert d.num_rows is not None
        assert d.topk_ids is not None
        assert d.topk_weights is not None
        rows, *counts = torch.cat([d.num_rows, d.counts]).tolist()
        tile = CONTIGUOUS_TILE if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM else 1
        counts = [-(-count // tile) * tile for count in counts]
        self._record(counts, step)
        scale = None if d.scale is None else d.scale[:rows]
        if scale is not None and self._wire is Wire.FP8_UE8M0:
            scale = packed(scale)
        return DeepEPNormalDispatchOutput(d.x[:rows], scale, d.topk_ids[:rows].to(torch.int64), d.topk_weights[:rows], counts)

    def _answers(self, rows: torch.Tensor, step: Step, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return rows.view(-1, self.layer.hidden), None

    def _record(self, counts: list[int], step: Step) -> None:
        """Feeds SGLang's balancing of experts with the counts that DeepEP gives, padding included."""
        recorder = get_global_expert_distribution_recorder()
        if not recorder.recording:
            return
        ids, ranks = step.topk_ids.to(torch.int64), self._manager.world_size
        of_rank = torch.where(ids >= 0, ids // (self.layer.num_experts // ranks), ranks)
        wanted = torch.zeros(ids.shape[0], ranks + 1, dtype=torch.int32, device=ids.device).scatter_(1, of_rank, 1)
        experts = torch.where(ids >= 0, ids, self.layer.num_experts).flatten()
        recorder.on_deepep_dispatch_normal(
            counts,
            num_tokens_per_rank=wanted.sum(0)[:ranks],
            num_tokens_per_rdma_rank=None,
            num_tokens_per_expert=experts.bincount(minlength=self.layer.num_experts + 1)[: self.layer.num_experts],
        )


def packed(scale: torch.Tensor) -> torch.Tensor:
    """float32 powers of two as DeepGEMM has them on Blackwell: the exponents of four in an int32, column by column for batches."""
    exponents = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    words = exponents.view(torch.int32)
    return words.transpose(1, 2).contiguous().transpose(1, 2) if words.dim() == 3 else words
