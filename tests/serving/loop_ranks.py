"""One of the ranks that run torchtitan's or Megatron-Core's whole training loop, over its own all-to-all, then over this library.

`python loop_ranks.py LIBRARY CASES` with RANK and WORLD_SIZE, run by the Python that has both. Prints for each case the losses of both
runs, which begin with the same weights and see the same tokens, how far the gradients of the first step are apart, and how many
steps of the AllToAll each optimizer step took.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import no_gpu
import torch
import torch.distributed as dist
from loops import Trained, Used

OURS: dict[str, Any] = {"precision": None, "recompute": ""}
"""Options that a case changes in ours; theirs does not have them."""


def apart(ours: Trained, theirs: Trained, word: str) -> float:
    """The length of the difference of gradients whose names have the word, relative to theirs."""
    names = [name for name in theirs.gradients if word in name]
    assert names
    a, b = (torch.cat([run.gradients[name].flatten().double() for name in names]) for run in (ours, theirs))
    assert b.norm() > 1e-6, f"nothing to compare: {word} has no gradients"
    return float((a - b).norm() / b.norm())


def main() -> None:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    from pplx_comm.compat.groups import close_all

    library, cases = sys.argv[1], json.loads(sys.argv[2])
    getattr(no_gpu, f"for_{library}")()
    loop = importlib.import_module(f"{library}_loop")
    used = Used(loop.adapter)
    results, known = [], {}
    for case in cases:
        model = json.dumps([case[name] for name in sorted(case) if name not in OURS])
        if model not in known:
            known[model] = loop.train(case | OURS, used)
        theirs, before = known[model], {counter: used.total(counter) for counter in ("steps", "rows_sent")}
        ours = loop.train(case, used)
        results.append({
            "ours": ours.losses, "theirs": theirs.losses, "steps": [each - before["steps"] for each in ours.steps],
            "rows": used.total("rows_sent") - before["rows_sent"],
            "apart": {part: apart(ours, theirs, part) for part in ("experts", "router")},
        })  # fmt: skip
    close_all()
    dist.barrier()
    dist.destroy_process_group()
    print("RESULTS", json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
