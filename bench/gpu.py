"""Kernel times of device="cuda", beside the floor: bare stores of the same bytes.

    mpirun -n 4 python bench/gpu.py --tokens 1,8,32,128

A graph of --pairs dispatches and combines on as many different inputs, so that L2 is not warm. Each launch stamps its start with
the GPU's clock; a time is the difference to the start of the next launch. Microseconds, p50 of all pairs and replays, slowest rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from typing import Any

import torch

import pplx_comm as pc

COLUMNS = ("tokens", "dispatch", "floor_d", "of_floor_d", "combine", "floor_c", "of_floor_c", "pair", "eager", "host")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,8,32,128")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--wire", default="fp8")
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--replays", type=int, default=10)
    parser.add_argument("--num-sms", type=int)
    parser.add_argument("--json", help="write the figures there, too")
    return parser.parse_args()


def slowest(comm: pc.Communicator, value: float) -> float:
    return max(float(v) for v in comm._exchange(value, "bench"))


class Shape:
    """One AllToAll and the inputs of its steps."""

    def __init__(self, comm: pc.Communicator, args: argparse.Namespace, tokens: int) -> None:
        self.comm, self.args, self.tokens = comm, args, tokens
        self.a2a = pc.AllToAll(
            comm, num_experts=args.experts, top_k=args.top_k, hidden=args.hidden, max_tokens_per_rank=tokens, wire=args.wire,
            device="cuda", timeout=5.0, num_sms=args.num_sms,
        )  # fmt: skip
        g = torch.Generator(device="cuda").manual_seed(comm.rank)
        self.x = torch.randn(args.pairs, tokens, args.hidden, device="cuda", generator=g, dtype=torch.bfloat16)
        self.ids = torch.rand(args.pairs, tokens, args.experts, device="cuda", generator=g).topk(args.top_k).indices
        self.weights = torch.rand(args.pairs, tokens, args.top_k, device="cuda", generator=g)
        rows = self.a2a.dispatch(self.x[0], self.ids[0])
        self.outputs = torch.randn(8, rows.x.shape[0], args.hidden, device="cuda", generator=g, dtype=torch.bfloat16)
        rows.release()

    def pair(self, i: int) -> None:
        d = self.a2a.dispatch(self.x[i], self.ids[i], self.weights[i])
        self.a2a.combine(self.outputs[i % 8], d)

    def rows_to(self, rank: int) -> float:
        """Rows of a step, on average."""
        owner = self.ids // -(-self.args.experts // self.comm.world_size)
        return float((owner == rank).any(-1).sum()) / self.args.pairs

    def kernels(self) -> dict[str, float]:
        pairs, replays = self.args.pairs, self.args.replays
        stamps = torch.zeros(pairs, 2, dtype=torch.int64, device="cuda")
        self.a2a._core.stamp(stamps.data_ptr(), pairs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(pairs):
                self.pair(i)
        self.a2a._core.stamp(0, 0)
        dispatch, combine, wall = [], [], []
        for replay in range(replays + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.comm.barrier()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            self.a2a.check()
            if replay < 2:  # warming up
                continue
            starts = sorted(stamps.flatten().tolist())
            gaps = [(b - a) / 1000 for a, b in itertools.pairwise(starts)]
            dispatch += gaps[0::2]
            combine += gaps[1::2]
            wall.append(begin.elapsed_time(end) * 1000 / pairs)
        return {
            "dispatch": slowest(self.comm, statistics.median(dispatch)),
            "combine": slowest(self.comm, statistics.median(combine)),
            "pair": slowest(self.comm, statistics.median(wall)),
        }

    def eager(self) -> dict[str, float]:
        pairs = self.args.pairs
        host, whole = [], []
        for _ in range(5):
            self.comm.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for i in range(pairs):
                self.pair(i)
            host.append((time.perf_counter() - begin) / pairs * 1e6)
            torch.cuda.synchronize()
            whole.append((time.perf_counter() - begin) / pairs * 1e6)
        return {
            "eager": slowest(self.comm, statistics.median(whole)),
            "host": slowest(self.comm, statistics.median(host)),
        }

    def floor(self, op: int) -> float:
        """Pushes of as many bytes as a step has, back to back in a graph. Ends the use of this AllToAll."""
        c, bytes_to = self.a2a._config, [0] * self.comm.world_size
        for peer in range(self.comm.world_size):
            if peer == self.comm.rank:
                continue
            rows = self.rows_to(peer) if op == 0 else self._rows_from(peer)
            bytes_to[peer] = int(rows * c.row_bytes(op)) // 16 * 16
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(50):
                self.a2a._core.push(torch.cuda.current_stream().cuda_stream, bytes_to)
        times = []
        for _ in range(12):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.comm.barrier()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / 50)
        return slowest(self.comm, statistics.median(times[2:]))

    def _rows_from(self, peer: int) -> float:
        if not hasattr(self, "_back"):
            mine = [self.rows_to(rank) for rank in range(self.comm.world_size)]
            self._back = [row[self.comm.rank] for row in self.comm._exchange(mine, "rows")]
        return float(self._back[peer])


def main() -> int:
    args = arguments()
    torch.cuda.set_device(
        int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", os.environ.get("LOCAL_RANK", "0"))) % torch.cuda.device_count()
    )
    comm = pc.Communicator.from_env()
    results: list[dict[str, Any]] = []
    if comm.rank == 0:
        print(f"{comm.world_size} ranks on {torch.cuda.get_device_name()}, {vars(args)}")
        print("".join(f"{name:>10}" for name in COLUMNS))
    for tokens in [int(t) for t in args.tokens.split(",")]:
        shape = Shape(comm, args, tokens)
        row: dict[str, Any] = {"tokens": tokens, **shape.kernels(), **shape.eager()}
        row["floor_c"], row["floor_d"] = shape.floor(1), shape.floor(0)
        shape.a2a.close()
        results.append(row)
        if comm.rank == 0:
            row["of_floor_d"], row["of_floor_c"] = row["dispatch"] / row["floor_d"], row["combine"] / row["floor_c"]
            print("".join(f"{row[name]:10.4g}" for name in COLUMNS), flush=True)
    if args.json and comm.rank == 0:
        with open(args.json, "w") as file:
            json.dump(
                {"arguments": vars(args), "ranks": comm.world_size, "gpu": torch.cuda.get_device_name(), "results": results},
                file,
                indent=1,
            )
    comm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
