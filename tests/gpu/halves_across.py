"""Prints how long halves of steps between nodes take on the GPUs, when all that they wait for has come, and both halves together.

    python tests/gpu/halves_across.py [--tokens 1024,4096] [--num-sms 24,0] [--slot-bytes N] [--mapped]
    python tests/gpu/halves_across.py --ranks 4 --node-size 2 --num-sms 24 [--combine-wire fp8]      # rows go once per node
    python tests/gpu/halves_across.py --ranks 2 --mapped --tokens 8,128 --max-tokens 4096 --slot-bytes 33554432 [--ragged]

Ranks are threads of this process, and the network is the GPUs' copy engines (copies.py). Medians of ten, in us of the slowest rank.
--num-sms 0: all. --mapped: all ranks share a node. In pieces a half is not what it is otherwise: both together alone. Ranks that share a
GPU need few multiprocessors each, and their links are its memory: such figures are good for comparisons.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # see test_placement.py
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("", "tests", "tests/ranks", "tests/gpu")]

import copies  # noqa: E402
import gpu_cases  # noqa: E402
import torch  # noqa: E402

import pplx_comm as pc  # noqa: E402

HIDDEN, TOP_K, WARM, MEASURED = 7168, 8, 4, 10
BEHIND = 4_000_000
"""Cycles of a kernel of rank 0's in front of all, during which every rank's thread launches what is measured."""


class Gate:
    """The moment at which the GPU work of all ranks begins."""

    event: torch.cuda.Event

    def close(self, me: Any, stream: torch.cuda.Stream) -> None:
        """Lets all that a rank launches on its stream wait for the gate, which rank 0 opens some milliseconds later."""
        me.comm.barrier()
        if me.rank == 0:
            self.event = torch.cuda.Event()
            torch.cuda._sleep(BEHIND)
            self.event.record(stream)
        me.comm.barrier()
        stream.wait_event(self.event)


def measure(me: Any, tokens: int, num_sms: int, gate: Gate, arguments: argparse.Namespace) -> dict[str, float]:
    device = gpu_cases.gpu_of(me)
    experts, generator = 32 * me.world_size, torch.Generator().manual_seed(me.rank)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:TOP_K] for _ in range(tokens)]).to(device)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().to(device)
    weights = torch.rand(tokens, TOP_K, generator=generator).to(device)
    where: dict[str, Any] = {"transport": "proxy", "provider": "copy", "placement": "device", "node_size": 1, "dedup": "rank"}
    if arguments.node_size > 1:
        where |= {"transport": "auto", "node_size": arguments.node_size, "dedup": "node", "combine_wire": arguments.combine_wire}
    if arguments.mapped:
        where = {"transport": "mapped"}
    stream, times = torch.cuda.Stream(device), dict[str, list[float]]()

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        me.comm.barrier()
        time.sleep(0.02)  # rows of the other ranks come
        gate.close(me, stream)
        begin.record(stream)
        made = call()
        end.record(stream)
        gpu_cases.settle(device)
        times.setdefault(name, []).append(begin.elapsed_time(end) * 1e3)
        return made

    a2a = pc.AllToAll(
        me.comm, num_experts=experts, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=arguments.max_tokens or tokens,
        dtype=torch.bfloat16, wire="fp8", layout=pc.Ragged(align=8) if arguments.ragged else pc.Compact(), device=str(device),
        num_sms=num_sms or None, slot_bytes=arguments.slot_bytes, timeout=20, **where,
    )  # fmt: skip
    with a2a, torch.cuda.stream(stream):
        d = a2a.dispatch(x, ids, weights)
        y = torch.zeros(len(d.x), HIDDEN, dtype=torch.bfloat16, device=device)
        a2a.combine(y, d)
        for _ in range(WARM + MEASURED):
            if arguments.slot_bytes is None:
                d = timed("dispatch_send", lambda: a2a.dispatch_send(x, ids, weights))
                timed("dispatch_recv", lambda d=d: a2a.dispatch_recv(d))  # type: ignore[misc]
                c = timed("combine_send", lambda d=d: a2a.combine_send(y, d))  # type: ignore[misc]
                timed("combine_recv", lambda c=c: a2a.combine_recv(c))  # type: ignore[misc]
            d = timed("dispatch", lambda: a2a.dispatch(x, ids, weights))
            timed("combine", lambda d=d: a2a.combine(y, d))  # type: ignore[misc]
        a2a.check()
        me.comm.barrier()
    return {name: statistics.median(of[WARM:]) for name, of in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--num-sms", default="24,0")
    parser.add_argument("--slot-bytes", type=int)
    parser.add_argument("--max-tokens", type=int, help="room for this number of tokens; default: those of a step")
    parser.add_argument("--ragged", action="store_true", help="not Compact")
    parser.add_argument("--mapped", action="store_true")
    parser.add_argument("--ranks", type=int, help="several share a GPU; default: one for each")
    parser.add_argument("--node-size", type=int, default=1)
    parser.add_argument("--combine-wire", default="native")
    arguments = parser.parse_args()
    ranks = arguments.ranks or torch.cuda.device_count()
    copies.copying()
    gate = Gate()
    for tokens in map(int, arguments.tokens.split(",")):
        for num_sms in map(int, arguments.num_sms.split(",")):
            times = copies.run(ranks, lambda me, t=tokens, s=num_sms: measure(me, t, s, gate, arguments))  # type: ignore[misc]
            worst = "  ".join(f"{name} {max(rank[name] for rank in times):.0f}" for name in times[0])
            print(f"{tokens} tokens on {num_sms or 'all'}: {worst}", flush=True)


if __name__ == "__main__":
    main()
