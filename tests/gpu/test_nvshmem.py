"""transport="nvshmem" over P2P on one host: every peer by NVSHMEM (node_size=1), and mixed. Each rank needs a GPU of its own, or a part of
one under MPS, which NVSHMEM wants there.

near: peers' symmetric memory is mapped memory. far: PPLX_COMM_NVSHMEM_NEAR=0, blocks are put as they go to a NIC, which over P2P is a copy by
one thread: slow, and no figure of it says anything about a NIC.

python -m pytest tests/gpu/test_nvshmem.py                  # a build with -DPPLX_NVSHMEM=ON, and NVSHMEM 3.4.5
python tests/gpu/mps.py 2 -- python -m pytest tests/gpu/test_nvshmem.py     # two ranks on one GPU, as for all lines here
python -m pytest tests/gpu/test_nvshmem.py -m slow -k many_steps            # without -m slow, -k finds none of them
python -m pytest tests/gpu/test_nvshmem.py -k fuzz          # builds the modules with PPLX_CUDA_FUZZ first
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases import WIRES, Case, in_pieces, random_case
from fuzz_build import ROOT, fuzz_module
from gpus import AT_ONCE
from harness import Crew, Crews, seed
from open_step_cases import small_case
from test_failure import CLOSED, NOTICED, check_survivors, reset_after_deaths

from pplx_comm.errors import Error
from pplx_comm.wiring import nvshmem


def _missing() -> str | None:
    try:
        nvshmem.kernels()
    except Error as problem:
        return str(problem)
    return None


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(AT_ONCE < 2, reason="NVSHMEM wants a GPU for each rank, and this is for two"),
    pytest.mark.skipif(AT_ONCE >= 2 and _missing() is not None, reason=str(_missing()) if AT_ONCE >= 2 else ""),
    pytest.mark.timeout(600),
]
RANKS = 4 if AT_ONCE >= 4 else 2
CARRIERS = ["nvshmem", *(["nvshmem-mixed"] if RANKS == 4 else [])]


REACH = {"near": {"PPLX_COMM_NVSHMEM_NEAR": "1"}, "far": {"PPLX_COMM_NVSHMEM_NEAR": "0"}}
TRIED = {"PPLX_TEST_NVSHMEM_TRIED": "1"}
"""Ranks do not try NVSHMEM in a process of its own first. Those of `crew` do."""


@pytest.fixture(scope="module", params=REACH)
def reach(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def crew(reach: str) -> Iterator[Crews]:
    with Crews(RANKS, REACH[reach]) as crews:
        yield crews


def small(transport: str, **changes: object) -> Case:
    case = Case(seed(), RANKS, num_experts=16, top_k=4, hidden=512, max_tokens=32, transport=transport)
    return replace(case, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", CARRIERS)
def test_ranks_that_are_put_to(crew: Crews, transport: str, reach: str) -> None:
    """Over P2P all ranks are near."""
    remote = crew.run("nvshmem_cases:remote", small(transport), timeout=120)
    node = 2 if transport == "nvshmem-mixed" else 1
    assert remote == [[peer for peer in range(RANKS) if reach == "far" and peer // node != rank // node] for rank in range(RANKS)]


@pytest.mark.parametrize("transport", CARRIERS)
def test_random_shapes(crew: Crews, transport: str) -> None:
    begin = seed() * 100_000 + 90_000
    for number in range(20):
        crew.run("gpu_cases:exchange", random_case(begin + number, RANKS, (transport,)), timeout=120)


@pytest.mark.parametrize(("wire", "transport"), [(wire, CARRIERS[n % len(CARRIERS)]) for n, wire in enumerate(WIRES)])
def test_the_bits_of_mapped_memory(crew: Crews, wire: str, transport: str) -> None:
    for layout in ("ragged", "padded", "compact"):
        experts = 16 if layout == "padded" else 64  # each has room for all that may come
        case = small(transport, num_experts=experts, top_k=8, hidden=7168, max_tokens=128, wire=wire, layout=layout, align=8)
        crew.run("nvshmem_cases:against_mapped", case, 6, timeout=200)


@pytest.mark.parametrize("transport", CARRIERS)
def test_soak(crew: Crews, transport: str) -> None:
    case = small(transport, first_step=2**32 - 500)
    assert crew.run("gpu_cases:soak", case, 1000, timeout=200) == [0] * RANKS
    assert crew.run("gpu_cases:soak", replace(case, max_tokens=1, hidden=7168), 300, timeout=200) == [0] * RANKS


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_steps(crew: Crews, reach: str) -> None:
    """40,000. Sizes, routing and steps in flight are drawn anew every 2,000. Of large far blocks fewer: a thread copies them."""
    for number in range(20):
        drawn = random_case(seed() * 100_000 + 95_000 + number, RANKS, tuple(CARRIERS))
        case = small(
            drawn.transport, seed=drawn.seed, in_flight=drawn.in_flight, wire="fp8" if number % 2 else "native",
            hidden=(128, 512, 2048, 7168)[number % 4], max_tokens=(1, 7, 32, 128)[number // 4 % 4], top_k=(1, 2, 4)[number % 3],
        )  # fmt: skip
        steps = 2000 if reach == "near" else 2000 // max(1, case.hidden * case.max_tokens // 16384)
        assert crew.run("gpu_cases:soak", case, steps, timeout=200) == [0] * RANKS, case


@pytest.mark.parametrize("transport", CARRIERS)
def test_graph_replay(crew: Crews, transport: str) -> None:
    """No host call of ours, and none of NVSHMEM's."""
    assert crew.run("gpu_cases:replay", small(transport, wire="fp8", align=8), 300, timeout=200) == [0] * RANKS


