"""Steps with delays from a seed before every publish, after every acquire and between the stores of rows.

python -m pytest tests/gpu/test_fuzz.py          # builds pplx_comm._cuda with PPLX_CUDA_FUZZ in build/gpu-fuzz first, for this GPU

PPLX_TEST_CUDA names a module that is built already: tests/mutants/run_cuda.py gives its mutants so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases import Case, in_pieces, random_case
from gpus import APART, GPUS
from harness import Crew, seed
from open_step_cases import NOT_OPEN, STILL_OPEN, small_case
from run_cuda import build_module, nvcc

ROOT = Path(__file__).resolve().parents[2]
RANKS = max([*APART, 2])
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU"), pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def module() -> str:
    """A fuzz build of pplx_comm._cuda."""
    given = os.environ.get("PPLX_TEST_CUDA")
    if given:
        return given
    if nvcc() is None or shutil.which("cmake") is None:
        pytest.skip("no nvcc or cmake to make a fuzz build with")
    try:
        return str(build_module(ROOT, ROOT / "build" / "gpu-fuzz"))
    except subprocess.CalledProcessError as problem:
        pytest.fail(problem.output[-4000:])


@pytest.fixture
def crew(module: str) -> Iterator[Crew]:
    with Crew(RANKS, {"PPLX_TEST_CUDA": module, "PPLX_COMM_CUDA_FUZZ": str(seed())}) as crew:
        yield crew


def test_random_shapes(crew: Crew) -> None:
    for number in range(20):
        crew.run("gpu_cases:exchange", random_case(seed() * 100_000 + number, RANKS, ("mapped",)), timeout=120)


@pytest.mark.parametrize(
    ("wire", "hidden", "tokens", "steps"),
    [
        ("native", 512, 32, 10_000),
        ("fp8", 512, 32, 5_000),
        ("mxfp8", 256, 8, 5_000),
        ("native", 7168, 128, 500),
        ("mxfp8", 20480, 8, 500),  # more scales than a warp looks at: rows have words
    ],
)
def test_soak(crew: Crew, wire: str, hidden: int, tokens: int, steps: int) -> None:
    """20,000 small steps and some large ones, whose rows fill the links."""
    case = Case(seed(), RANKS, num_experts=16, top_k=4, hidden=hidden, max_tokens=tokens, wire=wire, first_step=2**32 - 500)
    assert crew.run("gpu_cases:soak", case, steps, timeout=600) == [0] * RANKS


@pytest.mark.parametrize(
    ("wire", "hidden", "tokens", "least"),
    [("native", 512, 48, 1), ("fp8", 1024, 48, 1), ("native", 7168, 300, 1), ("native", 512, 48, 24)],
)
def test_soak_of_large_steps(module: str, wire: str, hidden: int, tokens: int, least: int) -> None:
    """All steps, or those of at least `least` tokens, go by the large kernels, and the others in the places that they leave."""
    with Crew(RANKS, {"PPLX_TEST_CUDA": module, "PPLX_COMM_CUDA_FUZZ": str(seed()), "PPLX_COMM_LARGE_TOKENS": str(least)}) as crew:
        case = Case(seed(), RANKS, num_experts=16, top_k=4, hidden=hidden, max_tokens=tokens, wire=wire, first_step=2**32 - 500)
        assert crew.run("gpu_cases:soak", case, 4_000 if tokens < 100 else 500, timeout=600) == [0] * RANKS


@pytest.mark.parametrize("transport", ["mapped", "proxy:shm", "proxy:tcp", "mixed:tcp"])
@pytest.mark.parametrize(("routing", "tokens"), [("uniform", 1200), ("sparse", 900), ("to_one", 700)])
def test_pieces(crew: Crew, routing: str, tokens: int, transport: str) -> None:
    case = Case(seed(), RANKS, num_experts=16, top_k=2, hidden=512, max_tokens=tokens, routing=routing, crowd="uneven", steps=12)
    crew.run("gpu_cases:exchange", in_pieces(replace(case, transport=transport), on_gpu=True), timeout=300)


@pytest.mark.parametrize("transport", ["proxy:tcp", "mixed:tcp"])
def test_pieces_in_a_chaos(module: str, transport: str) -> None:
    chaos = f"seed={seed()},delay=0.3,shuffle=0.5,split=0.3,duplicate=0.1,replay=0.05,again=0.1"
    with Crew(RANKS, {"PPLX_TEST_CUDA": module, "PPLX_COMM_CUDA_FUZZ": str(seed()), "PPLX_COMM_CHAOS": chaos}) as crew:
        case = Case(
            seed(), RANKS, num_experts=16, top_k=2, hidden=512, max_tokens=900, crowd="uneven", steps=6, transport=transport
        )
        crew.run("gpu_cases:exchange", in_pieces(case, on_gpu=True), timeout=300)


def test_soak_of_replicas(crew: Crew) -> None:
    case = Case(seed(), RANKS, num_experts=16, top_k=4, hidden=512, max_tokens=32, replicas=2, first_step=2**32 - 500)
    assert crew.run("gpu_cases:soak", case, 5_000, timeout=600) == [0] * RANKS


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp"])
@pytest.mark.parametrize(("tokens", "pieces"), [(16, False), (1024, False), (1024, True)], ids=["few", "many", "pieces"])
def test_hooks(crew: Crew, tokens: int, pieces: bool, transport: str, layout: str) -> None:
    pytest.importorskip("triton")
    case = small_case(seed(), RANKS, 1, transport=transport, layout=layout, hidden=1024, max_tokens=tokens, align=128)
    case = in_pieces(case, on_gpu=True) if pieces else case
    crew.run("hook_kernels:beside", case, 300 if tokens == 16 else 50, timeout=300)


@pytest.mark.parametrize("kind", ["ids", "accumulate"])
def test_replicas_apart(crew: Crew, kind: str) -> None:
    for r in crew.run("gpu_cases:on_gpu", "failure_cases:replicas_apart", Case(seed(), RANKS, replicas=2), kind):
        assert r.get("is_peer") and not r["is_timeout"], r


def test_open_steps(crew: Crew) -> None:
    """Eager steps and replays, several open at once: right, or refused."""
    crew.run("open_step_cases:interleaved", small_case(seed(), RANKS, 2), list(range(10)), 30, timeout=200)
    for heard in crew.run("open_step_cases:refused", small_case(seed(), RANKS, 1), "replay", 1):
        assert re.search(STILL_OPEN, heard["message"]), heard
    for heard in crew.run("open_step_cases:combined_again", small_case(seed(), RANKS, 2)):
        assert re.search(NOT_OPEN, heard["message"]), heard
