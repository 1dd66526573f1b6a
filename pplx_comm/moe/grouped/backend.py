"""What multiplies the rows of each expert with that expert's weights: the interface that all backends have.

Rows lie as dispatch writes them with Ragged: expert e's are offsets[e] up to offsets[e + 1], padding included. Rows behind the last
offset are never read, and what results have there is undefined. A backend that makes the host wait says so.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Backend(Protocol):
    """Products of rows in float32, bfloat16 or float16 with weights of the same dtype."""

    name: str
    waits: bool
    """Whether the host waits for the device, as CUDA graphs forbid."""

    def takes(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether it runs there with that."""
        ...

    def forward(self, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """x: [rows, k], w: [experts, n, k]. Returns x @ w^T: [rows, n]."""
        ...

    def dgrad(self, dy: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """dy: [rows, n], w: [experts, n, k]. Returns dy @ w: [rows, k]."""
        ...

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        """dy: [rows, n], x: [rows, k], out: [experts, n, k] of any dtype, to write or to add dy^T @ x to.

        Padding must be zero in both: it counts as rows.
        """
        ...


class ScaledBackend(Protocol):
    """Products of e4m3 codes with float32 scales: 1x128 of the rows, 128x128 of the weights."""

    name: str
    waits: bool

    def takes(self, codes: torch.Tensor) -> bool:
        """Whether it runs with weights of this shape, where they are."""
        ...

    def product(
        self,
        x: tuple[torch.Tensor, torch.Tensor],
        w: tuple[torch.Tensor, torch.Tensor],
        offsets: torch.Tensor,
        transposed: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Codes and scales of [rows, k] and [experts, n, k]: returns x @ w^T, [rows, n].

        transposed: of [rows, n] and [experts, n, k]: returns x @ w, [rows, k].
        """
        ...
