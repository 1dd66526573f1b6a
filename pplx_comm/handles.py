"""Results of dispatch and combine."""

from __future__ import annotations

import functools
import threading
from typing import Protocol

import torch

from pplx_comm.errors import Error
from pplx_comm.hooks import ExpertGroup, Hooks

Combined = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The tokens' outputs; with tail= also what came back with them."""


class Owner(Protocol):
    """The steps of an AllToAll, as its handles call them."""

    def dispatch_recv(self, d: Dispatched) -> Dispatched: ...

    def combine_recv(self, c: Combining) -> Combined: ...

    def release(self, d: Dispatched) -> None: ...

    def watch(self, d: Dispatched) -> None: ...

    def await_experts(self, d: Dispatched, experts: range) -> None: ...

    def strand(self, d: Dispatched, phase: str, why: str) -> None: ...


class Plan:
    """The routing of one dispatch. Immutable; further dispatches may use it for other tokens with the same routing.

    On a GPU it lies in one allocation with that dispatch's tensors, and keeps it."""

    owner: Owner
    generation: int
    """How often the AllToAll was reset when this was made."""
    tokens: int
    """Tokens of this rank."""

    @property
    def topk_weights(self) -> torch.Tensor | None:
        """float32 [tokens, top_k], or None if all are one."""
        raise NotImplementedError

    def rows(self, rank: int) -> int:
        """Rows for that rank: each token that it wants counts once."""
        raise NotImplementedError

    def with_weights(self, weights: torch.Tensor) -> Plan:
        """A plan with the same routing and a copy of these weights."""
        raise NotImplementedError


class Dispatched:
    """The rows that this rank received in a step. Its tensors belong to the caller and stay valid after combine."""

    x: torch.Tensor
    """Ragged, Compact: [rows, hidden]. Padded: [local experts, max_tokens_per_expert, hidden]. e4m3 on a quantised wire."""
    scale: torch.Tensor | None
    """The scales of x's rows: [..., ceil(hidden / 128)] float32, or with MXFP8 [..., ceil(hidden / 32)] uint8, which hold e8m0
    (`d.scale.view(torch.float8_e8m0fnu)` is torch's type for them). None on the native wire.

    scale_layout="row": contiguous. "tma": column by column, stride(-2) == 1, and columns start at multiples of 16 bytes."""
    counts: torch.Tensor
    """int32 [local experts]: rows of each expert."""
    offsets: torch.Tensor | None
    """Ragged: int32 [local experts + 1], where each expert's rows start."""
    weights: torch.Tensor | None
    """float32 [rows]: the router's weight of each row. Padded: [local experts, max_tokens_per_expert]. Compact: None."""
    src_rank: torch.Tensor
    """int32, shaped like weights (Compact: [rows]): the rank that each row came from."""
    src_token: torch.Tensor
    """int32, shaped like src_rank: the row's number among that rank's tokens."""
    topk_ids: torch.Tensor | None
    """Compact: int32 [rows, top_k], local expert or -1."""
    topk_weights: torch.Tensor | None
    """Compact: float32 [rows, top_k], 0 where topk_ids is -1."""
    num_rows: torch.Tensor | None
    """Compact: int32 [1]: the number of valid rows."""
    plan: Plan
    """The routing of the tokens that this rank sent."""
    step: int
    """Its number; -1 in the capture of a CUDA graph, whose replays take numbers."""
    received = False
    """True once the receive half is done."""
    used = False
    """True once it was combined or released."""
    owner: Owner
    receiving: threading.Lock
    """Held by the thread that receives: several may wait."""
    hooks: Hooks | None = None
    """With hooks=True."""
    expert_groups = 0
    """Groups that this dispatch was asked for."""

    @property
    def planned(self) -> torch.Tensor:
        """With hooks=True: uint32 [1]. `RAISED` is set in it once counts, offsets and num_rows are there."""
        return self._hooks("planned").planned

    @property
    def arrived(self) -> torch.Tensor:
        """With hooks=True: uint32 [blocks of 128 rows of d.x], Padded: [local experts]. `RAISED` is set in a word once all rows of
        the block (the expert) are there, at once where it has none. A kernel that waits for one loads it with acquire semantics
        and compares; then it may read the block's rows, and counts, offsets and num_rows too. See docs/design.md, Hooks."""
        return self._hooks("arrived").arrived

    def _hooks(self, name: str) -> Hooks:
        if self.hooks is None:
            raise Error(f"d.{name} needs an AllToAll with hooks=True, and no torch.compile or autograd around its dispatch")
        return self.hooks

    def watch(self) -> None:
        """Makes the current stream wait until d's words are those of this dispatch: call it on the stream of a kernel that is to
        wait for them, before its launch. It does not wait for the dispatch. On the CPU there is nothing to wait for."""
        self._hooks("watch()")
        self.owner.watch(self)

    def group(self, number: int) -> ExpertGroup:
        """Returns group 0 to g - 1 of dispatch(expert_groups=g): local experts in order, in equal parts."""
        groups = self.expert_groups
        if not 0 <= number < groups:
            raise Error(f"d.group({number}): this dispatch has {groups} groups; dispatch(expert_groups=) says how many")
        n = len(self.counts)
        experts = range(number * n // groups, (number + 1) * n // groups)
        return ExpertGroup(self, experts, functools.partial(self.owner.await_experts, self))

    def wait(self) -> Dispatched:
        """The receive half of an async dispatch. Any thread may call it, also again."""
        return self.owner.dispatch_recv(self)

    def release(self) -> None:
        """Closes the step without a combine. Every rank must do so."""
        self.owner.release(self)


class Combining:
    """A combine whose send half is done."""

    done = False
    """True once the receive half is done."""

    def __init__(self, dispatched: Dispatched, out: torch.Tensor, accumulate: bool, tail: torch.Tensor | None) -> None:
        self.owner = dispatched.owner
        self.dispatched = dispatched
        self.out = out
        self.accumulate = accumulate
        self.tail = tail
        self.result: Combined = out if tail is None else (out, tail)
        self.receiving = threading.Lock()

    def wait(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The receive half: returns the tokens' combined outputs, with tail= also the tail. Any thread may call it, also again."""
        return self.owner.combine_recv(self)
