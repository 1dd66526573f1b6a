"""The parameters of a rank's experts, and of the expert that every token visits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pplx_comm.errors import Error
from pplx_comm.moe.grouped.backend import Codes
from pplx_comm.moe.placement import Placement
from pplx_comm.moe.quantise import quantise_weights
from pplx_comm.moe.routed import Extras, Options, Pass, compute
from pplx_comm.moe.sharding import local, own
from pplx_comm.moe.stranded import telling
from pplx_comm.moe.swiglu import swiglu


class Experts(nn.Module):
    """The experts of this rank, or its slices of them: `intermediate` is then that of a slice.

    gate_up: [local experts, 2 * intermediate, hidden], gates before ups, as Megatron's linear_fc1 has them.
    down: [local experts, hidden, intermediate].
    """

    subnormal_codes: torch.Tensor
    """int64 []: codes that became subnormal when MXFP8 was rescaled for products that take 1x128, since the beginning."""

    def __init__(
        self, placement: Placement, hidden: int, intermediate: int, device: torch.device, dtype: torch.dtype, constant: bool = False
    ) -> None:
        """intermediate: of a whole expert. constant: for inference: the weights' e4m3 codes are kept."""
        super().__init__()
        self.placement, self.experts, self.constant = placement, placement.experts, constant
        if intermediate % placement.slices:
            raise Error(f"expert_tp={placement.slices} does not divide intermediate={intermediate}")
        experts, intermediate = placement.experts, intermediate // placement.slices
        self._kept: tuple[Any, tuple[Codes, Codes]] | None = None
        self.gate_up = nn.Parameter(torch.empty(len(experts), 2 * intermediate, hidden, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(len(experts), hidden, intermediate, device=device, dtype=dtype))
        self.subnormal_codes = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Uniform as nn.Linear's. They follow from the seed and the expert's number, whichever rank has it."""
        gate_up, down = local(self.gate_up), local(self.down)
        intermediate, hidden = down.shape[2] * self.placement.slices, down.shape[1]
        for place, expert in enumerate(self.experts):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + expert)
            gates, ups = _uniform(2 * intermediate, hidden, generator).chunk(2)
            gate_up[place].copy_(torch.cat([self.placement.part(gates, 0), self.placement.part(ups, 0)]))
            down[place].copy_(self.placement.part(_uniform(hidden, intermediate, generator), 1))

    def add_main_grad(self) -> None:
        """Gives the weights a float32 tensor that passes add their gradients to, in place of `grad`. Its owner clears it."""
        for weight in (self.gate_up, self.down):
            weight.main_grad = torch.zeros_like(own(weight), dtype=torch.float32)  # type: ignore[attr-defined]

    @torch.compiler.disable
    def forward(self, ticket: torch.Tensor, one: Pass, options: Options, whole: bool = False) -> torch.Tensor:
        """The middle of a pass that `routed.send` began. Takes and returns its ticket, which wrappers of modules may replace."""
        one.ticket = ticket
        with telling(one.sent, "compute"):
            gate_up, down = local(self.gate_up), local(self.down)
            main = [
                None if m is None else m.flatten(1, -2) for m in (getattr(w, "main_grad", None) for w in (self.gate_up, self.down))
            ]
            codes = self._codes(gate_up, down) if self.constant and options.quantised else None
        compute(one, gate_up, down, options, Extras(main[0], main[1], self.subnormal_codes, codes), whole=whole)
        return one.ticket

    def _codes(self, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[Codes, Codes]:
        """Returns the codes of weights that do not change: made once, and again after a write to them."""
        key = tuple((weight.data_ptr(), weight._version) for weight in (gate_up, down))
        if self._kept is None or self._kept[0] != key:
            self._kept = key, (quantise_weights(gate_up), quantise_weights(down))
        return self._kept[1]


def _uniform(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    bound = columns**-0.5
    return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)


class SharedExpert(nn.Module):
    """The expert that every token visits. With `gated`, its output is multiplied with a sigmoid of its own, as in Qwen2-MoE."""

    gate: nn.Parameter | None

    def __init__(self, hidden: int, intermediate: int, gated: bool, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * intermediate, hidden, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(hidden, intermediate, device=device, dtype=dtype))
        self.register_parameter("gate", nn.Parameter(torch.empty(1, hidden, device=device, dtype=dtype)) if gated else None)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 - 1)
        for weight in self.parameters():
            bound = weight.shape[-1] ** -0.5
            weight.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(swiglu(F.linear(x, self.gate_up.to(x.dtype))), self.down.to(x.dtype))
        return y if self.gate is None else y * F.linear(x, self.gate.to(x.dtype)).sigmoid()


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that ranks do not share: those of the local experts of every MoE in the model.

    Data parallelism over the same ranks must leave them out. A pass gives them the sum over the tokens of all ranks.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, Experts):
            yield from ((f"{prefix}.{name}" if prefix else name, weight) for name, weight in module.named_parameters())
