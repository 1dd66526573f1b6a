"""How many ranks this machine's GPUs run at once.

Kernels of one process after the other run on a GPU, so ranks that share one take turns of milliseconds. Under NVIDIA's MPS each has a part
of the multiprocessors, all the time: `mps.py` starts it, and says in PPLX_TEST_RANKS_PER_GPU how many ranks a GPU has room for.
"""

from __future__ import annotations

import os

import pytest
import torch

GPUS = torch.cuda.device_count()
AT_ONCE = GPUS * int(os.environ.get("PPLX_TEST_RANKS_PER_GPU", "1"))
"""How many ranks run beside each other, none of them in turns."""
FROM_768 = {"PPLX_COMM_LARGE_TOKENS": "384"}
"""Dispatches of 768 tokens, and combines of half, go by the large kernels, also where the kernels of few tokens are faster."""
APART = [n for n in (1, 2, 4, 8) if n <= AT_ONCE]
ENDS = [n for n in APART if n == 2 or n == APART[-1]] or [1]
"""The fewest ranks that have a peer, and the most. The emulation has the numbers between."""
fewest = pytest.mark.parametrize("crew", ENDS[:1], indirect=True, ids=lambda n: f"ep{n}")
"""Marks a test of what each rank computes on its own."""
