"""device="cuda" against the reference and the CPU device, to the last bit. Skips what the machine has too few GPUs for.

python -m pytest tests/gpu          # everything that this machine can run
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import WIRES, Case, random_case
from gpus import APART, AT_ONCE, ENDS, GPUS, fewest
from harness import Crew, Crews, clean_environment, seed
from memcheck_rank import SIZES
from test_dump import shows_ranks_between_halves, started, when
from test_failure import CLOSED, NOTICED, left_in_shm, reset_after_deaths

from pplx_comm.gpus import cuda_module

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU")]

LIMIT = 60
"""Seconds for a case on GPUs, the default of a crew: a rank that takes longer hangs, and is named."""

COMPILED_LIMIT = 250
"""The same where torch compiles, which takes most of it."""


@pytest.fixture(scope="module", params=ENDS, ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    with Crews(request.param) as crews:
        yield crews


@pytest.fixture(scope="module")
def sharing() -> Iterator[Crews]:
    with Crews(2, {"CUDA_VISIBLE_DEVICES": "0"}) as crews:
        yield crews


def test_random_shapes(crew: Crews) -> None:
    begin = seed() * 100_000
    for number in range(40):
        crew.run("gpu_cases:exchange", random_case(begin + number, crew.world_size, ("mapped",)))


def test_waits_are_counted(crew: Crews) -> None:
    case = Case(seed(), crew.world_size, num_experts=16, top_k=4, hidden=512, max_tokens=4, in_flight=2, steps=2)
    crew.run("gpu_cases:on_gpu", "rank_cases:a_late_rank", case, 1)


def test_rows_that_are_not_read(crew: Crews) -> None:
    for number in range(8):
        drawn = random_case(seed() * 100_000 + 90_000 + number, crew.world_size, ("mapped",))
        crew.run("gpu_cases:on_gpu", "rank_cases:opened_again", replace(drawn, hidden=1040 + 512 * number, in_flight=1))


@pytest.mark.parametrize("env", [{}, {"PPLX_COMM_LARGE_TOKENS": "1"}], ids=["few", "large"])
def test_one_rank(env: dict[str, str]) -> None:
    with Crew(1, env) as crew:
        for number in range(20):
            crew.run("gpu_cases:exchange", random_case(seed() * 100_000 + 30_000 + number, 1, ("mapped",)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_more_random_shapes(crew: Crews) -> None:
    begin = seed() * 100_000 + 50_000
    for number in range(1000):
        crew.run("gpu_cases:exchange", random_case(begin + number, crew.world_size, ("mapped",)))


@fewest
@pytest.mark.parametrize(("wire", "layout"), [("native", "ragged"), ("fp8", "compact")])
def test_the_composite_floor_of_the_benchmark(crew: Crews, layout: str, wire: str) -> None:
    arguments = ["--tokens", "100", "--hidden", "7168", "--experts", "64", "--wire", wire, "--layout", layout]
    for ran in crew.run("bench_cases:composite", arguments, "gpu", 8):
        assert ran["says"] == ran["counted"]


@pytest.mark.parametrize(
    ("wire", "dtype"),
    [("native", "bfloat16"), ("native", "float32"), ("fp8", "bfloat16"), ("fp8_ue8m0", "float16"), ("mxfp8", "bfloat16")],
)
def test_full_shape_as_on_the_cpu(crew: Crews, wire: str, dtype: str) -> None:
    case = Case(
        seed(), crew.world_size, num_experts=64, top_k=8, hidden=7168, max_tokens=64, wire=wire, dtype=dtype, align=128, threads=4
    )
    crew.run("gpu_cases:both_devices", case, 2)


@fewest
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numbers_that_are_nan_or_infinite(crew: Crews, wire: str, dtype: str) -> None:
    """Blocks with NaN, infinities, zeros and the ends of the range, blocks that are short, and both layouts of scales."""
    for hidden, scale_layout in ((1024, "row"), (7168, "tma"), (200, "row"), (1128, "tma")):
        case = Case(
            seed() + hidden, crew.world_size, num_experts=16, top_k=4, hidden=hidden, max_tokens=48, wire=wire, dtype=dtype,
            align=8, threads=2, scale_layout=scale_layout,
        )  # fmt: skip
        crew.run("gpu_cases:both_devices", case, 3, odd=True)


@pytest.mark.parametrize("large", ["1", "100000"], ids=["large", "few"])
def test_blocks_of_any_magnitude(large: str) -> None:
    with Crew(1, {"PPLX_COMM_LARGE_TOKENS": large}) as crew:
        case = Case(seed(), 1, num_experts=1, top_k=1, hidden=7168, max_tokens=1024, wire="fp8", dtype="float32", align=1)
        crew.run("gpu_cases:blocks_of_any_magnitude", case, 4)


@pytest.mark.parametrize("wire", ["native", "fp8"])
def test_rows_that_look_blank(crew: Crews, wire: str) -> None:
    case = Case(seed(), crew.world_size, num_experts=16, top_k=4, hidden=7168, max_tokens=64, wire=wire)
    crew.run("gpu_cases:rows_that_look_blank", case, 10)


@pytest.mark.parametrize("tokens", [8, 128])
def test_answers_that_look_blank(crew: Crews, tokens: int) -> None:
    case = Case(
        seed(),
        crew.world_size,
        num_experts=4 * crew.world_size,
        top_k=4,
        hidden=7168,
        max_tokens=tokens,
        dtype="bfloat16",
        layout="compact",
    )
    crew.run("gpu_cases:answers_that_look_blank", case, 10)


@fewest
def test_many_tokens(crew: Crews) -> None:
    """More tokens than thread blocks, and more than show by themselves that they have come: units are runs of tokens."""
    case = Case(seed(), crew.world_size, num_experts=32, top_k=4, hidden=256, max_tokens=4096, wire="fp8", align=8, threads=4)
    crew.run("gpu_cases:both_devices", case, 3)


@pytest.mark.parametrize("wire", ["native", "fp8", "mxfp8"])
def test_soak(crew: Crews, wire: str) -> None:
    case = Case(seed(), crew.world_size, num_experts=16, top_k=4, hidden=512, max_tokens=32, wire=wire, first_step=2**32 - 500)
    assert crew.run("gpu_cases:soak", case, 1000) == [0] * crew.world_size


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_long_soak(crew: Crews) -> None:
    case = Case(seed(), crew.world_size, num_experts=16, top_k=4, hidden=512, max_tokens=32, first_step=2**32 - 5000)
    assert crew.run("gpu_cases:soak", case, 100_000, timeout=1000) == [0] * crew.world_size


def test_soak_at_full_shape(crew: Crews) -> None:
    case = Case(seed(), crew.world_size, num_experts=256, top_k=8, hidden=7168, max_tokens=128, wire="fp8", align=128)
    assert crew.run("gpu_cases:soak", case, 200, timeout=300) == [0] * crew.world_size


def test_graph_replay(crew: Crews) -> None:
    case = Case(seed(), crew.world_size, num_experts=16, top_k=4, hidden=512, max_tokens=32, wire="fp8", align=8)
    assert crew.run("gpu_cases:replay", case, 300) == [0] * crew.world_size


@fewest
@pytest.mark.parametrize(("layout", "run"), [("padded", "compiled"), ("ragged", "compiled_training")])
def test_a_compiled_model(crew: Crews, layout: str, run: str) -> None:
    """As on the CPU: tests/ranks/test_graph.py."""
    case = Case(seed(), crew.world_size, num_experts=8, top_k=3, hidden=64, max_tokens=12, dtype="float32", layout=layout, align=8)
    for r in crew.run(f"graph_cases:{run}", case, "inductor", 6, gpu=True, timeout=COMPILED_LIMIT):
        assert r["worst"] < 1e-4 and r["open"] == 0, r


@fewest
@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_autograd_as_in_one_process(crew: Crews, layout: str) -> None:
    n = crew.world_size
    case = Case(seed(), n, num_experts=6, top_k=3, hidden=64, max_tokens=12, dtype="float32", layout=layout, align=8)
    for errors in crew.run("gpu_cases:on_gpu", "training_cases:gradients_of_autograd", case, "all"):
        assert max(errors.values()) < 1e-5, errors


@fewest
def test_tensors_of_before_a_reset(crew: Crews) -> None:
    case = Case(seed(), crew.world_size, num_experts=8, top_k=3, hidden=64, max_tokens=12, align=8, in_flight=2)
    crew.run("graph_cases:old_tensors", case, gpu=True, timeout=COMPILED_LIMIT)


@pytest.mark.skipif(AT_ONCE < 2, reason="no peer to lose")
def test_lost_peer() -> None:
    ranks = APART[-1]
    with Crew(ranks) as crew:
        assert crew.run("gpu_cases:lost_peer", Case(seed(), ranks), 0.5) == [ranks - 1] * (ranks - 1) + ["silent"]


def test_streams(crew: Crews) -> None:
    case = Case(seed(), crew.world_size, num_experts=16, top_k=4, hidden=512, max_tokens=32)
    crew.run("gpu_cases:streams", case, 40)


@pytest.mark.alone
def test_beside_a_kernel_that_holds_the_gpu(crew: Crews) -> None:
    """One multiprocessor is left."""
    case = Case(seed(), crew.world_size, num_experts=16, top_k=4, hidden=2048, max_tokens=128, wire="fp8")
    assert crew.run("gpu_cases:held_sms", case, 1, 50) == [0] * crew.world_size


# ---- failures: what the CPU device's tests ask, and what only a GPU has


def together(ranks: int) -> int:
    """The fewest ranks, of at least that many, that run at once; else they take turns."""
    return min([n for n in APART if n >= ranks], default=ranks)


@pytest.mark.alone
def test_killed() -> None:
    ranks = together(3)
    with Crew(ranks) as crew:
        crew.start("gpu_cases:killed", Case(seed(), ranks, num_experts=3 * ranks + 1, top_k=3, hidden=256, max_tokens=32), 1)
        crew.heard(1, "dying")
        died = crew.kill(1)
        others = [rank for rank in range(ranks) if rank != 1]
        for peer, at in crew.collect(LIMIT, others):
            assert peer == 1 and at - died < NOTICED, (peer, at - died)
        crew.leave()
        assert left_in_shm(crew) == []


@pytest.mark.alone
def test_reset(tmp_path: Path) -> None:
    ranks = together(4)
    case = Case(seed(), ranks, num_experts=2 * ranks + 2, top_k=4, crowd="uneven", wire="mxfp8", in_flight=2)
    with Crew(ranks) as crew:
        for r in reset_after_deaths(crew, ["gpu_cases:on_gpu"], case, tmp_path):
            assert max(r["noticed"]) < NOTICED and r["closing"] < CLOSED, r
        assert left_in_shm(crew) == []


def test_reset_without_a_death() -> None:
    ranks = together(2)
    with Crew(ranks) as crew:
        crew.run("gpu_cases:on_gpu", "failure_cases:reset_after_timeout", Case(seed(), ranks))


@pytest.mark.alone
def test_another_all_to_all_of_the_survivors(tmp_path: Path) -> None:
    ranks = together(3)
    with Crew(ranks) as crew:
        case = Case(seed(), ranks, num_experts=2 * ranks + 2, top_k=3)
        crew.start("gpu_cases:on_gpu", "failure_cases:anew_after_death", case, 1, str(tmp_path / "died"))
        crew.collect(LIMIT, [rank for rank in range(ranks) if rank != 1])
        crew.leave()


def test_a_graph_of_before_a_reset(crew: Crews) -> None:
    crew.run("gpu_cases:old_graph", Case(seed(), crew.world_size, num_experts=8, top_k=2, hidden=256, max_tokens=16))


@pytest.mark.parametrize("what", ["all_to_all", "communicator"])
def test_a_rank_that_leaves(what: str) -> None:
    ranks = together(3)
    with Crew(ranks) as crew:
        results = crew.run("gpu_cases:on_gpu", "failure_cases:leaves", Case(seed(), ranks), 2, what)
        left = results[2]["at"]
        for r in results[:2] + results[3:]:
            assert r.get("is_peer") and not r["is_timeout"] and r["peer"] == 2 and "closed" in r["message"], r
            assert r["at"] - left < 3.0 and r["closing"] < CLOSED, r


def test_leaving_after_the_last_step_is_no_failure() -> None:
    ranks = together(3)
    with Crew(ranks) as crew:
        case = Case(seed(), ranks, max_tokens=32, hidden=1024)
        crew.run("gpu_cases:on_gpu", "failure_cases:leave_at_once", case, 12)


@pytest.mark.parametrize("kind", ["weights", "no_tail"])
def test_ranks_that_end_a_step_differently(kind: str) -> None:
    ranks = together(3)
    with Crew(ranks) as crew:
        results: list[Any] = crew.run("gpu_cases:on_gpu", "failure_cases:mismatch", Case(seed(), ranks), kind)
        for r in results:
            assert r.get("is_peer") and not r["is_timeout"] and r["closing"] < CLOSED, r
        assert any(kind.removeprefix("no_") in r["message"] for r in results), results


# ---- several ranks on one GPU


def test_many_steps_of_ranks_that_share_a_gpu(sharing: Crews) -> None:
    case = Case(seed(), 2, num_experts=16, top_k=4, hidden=512, max_tokens=32, first_step=2**32 - 100)
    assert sharing.run("gpu_cases:soak", case, 250) == [0] * 2
    assert sharing.run("gpu_cases:soak", replace(case, wire="mxfp8"), 250) == [0] * 2


def test_ranks_that_share_a_gpu(sharing: Crews) -> None:
    begin = seed() * 100_000 + 20_000
    for number in range(10):
        sharing.run("gpu_cases:exchange", random_case(begin + number, 2, ("mapped",)))


def test_counts_of_a_routing(crew: Crews) -> None:
    for number in range(20):
        crew.run("gpu_cases:counts_of_a_routing", seed() * 100 + number)


def test_dump() -> None:
    """Names the rank for which kernels wait, while they do."""
    with Crew(2) as crew:
        crew.start("gpu_cases:on_gpu", "dump_cases:hangs", Case(16, 2, transport="mapped", max_tokens=8), 1, None)
        _, job = started(crew)
        said = when("rank 0 waits for rank 1, which waits for none: it is in no step", "--job", job)
        assert re.search(r"in dispatch_recv for [0-9.]+ m?s", said), said
        crew.tell(1)
        crew.collect()


def test_dump_between_halves() -> None:
    with Crew(2) as crew:
        shows_ranks_between_halves(crew, ["gpu_cases:on_gpu"], Case(23, 2, max_tokens=8))


def test_dump_beside_a_copy() -> None:
    """While a copy to pageable memory waits for its kernels CUDA holds up all other copies: the dump says as much."""
    with Crew(2) as crew:
        crew.start("gpu_cases:hangs_in_a_copy", Case(16, 2, max_tokens=8), 1)
        _, job = started(crew)
        when(r"rank 0: an AllToAll does not tell; its main thread:\n.*in hangs_in_a_copy", "--job", job)
        crew.tell(1)
        crew.collect()


def test_replays_in_a_timeline() -> None:
    """One has the kernels of graphs that were captured before it began, in their order."""
    case = Case(18, 2, max_tokens=8, steps=3)
    with Crew(2) as crew:
        for kernels in crew.run("gpu_cases:traced_replays", case):
            steps = [step for step, _, _ in kernels]
            assert steps == [step for step in range(steps[0], steps[0] + 2 * case.steps) for _ in ("dispatch", "combine")], kernels
            assert all(begun < ended for _, begun, ended in kernels), kernels
            assert all(a[2] <= b[1] for a, b in itertools.pairwise(kernels)), kernels


def test_pci_address() -> None:
    """As sysfs names devices, or no NIC would be found near it."""
    for device in range(GPUS):
        assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", cuda_module().pci_address(device))


# ---- under compute-sanitizer


@pytest.mark.timeout(700)
@pytest.mark.parametrize("size", SIZES)
def test_memcheck(size: str, tmp_path: Path) -> None:
    """Out of bounds, misaligned, leaks of device memory. Its racecheck and synccheck see shared memory only, and are not asked."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    world = max([2, *(n for n in APART if n <= 4)])
    begin = seed() * 100_000 + 70_000
    ranks = []
    for rank in range(world):
        command = [
            sanitizer, "--tool", "memcheck", "--error-exitcode", "9", "--log-file", str(tmp_path / f"{rank}.log"),
            sys.executable, str(Path(__file__).with_name("memcheck_rank.py")), size,
            *(str(begin + i) for i in range(12 if size == "few" else 6)),
        ]  # fmt: skip
        env = {
            **clean_environment(),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
        }
        env |= {"PPLX_COMM_JOB": f"memcheck{os.getpid()}{size}", "PPLX_TEST_STEP_TIMEOUT": "100"}
        env |= {"PPLX_COMM_LARGE_TOKENS": "1"} if size == "large" else {}
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, process in enumerate(ranks):
        log = (tmp_path / f"{rank}.log").read_text()
        assert process.returncode == 0 and "ERROR SUMMARY: 0 errors" in log, f"rank {rank}:\n{said[rank][-2000:]}\n{log[-4000:]}"
