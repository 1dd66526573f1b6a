"""vLLM's modular MoE kernel over pplx_comm with the classes and formats that GPUs use, two ranks of CPU tensors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engines import HERE, SECONDS, Engines, Process, shadowed

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


# Low latency takes some hidden sizes only.
LOW_LATENCY = PLAIN | {"format": "batched", "hidden": 2048}
NORMAL = PLAIN | {"format": "standard"}
THEIRS = {
    "deepep_low_latency": [
        LOW_LATENCY,
        LOW_LATENCY | {"fp8": True},
        LOW_LATENCY | {"tokens": [[0, 3], [4, 0]]},
        LOW_LATENCY | {"top_k": 1, "on_input": True},
    ],
    "deepep_high_throughput": [
        NORMAL,
        NORMAL | {"fp8": True},
        NORMAL | {"tokens": [[0, 3], [0, 0]]},
        NORMAL | {"top_k": 1, "on_input": True},
    ],
}


def conform(run: Engines, cases: list[dict[str, Any]], *arguments: str, **env: str) -> list[Process]:
    """Two ranks compute what one process does."""
    ranks = run.job(2, [str(HERE / "conformance.py"), json.dumps(cases), *arguments], **env)
    for rank in ranks:
        assert rank.ended() == 0, rank.text[-6000:]
        for case, result in zip(cases, rank.said("RESULTS"), strict=True):
            bound = 0.06 if case["fp8"] else 0.012  # relative to the largest output: rounding to bfloat16, and to e4m3
            assert result["worst"] <= bound * max(result["largest"], 0.1), (case, result)
    return ranks


@pytest.mark.parametrize("backend", THEIRS)
def test_their_own_classes(run: Engines, backend: str) -> None:
    """vLLM's classes for DeepEP, unchanged, over the package in DeepEP's place."""
    conform(run, THEIRS[backend], backend, "theirs", PYTHONPATH=shadowed("deep_ep"))


@pytest.mark.parametrize("backend", ["pplx_comm", "deepep_low_latency"])
def test_formats_wires_and_placements(run: Engines, backend: str) -> None:
    """Under its own name, and in the place of vLLM's DeepEP, which knows batches only."""
    cases = [case for case in CASES if backend == "pplx_comm" or case["format"] == "batched"]
    for rank in conform(run, cases, backend, **({} if backend == "pplx_comm" else {"PPLX_COMM_VLLM_ALIAS": backend})):
        assert rank.said("FAULTS") == {"mask": [0, 0], "fault": False, "after": [0, 0]}
