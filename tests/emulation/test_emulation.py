"""The CUDA kernels as they are, on a CPU (tests/emulation): the CPU device's cases, to the last bit, over every carrier.

Threads of all blocks take turns, so this finds wrong protocols and barriers. Memory models, and everything that CUDA itself does, are
for tests/gpu.
"""

from __future__ import annotations

import functools
import os
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import Case, random_case
from harness import Crew, Crews, seed
from open_step_cases import NOT_OPEN, STILL_OPEN, small_case
from test_cpp import build
from test_failure import left_in_shm

CHAOS = "delay=0.3,shuffle=0.5,split=0.3,duplicate=0.1,replay=0.05,again=0.1"
PARTS = {"PPLX_COMM_PART_BYTES": "500"}
"""Blocks for other nodes leave in parts of a few rows."""
# Fibers change stacks in its assembler.
pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the emulation is for x86-64")


@functools.cache
def module() -> str:
    # A folder with mutants, else what is built.
    folder = os.environ.get("PPLX_TEST_EMULATION") or build("pplx_emulation", "-DPPLX_CUDA=OFF") / "emulation"
    [built] = Path(folder).glob("_cuda*.so")
    return str(built)


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"ep{n}")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    crews = Crews(request.param, PARTS)
    yield crews
    crews.close()


def case_of(begin: int, number: int, world: int, transport: str) -> Case:
    return random_case(seed() * 100_000 + begin + number, world, (transport,))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "proxy:shm", "mixed:tcp"])
def test_random_shapes(crew: Crews, transport: str) -> None:
    for number in range(8):
        crew.run("emulated:call", module(), "rank_cases:exchange", case_of(20_000, number, crew.world_size, transport))


@pytest.mark.parametrize("wire", ["native", "fp8"])
def test_rows_that_look_blank(crew: Crews, wire: str) -> None:
    case = Case(seed(), crew.world_size, num_experts=8, top_k=3, hidden=264, max_tokens=20, wire=wire)
    crew.run("emulated:call", module(), "gpu_cases:rows_that_look_blank", case, 6)


def test_rows_of_several_rounds() -> None:
    """The senders of a thread block have a piece of each row at once. These have more pieces, and units are of several tokens."""
    with Crew(2) as crew:
        for wire in ("native", "fp8"):
            case = Case(seed(), 2, num_experts=8, top_k=2, hidden=7696, max_tokens=9, wire=wire, steps=2)
            crew.run("emulated:call", module(), "rank_cases:exchange", case)


def test_more_units_than_warps() -> None:
    """Several times: some warps of a combine only receive."""
    with Crew(2, {"PPLX_EMULATION_SMS": "2"}) as crew:
        case = Case(seed(), 2, num_experts=8, top_k=3, hidden=64, max_tokens=150, steps=12)
        crew.run("emulated:call", module(), "rank_cases:exchange", case)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
def test_one_resident_thread_block_suffices(transport: str, room: int) -> None:
    """The others find no room on the GPU before it has ended: it sends their shares."""
    with Crew(2, {"PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7", "PPLX_COMM_PART_BYTES": "1"}) as crew:
        for number in range(10):
            crew.run("emulated:call", module(), "rank_cases:exchange", case_of(25_000, number, 2, transport))


@pytest.mark.parametrize("transport", ["proxy:tcp", "proxy:shm", "mixed:tcp"])
def test_random_shapes_in_a_chaos(transport: str) -> None:
    with Crew(4, {"PPLX_COMM_CHAOS": f"seed={seed()},{CHAOS}", **PARTS}) as crew:
        for number in range(5):
            crew.run("emulated:call", module(), "rank_cases:exchange", case_of(21_000, number, 4, transport))


@pytest.mark.parametrize("layout", ["ragged", "compact"])
@pytest.mark.parametrize(("wire", "dtype"), [("fp8", "bf16"), ("native", "bf16"), ("fp8", "fp32"), ("native", "fp16")])
def test_the_composite_floor(layout: str, wire: str, dtype: str) -> None:
    """Rows of several parts, the last a short one; more rows to a sum than a lane holds; and several units for each warp."""
    layer = ["--hidden", "3072", "--experts", "24", "--top-k", "12", "--wire", wire, "--dtype", dtype, "--layout", layout]
    with Crew(2) as crew:
        for ran in crew.run("emulated:call", module(), "bench_cases:composite", ["--tokens", "41", *layer], "emulated", 2):
            assert ran["says"] == ran["counted"] and all(ran["says"].values())


# ---- a carrier that kernels drive, with a stand-in for its five calls that delays and reorders


@pytest.mark.timeout(900)
@pytest.mark.parametrize("near", ["none", "all", "odd"])
@pytest.mark.parametrize("transport", ["nvshmem", "nvshmem-mixed"])
def test_random_shapes_by_kernels(transport: str, near: str) -> None:
    """near: peers whose memory is mapped; to the others blocks are put. Some of both in one job, too."""
    for world in (2, 4):
        with Crew(world, {"PPLX_EMULATION_NEAR": near, **PARTS}) as crew:
            for number in range(5):
                crew.run("emulated:call", module(), "rank_cases:exchange", case_of(26_000, number, world, transport))


@pytest.mark.parametrize(
    ("near", "transport", "remote"),
    [
        ("none", "nvshmem", [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]),
        ("all", "nvshmem", [[], [], [], []]),
        ("all", "nvshmem-mixed", [[], [], [], []]),
        ("odd", "nvshmem", [[2], [3], [0], [1]]),
        ("odd", "nvshmem-mixed", [[2], [3], [0], [1]]),
        ("one way", "nvshmem", [[1, 3], [0, 2, 3], [1, 3], [0, 1, 2]]),
        ("one way", "nvshmem-mixed", [[2, 3], [2, 3], [0, 1], [0, 1]]),
        ("across", "nvshmem-mixed", [[2, 3], [2, 3], [0, 1], [0, 1]]),
    ],
)
def test_near_peers_are_mapped(near: str, transport: str, remote: list[list[int]]) -> None:
    """Those that stores reach both ways; and nobody, where ranks of a node do not reach each other so."""
    case = Case(seed(), 4, num_experts=9, top_k=3, hidden=64, max_tokens=8, in_flight=2, steps=8, transport=transport)
    for environment, wanted in (({}, remote), ({"PPLX_COMM_NVSHMEM_NEAR": "0"}, None)):
        if wanted is None:
            wanted = [[peer for peer in range(4) if rank_apart(peer, rank, transport)] for rank in range(4)]
        with Crew(4, {"PPLX_EMULATION_NEAR": near, **environment}) as crew:
            assert crew.run("emulated:call", module(), "nvshmem_cases:remote", case) == wanted


