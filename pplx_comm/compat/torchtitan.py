"""A token dispatcher for torchtitan: MoE layers of its models, dispatched over pplx_comm.

    OverrideConfig(imports=["pplx_comm.compat.torchtitan.pplx_comm_override"])

and its training loop takes it in the place of `AllToAllTokenDispatcher`. With arguments:

    OverrideConfig(imports=[("pplx_comm.compat.torchtitan.pplx_comm_override", {"precision": "fp8"})])

No token is dropped, and with CUDA the host waits for nothing: rows have room for `max_rows`, or for the worst case, and an expert's
segment is padded with zeros to a multiple of `align`, which its count includes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, BaseEPTokenDispatcher, LocalTokenDispatcher

from pplx_comm.all_to_all import AllToAll
from pplx_comm.compat.groups import rows_by_expert
from pplx_comm.moe.exchange import Exchange


class PplxCommTokenDispatcher(BaseEPTokenDispatcher):
    """Tokens to experts and back, with gradients, by dispatch and combine. Without an EP mesh it is torchtitan's local one."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """
        precision: how rows travel: "bf16", which is their own dtype; "fp8", e4m3 with a power of two per 1x128; "mxfp8", per 1x32.
            Quantised wires carry tokens forward and gradients back.
        align: an expert's rows begin at multiples of this. 16 suits torch._grouped_mm in bfloat16; torchao's FP8 wants 16 or 32.
        num_max_tokens_per_rank: in one call. None follows the calls, by powers of two: torchtitan pads sequences, so ranks have the
            same number.
        max_rows: rows that a rank has room for. None takes the worst case, if that is at most 1 GiB.
        """

        precision: str = "bf16"
        align: int = 16
        num_max_tokens_per_rank: int | None = None
        max_rows: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.precision, self.align, self.max_rows = config.precision, config.align, config.max_rows
        self.most_tokens = config.num_max_tokens_per_rank or 0

    @torch.compiler.disable
    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, object]:
        """Rows by local expert, how many each has, and what combine() wants."""
        if self.ep_mesh is None:
            local: tuple[torch.Tensor, torch.Tensor, object] = LocalTokenDispatcher.dispatch(
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
            return local
        one = Exchange(self._all_to_all(x_TD), weighted=True)
        rows, _ = one.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK)
        offsets = one.where.where
        return rows, (offsets[1:] - offsets[:-1]).to(num_local_tokens_per_expert_E.dtype), one

    @torch.compiler.disable
    def combine(self, routed_output_RD: torch.Tensor, metadata: object, x_TD: torch.Tensor) -> torch.Tensor:
        """The tokens' outputs, weighted and added."""
        if not isinstance(metadata, Exchange):
            combined: torch.Tensor = LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
            return combined
        return metadata.combine(routed_output_RD)

    def _all_to_all(self, x: torch.Tensor) -> AllToAll:
        if len(x) > self.most_tokens:
            self.most_tokens = 1 << max(len(x) - 1, 0).bit_length()
        return rows_by_expert(
            self.ep_mesh.get_group(), x, num_experts=self.num_experts, top_k=self.top_k, most_tokens=self.most_tokens,
            precision=self.precision, align=self.align, max_rows=self.max_rows,
        )  # fmt: skip


@override(target=AllToAllTokenDispatcher.Config, description="Dispatch and combine by pplx_comm.")
def pplx_comm_override(
    cfg: AllToAllTokenDispatcher.Config, *, precision: str = "bf16", align: int = 16, num_max_tokens_per_rank: int | None = None,
    max_rows: int | None = None,
) -> PplxCommTokenDispatcher.Config:  # fmt: skip
    """See PplxCommTokenDispatcher.Config."""
    return derive(
        cfg, PplxCommTokenDispatcher.Config, precision=precision, align=align, num_max_tokens_per_rank=num_max_tokens_per_rank,
        max_rows=max_rows,
    )  # fmt: skip
