"""MoE layers of torchtitan and of Megatron-Core over this library, on CPU tensors: trained as they are in one process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from engines import HERE, TRAINING_PYTHON, engines, shadowed

SEED = int(os.environ.get("PPLX_SEED", "1"))
LAYER = {"seed": SEED, "hidden": 128, "inner": 64, "experts": 8, "top_k": 2, "tokens": 24, "steps": 3, "precision": "bf16"}
# A quantised wire changes some tokens' experts once weights have moved, so it takes one step.
FP8 = {"precision": "fp8", "steps": 1}
CASES: dict[str, dict[str, Any]] = {
    "torchtitan": {"library": "torchtitan"},
    "torchtitan, max_rows": {"library": "torchtitan", "max_rows": 256},
    "torchtitan, fp8": {"library": "torchtitan", **FP8},
    "torchtitan, mxfp8": {"library": "torchtitan", **FP8, "precision": "mxfp8"},
    "megatron": {"library": "megatron", "expert_tp": 1},
    "megatron, max_rows": {"library": "megatron", "expert_tp": 1, "max_rows": 256},
    "megatron, fp8": {"library": "megatron", "expert_tp": 1, **FP8},
    "megatron, expert tp": {"library": "megatron", "expert_tp": 2},
    "megatron's names": {"library": "megatron_names"},
    "torchtitan, recomputed": {"library": "torchtitan", "reentrant": False},
    "megatron, recomputed": {"library": "megatron", "expert_tp": 1, "reentrant": True},
    "megatron over deep_ep": {"library": "megatron_deepep", "expert_tp": 1},
    "megatron over deep_ep, expert tp": {"library": "megatron_deepep", "expert_tp": 2},
}


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n} ranks")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """Each rank's results of all cases."""
    print(f"PPLX_SEED={SEED}")
    folder = tmp_path_factory.mktemp("training")
    with engines(folder, folder, folder, TRAINING_PYTHON) as training:
        cases = json.dumps([LAYER | case for case in CASES.values()])
        ranks = training.job(request.param, [str(HERE / "training_ranks.py"), cases], PYTHONPATH=shadowed("deep_ep"))
        yield [dict(zip(CASES, rank.hears("RESULTS"), strict=True)) for rank in ranks]


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_one_process(results: list[dict[str, Any]], case: str) -> None:
    """torchtitan's experts compute in bfloat16, and add up gradients in another order."""
    quantised = "fp8" in case
    for rank in results:
        assert max(rank[case].values()) < (0.08 if quantised else 0.004), rank[case]
        assert not quantised or rank[case]["y"] > 0.006, "nothing was quantised"