def rank_apart(a: int, b: int, transport: str) -> bool:
    return a // 2 != b // 2 if transport == "nvshmem-mixed" else a != b


@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_the_bits_of_mapped_memory(crew: Crews, layout: str) -> None:
    wire = {"ragged": "fp8", "padded": "native", "compact": "mxfp8"}[layout]
    case = Case(
        seed(), crew.world_size, num_experts=9, top_k=3, hidden=96, max_tokens=12, wire=wire, layout=layout, transport="nvshmem"
    )
    crew.run("emulated:call", module(), "nvshmem_cases:against_mapped", case, 6)


def test_several_all_to_alls_by_kernels(crew: Crews) -> None:
    """Of one Communicator, in steps that interleave, each of its own shape, among such of mapped memory and a proxy."""
    transports = ["nvshmem", "nvshmem-mixed", "nvshmem", "mapped", "proxy:tcp"]
    cases = [replace(case_of(27_000, i, crew.world_size, t), in_flight=1, steps=4) for i, t in enumerate(transports)]
    crew.run("emulated:call", module(), "rank_cases:interleaved", cases)


def test_across_the_wrap_of_steps_by_kernels(crew: Crews) -> None:
    """A turn follows from a step's number, of which only the low bits are a set's own."""
    for in_flight, first in ((4, 2**32 - 5), (8, 2**32 - 9), (2, 2**31 - 5)):
        case = Case(seed(), crew.world_size, first_step=first, in_flight=in_flight, steps=24, crowd="uneven", transport="nvshmem")
        crew.run("emulated:call", module(), "rank_cases:exchange", case)


@pytest.mark.parametrize("near", ["none", "odd"])
def test_a_put_that_lands_after_its_generation(near: str) -> None:
    """A step gives up on a put that comes later than the reset: it must not count in the new generation, nor lie in its blocks."""
    case = Case(seed(), 3, num_experts=9, top_k=3, hidden=64, max_tokens=8, in_flight=2, transport="nvshmem")
    with Crew(3, {"PPLX_EMULATION_NEAR": near, "PPLX_EMULATION_LATE": "2500@100"}) as crew:
        for r in crew.run("emulated:call", module(), "chaos_cases:until_failure", case, 1.0, again=True, timeout=60):
            assert r.get("is_peer") and r["is_timeout"], r


@pytest.mark.parametrize(("how", "landed"), [("whole", True), ("open", False), ("sent", False)])
def test_whose_memory_may_be_taken_again(how: str, landed: bool) -> None:
    """What a step that was not received has put may land after close(): the next AllToAll there would take it for its own."""
    case = Case(seed(), 2, num_experts=6, top_k=3, hidden=64, max_tokens=8, transport="nvshmem")
    with Crew(2, {"PPLX_EMULATION_NEAR": "none"}) as crew:
        assert crew.run("emulated:call", module(), "nvshmem_cases:landed_at_close", case, how)[:-1] == [landed]


def test_gpus_that_do_not_reach_each_other() -> None:
    """They are remote to each other, also where only one of the two cannot; the others of the node map each other's memory."""
    with Crew(4) as crew:
        for number in range(3):
            case = replace(case_of(22_000, number, 4, "auto:tcp"), replicas=1)
            remote = crew.run("emulated:call", module(), "gpu_cases:exchange_apart", case, [(0, 2), (3, 1), (1, 3)])
            assert remote == [[2], [3], [0], [1]]


@pytest.mark.parametrize("chaos", ["", f"seed=7,{CHAOS}"], ids=["quiet", "chaos"])
def test_blocks_in_gpu_memory(chaos: str) -> None:
    """Threads of one process, whose blocks a copy engine carries."""
    cases = [replace(case_of(23_000, number, 2, "copy"), replicas=1) for number in range(8)]
    with Crew(1) as crew:
        crew.run("emulated:call", module(), "placement_cases:random_shapes", cases, chaos, timeout=200)


def test_blocks_in_gpu_memory_take_no_host_memory() -> None:
    case = Case(1, 2, transport="copy", hidden=7168, max_tokens=64, in_flight=2)
    with Crew(1) as crew:
        for pinned, with_blocks in crew.run("emulated:call", module(), "placement_cases:pinned_bytes", case)[0]:
            assert 0 < pinned <= 64 * 1024 and with_blocks > 5 * 1024 * 1024, (pinned, with_blocks)


GDRCOPY = """
// Maps "GPU memory" where it is.
struct handle { unsigned long h; };
static int session;
void* gdr_open(void) { return &session; }
int gdr_close(void* g) { return g != &session; }
int gdr_pin_buffer(void* g, unsigned long address, unsigned long bytes, unsigned long token, unsigned space, struct handle* h) {
  h->h = address;
  return g != &session || address % 65536 != 0 || bytes == 0 || token != 0 || space != 0;
}
int gdr_unpin_buffer(void* g, struct handle h) { return g != &session || h.h == 0; }
int gdr_map(void* g, struct handle h, void** at, unsigned long bytes) { *at = (void*)h.h; return bytes == 0; }
int gdr_unmap(void* g, struct handle h, void* at, unsigned long bytes) { return (void*)h.h != at; }
"""


def test_arrival_words_by_gdrcopy(tmp_path: Path) -> None:
    source, library = tmp_path / "gdrapi.c", tmp_path / "libgdrapi.so.2"
    source.write_text(GDRCOPY)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "-o", library, source], check=True)
    case = replace(case_of(24_000, 0, 2, "proxy:tcp"), replicas=1)
    for environment, used in (({}, True), ({"PPLX_COMM_GDRCOPY": "0"}, False)):
        with Crew(2, {"PPLX_TEST_GDRCOPY": str(library), **environment}) as crew:
            assert crew.run("emulated:gdrcopy_is_used", module(), case) == [used, used]


@pytest.mark.parametrize("transport", ["mapped", "nvshmem"])
@pytest.mark.parametrize("busy", [True, False])
def test_a_rank_that_is_busy(busy: bool, transport: str) -> None:
    with Crew(2) as crew:
        crew.start("emulated:call", module(), "busy_cases:late_step", transport, 1, busy, device="cuda")
        crew.heard(1, "busy")
        crew.heard(0, "waits")
        crew.tell(1)
        results = crew.collect(60)
    if busy:
        assert all(result["worst"] == 0 for result in results), results
    else:
        assert results[0]["type"] == "StepTimeout" and results[0]["peer"] == 1, results


def test_fewer_sms() -> None:
    with Crew(2) as crew:
        assert crew.run("emulated:call", module(), "busy_cases:fewer_sms", "cuda") == [[0.0] * 8] * 2


