"""One Communicator for each process group of torch, and the AllToAlls of layers of one shape."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from pplx_comm.all_to_all import AllToAll
from pplx_comm.communicator import Communicator
from pplx_comm.errors import Error
from pplx_comm.layouts import Ragged
from pplx_comm.moe.shared_all_to_all import shared_all_to_all
from pplx_comm.wire import Wire

WIRES = {"bf16": Wire.NATIVE, "fp8": Wire.FP8_UE8M0, "mxfp8": Wire.MXFP8}

_of: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()


def communicator(group: Any) -> Communicator:
    """That of the group, made at first use: collective over it. It lives until close_all()."""
    if group not in _of:
        _of[group] = Communicator.from_torch(group)
    return _of[group]


def close_all() -> None:
    """Closes the Communicators that adapters made. Before destroy_process_group(), or never."""
    while _of:
        _of.popitem()[1].close()


def rows_by_expert(
    group: Any, like: torch.Tensor, *, num_experts: int, top_k: int, most_tokens: int, precision: str, align: int,
    max_rows: int | None = None,
) -> AllToAll:  # fmt: skip
    """Returns the AllToAll that fits rows [tokens, hidden] like these. Collective at first use. most_tokens: the most that any rank
    has; the same on each. max_rows: see Ragged."""
    if precision not in WIRES:
        raise Error(f"precision={precision!r}: must be one of {', '.join(map(repr, WIRES))}")
    return shared_all_to_all(
        communicator(group), num_experts=num_experts, top_k=top_k, hidden=like.shape[-1], max_tokens_per_rank=most_tokens,
        dtype=like.dtype, wire=WIRES[precision], layout=Ragged(align, zero_pad=True, max_rows=max_rows), device=like.device,
        in_flight=IN_FLIGHT,
    )  # fmt: skip


IN_FLIGHT = 4
"""Steps of one AllToAll: of microbatches whose parts a schedule interleaves."""
