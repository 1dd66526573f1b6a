"""Whole training loops of torchtitan and of Megatron-Core over this library, on CPU tensors, beside the same over their own all-to-all.

Both are written for GPUs: `no_gpu.py` has what of the device is replaced, and by what. What cannot run without one, or here:

- torchtitan 0.3.0, spmd_backend="spmd_types", its default: models/qwen3/parallelize.py gives apply_fsdp_to_decoder() dp_mesh_dims and plain
  parameters, which torch 2.13 refuses (FSDPParam._init_sharding_spec) on any device. "partial_dtensor" runs.
- torchtitan's attention: models/common/config_utils.py has flex, which torch refuses to train on CPUs (flex_attention.py, "does not support
  backward on CPU"), and varlen, which is cuDNN or Flash Attention. Its own ScaledDotProductAttention stands there.
- FSDP's division of sums, which gloo has not (ReduceOp.PREMUL_SUM): set_force_sum_reduction_for_comms().
- Megatron-Core 0.16.1, transformer/moe/experts.py: GroupedMLP asks for grouped_gemm, TEGroupedMLP for Transformer Engine, as does FP8. Its
  SequentialMLP runs.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from engines import HERE, TRAINING_PYTHON, engines
from loops import LAYERS, MICRO_BATCHES, STEPS

SEED = int(os.environ.get("PPLX_SEED", "1"))
MODEL = {"seed": SEED, "hidden": 128, "inner": 64, "experts": 8, "top_k": 3, "length": 32, "rate": 0.003}
PLAIN = MODEL | {"precision": "bf16", "recompute": "", "sharded": False, "overlapped": False}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "torchtitan": {
        "plain": PLAIN,
        "all recomputed": PLAIN | {"recompute": "all"},
        "some recomputed": PLAIN | {"recompute": "selected"},
        "fp8": PLAIN | {"precision": "fp8"},
        "mxfp8": PLAIN | {"precision": "mxfp8"},
    },
    "megatron": {
        "plain": PLAIN,
        "two experts a token": PLAIN | {"top_k": 2},
        "all recomputed": PLAIN | {"recompute": "all"},
        "optimizer sharded": PLAIN | {"sharded": True},
        "overlapped": PLAIN | {"top_k": 2, "overlapped": True},
        "fp8": PLAIN | {"precision": "fp8"},
        "mxfp8": PLAIN | {"precision": "mxfp8"},
    },
}
BOTH = [(library, case) for library, cases in CASES.items() for case in cases]
Result = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Result]]]:
    """Results of each of two ranks for the cases of each library."""
    print(f"PPLX_SEED={SEED}")
    folder, made = tmp_path_factory.mktemp("loops"), {}
    with engines(folder, folder, folder, TRAINING_PYTHON) as training:
        for library, cases in CASES.items():
            ranks = training.job(2, [str(HERE / "loop_ranks.py"), library, json.dumps(list(cases.values()))])
            made[library] = [dict(zip(cases, rank.hears("RESULTS"), strict=True)) for rank in ranks]
    return made


def worst(result: Result) -> float:
    """Returns the largest difference of a step's loss, relative to theirs."""
    return max(abs(ours / theirs - 1) for ours, theirs in zip(result["ours"], result["theirs"], strict=True))


@pytest.mark.parametrize(("library", "case"), BOTH)
def test_every_step_is_ours(results: dict[str, list[dict[str, Result]]], library: str, case: str) -> None:
    """One step of the AllToAll for each layer's forward pass and one for its backward pass; one more where layers run again."""
    passes = 3 if CASES[library][case]["recompute"] else 2
    for rank in results[library]:
        each = LAYERS * MICRO_BATCHES * passes
        assert rank[case]["steps"] == [each * step for step in range(1, STEPS + 1)]
        assert rank[case]["rows"] > 0


@pytest.mark.parametrize(("library", "case"), [both for both in BOTH if "fp8" not in both[1]])
def test_the_same_as_their_own(results: dict[str, list[dict[str, Result]]], library: str, case: str) -> None:
    """Both add up the same numbers. A token's outputs are added in another order, which is a float32's rounding, 6e-8.

    torchtitan's experts round what they get to bfloat16: where an input lies on an edge that is 4e-3, of few elements. Seen: gradients
    apart by 2e-4, losses by 4e-5. Megatron-Core's compute in float32: 2e-7 and 5e-8. Adam, which divides by the size of a gradient,
    makes more of what is small. Of two outputs the order does not matter: the same bits, in bfloat16, too.
    """
    losses, gradients = {"torchtitan": (5e-4, 2e-3), "megatron": (2e-6, 5e-6)}[library]
    if CASES[library][case]["top_k"] == 2:
        losses = gradients = 0.0
    for rank in results[library]:
        assert rank[case]["theirs"][-1] < rank[case]["theirs"][0] - 0.3, "nothing was learned"
        assert worst(rank[case]) <= losses, rank[case]
        assert max(rank[case]["apart"].values()) <= gradients, rank[case]


@pytest.mark.parametrize(("library", "case"), [both for both in BOTH if "fp8" in both[1]])
def test_a_quantised_wire(results: dict[str, list[dict[str, Result]]], library: str, case: str) -> None:
    """e4m3 has three bits behind the point, so a row is off by some 3 %, forward and backward. Seen: losses apart by 3e-4 at most."""
    for rank in results[library]:
        assert worst(rank[case]) < 0.01, rank[case]
        assert 0.01 < min(rank[case]["apart"].values()) <= max(rank[case]["apart"].values()) < 0.15, rank[case]