@pytest.mark.parametrize("how", ["kill", "mute"])
def test_cut_link(how: str) -> None:
    """A write fails, or is never heard of again: every rank names an end of the link, and all go on after reset()."""
    case = Case(seed(), 3, transport="proxy:tcp", max_tokens=8, hidden=64)
    with Crew(3, {"PPLX_COMM_CHAOS": f"seed={seed()},delay=0.1,{how}=0-2@40"}) as crew:
        results: list[dict[str, Any]] = crew.run("emulated:call", module(), "chaos_cases:until_failure", case, 3.0, again=True)
        for r in results:
            assert r.get("is_peer") and r["peer"] in (0, 2), r
            assert (" on " if how == "kill" else " over ") in r["message"], r


@pytest.mark.parametrize(
    ("transport", "near"),
    [("mapped", ""), ("mixed:tcp", ""), ("nvshmem", "odd"), ("nvshmem-mixed", "odd"), ("nvshmem", "none"), ("nvshmem", "all")],
)
def test_reset(transport: str, near: str, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"died{i}") for i in range(2)]
    case = Case(seed(), 4, num_experts=10, top_k=4, crowd="uneven", in_flight=2, transport=transport)
    with Crew(4, {"PPLX_EMULATION_NEAR": near}) as crew:
        crew.start("emulated:call", module(), "failure_cases:reset_after", case, [2, 0], paths)
        assert [len(r["rounds"]) for r in crew.collect(120, [1, 3])] == [2, 2]
        crew.leave()
        assert left_in_shm(crew) == []


# ---- several steps open, and graphs


def run_refused(crew: Crews | Crew, name: str, *args: Any, sentence: str = STILL_OPEN) -> list[re.Match[str]]:
    """What all ranks heard: the sentence, and no word of a timeout."""
    found = []
    for heard in crew.run("emulated:call", module(), f"open_step_cases:{name}", *args):
        match = re.search(sentence, heard["message"])
        assert match and not heard["timeout"] and str(heard["peer"]) == match[1], heard
        found.append(match)
    return found


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
def test_eager_steps_among_replays(crew: Crews, transport: str, in_flight: int) -> None:
    case = small_case(seed(), crew.world_size, in_flight, transport=transport)
    crew.run("emulated:call", module(), "open_step_cases:interleaved", case, list(range(3)), 12, timeout=120)


@pytest.mark.parametrize("first", [0, 1])
def test_a_replay_between_eager_steps(crew: Crews, first: int) -> None:
    case = small_case(seed(), crew.world_size, 4)
    crew.run("emulated:call", module(), "open_step_cases:around_a_replay", case, first)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_capture_takes_no_step(crew: Crews, in_flight: int) -> None:
    case = small_case(seed(), crew.world_size, in_flight)
    crew.run("emulated:call", module(), "open_step_cases:a_capture_between", case)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize(
    ("kind", "in_flight", "alone"),
    [("eager", 2, None), ("replay", 1, None), ("replay", 2, None), ("replay", 1, 1), ("replay", 2, 1), ("dispatch only", 2, None)],
)
def test_a_step_whose_memory_is_taken(crew: Crews, kind: str, in_flight: int, alone: int | None, transport: str) -> None:
    case = small_case(seed(), crew.world_size, in_flight, transport=transport)
    for match in run_refused(crew, "refused", case, kind, alone):
        assert int(match[2]) - int(match[3]) == in_flight
        assert alone is None or int(match[1]) == alone


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_step_that_is_combined_again(crew: Crews, in_flight: int) -> None:
    case = small_case(seed(), crew.world_size, in_flight)
    run_refused(crew, "combined_again", case, sentence=NOT_OPEN)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_replay_beside_the_combine_whose_memory_it_takes(crew: Crews, in_flight: int) -> None:
    case = small_case(seed(), crew.world_size, in_flight)
    outcomes = crew.run("emulated:call", module(), "open_step_cases:beside_a_combine", case, 8)
    assert outcomes == [outcomes[0]] * crew.world_size, outcomes


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
def test_ids_that_only_the_device_sees(crew: Crews, transport: str) -> None:
    crew.run("emulated:call", module(), "open_step_cases:bad_ids", small_case(seed(), crew.world_size, 2, transport=transport), 1)


@pytest.mark.parametrize("transport", ["mapped", "nvshmem"])
@pytest.mark.parametrize("kind", ["release", "weights", "no_tail"])
def test_ranks_that_end_a_step_differently(kind: str, transport: str) -> None:
    with Crew(3) as crew:
        results = crew.run("emulated:call", module(), "failure_cases:mismatch", Case(81, 3, transport=transport), kind)
        for r in results:
            assert r.get("is_peer") and not r["is_timeout"], r
        assert any(kind.removeprefix("no_") in r["message"] for r in results), results


# ---- dispatches of many tokens, as steps of few take them here

