"""What dispatch and combine return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .errors import Error

if TYPE_CHECKING:
    from . import _core
    from .all_to_all import AllToAll


class Plan:
    """The routing of one dispatch: immutable, and good for further dispatches of other tokens with the same routing."""

    def __init__(self, owner: AllToAll, core: _core.Plan, weights: torch.Tensor | None, generation: int) -> None:
        self._owner = owner
        self._core = core
        self._generation = generation
        self._weights = None if weights is None else weights.detach().clone()

    @property
    def topk_weights(self) -> torch.Tensor | None:
        """float32 [tokens, top_k], or None where all are one."""
        return self._weights

    def _with_weights(self, weights: torch.Tensor | None) -> Plan:
        return Plan(self._owner, self._core, weights, self._generation)

    @property
    def tokens(self) -> int:
        return int(self._core.tokens)

    def rows(self, rank: int) -> int:
        """Rows that go to that rank: its tokens, each once."""
        return int(self._core.rows(rank))


class Dispatched:
    """What this rank received in a step. Its tensors belong to the caller; they stay valid after combine."""

    x: torch.Tensor
    """Ragged, Compact: [rows, hidden]. Padded: [local experts, max_tokens_per_expert, hidden]. e4m3 on a quantised wire."""
    scale: torch.Tensor | None
    """The scales of x, shaped like its rows: [..., ceil(hidden / 128)] float32, or with MXFP8 [..., ceil(hidden / 32)] uint8, e8m0
    (torch's own name for such bytes is `d.scale.view(torch.float8_e8m0fnu)`). None on the native wire.

    scale_layout="row": contiguous. "tma": column by column, stride(-2) == 1, and columns start at multiples of 16 bytes."""
    counts: torch.Tensor
    """int32 [local experts]: rows of each."""
    offsets: torch.Tensor | None
    """Ragged: int32 [local experts + 1], where each expert's rows start."""
    weights: torch.Tensor | None
    """float32 [rows], the router's weight of each. Padded: [local experts, max_tokens_per_expert]. Compact: None."""
    src_rank: torch.Tensor
    """int32, shaped like weights (Compact: [rows]): where each row came from."""
    src_token: torch.Tensor
    """int32: its number among that rank's tokens."""
    topk_ids: torch.Tensor | None
    """Compact: int32 [rows, top_k], local expert or -1."""
    topk_weights: torch.Tensor | None
    """Compact: float32 [rows, top_k], 0 where topk_ids is -1."""
    num_rows: torch.Tensor | None
    """Compact: int32 [1], how many rows are valid."""
    plan: Plan
    """The routing of what this rank sent."""

    def __init__(self, owner: AllToAll, plan: Plan, step: int, inputs: tuple[Any, ...]) -> None:
        self.plan = plan
        self.step = step
        self._owner = owner
        self._inputs: tuple[Any, ...] = inputs  # must live until the step's rows are placed
        self._received: _core.Received | None = None
        self._used = False
        self._zeroed = False
        self._small: torch.Tensor  # on the CPU: the memory of all but x and scale
        for name in ("scale", "offsets", "weights", "topk_ids", "topk_weights", "num_rows"):
            setattr(self, name, None)

    def wait(self) -> Dispatched:
        """The receive half of an async dispatch. From any thread; again is harmless."""
        return self._owner.dispatch_recv(self)

    def release(self) -> None:
        """Closes the step without a combine. Every rank must."""
        self._owner._release(self)

    def _require_received(self, call: str) -> _core.Received:
        if self._received is None:
            raise Error(f"{call}: nothing was received yet: call wait() (or dispatch_recv) on the dispatch first")
        return self._received


class Combining:
    """A combine whose send half is done."""

    def __init__(
        self, owner: AllToAll, dispatched: Dispatched, out: torch.Tensor, accumulate: bool, tail: torch.Tensor | None
    ) -> None:
        self._owner = owner
        self._dispatched = dispatched
        self._out = out
        self._accumulate = accumulate
        self._tail = tail
        self._result = out if tail is None else (out, tail)
        self._done = False

    def wait(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The receive half: the tokens' combined outputs, with tail= those and the tail. From any thread; again is harmless."""
        return self._owner.combine_recv(self)
