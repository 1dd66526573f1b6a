"""Blocks of remote peers in GPU memory, carried by the copy engines of GPUs of one process in a NIC's place, and what may be seen of
a row when its arrival word is.

python -m pytest tests/gpu/test_placement.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from cases import Case, random_case
from gpus import GPUS
from harness import Crew, Crews, run_ranks, seed

RANKS = max([n for n in (2, 4) if n <= GPUS], default=2)
# Threads that shared a GPU would share its default stream, in which one rank's kernels wait behind another's.
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="ranks that are threads need a GPU each")]
CHAOS = "seed=7,delay=0.3,shuffle=0.5,split=0.3,duplicate=0.1,replay=0.05,again=0.1"


@pytest.fixture(scope="module")
def process() -> Iterator[Crews]:
    """One process, whose threads are the ranks."""
    # A kernel that is loaded when it is first launched makes all threads of the process wait for those that run.
    # Streams share a GPU's queues, by default eight: a copy must not come to stand behind a kernel that waits for it.
    parts = {"PPLX_COMM_PART_BYTES": "2000"}
    with Crews(1, {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32", **parts}) as crews:
        yield crews


def small(transport: str) -> Case:
    return Case(seed(), RANKS, num_experts=16, top_k=4, hidden=512, max_tokens=32, transport=transport, first_step=2**32 - 500)


def shapes(begin: int, count: int) -> list[Case]:
    """Shapes without replicas, which share a node: with two ranks no copies would be left."""
    return [replace(random_case(seed() * 100_000 + begin + n, RANKS, ("copy",)), replicas=1) for n in range(count)]


def test_random_shapes(process: Crews) -> None:
    process.run("placement_cases:random_shapes", shapes(80_000, 15), timeout=200)


def test_random_shapes_in_a_chaos(process: Crews) -> None:
    process.run("placement_cases:random_shapes", shapes(81_000, 15), CHAOS, timeout=200)


def test_blocks_take_no_host_memory(process: Crews) -> None:
    for pinned, with_blocks in process.run("placement_cases:pinned_bytes", small("copy"))[0]:
        assert 0 < pinned < with_blocks / 4, (pinned, with_blocks)


def test_soak(process: Crews) -> None:
    assert process.run("placement_cases:soak", small("copy"), 1000, timeout=200) == [[0] * RANKS]


@pytest.mark.parametrize("hidden", [512, 7168])
def test_one_row_steps(process: Crews, hidden: int) -> None:
    case = Case(seed(), RANKS, hidden=hidden, transport="copy")
    assert process.run("placement_cases:one_row_steps_on_gpu_memory", case, 2000, timeout=200) == [[0] * RANKS]


@pytest.mark.parametrize("transport", ["proxy:tcp", "proxy:shm"])
def test_one_row_steps_in_host_memory(transport: str) -> None:
    with Crew(RANKS) as crew:
        assert crew.run("placement_cases:one_row_steps", Case(seed(), RANKS, hidden=7168, transport=transport), 2000) == [0] * RANKS


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["copy", "proxy:shm", "proxy:tcp"])
def test_a_million_one_row_steps(process: Crews, transport: str) -> None:
    case = Case(seed(), RANKS, hidden=512, transport=transport)
    if transport == "copy":
        assert process.run("placement_cases:one_row_steps_on_gpu_memory", case, 1_000_000, timeout=800) == [[0] * RANKS]
    else:
        assert run_ranks(RANKS, "placement_cases:one_row_steps", case, 1_000_000, timeout=800) == [0] * RANKS


def test_placements_that_are_refused() -> None:
    said = run_ranks(2, "placement_cases:device_memory_over_tcp")
    assert all("placement='device'" in text and "GPU" in text for text in said), said