BULK = {"PPLX_COMM_BULK_TOKENS": "1"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_bulk_copies(world: int, least: int) -> None:
    """Ranks with fewer tokens take the other way, in the same step."""
    with Crew(world, {"PPLX_COMM_BULK_TOKENS": str(least)}) as crew:
        for number in range(8):
            crew.run("emulated:call", module(), "rank_cases:exchange", case_of(26_000 + 1000 * least, number, world, "mapped"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("room", [1, 2, 7])
def test_bulk_copies_with_one_resident_thread_block(room: int) -> None:
    """It counts the chunks that the others would have counted, and sends all."""
    with Crew(2, {**BULK, "PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7"}) as crew:
        for number in range(3):
            crew.run("emulated:call", module(), "rank_cases:exchange", case_of(30_000, number, 2, "mapped"))
        for tokens in (3, 60):
            case = Case(seed() + tokens, 2, num_experts=8, top_k=2, hidden=64, max_tokens=tokens, crowd="full", steps=6)
            crew.run("emulated:call", module(), "rank_cases:exchange", case)


def test_bulk_copies_of_many_chunks() -> None:
    """More than the thread blocks begin with, and rows of several tiles and parts."""
    counts: list[list[list[int]]] = []
    with Crew(2, BULK) as crew:
        for number, (wire, dtype, hidden, tokens) in enumerate(
            [
                ("native", "bfloat16", 8192, 30),
                ("fp8", "bfloat16", 8192, 40),
                ("fp8_ue8m0", "float32", 2304, 70),
                ("mxfp8", "bfloat16", 64, 300),
            ]
        ):
            case = Case(
                seed() + number, 2, num_experts=10, top_k=3, hidden=hidden, max_tokens=tokens, wire=wire, dtype=dtype, steps=3
            )
            counts.append(crew.run("emulated:by_bulk", module(), case, timeout=200))
    assert all(sum(rank[i] for case_of_ranks in counts for rank in case_of_ranks) > 0 for i in (0, 1)), counts


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [("float32", "ragged"), ("bfloat16", "ragged"), ("bfloat16", "padded"), ("bfloat16", "compact"), ("float16", "compact")],
)
def test_bulk_copies_of_sums(dtype: str, layout: str) -> None:
    """Tokens with no rows, one, two and more, of which this rank's own are the first, the last, or between."""
    with Crew(4, BULK) as crew:
        case = Case(
            seed(), 4, num_experts=10, top_k=2, hidden=144, max_tokens=30, dtype=dtype, layout=layout, routing="sparse", steps=4
        )
        crew.run("emulated:call", module(), "rank_cases:exchange", case)
        crew.run("emulated:call", module(), "gpu_cases:both_devices", replace(case, top_k=5), 4, odd=True)


def test_bulk_copies_beside_rows_that_show() -> None:
    """Rows that are only copied, of sources with many; those of sources with few go out tile by tile, from the same memory."""
    with Crew(4, {"PPLX_COMM_BULK_TOKENS": "10"}) as crew:
        for number in range(4):
            case = Case(
                seed() + number, 4, num_experts=8, top_k=3, hidden=2048, max_tokens=24, layout="compact", crowd="uneven", steps=4
            )
            crew.run("emulated:call", module(), "rank_cases:exchange", case)


@pytest.mark.parametrize("wire", ["native", "fp8"])
def test_bulk_copies_of_any_bits(wire: str) -> None:
    """Places are blank again for what comes after."""
    with Crew(2, {"PPLX_COMM_BULK_TOKENS": "10"}) as crew:
        case = Case(seed(), 2, num_experts=8, top_k=3, hidden=272, max_tokens=20, wire=wire)
        crew.run("emulated:call", module(), "gpu_cases:rows_that_look_blank", case, 6)


def test_long_rows_of_many_from_ranks_with_few() -> None:
    """A rank with few tokens returns rows with arrival words, too, when it got many. Warps have five runs of strips of each."""
    with Crew(2, {"PPLX_COMM_BULK_TOKENS": "12"}) as crew:
        for number, crowd in enumerate(("one_has_none", "uneven", "one_has_all", "uneven")):
            case = Case(seed() + number, 2, num_experts=6, top_k=2, hidden=9216, max_tokens=24, crowd=crowd, steps=4)
            crew.run("emulated:call", module(), "rank_cases:exchange", case)


@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_bulk_copies_and_steps_of_few_in_turn(layout: str) -> None:
    """As on the CPU device, in the same memory."""
    with Crew(2, {"PPLX_COMM_BULK_TOKENS": "30"}) as crew:
        case = Case(seed(), 2, num_experts=8, top_k=3, hidden=144, max_tokens=80, wire="fp8", layout=layout, align=4)
        tokens_of = [40, 3, 3, 80, 29, 30, 1, 1, *[40, 5] * 6]
        crew.run("emulated:call", module(), "gpu_cases:both_devices", case, len(tokens_of), tokens_of=tokens_of)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_bulk_copies_among_replays(in_flight: int) -> None:
    with Crew(2, BULK) as crew:
        case = small_case(seed(), 2, in_flight)
        crew.run("emulated:call", module(), "open_step_cases:interleaved", case, list(range(3)), 12, timeout=120)
        run_refused(crew, "refused", case, "replay", None)


def test_bulk_copies_after_a_reset(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"died{i}") for i in range(2)]
    case = Case(seed(), 4, num_experts=10, top_k=4, crowd="uneven", in_flight=2)
    with Crew(4, BULK) as crew:
        crew.start("emulated:call", module(), "failure_cases:reset_after", case, [2, 0], paths)
        assert [len(r["rounds"]) for r in crew.collect(120, [1, 3])] == [2, 2]
        crew.leave()


@pytest.mark.parametrize("near", ["none", "odd"])
@pytest.mark.parametrize("transport", ["nvshmem", "nvshmem-mixed", "mixed:tcp"])
def test_no_bulk_copies_across_nodes(transport: str, near: str) -> None:
    with Crew(4, {**BULK, "PPLX_EMULATION_NEAR": near}) as crew:
        case = Case(seed(), 4, num_experts=8, top_k=3, hidden=64, max_tokens=20, crowd="full", steps=4, transport=transport)
        for remote in crew.run("emulated:none_by_bulk", module(), case, []):
            assert len(remote) == (2 if transport == "mixed:tcp" else 1 if near == "odd" else 3 if transport == "nvshmem" else 2)


@pytest.mark.parametrize("transport", ["auto:tcp", "nvshmem"])
def test_no_bulk_copies_where_others_are_apart(transport: str) -> None:
    """A rank that maps the memory of all others knows that two of them do not map each other's: these return rows their way."""
    with Crew(3, BULK) as crew:
        case = Case(seed(), 3, num_experts=8, top_k=3, hidden=64, max_tokens=20, crowd="full", steps=4, transport=transport)
        assert crew.run("emulated:none_by_bulk", module(), case, [(0, 2)]) == [[2], [], [0]]


@pytest.mark.parametrize("transport", ["nvshmem", "nvshmem-mixed"])
def test_bulk_copies_where_nvshmem_has_nobody_to_put_to(transport: str) -> None:
    """All are near, or of one node."""
    with Crew(2, {**BULK, "PPLX_EMULATION_NEAR": "all"}) as crew:
        case = Case(seed(), 2, num_experts=8, top_k=3, hidden=64, max_tokens=20, steps=4, transport=transport)
        counts = crew.run("emulated:by_bulk", module(), case)
    assert all(sum(rank[i] for rank in counts) > 0 for i in (0, 1)), counts


def test_bulk_copies_of_ids_that_only_the_device_sees() -> None:
    with Crew(2, BULK) as crew:
        crew.run("emulated:call", module(), "open_step_cases:bad_ids", small_case(seed(), 2, 2), 1)


# ---- hooks: threads beside the kernels, which look at their words and raise others


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "mixed:tcp", "nvshmem", "nvshmem-mixed"])
def test_hooks(crew: Crews, transport: str) -> None:
    for number in range(8):
        crew.run("emulated:call", module(), "hook_cases:hooked", case_of(40_000, number, crew.world_size, transport))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("least", [1, 4])
