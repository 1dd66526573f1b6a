"""Measures what the counters of stats() cost: steps that are counted beside steps that are not, in turn.

    mpirun -n 2 python bench/counting.py
    python -m torch.distributed.run --nproc-per-node 2 bench/counting.py --device cuda

Microseconds of a dispatch and a combine, of the slowest rank: the median of ten turns, on GPUs of
replays of a graph.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    import checkout  # noqa: F401

import torch

import pplx_comm as pc

TURNS = 10


def layer(comm: pc.Communicator, counts: bool, device: str, tokens: int) -> pc.AllToAll:
    os.environ["PPLX_COMM_STATS"] = str(int(counts))
    return pc.AllToAll(
        comm,
        num_experts=256,
        top_k=8,
        hidden=7168,
        max_tokens_per_rank=tokens,
        wire="fp8",
        layout=pc.Ragged(align=8),
        device=device,
    )


def turns_of(a2a: pc.AllToAll, pairs: int, x: torch.Tensor, ids: torch.Tensor) -> Callable[[], float]:
    """A turn returns microseconds of a pair."""
    first = a2a.dispatch(x, ids)
    out = torch.zeros_like(first.x, dtype=a2a.dtype)
    y = torch.empty_like(x)
    a2a.combine(out, first, out=y)

    def all_pairs() -> None:
        for _ in range(pairs):
            a2a.combine(out, a2a.dispatch(x, ids), out=y)

    if a2a.device.type == "cpu":

        def turn() -> float:
            begun = time.perf_counter()
            all_pairs()
            return (time.perf_counter() - begun) * 1e6 / pairs

        return turn
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_pairs()

    def replay() -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        return begun.elapsed_time(ended) * 1e3 / pairs

    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", default="1,128", help="of each rank (%(default)s)")
    parser.add_argument("--pairs", type=int, help="in a turn (20 on CPUs, 200 on GPUs)")
    options = parser.parse_args()
    pairs = options.pairs or (200 if options.device == "cuda" else 20)
    torch.set_num_threads(1)
    with pc.Communicator.from_env() as comm:
        device = "cpu" if options.device == "cpu" else f"cuda:{comm.host_rank % torch.cuda.device_count()}"
        if device != "cpu":
            torch.cuda.set_device(device)
        for tokens in map(int, options.tokens.split(",")):
            generator = torch.Generator().manual_seed(comm.rank)
            x = torch.randn(tokens, 7168, generator=generator).to(device, torch.bfloat16)
            ids = torch.rand(tokens, 256, generator=generator).topk(8).indices.to(device)
            both = {counts: layer(comm, counts, device, tokens) for counts in (False, True)}
            turns = {counts: turns_of(a2a, pairs, x, ids) for counts, a2a in both.items()}
            times: dict[bool, list[float]] = {False: [], True: []}
            for number in range(TURNS + 1):
                for counts in (number % 2 == 0, number % 2 != 0):
                    comm.barrier()
                    mine = {"us": turns[counts]()}
                    if number > 0:  # the first warms up
                        times[counts].append(max(each["us"] for each in _gathered(comm, mine)))
            off, on = (statistics.median(times[counts]) for counts in (False, True))
            if comm.rank == 0:
                print(f"{tokens} tokens: {off:.2f} us a pair, counted {on:.2f}: {on - off:+.2f} us, {(on / off - 1) * 100:+.2f} %")
            for a2a in both.values():
                a2a.close()


def _gathered(comm: pc.Communicator, mine: dict[str, Any]) -> list[dict[str, Any]]:
    return comm.control.all_gather(mine, "counting")


if __name__ == "__main__":
    main()