@pytest.mark.parametrize("transport", CARRIERS)
def test_streams(crew: Crews, transport: str) -> None:
    crew.run("gpu_cases:streams", small(transport), 40, timeout=120)
    crew.run("gpu_cases:streams", small(transport, in_flight=2), 40, timeout=120)


@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize("in_flight", [1, 4])
def test_eager_steps_among_replays(crew: Crews, transport: str, in_flight: int) -> None:
    case = small_case(seed(), RANKS, in_flight, transport=transport)
    crew.run("open_step_cases:interleaved", case, list(range(3)), 12, timeout=120)


@pytest.mark.parametrize("transport", CARRIERS)
def test_two_all_to_alls(crew: Crews, transport: str) -> None:
    crew.run("nvshmem_cases:two", small(transport), 60, timeout=120)


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("transport", CARRIERS)
def test_one_of_two_is_made_again(crew: Crews, transport: str, in_parts: bool) -> None:
    """Ten times, while the other goes on."""
    case = small(transport, max_tokens=600 if in_parts else 32, dtype="float32")
    crew.run("nvshmem_cases:remade", in_pieces(case, on_gpu=True) if in_parts else case, 10, 5, timeout=120)


@pytest.mark.parametrize(("how", "landed"), [("whole", True), ("open", False), ("sent", False), ("gave up", False)])
def test_whose_memory_may_be_taken_again(crew: Crews, how: str, landed: bool, reach: str) -> None:
    with contextlib.ExitStack() as stack:  # a Communicator that failed is of no use to other tests
        ranks = stack.enter_context(Crew(RANKS, REACH[reach] | TRIED)) if how == "gave up" else crew
        assert ranks.run("nvshmem_cases:landed_at_close", small("nvshmem"), how, timeout=120)[:-1] == [landed] * (RANKS - 1)


def test_a_silent_rank(reach: str) -> None:
    with Crew(RANKS, REACH[reach] | TRIED) as crew:
        found = crew.run("gpu_cases:lost_peer", small("nvshmem"), 0.5, timeout=100)
        assert found == [RANKS - 1] * (RANKS - 1) + ["silent"]


@pytest.mark.alone
def test_killed(reach: str) -> None:
    """Named within a second; close() works, and the process lives and goes on."""
    with Crew(RANKS, REACH[reach] | TRIED) as crew:
        crew.start("gpu_cases:killed", small(CARRIERS[-1]), 1)
        crew.heard(1, "dying")
        died = crew.kill(1)
        for peer, at in crew.collect(100, [rank for rank in range(RANKS) if rank != 1]):
            assert peer == 1 and at - died < NOTICED, (peer, at - died)
        crew.leave()


