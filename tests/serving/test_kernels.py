"""vLLM's modular MoE kernel over pplx_comm with the classes and formats that GPUs use, two ranks of CPU tensors."""

from __future__ import annotations

import json

import pytest
from engines import HERE, SECONDS, Engines, free_port

pytestmark = pytest.mark.timeout(2 * SECONDS)

PLAIN = {"experts": 8, "top_k": 2, "hidden": 256, "tokens": [[5, 9], [48, 1]], "seed": 1, "fp8": False}
CASES = [
    PLAIN | {"format": "batched"},
    PLAIN | {"format": "standard"},
    PLAIN | {"format": "batched", "fp8": True},
    PLAIN | {"format": "standard", "fp8": True},
    PLAIN | {"format": "batched", "tokens": [[0, 3], [4, 0]]},
    PLAIN | {"format": "standard", "tokens": [[0, 3], [0, 0]]},
    PLAIN | {"format": "standard", "experts": 7},  # the last rank has one fewer
    PLAIN | {"format": "standard", "round_robin": True},
    PLAIN | {"format": "batched", "round_robin": True},
    PLAIN | {"format": "standard", "experts": 7, "round_robin": True},
    PLAIN | {"format": "standard", "top_k": 1, "on_input": True},
    PLAIN | {"format": "batched", "top_k": 1, "on_input": True},
    PLAIN | {"format": "batched", "in_flight": 2},
]


@pytest.mark.parametrize("backend", ["pplx_comm", "deepep_low_latency"])
def test_formats_wires_and_placements(run: Engines, backend: str) -> None:
    """Under its own name, and in the place of vLLM's DeepEP, which knows batches only."""
    cases = [case for case in CASES if backend == "pplx_comm" or case["format"] == "batched"]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if backend != "pplx_comm":
        job["PPLX_COMM_VLLM_ALIAS"] = backend
    arguments = [str(HERE / "conformance.py"), json.dumps(cases), backend]
    ranks = [run.start(arguments, **job, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    for rank in ranks:
        assert rank.ended() == 0, rank.text[-6000:]
        results = rank.said("RESULTS")
        assert len(results) == len(cases)
        for case, result in zip(cases, results, strict=True):
            bound = 0.06 if case["fp8"] else 0.012  # relative to the largest output: rounding to bfloat16, and to e4m3
            assert result["worst"] <= bound * max(result["largest"], 0.1), (case, result)
        assert rank.said("FAULTS") == {"mask": [0, 0], "fault": False, "after": [0, 0]}
