"""SGLang's own classes over this library, on CPU tensors: its plug-in loader, its arguments, its dispatchers and their formats."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import HERE, SGLANG_PYTHON, Process, engines, shadowed

SEED = int(os.environ.get("PPLX_SEED", "1"))
LAYER = {"seed": SEED, "experts": 8, "top_k": 3, "hidden": 512}
# Tokens of the two ranks in each step, and which steps prefill.
STEPS = {"tokens": [[5, 9], [0, 7], [30, 0], [0, 0]], "extend": [False, True, True, False]}
BATCHES = {"two_batches": True, "tokens": [[5, 9], [4, 7], [30, 0], [0, 3]]}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"kind": "steps", "dtype": "bf16", **STEPS},
    "fp8": {"kind": "steps", "dtype": "fp8", "told": "nothing", **STEPS},
    "fp8 with packed scales": {"kind": "steps", "dtype": "fp8_ue8m0", **STEPS},
    "two batches, low latency": {"kind": "two_batches", "dtype": "fp8", "deepep_mode": "low_latency", "extend": [True], **BATCHES},
    "two batches, normal": {"kind": "two_batches", "dtype": "bf16", "deepep_mode": "normal", "extend": [False], **BATCHES},
    "hooks": {"kind": "hooks", "dtype": "bf16", "tokens": [[5, 9]], "extend": [True]},
    "other weights": {"kind": "other_weights", "dtype": "bf16", "tokens": [[5, 9]]},
    "recorded": {"kind": "recorded", "dtype": "bf16", "told": "by argument", **STEPS},
    "unweighted": {"kind": "unweighted", "dtype": "bf16", "tokens": [[5, 9]], "extend": [False]},
    "refusals": {"kind": "refusals", "dtype": "bf16", "tokens": [[5, 9], [3, 0]], "extend": [False, True]},
    "packed": {"kind": "cast"},
    "counted": {"kind": "counted"},
}
# SGLang's own dispatchers, for DeepEP and pplx_kernels.
THEIRS = {name: CASES[name] for name in ("bf16", "fp8", "two batches, low latency", "two batches, normal")} | {
    "fp8 with packed scales": CASES["fp8 with packed scales"] | {"extend": [False] * 4},
    "pplx": CASES["bf16"] | {"dispatcher": "pplx", "extend": [False] * 4},
}
COMPARED = [name for name in CASES if name not in ("unweighted", "refusals", "packed", "counted")]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory, metadata: Path) -> Iterator[list[Process]]:
    """One that registers, two ranks, and two of SGLang's own dispatchers. Most of their time is imports, so they start together."""
    print(f"PPLX_SEED={SEED}")
    ranks = str(HERE / "sglang_ranks.py")
    cases, theirs = ([LAYER | case for case in each.values()] for each in (CASES, THEIRS))
    folder = tmp_path_factory.mktemp("sglang")
    with engines(folder, metadata, folder, SGLANG_PYTHON) as sglang:
        yield [
            sglang.start([str(HERE / "sglang_registering.py")]),
            *sglang.job(2, [ranks, json.dumps(cases)], PPLX_COMM_METRICS=str(folder), PPLX_COMM_METRICS_SECONDS="1"),
            *sglang.job(2, [ranks, json.dumps(theirs), "deepep"], PYTHONPATH=shadowed("deep_ep", "pplx_kernels")),
        ]


@pytest.fixture(scope="module")
def registered(processes: list[Process]) -> dict[str, Any]:
    heard: dict[str, Any] = processes[0].hears("REGISTERED")
    return heard


@pytest.fixture(scope="module")
def results(processes: list[Process]) -> list[dict[str, Any]]:
    """Each rank's results of all cases."""
    return [dict(zip(CASES, rank.hears("RESULTS"), strict=True)) for rank in processes[1:3]]


@pytest.fixture(scope="module")
def their_results(processes: list[Process]) -> list[dict[str, Any]]:
    return [dict(zip(THEIRS, rank.hears("RESULTS"), strict=True)) for rank in processes[3:]]


