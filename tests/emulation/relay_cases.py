"""Node blocks that a relay receives damaged: under the emulation its memory is this process's."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rank_cases
import torch
from cases import DTYPES, Case
from harness import until
from outcomes import must, raised

import pplx_comm as pc

SOURCE, RELAY = 0, 2
"""Ranks of four, in nodes of two."""
STEP, GENERATION, ROWS, SENDER, COUNTS = 0, 1, 2, 4, 16
"""Words of a node block. Masks follow the counts of the node's experts."""


def _memory_of_proxies() -> Iterator[torch.Tensor]:
    """That of this rank's proxy, and what it maps of its mate's, as words."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if match := re.match(r"(\w+)-(\w+) rw\S* .*/memfd:pplx_comm ", line):
            begin, end = (int(part, 16) for part in match.groups())
            yield torch.frombuffer((ctypes.c_uint8 * (end - begin)).from_address(begin), dtype=torch.int32)


def _node_block(case: Case, generation: int) -> torch.Tensor:
    """Waits for the source's block of the first step."""
    word = 2 * (8 + case.world_size + SOURCE)  # the arrival word of its dispatch
    found: list[torch.Tensor] = []

    def here() -> bool:
        found[:] = [memory for memory in _memory_of_proxies() if memory[word : word + 2].tolist() == [1, generation]]
        return bool(found)

    until("the block is there", here)
    [memory] = found
    header = torch.tensor([1, generation, case.max_tokens, 0, SOURCE])
    places = memory[: len(memory) // 32 * 32].view(-1, 32)[:, : len(header)]
    [at] = (places == header).all(dim=1).nonzero().flatten().tolist()
    return memory[32 * at :]


def memory(me: Any, case: Case) -> tuple[int, int]:
    """Bytes of what the proxy moves and of a relay, and of both what required_bytes says, beside the mapped memory."""
    with rank_cases.open_all_to_all(me, case) as a2a:
        core, config = a2a._steps.device.core, a2a._steps.session.config
        required = pc.AllToAll.required_bytes(
            world_size=case.world_size, num_experts=case.num_experts, top_k=case.top_k, hidden=case.hidden,
            max_tokens_per_rank=case.max_tokens, dtype=DTYPES[case.dtype], in_flight=case.in_flight, dedup="node",
            remote_peers=case.world_size // 2, device="cuda",
        )  # fmt: skip
        return core.host.pinned_bytes + core.relay_bytes(me.rank) + config.mapped_bytes, required


def refused(me: Any, case: Case) -> None:
    said = raised(functools.partial(rank_cases.open_all_to_all, me, case, transport="nvshmem", provider=None))["message"]
    must("dedup='node'" in said and "transport='nvshmem'" in said, "a refusal:", said)


def damages(case: Case) -> dict[str, tuple[int, int]]:
    """A word of the block, by what it says then, and what it says instead: every choice goes to the relay, and the first mask is 1."""
    masks = COUNTS + -(-case.num_experts // case.world_size) * 2
    return {
        "more rows than a block has": (ROWS, case.max_tokens + 1),
        "another step": (STEP, 2),
        "another generation": (GENERATION, 77),
        "another source": (SENDER, 1),
        "no mate": (masks, 0),
        "a mate that there is not": (masks, 1 | 1 << 2),
        "a mate that no choice names": (masks, 3),
        "another mate": (masks, 2),
        "fewer choices than rows": (COUNTS, 0),
        "more choices than rows have": (COUNTS, case.max_tokens * case.top_k + 1),
    }


def damaged(me: Any, case: Case) -> dict[str, dict[str, Any]]:
    """Returns the outcome of each damage at this rank."""
    told: dict[str, dict[str, Any]] = {}
    x = torch.ones(case.max_tokens, case.hidden, dtype=DTYPES[case.dtype])
    ids = torch.full((case.max_tokens, case.top_k), case.num_experts // 2)
    with rank_cases.open_all_to_all(me, case) as a2a:
        for generation, (name, (word, value)) in enumerate(damages(case).items(), 1):
            d = a2a.dispatch_send(x, ids)
            if me.rank == RELAY:
                block = _node_block(case, generation)
                must(block[word] != value, name, "is there already")
                block[word] = value
            me.comm.barrier()

            def step(d: Any = d) -> None:
                a2a.dispatch_recv(d)
                me.comm.barrier()  # until another rank's failure is here

            told[name] = raised(step)
            must(a2a.reset() == list(range(me.world_size)), "the survivors")
        d = a2a.dispatch(x, ids)
        a2a.combine(torch.ones(d.x.shape, dtype=x.dtype), d)
        a2a.check()
        me.comm.barrier()
    return told
