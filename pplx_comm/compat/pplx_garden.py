"""pplx_garden's `P2PAllToAll` over this library. Names and arguments are pplx_garden's. docs/migrate.md says what differs."""

from __future__ import annotations

from typing import Any

import torch

from pplx_comm.communicator import Communicator
from pplx_comm.compat.halves import Halves
from pplx_comm.compat.shared import Pool, announce
from pplx_comm.control.rendezvous import Gathered
from pplx_comm.errors import Error
from pplx_comm.layouts import Ragged


class P2PAllToAll(Halves):
    def __init__(
        self,
        *,
        max_num_tokens: int,
        num_experts: int,
        expert_padding: int,
        hidden_dim: int,
        hidden_dim_scale: int | None,
        in_dtype: torch.dtype,
        out_dtype: torch.dtype,
        scale_dtype: torch.dtype | None,
        num_experts_per_token: int,
        nets_per_gpu: int,
        max_private_tokens: int | None,
        device: torch.device,
        dp_group: Any,
        node_group: Any,
        global_group: Any,
    ) -> None:
        """Collective over global_group: an object with rank, size and all_gather_object()."""

        def communicator(node_size: int | None) -> Communicator:
            if node_size is None and node_group is not None:
                node_size = node_group.size
            return Communicator(Gathered(global_group.rank, global_group.size, global_group.all_gather_object), node_size=node_size)

        replicas = 1 if dp_group is None else dp_group.size
        ranks = global_group.size
        choices = max_num_tokens * (ranks // replicas) * num_experts_per_token
        padding = -(-num_experts // ranks) * (expert_padding - 1)
        super().__init__(
            Pool(communicator), num_experts=num_experts, top_k=num_experts_per_token, hidden=hidden_dim,
            max_tokens_per_rank=max_num_tokens, replicas=replicas,
            layout=Ragged(expert_padding, max_rows=-(-(choices + padding) // expert_padding) * expert_padding),
        )  # fmt: skip
        self._answers, self._out_dtype, self._replicas = out_dtype, out_dtype, replicas
        if global_group.rank == 0:
            announce("pplx_garden")

    def dispatch(
        self,
        out_expert_num_tokens: torch.Tensor,
        out_expert_x: torch.Tensor,
        out_expert_x_scale: torch.Tensor | None,
        dp_x: torch.Tensor,
        dp_x_scale: torch.Tensor | None,
        indices: torch.Tensor,
        weights: torch.Tensor,
        bound_m: torch.Tensor | None = None,
        do_send: bool = True,
        do_recv: bool = True,
    ) -> None:
        self.dispatch_into(
            out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices, bound_m, do_send, do_recv
        )

    def combine(
        self,
        out_tokens: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        expert_y: torch.Tensor,
        bound_m: torch.Tensor | None = None,
        do_send: bool = True,
        do_recv: bool = True,
        accumulate: bool = False,
    ) -> None:
        if accumulate and self._replicas > 1:
            raise Error("combine: accumulate=True needs dp_group=None, or one of size 1")
        self.combine_into(out_tokens, weights, expert_y, do_send, do_recv, accumulate)