def test_nothing_happens_unless_it_is_asked_for(registered: dict[str, Any]) -> None:
    assert registered["loaded"]
    assert registered["default"] == "none is none"
    assert registered["deepep"] == "deepep is deepep"
    assert registered["unknown"] == "refused"
    assert registered["another version, not asked"] == "none is none"
    assert registered["published default"] == "none, layers False"
    assert registered["published deepep"] == "deepep, layers False"
    assert registered["nothing imported"]


def test_the_backend_is_one_of_the_choices(registered: dict[str, Any]) -> None:
    assert registered["ours"] == "pplx_comm is deepep"
    assert registered["published ours"] == "deepep, layers True"
    assert registered["hooks"] == ["clean_buffer", "create_moe_dispatcher", "get_instance", "publish"]
    assert registered["mode"] == "changed"
    assert registered["sms"] == "20"


def test_refusals_at_the_start(registered: dict[str, Any]) -> None:
    says = {
        "ray": "--use-ray",
        "single batch": "--enable-single-batch-overlap",
        "elastic": "--elastic-ep-backend",
        "deepep config": "PPLX_COMM_SGLANG_NUM_SMS",
        "another version": "this is 0.9.0",
    }
    for asked, words in says.items():
        assert registered[asked].startswith("Error: ") and words in registered[asked], (asked, registered[asked])


@pytest.mark.parametrize("case", COMPARED)
def test_the_same_as_one_process(results: list[dict[str, Any]], case: str) -> None:
    for rank in results:
        assert rank[case]["largest"] > 0.5
        # Outputs of experts, and sums of at most three, in bfloat16.
        assert rank[case]["worst"] < 0.03 * rank[case]["largest"], rank[case]
    assert "formats" not in results[0][case] or results[0][case]["formats"] == [
        "deepep_normal" if extend else "deepep_ll" for extend in STEPS["extend"]
    ]


@pytest.mark.parametrize("case", THEIRS)
def test_their_own_dispatchers(their_results: list[dict[str, Any]], case: str) -> None:
    """Unchanged, over the packages in the places of DeepEP and pplx_kernels."""
    for rank in their_results:
        assert rank[case]["largest"] > 0.5
        assert rank[case]["worst"] < 0.03 * rank[case]["largest"], rank[case]


def test_hooks_are_called(results: list[dict[str, Any]]) -> None:
    for rank in results:
        with_hooks = ["pre_dispatch", "dispatch_send", "between", "post_dispatch", "pre_combine", "combine", "post_combine"]
        assert rank["hooks"]["heard"] == [*with_hooks, "dispatch", "combine"]


def test_recorded_loads(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["recorded"]["recorded"] == rank["recorded"]["meant"]


def test_without_weights_it_differs(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["unweighted"]["worst"] > 0.1 * rank["unweighted"]["largest"]


def test_scales_are_packed_as_sglang_packs_them(results: list[dict[str, Any]]) -> None:
    assert all(rank["packed"] == {"same": True, "strides": True} for rank in results)


def test_metrics(results: list[dict[str, Any]]) -> None:
    assert all(rank["counted"]["steps"] > 0 for rank in results), [rank["counted"] for rank in results]


def test_refusals_of_a_dispatcher(results: list[dict[str, Any]]) -> None:
    says = {
        "low_latency": "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
        "normal": "PPLX_COMM_SGLANG_MAX_TOKENS",
        "order": "combine_b was called when dispatch_a was to come",
        "nvfp4": "--deepep-dispatcher-output-dtype bf16",
        "overlap": "--enable-single-batch-overlap",
        "uneven": "the same number of experts on every rank",
    }
    for rank in results:
        for asked, words in says.items():
            assert rank["refusals"][asked].startswith("Error: ") and words in rank["refusals"][asked], (
                asked,
                rank["refusals"][asked],
            )
        assert rank["refusals"]["steps"]["worst"] < 0.03 * rank["refusals"]["steps"]["largest"]
