"""The CUDA kernels as they are, on a CPU (tests/emulation): the CPU device's cases, to the last bit, over every carrier.

Threads of all blocks take turns, so this finds wrong protocols and barriers. Memory models, and everything that CUDA itself does, are
for tests/gpu. Here are whole blocks of few tokens; each file beside this one has a subject of its own.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trace_cases
from cases import Case
from emulation_cases import CHAOS, LARGE, ON_X86_64, PARTS, case_of, module, numbers
from harness import Crew, Crews, allowed, seed
from test_failure import left_in_shm, reset_after_deaths
from test_trace import Read

pytestmark = ON_X86_64


@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "proxy:shm", "mixed:tcp", "dealt:tcp"])
def test_random_shapes(crew: Crews, transport: str) -> None:
    for number in numbers(8):
        crew.run("emulated:call", module(), "rank_cases:exchange", case_of(20_000, number, crew.world_size, transport))


@pytest.mark.parametrize(
    ("transport", "large"),
    [("mapped", False), ("mapped", True), ("mapped in pieces", True), ("mixed:tcp", False), ("relayed:tcp", False)],
)
def test_rows_that_are_not_read(transport: str, large: bool) -> None:
    """Beginnings of rows, and whole rows in turn: what one leaves behind, the other finds."""
    with Crew(4, LARGE if large else {}) as crew:
        for number, wire in enumerate(["native", "mxfp8" if large else "fp8_ue8m0"]):
            drawn = case_of(26_000, number, 4, transport.split()[0])
            case = replace(drawn, hidden=1040 + 512 * number, wire=wire, replicas=1, in_flight=1)
            how, whole = ("in_pieces", [2]) if "in pieces" in transport else ("call", [])
            crew.run(f"emulated:{how}", module(), *whole, "rank_cases:opened_again", case)


@pytest.mark.parametrize(("transport", "large"), [("mapped", False), ("mapped", True), ("mixed:tcp", False)])
def test_waits_are_counted(transport: str, large: bool) -> None:
    with Crew(4, LARGE if large else {}) as crew:
        case = Case(seed(), 4, num_experts=8, top_k=3, hidden=264, max_tokens=5, transport=transport, steps=2)
        crew.run("emulated:call", module(), "rank_cases:a_late_rank", case, 2)


def test_counts_of_a_routing(crew: Crews) -> None:
    for number in range(20):
        crew.run("emulated:call", module(), "gpu_cases:counts_of_a_routing", seed() * 100 + number)


@pytest.mark.parametrize("wire", ["native", "fp8"])
def test_rows_that_look_blank(crew: Crews, wire: str) -> None:
    case = Case(seed(), crew.world_size, num_experts=8, top_k=3, hidden=264, max_tokens=20, wire=wire)
    crew.run("emulated:call", module(), "gpu_cases:rows_that_look_blank", case, 6)


@pytest.mark.parametrize(("tokens", "dtype"), [(8, "bfloat16"), (40, "bfloat16"), (40, "float32")])
def test_answers_that_look_blank(crew: Crews, tokens: int, dtype: str) -> None:
    """In strips of one warp each, and in as long ones as leave each warp one."""
    case = Case(
        seed(),
        crew.world_size,
        num_experts=4 * crew.world_size,
        top_k=3,
        hidden=1032,
        max_tokens=tokens,
        dtype=dtype,
        layout="compact",
    )
    crew.run("emulated:call", module(), "gpu_cases:answers_that_look_blank", case, 3)


def test_ranks_take_the_module_that_their_environment_names() -> None:
    """So does the fuzz build of tests/gpu reach ranks, which are forked."""
    with Crew(1, {"PPLX_TEST_CUDA": module()}) as crew:
        assert crew.run("gpu_cases:module_in_use") == [module()]


def test_rows_of_several_rounds() -> None:
    """The senders of a thread block have a piece of each row at once. These have more pieces, and units are of several tokens."""
    with Crew(2) as crew:
        for wire in ("native", "fp8"):
            case = Case(seed(), 2, num_experts=8, top_k=2, hidden=7696, max_tokens=9, wire=wire, steps=2)
            crew.run("emulated:call", module(), "rank_cases:exchange", case)


def test_more_units_than_warps() -> None:
    """Several times: some warps of a combine only receive."""
    with Crew(2, {"PPLX_EMULATION_SMS": "2"}) as crew:
        case = Case(seed(), 2, num_experts=8, top_k=3, hidden=64, max_tokens=150, steps=3)
        crew.run("emulated:call", module(), "rank_cases:exchange", case)


@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("transport", ["mapped", "proxy:tcp", "nvshmem"])
def test_one_resident_thread_block_suffices(transport: str, room: int) -> None:
    """The others find no room on the GPU before it has ended: it sends their shares."""
    with Crew(2, {"PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7", "PPLX_COMM_PART_BYTES": "1"}) as crew:
        for number in numbers(10):
            crew.run("emulated:call", module(), "rank_cases:exchange", case_of(25_000, number, 2, transport))


@pytest.mark.parametrize("transport", ["mixed:tcp", "dealt:tcp"])
def test_sums_by_node(transport: str) -> None:
    """Most tokens have several rows of each node."""
    with Crew(4) as crew:
        for dtype in ("bfloat16", "float32"):
            case = Case(seed(), 4, num_experts=16, top_k=8, hidden=256, max_tokens=12, dtype=dtype, transport=transport, steps=4)
            crew.run("emulated:call", module(), "rank_cases:exchange", case)


@pytest.mark.parametrize("transport", ["proxy:tcp", "proxy:shm", "mixed:tcp"])
def test_random_shapes_in_a_chaos(transport: str) -> None:
    with Crew(4, {"PPLX_COMM_CHAOS": f"seed={seed()},{CHAOS}", **PARTS}) as crew:
        for number in numbers(5):
            crew.run("emulated:call", module(), "rank_cases:exchange", case_of(21_000, number, 4, transport))


@pytest.mark.parametrize("how", ["proxy:tcp", "proxy:tcp in pieces", "relayed:tcp"])
def test_weights_that_the_next_step_overtakes(how: str) -> None:
    transport, _, pieces = how.partition(" ")
    case = Case(seed(), 4, num_experts=4, top_k=2, hidden=64, max_tokens=9, wire="native", transport=transport, steps=10)
    unruly = f"seed={seed()},delay=0.3,delay_us=60000,shuffle=0.9,split=0,duplicate=0,replay=0,again=0"
    with Crew(4, {"PPLX_COMM_CHAOS": unruly}) as crew:
        call = ["emulated:in_pieces", module(), 4] if pieces else ["emulated:call", module()]
        crew.run(*call, "rank_cases:weights_at_combine", case)


@pytest.mark.parametrize("layout", ["ragged", "compact"])
@pytest.mark.parametrize(("wire", "dtype"), [("fp8", "bf16"), ("native", "bf16"), ("fp8", "fp32"), ("native", "fp16")])
def test_the_composite_floor(layout: str, wire: str, dtype: str) -> None:
    """Rows of several parts, the last a short one; more rows to a sum than a lane holds; and several units for each warp."""
    layer = ["--hidden", "3072", "--experts", "24", "--top-k", "12", "--wire", wire, "--dtype", dtype, "--layout", layout]
    with Crew(2) as crew:
        for ran in crew.run("emulated:call", module(), "bench_cases:composite", ["--tokens", "41", *layer], "emulated", 2):
            assert ran["says"] == ran["counted"] and all(ran["says"].values())


def test_the_schedules_of_the_floor() -> None:
    """Rows of several parts, of warps and of bulk copies."""
    arguments = ["--tokens", "41", "--hidden", "5120", "--experts", "12", "--top-k", "3", "--wire", "fp8"]
    with Crew(3) as crew:
        for changes in crew.run("emulated:call", module(), "bench_cases:schedules", arguments):
            assert changes["peers"] == 1 < changes["runs-16"] < changes["runs-1"]


def test_gpus_that_do_not_reach_each_other() -> None:
    """They are remote to each other, also where only one of the two cannot; the others of the node map each other's memory."""
    with Crew(4) as crew:
        for number in numbers(3):
            case = replace(case_of(22_000, number, 4, "auto:tcp"), replicas=1)
            remote = crew.run("emulated:call", module(), "gpu_cases:exchange_apart", case, [(0, 2), (3, 1), (1, 3)])
            assert remote == [[2], [3], [0], [1]]
            # No relays then, where they were not insisted on.
            undecided = replace(case, transport="undecided:tcp", in_flight=1)
            remote = crew.run("emulated:call", module(), "gpu_cases:exchange_apart", undecided, [(0, 1)])
            assert remote == [[1, 2, 3], [0, 2, 3], [0, 1], [0, 1]]
            assert crew.run("emulated:call", module(), "rank_cases:goes_by_node", undecided) == [True] * 4


