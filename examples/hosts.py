"""mpirun -f hosts -ppn 2 -n 4 python examples/hosts.py: ranks on several hosts, and whether the results are right."""

import logging
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is built is found without being installed

import pplx_comm as pc

logging.basicConfig(level=logging.INFO, format="%(message)s")  # rank 0 says which peers it reaches how

comm = pc.Communicator.from_env()
a2a = pc.AllToAll(comm, num_experts=16, top_k=4, hidden=1024, max_tokens_per_rank=64, dtype=torch.float32, device="cpu")

torch.manual_seed(comm.rank)
x = torch.randn(64, 1024)
weights, ids = torch.rand(64, 16).softmax(-1).topk(4)

d = a2a.dispatch(x, ids, weights)
expert = torch.repeat_interleave(torch.arange(len(d.counts)), d.offsets.diff())  # expert of each row, padding included
scale = 1 + comm.rank * len(d.counts) + expert  # expert e multiplies by 1 + e
y = a2a.combine(d.x[: len(scale)] * scale[:, None], d)

right = torch.allclose(y, x * (weights * (1 + ids)).sum(1, keepdim=True), rtol=1e-5, atol=1e-5)
everywhere = comm.agree(right)
if comm.rank == 0:
    nodes = comm.world_size // comm.node_size
    print(f"{comm.world_size} ranks on {nodes} nodes: the results are {'right' if everywhere else 'WRONG'} on every rank.")
raise SystemExit(not everywhere)
