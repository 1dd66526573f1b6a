"""How the caller's kernels run beside dispatch and combine: the words of a dispatch, and its groups of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

import pplx_comm._core as _core

RAISED: int = _core.RAISED
"""The top bit of a word of `d.planned` and `d.arrived`: once it is set, it stays."""
HOOK_ROWS: int = _core.HOOK_ROWS
"""Rows of d.x in the block of a word of `d.arrived`. With Padded a word is an expert's."""


class Hooks:
    """The words of one dispatch."""

    def __init__(self, words: torch.Tensor, layout: _core.HookLayout) -> None:
        self.words = words
        """uint32, all of them."""
        self.planned = words[:1]
        self.arrived = words[layout.arrived : layout.arrived + layout.count]
        self.begun: Any = None
        """CUDA: the event behind which the words are this step's."""
        self.failed = False
        """CPU: all words were raised, because the receive half failed."""


class Rows(Protocol):
    """The part of a dispatch that a group shows."""

    x: torch.Tensor
    scale: torch.Tensor | None
    counts: torch.Tensor
    offsets: torch.Tensor | None


class ExpertGroup:
    """Experts of a dispatch whose rows are there before those of later groups may be: see AllToAll.dispatch(expert_groups=)."""

    def __init__(self, dispatched: Rows, experts: range, wait: Callable[[range], None]) -> None:
        self._dispatched = dispatched
        self._wait = wait
        self.experts = experts
        """Local numbers."""

    @property
    def _own(self) -> slice:
        return slice(self.experts.start, self.experts.stop)

    @property
    def counts(self) -> torch.Tensor:
        """int32 [experts of the group]: rows of each."""
        return self._dispatched.counts[self._own]

    @property
    def offsets(self) -> torch.Tensor | None:
        """Ragged: int32 [experts of the group + 1]: where their rows start in d.x, and where those of the next group do."""
        offsets = self._dispatched.offsets
        return None if offsets is None else offsets[self.experts.start : self.experts.stop + 1]

    @property
    def x(self) -> torch.Tensor:
        """Padded: the group's part of d.x. Ragged: d.x, for only the device knows where the group's rows lie in it."""
        return self._of(self._dispatched.x)

    @property
    def scale(self) -> torch.Tensor | None:
        """The scales of x."""
        scale = self._dispatched.scale
        return None if scale is None else self._of(scale)

    def _of(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._dispatched.offsets is not None else rows[self._own]

    def wait(self) -> None:
        """CUDA: what is launched behind it on the current stream has the group's rows, counts and offsets. It launches a warp
        that waits for them, and returns. In a capture it is a node of the graph. CPU: returns when they are there. If no thread
        is in the receive half, this one does all of it."""
        if len(self.experts) > 0:
            self._wait(self.experts)
