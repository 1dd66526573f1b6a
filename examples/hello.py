"""mpirun -n 4 python examples/hello.py"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is built is found without being installed

import pplx_comm as pc

comm = pc.Communicator.from_env()
a2a = pc.AllToAll(comm, num_experts=16, top_k=4, hidden=1024, max_tokens_per_rank=64, device="cpu")

x = torch.randn(64, 1024, dtype=torch.bfloat16)
weights, ids = torch.rand(64, 16).softmax(-1).topk(4)

d = a2a.dispatch(x, ids, weights)  # every token to the ranks that own its experts: rows by expert in d.x
y = a2a.combine(d.x * 2, d)  # "experts" that double; their outputs come back weighted and added

error = (y - 2 * x * weights.sum(1, keepdim=True)).abs().max().item()
if comm.rank == 0:
    print(f"{comm.world_size} ranks. Rank 0 received {int(d.counts.sum())} rows for its {len(d.counts)} experts,")
    print(f"and its 64 tokens came back within {error:.3f} of the local computation.")
