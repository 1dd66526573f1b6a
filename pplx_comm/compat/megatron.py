"""A token dispatcher for Megatron-Core: its MoE layers, dispatched over pplx_comm.

    model = GPTModel(...)
    pplx_comm.compat.megatron.use(model, max_tokens_per_rank=4096)

Every MoELayer of the model then has this dispatcher, whatever `moe_token_dispatcher_type` says. Experts, router, losses,
checkpoints and schedules stay Megatron-Core's. Expert tensor parallelism (`expert_tensor_parallel_size`) is there, too. Steps are
open between token_dispatch() and dispatch_postprocess(), and between token_combine() and combine_postprocess(), so that what a
schedule puts there runs while tokens travel.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import nn

from pplx_comm.compat.groups import rows_by_expert
from pplx_comm.errors import Error
from pplx_comm.moe.exchange import Exchange
from pplx_comm.moe.placement import Placement


class PplxCommTokenDispatcher(MoETokenDispatcher):
    """Tokens to experts and back, with gradients, by dispatch and combine. Experts apply the router's weights, as Megatron's do."""

    def __init__(
        self, num_local_experts: int, config: Any, pg_collection: Any, *, max_tokens_per_rank: int, precision: str = "bf16",
        max_rows: int | None = None,
    ) -> None:  # fmt: skip
        """
        max_tokens_per_rank: the most that any rank has in one call: micro batch * sequence / (tensor * context parallel size).
        precision: how rows travel: "bf16", which is their own dtype; "fp8", e4m3 with a power of two per 1x128; "mxfp8", per 1x32.
        max_rows: rows that a rank has room for, the same on each. None takes the worst case, if that is at most 1 GiB.
        """
        super().__init__(config=config, pg_collection=pg_collection)
        if config.moe_expert_capacity_factor is not None and config.moe_pad_expert_input_to_capacity:
            raise Error("pplx_comm drops no token and pads none: set moe_pad_expert_input_to_capacity=False")
        self.max_tokens_per_rank, self.precision, self.max_rows = max_tokens_per_rank, precision, max_rows
        ranks = self.tp_size * self.ep_size
        self.placement = Placement(config.num_moe_experts, ranks, self.ep_group.rank() * self.tp_size + self.tp_rank, self.tp_size)
        assert len(self.placement.experts) == num_local_experts
        self.top_k = self.placement.top_k(config.moe_router_topk)
        self.overlapped = config.overlap_moe_expert_parallel_comm
        self.align = get_align_size_for_quantization(config) if config.fp8 or config.fp4 else 1

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens: [..., hidden]. routing_map: bool [tokens, experts], and probs. Returns tokens, and weights by choice."""
        self.hidden_shape = tokens.shape
        chosen = probs.detach().float().masked_fill(~routing_map, -1.0).topk(self.config.moe_router_topk, dim=-1)
        dropped = chosen.values < 0
        weights = probs.gather(-1, chosen.indices).masked_fill(dropped, 0.0)
        self.ids, weights = self.placement.targets(chosen.indices.masked_fill(dropped, -1), weights)
        tokens = tokens.reshape(-1, tokens.shape[-1])
        # A schedule that overlaps frees what token_dispatch() was given, and the router needs the tokens again.
        return tokens.clone() if self.overlapped else tokens, weights

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The send half of dispatch. Returns tickets for dispatch_postprocess(), which hold nothing.

        One for tokens and one for weights: a schedule that runs each part's backward pass by itself hands on a gradient of both.
        """
        a2a = rows_by_expert(
            self.tp_ep_group, hidden_states, num_experts=self.placement.num_targets, top_k=self.top_k,
            most_tokens=self.max_tokens_per_rank, precision=self.precision, align=self.align, max_rows=self.max_rows,
        )  # fmt: skip
        self.one = Exchange(a2a, weighted=False, together=not self.overlapped)
        self.probs_dtype = probs.dtype
        ticket = self.one.send(hidden_states, self.ids, probs)
        return ticket, ticket

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The receive half. Returns rows, how many each local expert has, and their weights.

        The host waits for the counts, which Megatron-Core's experts take as numbers.
        """
        rows, weights = self.one.receive(hidden_states + probs)
        offsets = self.one.where.where.to("cpu", torch.int64)
        used = int(offsets[-1])
        return rows[:used], offsets.diff(), weights[:used].to(self.probs_dtype)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows stay as they are."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The send half of combine. Returns a ticket for combine_postprocess()."""
        return self.one.send_back(hidden_states)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The receive half: [..., hidden]."""
        return self.one.receive_back(hidden_states).view(self.hidden_shape)

    def set_shared_experts(self, shared_experts: nn.Module) -> None:
        """Refuses: that overlap is the all-to-all dispatcher's own."""
        raise Error("pplx_comm: set moe_shared_expert_overlap=False; a shared expert runs between preprocess and dispatch")


def use(model: nn.Module, *, max_tokens_per_rank: int, precision: str = "bf16", max_rows: int | None = None) -> int:
    """Gives every MoELayer of the model this dispatcher. Returns how many there were. See PplxCommTokenDispatcher."""
    layers = [layer for layer in model.modules() if isinstance(layer, MoELayer)]
    for layer in layers:
        if layer.shared_expert_overlap:
            raise Error("pplx_comm: set moe_shared_expert_overlap=False")
        theirs = layer.token_dispatcher
        groups = SimpleNamespace(ep=theirs.ep_group, expt_tp=theirs.tp_group, tp_ep=theirs.tp_ep_group)
        layer.token_dispatcher = PplxCommTokenDispatcher(
            layer.num_local_experts, layer.config, groups, max_tokens_per_rank=max_tokens_per_rank, precision=precision,
            max_rows=max_rows,
        )  # fmt: skip
    return len(layers)