def test_hooks_of_bulk_copies(least: int) -> None:
    with Crew(2, {"PPLX_COMM_BULK_TOKENS": str(least)}) as crew:
        for number in range(8):
            crew.run("emulated:call", module(), "hook_cases:hooked", case_of(41_000 + 1000 * least, number, 2, "mapped"))
        for number, (wire, dtype, hidden, tokens) in enumerate([("native", "bfloat16", 8192, 30), ("mxfp8", "bfloat16", 64, 300)]):
            case = Case(
                seed() + number, 2, num_experts=10, top_k=3, hidden=hidden, max_tokens=tokens, wire=wire, dtype=dtype, steps=3
            )
            crew.run("emulated:call", module(), "hook_cases:hooked", case, timeout=200)


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize(("align", "zero_pad"), [(1, True), (48, True), (128, False), (256, True)])
def test_hooks_of_alignments(align: int, zero_pad: bool, bulk: bool) -> None:
    case = Case(seed(), 2, num_experts=6, top_k=2, hidden=32, max_tokens=150, align=align, zero_pad=zero_pad)
    with Crew(2, BULK if bulk else {}) as crew:
        crew.run("emulated:call", module(), "hook_cases:hooked", case, timeout=120)
        assert crew.run("emulated:call", module(), "hook_cases:plain", case) == crew.run("hook_cases:plain", case)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("bulk", [False, True])
def test_hooks_with_one_resident_thread_block(bulk: bool) -> None:
    with Crew(2, {**(BULK if bulk else {}), "PPLX_EMULATION_ROOM": "1", "PPLX_EMULATION_SMS": "7"}) as crew:
        for number in range(4):
            crew.run("emulated:call", module(), "hook_cases:hooked", case_of(43_000, number, 2, "mapped"))


def test_hooks_of_an_output_that_is_too_small() -> None:
    with Crew(2) as crew:
        for layout, rows in (("ragged", 200), ("padded", 20)):
            case = Case(seed(), 2, num_experts=4, top_k=2, hidden=16, max_tokens=150, layout=layout, rows=rows)
            crew.run("emulated:call", module(), "hook_cases:overflowing", case)


@pytest.mark.parametrize("how", ["whole", "receives first"])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_groups(crew: Crews, layout: str, how: str) -> None:
    case = replace(case_of(44_000, 0, crew.world_size, "mapped"), layout=layout, in_flight=1, max_tokens=20)
    plain = crew.run("hook_cases:plain", case)
    for parts in (1, 3):
        assert crew.run("emulated:call", module(), "hook_cases:groups", case, parts, how) == plain


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_a_kernel_that_never_comes(layout: str, bulk: bool) -> None:
    case = Case(seed(), 3, num_experts=6, top_k=2, max_tokens=9, layout=layout)
    with Crew(3, BULK if bulk else {}) as crew:
        results = crew.run("emulated:call", module(), "hook_cases:never_ready", case, 1, 1.0, timeout=60)
    what = "local expert 0" if layout == "padded" else "block 0"
    for rank, said in enumerate(results):
        assert said["peer"] == 1 and said["type"] == "StepTimeout" and said["left"] == [0, 1, 2], (rank, said)
    assert f"the rows of {what} were never written: its word of ready= is still 0" in results[1]["message"], results


def test_nobody_spins_for_ever() -> None:
    with Crew(3) as crew:
        crew.start("emulated:call", module(), "hook_cases:nobody_comes", Case(seed(), 3), 1.0)
        said = crew.collect(60, [0, 2])
        crew.tell(1)
        crew.collect(60, [1])
    assert all(s["raised"] and s["type"] == "StepTimeout" and s["peer"] == 1 for s in said), said


def test_mistakes_with_hooks(crew: Crews) -> None:
    case = Case(seed(), crew.world_size, num_experts=2 * crew.world_size)
    for said in crew.run("emulated:call", module(), "hook_cases:mistakes", case):
        assert len(said) == 11 and "nothing" not in said, said


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_hooks_in_a_graph(in_flight: int, bulk: bool) -> None:
    case = small_case(seed(), 2, in_flight, layout="padded")
    with Crew(2, BULK if bulk else {}) as crew:
        crew.run("emulated:call", module(), "hook_cases:replayed", case, 2, 10, timeout=120)


# ---- blocks in pieces


def piece_case(number: int, world: int) -> Case:
    """Steps of several rounds, in which a rank may have few tokens and the others many. Printed by what runs it."""
    r = random.Random(f"pieces {seed()} {number} {world}")
    dtype = r.choice(["bfloat16", "float16", "float32"])
    return Case(
        seed() * 1000 + number, world, num_experts=r.choice([1, world, r.randint(1, 12)]), top_k=r.choice([1, 2, 3, 8]),
        hidden=r.choice([16, 32, 48, 144, 272]), max_tokens=r.choice([9, 20, 33, 60]), dtype=dtype,
        wire=r.choice(["native", "fp8", "fp8_ue8m0", "mxfp8"]), layout=r.choice(["ragged", "ragged", "padded", "compact"]),
        align=r.choice([1, 8, 128]), zero_pad=r.random() < 0.5, in_flight=r.choice([1, 1, 2, 4]),
        scale_layout=r.choice(["row", "tma"]), first_step=r.choice([1, 2**32 - 3]),
        routing=r.choice(["uniform", "uniform", "zipf", "to_one", "repeats", "sparse", "local"]),
        crowd=r.choice(["full", "uneven", "uneven", "one_has_none", "one_has_all"]), steps=r.choice([3, 6]),
    )  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_pieces(world: int) -> None:
    with Crew(world) as crew:
        for number in range(8):
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", piece_case(number, world), timeout=120)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "transport"), [(2, "proxy:tcp"), (3, "proxy:tcp"), (4, "mixed:tcp"), (2, "proxy:shm")])
def test_pieces_between_nodes(world: int, transport: str) -> None:
    """Nodes of one rank, and of two: rounds of mapped and of remote peers pass each other."""
    with Crew(world) as crew:
        for number in range(6):
            case = replace(piece_case(300 + number, world), transport=transport)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=120)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("world", "transport", "near"),
    [
        (2, "nvshmem", "none"),
        (2, "nvshmem", "all"),
        (3, "nvshmem", "none"),
        (4, "nvshmem", "odd"),
        (4, "nvshmem-mixed", "none"),
        (4, "nvshmem", "one way"),
    ],
)
def test_pieces_by_kernels(world: int, transport: str, near: str) -> None:
    """Peers that are put to, mapped ones, and both in one job."""
    with Crew(world, {"PPLX_EMULATION_NEAR": near}) as crew:
        for number in range(6):
            case = replace(piece_case(350 + number, world), transport=transport)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=120)


@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_the_bits_of_mapped_memory_in_pieces(layout: str) -> None:
    wire = {"ragged": "fp8", "padded": "native", "compact": "mxfp8"}[layout]
    case = Case(seed(), 3, num_experts=9, top_k=3, hidden=96, max_tokens=40, wire=wire, layout=layout, transport="nvshmem")
    with Crew(3, {"PPLX_EMULATION_NEAR": "none"}) as crew:
        crew.run("emulated:in_pieces", module(), 4, "nvshmem_cases:against_mapped", case, 6, timeout=120)


