"""The interface of all backends. A backend multiplies the rows of each expert with that expert's weights.

Rows lie as dispatch writes them, with Ragged or with Padded: see pplx_comm.moe.segments. Rows of no expert count for nothing, and
results have anything there. Gradients are for rows as Ragged lays them. A backend that makes the host wait says so.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pplx_comm.moe.segments import Segments

Codes = tuple[torch.Tensor, torch.Tensor]
"""e4m3 codes, and their scales."""


class Backend(Protocol):
    """Products of rows in float32, bfloat16 or float16 with weights of the same dtype."""

    name: str
    waits: bool
    """True if the host waits for the device, which CUDA graphs forbid."""

    def takes(self, device: torch.device, dtype: torch.dtype) -> bool:
        """True if the backend runs on this device with this dtype."""
        ...

    def forward(self, x: torch.Tensor, w: torch.Tensor, where: Segments) -> torch.Tensor:
        """x: [rows, k], w: [experts, n, k]. Returns x @ w^T: [rows, n]."""
        ...

    def dgrad(self, dy: torch.Tensor, w: torch.Tensor, where: Segments) -> torch.Tensor:
        """dy: [rows, n], w: [experts, n, k]. Returns dy @ w: [rows, k]."""
        ...

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, where: Segments, out: torch.Tensor, accumulate: bool) -> None:
        """dy: [rows, n], x: [rows, k], out: [experts, n, k] of any dtype, to write or to add dy^T @ x to.

        Padding must be zero in both: it counts as rows.
        """
        ...


class ScaledBackend(Protocol):
    """Products of e4m3 codes with float32 scales: 1x128 of the rows, 128x128 of the weights."""

    name: str
    waits: bool
    mx: bool
    """True if the backend takes rows of MXFP8 instead, whose scales are e8m0 bytes per 1x32."""

    def takes(self, codes: torch.Tensor, where: Segments) -> bool:
        """True if the backend runs with weights of this shape and device, and with rows laid out like this."""
        ...

    def product(self, x: Codes, w: Codes, where: Segments, transposed: bool, dtype: torch.dtype) -> torch.Tensor:
        """Codes and scales of [rows, k] and [experts, n, k]: returns x @ w^T, [rows, n].

        The rows' scales are [rows, k / 128], or with Padded [experts, room, k / 128], with any strides.

        transposed: of [rows, n] and [experts, n, k]: returns x @ w, [rows, k].
        """
        ...


def laid_out(w: Codes, transposed: bool) -> Codes:
    """Codes and scales of weights, or of the transposed ones, row by row.

    Tensor cores take codes along the sum only. A 128x128 block has the same codes when it is transposed.
    """
    codes, scale = w
    if transposed:
        codes, scale = codes.mT, scale.mT
    return codes.contiguous(), scale.contiguous()
