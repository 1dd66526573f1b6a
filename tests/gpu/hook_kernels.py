"""A kernel that runs beside a dispatch and waits for its words: what the ranks of test_hooks_gpu.py run."""

from __future__ import annotations

import random
from typing import Any

import open_step_cases as steps
import rank_cases
import torch
import triton
import triton.language as tl
from cases import Case
from gpu_cases import gpu_of
from outcomes import must

import pplx_comm as pc


@triton.jit
def pass_rows_on(x, out, arrived, words, rows_of_word, rows, row_words, CHUNK: tl.constexpr):
    """Experts that give back what they get, as soon as a block is there."""
    for word in range(tl.program_id(0), words, tl.num_programs(0)):
        while tl.atomic_add(arrived + word, 0, sem="acquire", scope="gpu") >= 0:
            pass
        first = word * rows_of_word
        count = min(rows_of_word, rows - first) * row_words
        begin = first.to(tl.int64) * row_words
        for at in range(0, count, CHUNK):
            i = at + tl.arange(0, CHUNK)
            tl.store(out + begin + i, tl.load(x + begin + i, mask=i < count, cache_modifier=".cg"), mask=i < count)


PROGRAMS = 8
"""Few: the dispatch finds room beside them."""


def relay(d: pc.Dispatched, out: torch.Tensor, padded: bool) -> None:
    rows = d.x.numel() // d.x.shape[-1]
    of_word = d.x.shape[1] if padded else pc.HOOK_ROWS
    as_words, out_words = d.x.view(torch.int32), out.view(torch.int32)
    pass_rows_on[(PROGRAMS,)](
        as_words, out_words, d.arrived.view(torch.int32), len(d.arrived), of_word, rows, as_words.shape[-1], CHUNK=1024
    )


def beside(me: Any, case: Case, rounds: int) -> list[int]:
    """The kernel is launched before the receive half. Returns how many launches went by the large kernels."""
    device, r = gpu_of(me), random.Random(f"beside {case.seed}")
    consumer = torch.cuda.Stream()
    with rank_cases.open_all_to_all(me, case, device=str(device), hooks=True) as a2a:
        padded = case.layout == "padded"
        out: torch.Tensor | None = None
        for n in range(rounds + 1):
            inputs = steps.draw_inputs(case, r)
            x, ids = inputs.tokens[me.rank].x.to(device), inputs.tokens[me.rank].ids.to(device)
            d = a2a.dispatch_send(x, ids)
            if out is None:
                out = torch.empty(d.x.shape, dtype=d.x.dtype, device=device)
                a2a.dispatch_recv(d)
                relay(d, out, padded)  # compiles it
                a2a.combine(out, d)
                torch.cuda.synchronize()
                continue
            out.fill_(float("nan"))
            consumer.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(consumer):
                d.watch()
                relay(d, out, padded)
            a2a.dispatch_recv(d)
            torch.cuda.current_stream().wait_stream(consumer)
            y = a2a.combine(out, d)
            assert isinstance(y, torch.Tensor)
            torch.cuda.synchronize()
            a2a.check()
            steps.check_combined(inputs, me.rank, y, f"round {n}")
            must(all(word >> 31 for word in d.arrived.tolist()), "all words are raised")
        stats = a2a.stats()
        return [stats["large_dispatches"], stats["large_combines"]]