def test_several_all_to_alls_in_pieces() -> None:
    """Of one Communicator, in steps that interleave, over every carrier."""
    transports = ["nvshmem", "nvshmem-mixed", "nvshmem", "mapped", "proxy:tcp"]
    with Crew(3) as crew:
        cases = [replace(piece_case(370 + i, 3), in_flight=1, steps=4, transport=t) for i, t in enumerate(transports)]
        crew.run("emulated:all_in_pieces", module(), 4, "rank_cases:interleaved", cases, timeout=120)


@pytest.mark.parametrize("near", ["none", "odd"])
@pytest.mark.parametrize("late", [301, 330, 364])
def test_a_piece_that_lands_after_its_generation(near: str, late: int) -> None:
    """A piece, or a credit, comes later than the reset: it must not count in the new generation."""
    case = Case(seed(), 3, num_experts=9, top_k=3, hidden=64, max_tokens=30, in_flight=2, crowd="full", transport="nvshmem")
    with Crew(3, {"PPLX_EMULATION_NEAR": near, "PPLX_EMULATION_LATE": f"4500@{late}"}) as crew:
        run = functools.partial(crew.run, "emulated:in_pieces", module(), 4, "chaos_cases:until_failure", case, 2.0, again=True)
        for r in run(timeout=60):
            assert r.get("is_peer") and r["is_timeout"], r


@pytest.mark.parametrize("context", [0, 1], ids=["dispatch", "combine"])
def test_a_piece_that_is_not_the_next(context: int) -> None:
    """A signal counts one too many: what lies there is an earlier piece of the same step, whose number says so."""
    case = Case(seed(), 2, num_experts=4, top_k=2, hidden=64, max_tokens=60, crowd="full", steps=3, transport="nvshmem")
    with Crew(2, {"PPLX_EMULATION_TWICE": f"{context}@18"}) as crew:
        results = crew.run("emulated:in_pieces", module(), 4, "chaos_cases:until_failure", case, 5.0, again=False, timeout=60)
    assert all(r.get("is_peer") and not r["is_timeout"] for r in results), results
    assert any("must not send" in r["message"] for r in results), results


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "transport"), [(3, "proxy:tcp"), (4, "mixed:tcp")])
def test_pieces_in_a_chaos(world: int, transport: str) -> None:
    with Crew(world, {"PPLX_COMM_CHAOS": f"seed={seed()},{CHAOS}"}) as crew:
        for number in range(4):
            case = replace(piece_case(400 + number, world), transport=transport)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=120)


def test_pieces_that_leave_late() -> None:
    """A peer has read a piece, and given its credit, before the network says that it has left."""
    with Crew(2, {"PPLX_COMM_CHAOS": f"seed={seed()},delay=0.1,delay_us=1000000"}) as crew:
        case = Case(seed(), 2, num_experts=4, top_k=2, hidden=32, max_tokens=30, transport="proxy:tcp", steps=3)
        crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=120)


def test_pieces_in_gpu_memory() -> None:
    """Threads of one process, whose blocks a copy engine carries."""
    cases = [replace(piece_case(500 + number, 2), transport="copy") for number in range(4)]
    with Crew(1) as crew:
        crew.run("emulated:all_in_pieces", module(), 4, "placement_cases:random_shapes", cases, "", timeout=200)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("room", [1, 2])
def test_pieces_with_one_resident_thread_block(room: int, transport: str) -> None:
    """It claims the rounds in their order, whoever else was to have them."""
    with Crew(2, {"PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "5"}) as crew:
        for number in range(3):
            case = replace(piece_case(100 + number, 2), transport=transport)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=120)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "mixed:tcp", "nvshmem"])
def test_pieces_of_ranks_with_few(transport: str) -> None:
    """Those take part in the rounds of others by the kernels of steps of few; steps of few alone come in between."""
    with Crew(3) as crew:
        for number, whole in enumerate((16, 24)):
            case = replace(piece_case(200 + number, 3), max_tokens=60, crowd="uneven", num_experts=6, routing="uniform", steps=6)
            case = replace(case, transport=transport)
            crew.run("emulated:in_pieces", module(), whole, "rank_cases:exchange", case, timeout=120)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_pieces_and_whole_steps_in_turn(layout: str, transport: str) -> None:
    """As on the CPU device, in the same memory."""
    with Crew(2) as crew:
        case = Case(seed(), 2, num_experts=8, top_k=3, hidden=144, max_tokens=80, wire="fp8", layout=layout, align=4)
        case = replace(case, transport=transport)
        tokens_of = [80, 3, 3, 41, 16, 17, 1, 1, *[40, 5] * 3]
        crew.run(
            "emulated:in_pieces", module(), 16, "gpu_cases:both_devices", case, len(tokens_of), tokens_of=tokens_of, timeout=120
        )


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
def test_pieces_among_replays(transport: str) -> None:
    """With one step open: those draw their order for each of several."""
    with Crew(2) as crew:
        case = replace(small_case(seed(), 2, 1), max_tokens=20, transport=transport)
        crew.run("emulated:in_pieces", module(), 4, "open_step_cases:interleaved", case, list(range(3)), 8, timeout=120)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
def test_pieces_in_order(transport: str) -> None:
    with Crew(2) as crew:
        case = Case(1, 2, max_tokens=30, in_flight=2, transport=transport)
        for first, second in crew.run("emulated:in_pieces", module(), 4, "pieces_cases:out_of_order", case):
            assert "dispatch_recv: step 2 before step 1" in first and "received in order" in first, first
            assert "combine_recv: step 2 before step 1" in second and "slot_bytes" in second, second


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("phase", ["dispatch_recv", "combine_recv"])
def test_a_rank_that_does_not_come_for_its_pieces(phase: str, transport: str) -> None:
    """The other says who, where, and which piece it waits for; then both reset and go on."""
    case = Case(2, 2, max_tokens=30, num_experts=2, transport=transport)
    with Crew(2) as crew:
        _, r = crew.run("emulated:in_pieces", module(), 4, "pieces_cases:does_not_come", case, phase, timeout=60)
        assert r["type"] == "StepTimeout" and r["peer"] == 0 and r["phase"] == phase, r
        found = re.search(r"waited for (piece [2-9]) of the (dispatch|combine) block of rank 0", r["message"])
        assert found and r["expected"] == found[1] and phase.startswith(found[2]), r