@pytest.mark.skipif(RANKS < 4, reason="two ranks die, two go on")
@pytest.mark.alone
def test_reset(reach: str, tmp_path: Path) -> None:
    case = Case(seed(), 4, num_experts=10, top_k=4, crowd="uneven", in_flight=2, transport="nvshmem")
    with Crew(4, REACH[reach] | TRIED) as crew:
        for r in reset_after_deaths(crew, ["gpu_cases:on_gpu"], case, tmp_path):
            assert max(r["noticed"]) < NOTICED and r["closing"] < CLOSED, r


# ---- blocks in pieces: those of near peers by the kernels of mapped memory, those of far ones by puts and credits


def pieces(transport: str, **changes: object) -> Case:
    case = Case(
        seed(), RANKS, num_experts=16, top_k=4, hidden=1024, max_tokens=1500, wire="fp8", align=8, crowd="uneven", steps=4,
        transport=transport,
    )  # fmt: skip
    return in_pieces(replace(case, **changes), on_gpu=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize(
    ("routing", "crowd", "in_flight"),
    [("uniform", "full", 1), ("sparse", "one_has_none", 2), ("to_one", "one_has_all", 1), ("zipf", "uneven", 4)],
)
def test_pieces(crew: Crews, routing: str, crowd: str, in_flight: int, transport: str) -> None:
    for number in range(2):
        case = pieces(
            transport, seed=seed() * 100 + number, routing=routing, in_flight=in_flight, first_step=2**32 - 3, max_tokens=500,
            wire=WIRES[(2 * in_flight + number + CARRIERS.index(transport)) % 4], hidden=[1040, 144][number], crowd=["uneven", crowd][number],
        )  # fmt: skip
        crew.run("gpu_cases:exchange", case, timeout=200)


@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_the_bits_of_mapped_memory_in_pieces(crew: Crews, layout: str, transport: str) -> None:
    """An expert of Padded has room for all rows of all ranks: of few experts they are many already."""
    shape = {"num_experts": 8, "top_k": 2} if layout == "padded" else {"num_experts": 64, "top_k": 8}
    case = pieces(transport, layout=layout, hidden=2048, max_tokens=700, **shape)
    crew.run("nvshmem_cases:against_mapped", case, 6, timeout=200)


@pytest.mark.parametrize("transport", CARRIERS)
def test_pieces_and_whole_steps_in_turn(crew: Crews, transport: str) -> None:
    """As on the CPU device. Steps of few tokens in between, of which none is cut."""
    tokens_of = [1500, 128, 900, 1, 257, 256, 1200]
    crew.run("gpu_cases:both_devices", pieces(transport, threads=4), len(tokens_of), tokens_of=tokens_of, timeout=200)


@pytest.mark.parametrize("transport", CARRIERS)
def test_pieces_among_replays(crew: Crews, transport: str) -> None:
    case = in_pieces(small_case(seed(), RANKS, 1, transport=transport, max_tokens=900), on_gpu=True)
    crew.run("open_step_cases:interleaved", case, list(range(3)), 12, timeout=200)


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("transport", CARRIERS)
def test_hooks_of_pieces(crew: Crews, transport: str, layout: str) -> None:
    pytest.importorskip("triton")
    case = small_case(seed(), RANKS, 1, transport=transport, layout=layout, hidden=1024, max_tokens=1024, align=128)
    crew.run("hook_kernels:beside", in_pieces(case, on_gpu=True), 10, timeout=200)


@pytest.mark.parametrize("transport", CARRIERS)
def test_hooks_of_pieces_in_a_graph(crew: Crews, transport: str) -> None:
    case = small_case(seed(), RANKS, 1, transport=transport, layout="padded", hidden=1024, max_tokens=1024)
    crew.run("hook_cases:replayed", in_pieces(case, on_gpu=True), 2, 20, timeout=200)


@pytest.mark.parametrize(("place", "transport"), [("after_dispatch_send", "nvshmem"), ("after_combine_send", CARRIERS[-1])])
@pytest.mark.alone
def test_death_in_pieces(place: str, transport: str, reach: str, tmp_path: Path) -> None:
    with Crew(RANKS, REACH[reach] | TRIED) as crew:
        case = pieces(transport, hidden=64, crowd="full", max_tokens=700)
        crew.start("gpu_cases:on_gpu", "failure_cases:survive", case, 1, place, str(tmp_path / "died"))
        left = [rank for rank in range(RANKS) if rank != 1]
        check_survivors(crew.collect(60, left), 1, float((tmp_path / "died").read_text()))


@pytest.mark.skipif(RANKS < 4, reason="two ranks die, two go on")
@pytest.mark.alone
def test_pieces_after_a_reset(reach: str, tmp_path: Path) -> None:
    with Crew(4, REACH[reach] | TRIED) as crew:
        case = pieces("nvshmem-mixed", hidden=64, in_flight=2, max_tokens=700)
        reset_after_deaths(crew, ["gpu_cases:on_gpu"], case, tmp_path)


def test_ranks_that_end_a_step_differently(reach: str) -> None:
    with Crew(RANKS, REACH[reach] | TRIED) as crew:
        case = Case(seed(), RANKS, transport="nvshmem")
        for r in crew.run("gpu_cases:on_gpu", "failure_cases:mismatch", case, "weights", timeout=120):
            assert r.get("is_peer") and r["closing"] < CLOSED, r


@pytest.mark.parametrize("given", [False, True], ids=["our memory", "its memory"])
def test_an_nvshmem_that_is_there_already(given: bool) -> None:
    with Crew(RANKS) as crew:
        if crew.run("nvshmem_cases:begun_by_nvshmem4py", small("nvshmem"), given, timeout=120) == [False] * RANKS:
            pytest.skip("no nvshmem4py")


def test_a_heap_without_room() -> None:
    """Not of virtual memory, which would grow."""
    with Crew(RANKS, {"NVSHMEM_SYMMETRIC_SIZE": str(256 << 20), "NVSHMEM_DISABLE_CUDA_VMM": "1"}) as crew:
        for text in crew.run("nvshmem_cases:too_small", timeout=120):
            assert "NVSHMEM_SYMMETRIC_SIZE" in text and " bytes" in text, text


def test_doctor() -> None:
    done = subprocess.run([sys.executable, "-m", "pplx_comm", "doctor"], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0 and "NVSHMEM 3.4.5 starts" in done.stdout, done.stdout + done.stderr


# ---- under the fuzz build


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Crews]:
    """Fuzzes the module's own kernels. Where all are near, they are those of mapped memory."""
    with Crews(RANKS, {"PPLX_TEST_NVSHMEM": fuzz_module("_nvshmem"), "PPLX_COMM_CUDA_FUZZ": str(seed()), **REACH["far"]}) as crews:
        yield crews


@pytest.mark.timeout(1200)
def test_fuzz(fuzzed: Crews) -> None:
    for number in range(20):
        case = random_case(seed() * 100_000 + 97_000 + number, RANKS, tuple(CARRIERS))
        fuzzed.run("gpu_cases:exchange", case, timeout=120)
    for wire, hidden, tokens, steps in (("native", 512, 32, 2000), ("fp8", 512, 32, 2000), ("native", 7168, 128, 50)):
        case = small("nvshmem", hidden=hidden, max_tokens=tokens, wire=wire, first_step=2**32 - 500)
        assert fuzzed.run("gpu_cases:soak", case, steps, timeout=600) == [0] * RANKS


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize(("routing", "tokens"), [("uniform", 600), ("sparse", 500), ("to_one", 400)])
def test_fuzz_of_pieces(fuzzed: Crews, routing: str, tokens: int, transport: str) -> None:
    case = pieces(transport, hidden=512, max_tokens=tokens, routing=routing, steps=6)
    fuzzed.run("gpu_cases:exchange", case, timeout=300)
