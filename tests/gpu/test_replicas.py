"""replicas= with device="cuda": the bits of the CPU device and of a world without replicas, mapped, mixed and through the proxy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases import WIRES, Case, random_case
from gpus import AT_ONCE, GPUS
from harness import Crew, Crews, seed
from test_failure import CLOSED, NOTICED, left_in_shm, reset_after_deaths

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU"), pytest.mark.timeout(300)]

RANKS = 4 if AT_ONCE >= 4 else 2  # fewer GPUs are shared
CARRIERS = ["mapped", *(["mixed:tcp", "proxy:shm", "relayed:tcp"] if RANKS == 4 else [])]
GROUPS = [g for g in (2, 4) if g <= RANKS]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crews]:
    with Crews(RANKS) as crews:
        yield crews


def small(transport: str, **changes: object) -> Case:
    case = Case(seed(), RANKS, num_experts=16, top_k=4, hidden=512, max_tokens=32, transport=transport, replicas=2)
    return replace(case, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", CARRIERS)
def test_random_shapes(crew: Crews, transport: str) -> None:
    begin = seed() * 100_000 + 80_000
    cases = (random_case(begin + number, RANKS, (transport,)) for number in range(150))
    for case in [case for case in cases if case.replicas > 1][:25]:
        crew.run("gpu_cases:exchange", case)


# Four replicas of nodes of two are one node, but two nodes without them.
@pytest.mark.parametrize(
    ("transport", "replicas"), [(t, g) for t in CARRIERS for g in GROUPS if g == 2 or t in ("mapped", "proxy:shm")]
)
def test_as_without_replicas(crew: Crews, transport: str, replicas: int) -> None:
    """Fewer tokens than replicas, too."""
    for number, max_tokens in enumerate([1, 5, 8]):
        case = small(
            transport, seed=seed() * 100 + number, replicas=replicas, max_tokens=max_tokens, crowd="uneven",
            layout=("ragged", "padded", "compact")[number], in_flight=(1, 4, 2)[number], steps=6, top_k=3, wire=("native", "fp8", "mxfp8")[number],
            first_step=2**32 - 3, routing=("uniform", "sparse", "zipf")[number],
        )  # fmt: skip
        crew.run("gpu_cases:on_gpu", "rank_cases:as_without_replicas", case)


@pytest.mark.parametrize(("wire", "replicas"), [(wire, GROUPS[n % len(GROUPS)]) for n, wire in enumerate(WIRES)])
def test_full_shape_as_on_the_cpu(crew: Crews, wire: str, replicas: int) -> None:
    """More strips than the GPU has warps: each of them claims several."""
    case = small("mapped", replicas=replicas, num_experts=64, top_k=8, hidden=7168, max_tokens=300, wire=wire, align=128, threads=4)
    crew.run("gpu_cases:both_devices", case, 2, timeout=200)


@pytest.mark.parametrize("transport", CARRIERS)
def test_soak(crew: Crews, transport: str) -> None:
    case = small(transport, first_step=2**32 - 500)
    assert crew.run("gpu_cases:soak", case, 1000, timeout=200) == [0] * RANKS
    assert crew.run("gpu_cases:soak", replace(case, max_tokens=3, hidden=7168), 300, timeout=200) == [0] * RANKS


@pytest.mark.parametrize("transport", CARRIERS)
def test_graph_replay(crew: Crews, transport: str) -> None:
    assert crew.run("gpu_cases:replay", small(transport, wire="fp8", align=8), 300, timeout=200) == [0] * RANKS


@pytest.mark.alone
@pytest.mark.skipif(AT_ONCE < RANKS, reason="ranks that share a GPU hold it for each other")
def test_beside_a_kernel_that_holds_the_gpu(crew: Crews) -> None:
    """Thread blocks that do not run yet have no rows that replicas wait for."""
    assert crew.run("gpu_cases:held_sms", small("mapped", hidden=2048, max_tokens=128), 1, 50) == [0] * RANKS


def test_a_silent_replica() -> None:
    with Crew(RANKS) as crew:
        found = crew.run("gpu_cases:lost_peer", small("mapped"), 0.5, timeout=100)
        assert found == [RANKS - 1] * (RANKS - 1) + ["silent"]


@pytest.mark.parametrize("kind", ["ids", "tokens", "accumulate"])
def test_different_tokens(kind: str) -> None:
    with Crew(RANKS) as crew:
        results = crew.run("gpu_cases:on_gpu", "failure_cases:replicas_apart", small("mapped", max_tokens=8), kind)
        for r in results:
            assert r.get("is_peer") and not r["is_timeout"], r
            assert r["closing"] < CLOSED, r
        last = RANKS - 1
        word = {"ids": "passed different topk_ids", "tokens": f"rank {last} passed 7 ", "accumulate": "accumulate="}[kind]
        assert any(word in r["message"] for r in results), results


@pytest.mark.parametrize("transport", ["mapped", "mixed:tcp", "relayed:tcp"])
@pytest.mark.alone
def test_reset(transport: str, tmp_path: Path) -> None:
    """A replica dies: those that are left of its group send its tokens too."""
    case = Case(seed(), 4, transport=transport, num_experts=10, top_k=4, crowd="uneven", replicas=2, in_flight=2, max_tokens=7)
    with Crew(4) as crew:
        for r in reset_after_deaths(crew, ["gpu_cases:on_gpu"], case, tmp_path):
            assert max(r["noticed"]) < NOTICED and r["closing"] < CLOSED, r
        assert left_in_shm(crew) == []