@pytest.mark.parametrize(
    ("transport", "near"),
    [("mapped", ""), ("proxy:tcp", ""), ("mixed:tcp", ""), ("nvshmem", "none"), ("nvshmem", "odd"), ("nvshmem-mixed", "none")],
)
def test_pieces_after_a_reset(tmp_path: Path, transport: str, near: str) -> None:
    paths = [str(tmp_path / f"died{i}") for i in range(2)]
    case = Case(seed(), 4, num_experts=10, top_k=4, max_tokens=24, crowd="uneven", in_flight=2, transport=transport)
    with Crew(4, {"PPLX_EMULATION_NEAR": near} if near else {}) as crew:
        crew.start("emulated:in_pieces", module(), 4, "failure_cases:reset_after", case, [2, 0], paths)
        assert [len(r["rounds"]) for r in crew.collect(120, [1, 3])] == [2, 2]
        crew.leave()


# ---- hooks of blocks in pieces


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("world", "transport"),
    [
        (1, "mapped"),
        (2, "mapped"),
        (4, "mapped"),
        (2, "proxy:tcp"),
        (3, "proxy:tcp"),
        (4, "mixed:tcp"),
        (2, "nvshmem"),
        (3, "nvshmem"),
    ],
)
def test_hooks_of_pieces(world: int, transport: str) -> None:
    """Ranks with few tokens, and with many."""
    with Crew(world) as crew:
        for number in range(8):
            case = replace(piece_case(600 + number, world), transport=transport)
            crew.run("emulated:in_pieces", module(), 4, "hook_cases:hooked", case, timeout=120)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "mixed:tcp", "nvshmem"])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_hooks_of_pieces_of_many_blocks(layout: str, transport: str) -> None:
    """Rounds whose rows lie in several blocks of the output, of ranks with few tokens and with many. Rows of two parts."""
    with Crew(3) as crew:
        for number, whole in enumerate((12, 24)):
            case = Case(
                seed() + number, 3, num_experts=9, top_k=4, hidden=[1040, 144][number], max_tokens=90, layout=layout, steps=4,
                crowd="uneven", wire=["native", "fp8"][number], align=32, zero_pad=True, transport=transport,
            )  # fmt: skip
            crew.run("emulated:in_pieces", module(), whole, "hook_cases:hooked", case, timeout=200)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("room", [1, 2])
def test_hooks_of_pieces_with_one_resident_thread_block(room: int, transport: str) -> None:
    with Crew(2, {"PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7"}) as crew:
        for number in range(3):
            case = replace(piece_case(700 + number, 2), transport=transport)
            crew.run("emulated:in_pieces", module(), 4, "hook_cases:hooked", case, timeout=120)


def test_hooks_of_pieces_in_a_chaos() -> None:
    with Crew(3, {"PPLX_COMM_CHAOS": f"seed={seed()},{CHAOS}"}) as crew:
        for number in range(3):
            case = replace(piece_case(800 + number, 3), transport="proxy:tcp")
            crew.run("emulated:in_pieces", module(), 4, "hook_cases:hooked", case, timeout=120)


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("how", ["whole", "receives first"])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_groups_of_pieces(layout: str, how: str, transport: str) -> None:
    case = replace(piece_case(900, 2), layout=layout, in_flight=1, num_experts=7, max_tokens=33)
    with Crew(2) as crew:
        plain = crew.run("hook_cases:plain", case)
        case = replace(case, transport=transport)
        for parts in (1, 3):
            assert crew.run("emulated:in_pieces", module(), 4, "hook_cases:groups", case, parts, how, timeout=120) == plain


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("few", [None, 2])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_a_kernel_that_never_comes_in_pieces(layout: str, few: int | None, transport: str) -> None:
    case = Case(seed(), 3, num_experts=6, top_k=2, max_tokens=30, layout=layout, transport=transport)
    with Crew(3) as crew:
        results = crew.run("emulated:in_pieces", module(), 4, "hook_cases:never_ready", case, 1, 3.0, few, timeout=100)
    what = "local expert 0" if layout == "padded" else "block 0"
    for rank, said in enumerate(results):
        assert said["peer"] == 1 and said["type"] == "StepTimeout" and said["left"] == [0, 1, 2], (rank, said)
    assert f"the rows of {what} were never written: its word of ready= is still 0" in results[1]["message"], results


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
@pytest.mark.parametrize("few", [None, 3])
def test_rows_that_are_written_behind_the_send_half(few: int | None, transport: str) -> None:
    case = Case(seed(), 2, num_experts=4, top_k=2, max_tokens=30, hidden=48, layout="padded", wire="native", transport=transport)
    with Crew(2) as crew:
        crew.run("emulated:in_pieces", module(), 4, "hook_cases:behind_two_rounds", case, 4, few)


@pytest.mark.parametrize("transport", ["mapped", "nvshmem"])
def test_nobody_spins_for_ever_in_pieces(transport: str) -> None:
    with Crew(3) as crew:
        case = Case(seed(), 3, max_tokens=30, transport=transport)
        crew.start("emulated:in_pieces", module(), 4, "hook_cases:nobody_comes", case, 1.0)
        said = crew.collect(60, [0, 2])
        crew.tell(1)
        crew.collect(60, [1])
    assert all(s["raised"] and s["type"] == "StepTimeout" and s["peer"] == 1 for s in said), said


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
def test_hooks_of_pieces_in_a_graph(transport: str) -> None:
    case = small_case(seed(), 2, 1, layout="padded", max_tokens=20, transport=transport)
    with Crew(2) as crew:
        crew.run("emulated:in_pieces", module(), 4, "hook_cases:replayed", case, 2, 10, timeout=120)


# ---- replicas where blocks go in pieces

REPLICAS = [(2, 2, "mapped"), (4, 2, "mapped"), (4, 4, "mapped"), (3, 3, "mapped"), (4, 2, "proxy:tcp"), (4, 2, "mixed:tcp")]
"""World, replicas, transport: those of a group are of one node."""


def replica_case(number: int, world: int, replicas: int, transport: str = "mapped") -> Case:
    """Each sends as many tokens as a rank of piece_case() does: one of a group may have one more than the next."""
    case = piece_case(number, world)
    return replace(case, replicas=replicas, max_tokens=replicas * case.max_tokens - number % replicas, transport=transport)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "replicas", "transport"), REPLICAS)
def test_replicas_in_pieces(world: int, replicas: int, transport: str) -> None:
    with Crew(world) as crew:
        for number in range(6):
            case = replica_case(1000 + number, world, replicas, transport)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=200)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["proxy:tcp", "mixed:tcp"])
def test_replicas_in_pieces_in_a_chaos(transport: str) -> None:
    with Crew(4, {"PPLX_COMM_CHAOS": f"seed={seed()},{CHAOS}"}) as crew:
        for number in range(3):
            case = replica_case(1100 + number, 4, 2, transport)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=200)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("room", [1, 2])