@pytest.mark.parametrize("chaos", ["", pytest.param(f"seed=7,{CHAOS}", marks=pytest.mark.slow)], ids=["quiet", "chaos"])
def test_blocks_in_gpu_memory(chaos: str) -> None:
    """Threads of one process, whose blocks a copy engine carries."""
    cases = [replace(case_of(23_000, number, 2, "copy"), replicas=1) for number in numbers(8)]
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
        crew.start("emulated:call", module(), "busy_cases:late_step", transport, 1, busy, device="cuda", times=allowed(1.0))
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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "mute"])
def test_cut_link(how: str) -> None:
    """A write fails, or is never heard of again: every rank names an end of the link, and all go on after reset()."""
    timeout = allowed(10.0 if how == "kill" else 5.0)
    case = Case(seed(), 3, transport="proxy:tcp", max_tokens=8, hidden=64)
    with Crew(3, {"PPLX_COMM_CHAOS": f"seed={seed()},delay=0.1,{how}=0-2@40"}) as crew:
        results: list[dict[str, Any]] = crew.run("emulated:call", module(), "chaos_cases:until_failure", case, timeout, again=True)
        for r in results:
            assert r.get("is_peer") and r["peer"] in (0, 2), r
            assert (" on " if how == "kill" else " over ") in r["message"], r


