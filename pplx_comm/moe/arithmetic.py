"""The four products of an expert with its activations, in the tokens' dtype or in e4m3 codes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from pplx_comm.moe.grouped import products
from pplx_comm.moe.grouped.backend import Codes
from pplx_comm.moe.quantise import dequantise, quantise, quantise_weights, rescale_mx
from pplx_comm.moe.segments import Segments
from pplx_comm.moe.swiglu import swiglu, swiglu_quantise


@dataclass(frozen=True)
class Rows:
    """Rows as they were received, one under the other: values, or codes with their scales, which Padded has by expert."""

    x: torch.Tensor
    scale: torch.Tensor | None
    where: Segments

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """As numbers. A block scale that is a power of two makes this exact in bfloat16."""
        return self.x if self.scale is None else dequantise(self.x, self.scale, dtype, self.where)

    def codes(self, subnormal: torch.Tensor | None = None, mx: bool = False) -> Codes:
        """As e4m3 with float32 scales per 1x128. MXFP8 adds to `subnormal` the codes that the change of scale made so.

        mx: MXFP8 stays what it is.
        """
        if self.scale is None:
            return quantise(self.x, self.where)
        if self.scale.dtype == torch.uint8 and not mx:
            codes, scale, became = rescale_mx(self.x, self.scale, self.where)
            if subnormal is not None:
                subnormal += became
            return codes, scale
        return self.x, self.scale


class Arithmetic(Protocol):
    """The products of one pass, on one set of weights and one set of rows."""

    def up(self, rows: Rows) -> torch.Tensor:
        """[rows, hidden] to [rows, 2 * intermediate]."""
        ...

    def down(self, h: torch.Tensor) -> torch.Tensor:
        """[rows, 2 * intermediate] through the activation to [rows, hidden]."""
        ...

    def through(self, rows: Rows) -> torch.Tensor:
        """up() and down(), for a pass that keeps nothing in between: [rows, hidden] to [rows, hidden]."""
        ...

    def back_through_down(self, g: Rows) -> torch.Tensor:
        """The gradient of the activation: [rows, hidden] to [rows, intermediate]."""
        ...

    def back_through_up(self, dh: torch.Tensor) -> torch.Tensor:
        """The gradient of the rows: [rows, 2 * intermediate] to [rows, hidden]."""
        ...


@dataclass(frozen=True)
class Precise:
    """In the dtype of the layer, whatever the rows travelled as."""

    gate_up_as_kept: torch.Tensor
    down_as_kept: torch.Tensor
    where: Segments
    dtype: torch.dtype
    backend: str

    @property
    def gate_up(self) -> torch.Tensor:
        return self.gate_up_as_kept.to(self.dtype)

    @property
    def down_weights(self) -> torch.Tensor:
        return self.down_as_kept.to(self.dtype)

    def up(self, rows: Rows) -> torch.Tensor:
        return products.forward(rows.values(self.dtype), self.gate_up, self.where, self.backend)

    def down(self, h: torch.Tensor) -> torch.Tensor:
        return products.forward(swiglu(h, self.where), self.down_weights, self.where, self.backend)

    def through(self, rows: Rows) -> torch.Tensor:
        return self.down(self.up(rows))

    def back_through_down(self, g: Rows) -> torch.Tensor:
        return products.dgrad(g.values(self.dtype), self.down_weights, self.where, self.backend)

    def back_through_up(self, dh: torch.Tensor) -> torch.Tensor:
        return products.dgrad(dh, self.gate_up, self.where, self.backend)


class WeightCodes:
    """e4m3 codes of both weights, of what they hold when a product first wants them. Across: see quantise_weights."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up, self._down = gate_up, down

    @staticmethod
    def known(gate_up: Codes, down: Codes) -> WeightCodes:
        """Those of weights that do not change."""
        codes = WeightCodes(gate_up[0], down[0])
        codes.gate_up = codes.gate_up_across = gate_up
        codes.down = codes.down_across = down
        return codes

    @cached_property
    def gate_up(self) -> Codes:
        return quantise_weights(self._gate_up)

    @cached_property
    def down(self) -> Codes:
        return quantise_weights(self._down)

    @cached_property
    def gate_up_across(self) -> Codes:
        return quantise_weights(self._gate_up, across=True)

    @cached_property
    def down_across(self) -> Codes:
        return quantise_weights(self._down, across=True)


@dataclass(frozen=True)
class Quantised:
    """All four in e4m3, scaled from what the tensors hold now; results in the dtype of the layer."""

    codes: WeightCodes
    where: Segments
    dtype: torch.dtype
    backend: str
    subnormal: torch.Tensor | None

    @property
    def gate_up(self) -> Codes:
        return self.codes.gate_up

    @property
    def down_weights(self) -> Codes:
        return self.codes.down

    def up(self, rows: Rows) -> torch.Tensor:
        return self._product(self._received(rows, self.gate_up), self.gate_up, False)

    def down(self, h: torch.Tensor) -> torch.Tensor:
        return self._product(swiglu_quantise(h, self.where), self.down_weights, False)

    def through(self, rows: Rows) -> torch.Tensor:
        x = self._received(rows, self.gate_up)
        return products.through_experts(x, self.gate_up, self.down_weights, self.where, dtype=self.dtype, backend=self.backend)

    def back_through_down(self, g: Rows) -> torch.Tensor:
        return self._product(self._received(g, self.codes.down_across), self.codes.down_across, True)

    def back_through_up(self, dh: torch.Tensor) -> torch.Tensor:
        return self._product(quantise(dh, self.where), self.codes.gate_up_across, True)

    def _received(self, rows: Rows, weights: Codes) -> Codes:
        return rows.codes(self.subnormal, products.takes_mx(weights, self.where, self.backend))

    def _product(self, x: Codes, w: Codes, transposed: bool) -> torch.Tensor:
        return products.scaled(x, w, self.where, transposed=transposed, dtype=self.dtype, backend=self.backend)