def test_replicas_in_pieces_with_one_resident_thread_block(room: int) -> None:
    """It finishes all that replicas wait for."""
    with Crew(2, {"PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "5"}) as crew:
        for number in range(3):
            case = replica_case(1200 + number, 2, 2)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=120)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("layout", "world", "transport"),
    [("ragged", 2, "mapped"), ("padded", 2, "mapped"), ("compact", 2, "mapped"), ("ragged", 4, "proxy:tcp")],
)
def test_replicas_of_which_one_has_many(layout: str, world: int, transport: str) -> None:
    """From 17 tokens of its own on a rank takes the kernels of many: of 33 the first replica does, the second one does not. As on the CPU
    device, in the same memory."""
    with Crew(world) as crew:
        case = Case(seed(), world, num_experts=8, top_k=3, hidden=144, max_tokens=160, wire="fp8", layout=layout, align=4)
        case = replace(case, replicas=2, transport=transport)
        tokens_of = [160, 33, 6, 33, 81, 32, 34, 33, 1, 2, 33, 0, 33]
        crew.run(
            "emulated:in_pieces", module(), 16, "gpu_cases:both_devices", case, len(tokens_of), tokens_of=tokens_of, timeout=200
        )


def test_plans_of_replicas_in_pieces() -> None:
    with Crew(2) as crew:
        for tokens in (41, 7):
            case = Case(seed(), 2, num_experts=6, top_k=3, hidden=48, max_tokens=tokens, replicas=2)
            crew.run("emulated:in_pieces", module(), 4, "pieces_cases:plan_of_replicas", case)


def test_long_rows_of_replicas_in_pieces() -> None:
    """Sums of several tiles, and strips of those that replicas finish."""
    with Crew(2) as crew:
        case = Case(seed(), 2, num_experts=6, top_k=2, hidden=4624, max_tokens=31, steps=4, crowd="full", replicas=2)
        crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=200)


def test_replicas_in_pieces_as_without_either() -> None:
    with Crew(4) as crew:
        for number, transport in enumerate(("mapped", "mixed:tcp")):
            case = replace(replica_case(1300 + number, 4, 2, transport), max_tokens=41)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:as_without_replicas", case, timeout=200)


@pytest.mark.parametrize("transport", ["mapped", "mixed:tcp"])
@pytest.mark.parametrize("through", ["recipe", "autograd"])
def test_gradients_of_replicas_in_pieces(through: str, transport: str) -> None:
    with Crew(4) as crew:
        for layout in ("ragged", "padded", "compact"):
            case = Case(
                seed(), 4, num_experts=7, top_k=4, hidden=64, max_tokens=41, dtype="float32", layout=layout, align=4,
                transport=transport, replicas=2,
            )  # fmt: skip
            name, how = ("gradients", []) if through == "recipe" else ("gradients_of_autograd", ["all"])
            for errors in crew.run("emulated:in_pieces", module(), 4, f"training_cases:{name}", case, *how, timeout=120):
                assert all(error < 2e-6 for error in errors.values()), (layout, errors)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "transport"), [(2, "mapped"), (4, "mapped"), (4, "proxy:tcp"), (4, "mixed:tcp")])
def test_hooks_of_replicas_in_pieces(world: int, transport: str) -> None:
    with Crew(world) as crew:
        for number in range(4):
            case = replica_case(1400 + number, world, 2, transport)
            crew.run("emulated:in_pieces", module(), 4, "hook_cases:hooked", case, timeout=200)


@pytest.mark.parametrize(("world", "transport"), [(2, "mapped"), (4, "proxy:tcp")])
@pytest.mark.parametrize("hooks", [False, True])
def test_replicas_in_pieces_among_replays(hooks: bool, world: int, transport: str) -> None:
    with Crew(world) as crew:
        case = replace(small_case(seed(), world, 1), max_tokens=41, transport=transport, replicas=2)
        if hooks:
            crew.run("emulated:in_pieces", module(), 4, "hook_cases:replayed", replace(case, layout="padded"), 2, 6, timeout=120)
        else:
            crew.run("emulated:in_pieces", module(), 4, "open_step_cases:interleaved", case, list(range(3)), 8, timeout=200)


@pytest.mark.parametrize("kind", ["ids", "tokens", "accumulate"])
@pytest.mark.parametrize("transport", ["mapped", "mixed:tcp"])
def test_replicas_apart_in_pieces(kind: str, transport: str) -> None:
    case = Case(seed(), 4, max_tokens=40, replicas=2, transport=transport)
    with Crew(4) as crew:
        results = crew.run("emulated:in_pieces", module(), 4, "failure_cases:replicas_apart", case, kind, timeout=60)
    for r in results:
        assert r.get("is_peer") and not r["is_timeout"], r
    word = {"ids": "passed different topk_ids", "tokens": "rank 3 passed 39 ", "accumulate": "accumulate="}[kind]
    assert any(word in r["message"] for r in results), results


@pytest.mark.parametrize(("world", "transport"), [(2, "mapped"), (4, "proxy:tcp")])
@pytest.mark.parametrize("phase", ["dispatch_recv", "combine_recv"])
def test_a_replica_that_does_not_come_for_its_pieces(phase: str, world: int, transport: str) -> None:
    """Its replica, who waits for its rows and for those that it finishes, says who. Of four some wait for others who wait for it. All
    reset, and go on."""
    case = Case(2, world, max_tokens=80, num_experts=world, transport=transport, replicas=2)
    with Crew(world) as crew:
        heard = crew.run("emulated:in_pieces", module(), 4, "pieces_cases:does_not_come", case, phase, timeout=100)[1:]
        assert all(r["type"] == "StepTimeout" for r in heard), heard
        assert world > 2 or (heard[0]["phase"], heard[0]["peer"]) == (phase, 0), heard


@pytest.mark.parametrize(("replicas", "transport"), [(2, "mapped"), (2, "mixed:tcp"), (4, "mapped")])
def test_replicas_in_pieces_after_a_reset(tmp_path: Path, replicas: int, transport: str) -> None:
    """Those that are left of a group send the tokens of the dead, too."""
    paths = [str(tmp_path / f"died{i}") for i in range(2)]
    case = Case(seed(), 4, num_experts=10, top_k=4, max_tokens=24 * replicas, crowd="uneven", in_flight=2, transport=transport)
    with Crew(4) as crew:
        crew.start("emulated:in_pieces", module(), 4, "failure_cases:reset_after", replace(case, replicas=replicas), [2, 0], paths)
        assert [len(r["rounds"]) for r in crew.collect(200, [1, 3])] == [2, 2]
        crew.leave()


@pytest.mark.parametrize(("world", "near"), [(4, "none"), (4, "odd")])
def test_replicas_in_pieces_by_kernels(world: int, near: str) -> None:
    with Crew(world, {"PPLX_EMULATION_NEAR": near}) as crew:
        for number in range(4):
            case = replace(piece_case(950 + number, world), transport="nvshmem", replicas=2)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=200)