@pytest.mark.parametrize(
    ("transport", "near"),
    [("mapped", ""), ("mixed:tcp", ""), ("nvshmem", "odd"), ("nvshmem-mixed", "odd"), ("nvshmem", "none"), ("nvshmem", "all")],
)
def test_reset(transport: str, near: str, tmp_path: Path) -> None:
    case = Case(seed(), 4, num_experts=10, top_k=4, crowd="uneven", in_flight=2, transport=transport)
    with Crew(4, {"PPLX_EMULATION_NEAR": near}) as crew:
        reset_after_deaths(crew, ["emulated:call", module()], case, tmp_path)
        assert left_in_shm(crew) == []


@pytest.mark.parametrize(
    ("transport", "stages"),
    [
        ("proxy:tcp", []),
        # The module for this one has been built with them.
        (
            "nvshmem",
            [
                "unit and step there",
                "row there",
                "row placed",
                "proxy told",
                "dispatch ends",
                "sum stored",
                "added",
                "combine ends",
            ],
        ),
    ],
)
def test_launches_in_a_timeline(tmp_path: Path, transport: str, stages: list[str]) -> None:
    file = tmp_path / "job.pftrace"
    with Crew(2) as crew:
        case = Case(12, 2, transport=transport, max_tokens=8, steps=8)
        crew.run("emulated:call", module(), "trace_cases:record", case, str(file))
    read = Read(file)
    names = Counter(each[2] for each in read.slices)
    for what in ("launch dispatch_send", "launch combine_send", "kernel dispatch_send", "kernel combine_send", *stages):
        assert names[what] == 2 * trace_cases.STEPS, names
    steps = {(rank, said["step"], what): (begun, ended) for rank, _, what, begun, ended, said in read.slices if "step" in said}
    for rank, step, what in [key for key in steps if key[2] in stages]:
        begun, ended = steps[rank, step, what]
        combines = what in ("sum stored", "added", "combine ends")
        launched, _ = steps[rank, step, "kernel combine_send" if combines else "kernel dispatch_send"]
        assert launched - 5000 <= begun <= ended <= steps[rank, step, "combine ends" if combines else "dispatch ends"][1], (
            what,
            step,
        )


def test_a_timeline_of_a_whole_job(tmp_path: Path) -> None:
    """PPLX_COMM_TRACE begins before a process has the module of its kernels."""
    with Crew(2, {"PPLX_COMM_TRACE": str(tmp_path / "%j.pftrace")}) as crew:
        [job] = set(crew.run("emulated:call", module(), "trace_cases:at_the_end", Case(14, 2, transport="proxy:tcp", steps=3)))
    names = Counter(each[2] for each in Read(tmp_path / f"{job}.pftrace").slices)
    assert names["launch dispatch_send"] == names["kernel dispatch_send"] > 0, names
