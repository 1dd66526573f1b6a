"""pplx_kernels' `AllToAll` over this library. Names and arguments are pplx_kernels'. docs/migrate.md says what differs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pplx_comm.communicator import Communicator
from pplx_comm.compat.halves import Halves
from pplx_comm.compat.shared import Pool, announce
from pplx_comm.errors import Error
from pplx_comm.layouts import Padded


class AllToAll(Halves):
    """Made by intranode() or internode(), which are alike here: nodes are found."""

    @classmethod
    def intranode(
        cls, max_num_tokens: int, num_experts: int, experts_per_token: int, rank: int, world_size: int, dp_size: int,
        hidden_dim: int, hidden_dim_bytes: int, hidden_dim_scale_bytes: int, group_name: str = "default",
    ) -> AllToAll:  # fmt: skip
        """Collective over the group that is registered with torch by that name."""
        name: Any = group_name
        group = dist.distributed_c10d._resolve_process_group(name)
        return cls._over(group, rank, world_size, max_num_tokens, num_experts, experts_per_token, dp_size, hidden_dim)

    @classmethod
    def internode(
        cls, max_num_tokens: int, num_experts: int, experts_per_token: int, rank: int, world_size: int, dp_size: int,
        hidden_dim: int, hidden_dim_bytes: int, hidden_dim_scale_bytes: int,
    ) -> AllToAll:  # fmt: skip
        """Collective over torch's default group."""
        return cls._over(None, rank, world_size, max_num_tokens, num_experts, experts_per_token, dp_size, hidden_dim)

    @classmethod
    def _over(
        cls, group: Any, rank: int, world_size: int, tokens: int, experts: int, top_k: int, dp_size: int, hidden: int
    ) -> AllToAll:
        pool = Pool(lambda node_size: Communicator.from_torch(group, node_size=node_size))
        comm = pool.comm
        if (comm.rank, comm.world_size) != (rank, world_size):
            pool.close()
            raise Error(f"AllToAll: rank={rank} and world_size={world_size}, but the group has {comm.rank} and {comm.world_size}")
        if rank == 0:
            announce("pplx_kernels")
        return cls(
            pool, num_experts=experts, top_k=top_k, hidden=hidden, max_tokens_per_rank=tokens, replicas=dp_size,
            layout=Padded(tokens * (world_size // dp_size)),
        )  # fmt: skip

    def dispatch(
        self,
        out_expert_num_tokens: torch.Tensor,
        out_expert_x: torch.Tensor,
        out_expert_x_scale: torch.Tensor | None,
        dp_x: torch.Tensor,
        dp_x_scale: torch.Tensor | None,
        indices: torch.Tensor,
        bound_m: torch.Tensor | None,
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
        bound_m: torch.Tensor | None,
        do_send: bool = True,
        do_recv: bool = True,
    ) -> None:
        self.combine_into(out_tokens, weights, expert_y, do_send, do_recv, accumulate=False)


def nvshmem_init(*_: Any, **__: Any) -> None:
    """Does nothing: there is no NVSHMEM to start."""


def nvshmem_finalize() -> None:
    """Does nothing."""


class PyTorchStreamWrapper:
    """A stream of torch, as CUDA Python takes it."""

    def __init__(self, pt_stream: Any) -> None:
        self.pt_stream, self.handle = pt_stream, pt_stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle
