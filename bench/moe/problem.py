"""Inputs of every layer at one size: weights, tokens, and where they go. They follow from the seed, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from bench.moe.options import LayerOptions


@dataclass(frozen=True)
class Weights:
    """Weights of this rank's experts, bfloat16."""

    gate_up: torch.Tensor
    """[experts, 2 * intermediate, hidden], gates before ups."""
    down: torch.Tensor
    """[experts, hidden, intermediate]."""


@dataclass(frozen=True)
class Problem:
    options: LayerOptions
    tokens: int
    routing: str
    rank: int
    world: int
    device: torch.device
    weights: Weights

    @property
    def local_experts(self) -> int:
        return self.options.experts // self.world

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.options.seed * 1_000_003 + number * 1009 + self.rank)

    @cached_property
    def x(self) -> torch.Tensor:
        return self._normal(1)

    @cached_property
    def dy(self) -> torch.Tensor:
        return self._normal(2)

    def _normal(self, number: int) -> torch.Tensor:
        shape = (self.tokens, self.options.hidden)
        return torch.randn(shape, generator=self._generator(number), device=self.device).bfloat16()

    @cached_property
    def ids(self) -> torch.Tensor:
        """int64 [tokens, top_k], each expert once a token."""
        o = self.options
        e = torch.arange(o.experts, device=self.device)
        turn = torch.arange(self.tokens, device=self.device) * self.local_experts // max(self.tokens, 1)
        liked = {
            "even": torch.zeros_like(e, dtype=torch.float32), "zipf": -torch.log1p(e), "hot": torch.where(e == 0, 1e4, 0.0),
            "ordered": torch.where(e % self.local_experts == turn[:, None], 1e4, 0.0),
        }  # fmt: skip
        noise = -torch.log(-torch.log(torch.rand(self.tokens, o.experts, generator=self._generator(3), device=self.device)))
        return (noise + liked[self.routing]).topk(o.top_k, dim=-1).indices

    @cached_property
    def choice_weights(self) -> torch.Tensor:
        """float32 [tokens, top_k]; each token's sum to one."""
        shape = (self.tokens, self.options.top_k)
        return torch.rand(shape, generator=self._generator(4), device=self.device).softmax(-1)


def make_weights(options: LayerOptions, rank: int, world: int, device: torch.device) -> Weights:
    """On the device, expert by expert: the whole in float32 would not fit."""
    local = options.experts // world
    gate_up = torch.empty(local, 2 * options.intermediate, options.hidden, dtype=torch.bfloat16, device=device)
    down = torch.empty(local, options.hidden, options.intermediate, dtype=torch.bfloat16, device=device)
    for place in range(local):
        generator = torch.Generator(device).manual_seed(options.seed * 1_000_003 + rank * local + place)
        for weight in (gate_up[place], down[place]):
            weight.copy_(torch.randn(weight.shape, generator=generator, device=device) * weight.shape[-1] ** -0.5)
    return Weights(gate_up, down)
