"""Steps with delays from a seed before every publish, after every acquire and between the stores of rows.

python -m pytest tests/gpu/test_fuzz.py          # builds the modules with PPLX_CUDA_FUZZ in build/gpu-fuzz first: fuzz_build.py

PPLX_TEST_CUDA names a module that is built already: tests/mutants/run_cuda.py gives its mutants so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from cases import Case, in_pieces, random_case
from fuzz_build import fuzz_module
from gpus import APART, GPUS
from harness import Crew, Crews, seed
from open_step_cases import NOT_OPEN, STILL_OPEN, small_case

RANKS = max([2, *(n for n in APART if n <= 4)])
VOLUME = float(os.environ.get("PPLX_TEST_VOLUME", "1"))
"""Factor on the steps of soaks; 3 for mutants."""
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU"), pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def module() -> str:
    return fuzz_module("_cuda")


@pytest.fixture(scope="module")
def crew(module: str) -> Iterator[Crews]:
    with Crews(RANKS, {"PPLX_TEST_CUDA": module, "PPLX_COMM_CUDA_FUZZ": str(seed())}) as crews:
        yield crews


def test_random_shapes(crew: Crews) -> None:
    for number in range(20):
        crew.run("gpu_cases:exchange", random_case(seed() * 100_000 + number, RANKS, ("mapped",)), timeout=120)


@pytest.mark.parametrize(
    ("wire", "hidden", "tokens", "steps"),
    [
        ("native", 512, 32, 3_000),
        ("fp8", 512, 32, 2_000),
        ("mxfp8", 256, 8, 2_000),
        ("native", 7168, 128, 250),
        ("mxfp8", 20480, 8, 250),  # more scales than a warp looks at: rows have words
    ],
)
def test_soak(crew: Crews, wire: str, hidden: int, tokens: int, steps: int) -> None:
    """7,000 small steps and some large ones, whose rows fill the links."""
    case = Case(seed(), RANKS, num_experts=16, top_k=4, hidden=hidden, max_tokens=tokens, wire=wire, first_step=2**32 - 100)
    assert crew.run("gpu_cases:soak", case, int(steps * VOLUME), timeout=600) == [0] * RANKS


@pytest.mark.parametrize(
    ("wire", "hidden", "tokens", "least"),
    [("native", 512, 48, 1), ("fp8", 1024, 48, 1), ("native", 7168, 300, 1), ("native", 512, 48, 24)],
)
def test_soak_of_large_steps(module: str, wire: str, hidden: int, tokens: int, least: int) -> None:
    """All steps, or those of at least `least` tokens, go by the large kernels, and the others in the places that they leave."""
    with Crew(RANKS, {"PPLX_TEST_CUDA": module, "PPLX_COMM_CUDA_FUZZ": str(seed()), "PPLX_COMM_LARGE_TOKENS": str(least)}) as crew:
        case = Case(seed(), RANKS, num_experts=16, top_k=4, hidden=hidden, max_tokens=tokens, wire=wire, first_step=2**32 - 100)
        steps = int((1_500 if tokens < 100 else 250) * VOLUME)
        assert crew.run("gpu_cases:soak", case, steps, timeout=600) == [0] * RANKS


@pytest.mark.parametrize(
    ("routing", "tokens", "transport"),
    [
        ("uniform", 600, "mapped"),
        ("to_one", 400, "mapped"),
        ("uniform", 500, "proxy:shm"),
        ("sparse", 600, "proxy:tcp"),
        ("uniform", 500, "mixed:tcp"),
    ],
)
def test_pieces(crew: Crews, routing: str, tokens: int, transport: str) -> None:
    case = Case(seed(), RANKS, num_experts=16, top_k=2, hidden=512, max_tokens=tokens, routing=routing, crowd="uneven", steps=6)
    crew.run("gpu_cases:exchange", in_pieces(replace(case, transport=transport), on_gpu=True), timeout=300)


@pytest.mark.parametrize("transport", ["proxy:tcp", "mixed:tcp"])
def test_pieces_in_a_chaos(module: str, transport: str) -> None:
    chaos = f"seed={seed()},delay=0.3,shuffle=0.5,split=0.3,duplicate=0.1,replay=0.05,again=0.1"
    with Crew(RANKS, {"PPLX_TEST_CUDA": module, "PPLX_COMM_CUDA_FUZZ": str(seed()), "PPLX_COMM_CHAOS": chaos}) as crew:
        case = Case(
            seed(), RANKS, num_experts=16, top_k=2, hidden=512, max_tokens=500, crowd="uneven", steps=4, transport=transport
        )
        crew.run("gpu_cases:exchange", in_pieces(case, on_gpu=True), timeout=300)


def test_soak_of_replicas(crew: Crews) -> None:
    case = Case(seed(), RANKS, num_experts=16, top_k=4, hidden=512, max_tokens=32, replicas=2, first_step=2**32 - 500)
    assert crew.run("gpu_cases:soak", case, int(1_500 * VOLUME), timeout=600) == [0] * RANKS


@pytest.mark.parametrize(
    ("tokens", "pieces", "transport", "layout"),
    [
        (16, False, "mapped", "ragged"), (16, False, "proxy:tcp", "padded"), (1024, False, "mapped", "padded"), (1024, True, "mapped", "ragged"),
        (1024, True, "proxy:tcp", "padded"),
    ],
    ids=["few", "few by proxy", "large", "pieces", "pieces by proxy"],
)  # fmt: skip
def test_hooks(crew: Crews, tokens: int, pieces: bool, transport: str, layout: str) -> None:
    pytest.importorskip("triton")
    case = small_case(seed(), RANKS, 1, transport=transport, layout=layout, hidden=1024, max_tokens=tokens, align=128)
    case = in_pieces(case, on_gpu=True) if pieces else case
    crew.run("hook_kernels:beside", case, 100 if tokens == 16 else 20, timeout=300)


@pytest.mark.parametrize("kind", ["ids", "accumulate"])
def test_replicas_apart(module: str, kind: str) -> None:
    with Crew(RANKS, {"PPLX_TEST_CUDA": module, "PPLX_COMM_CUDA_FUZZ": str(seed())}) as crew:
        for r in crew.run("gpu_cases:on_gpu", "failure_cases:replicas_apart", Case(seed(), RANKS, replicas=2), kind):
            assert r.get("is_peer") and not r["is_timeout"], r


def test_open_steps(crew: Crews) -> None:
    """Eager steps and replays, several open at once: right, or refused."""
    crew.run("open_step_cases:interleaved", small_case(seed(), RANKS, 2), list(range(10)), 30, timeout=200)
    for heard in crew.run("open_step_cases:refused", small_case(seed(), RANKS, 1), "replay", 1):
        assert re.search(STILL_OPEN, heard["message"]), heard
    for heard in crew.run("open_step_cases:combined_again", small_case(seed(), RANKS, 2)):
        assert re.search(NOT_OPEN, heard["message"]), heard
