"""Dispatches and combines of many tokens, by the large kernels, as steps of few take them here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cases import Case, in_pieces
from emulation_cases import LARGE, ON_X86_64, PARTS, case_of, module, numbers, run_refused
from harness import Crew, seed
from open_step_cases import small_case
from test_failure import reset_after_deaths

pytestmark = [ON_X86_64, pytest.mark.slow]


@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_large_steps(world: int, least: int) -> None:
    """Ranks with fewer tokens take the other way, in the same step."""
    with Crew(world, {"PPLX_COMM_LARGE_TOKENS": str(least)}) as crew:
        for number in numbers(8):
            crew.run("emulated:call", module(), "rank_cases:exchange", case_of(26_000 + 1000 * least, number, world, "mapped"))


@pytest.mark.parametrize(
    ("world", "transport", "least", "room"),
    [
        (2, "proxy:tcp", 1, 1), (3, "proxy:tcp", 4, 7), (4, "mixed:tcp", 1, 2), (4, "dealt:tcp", 4, 7), (2, "nvshmem", 1, 7),
        (4, "nvshmem-mixed", 4, 7), (4, "relayed:tcp", 1, 1), (5, "relayed-dealt:tcp", 4, 7), (7, "relayed-dealt:tcp", 1, 2),
    ],
)  # fmt: skip
def test_large_combines_between_nodes(world: int, transport: str, least: int, room: int) -> None:
    """Whole blocks leave in parts of a few rows. Ranks with fewer tokens take the other way, in the same step."""
    least_tokens = {"PPLX_COMM_LARGE_TOKENS": str(least)}
    with Crew(world, {**PARTS, **least_tokens, "PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7"}) as crew:
        for number in numbers(12):
            case = replace(case_of(27_000 + 1000 * least, number, world, transport), replicas=1)
            crew.run("emulated:call", module(), "rank_cases:exchange", case, timeout=200)


@pytest.mark.parametrize(("world", "transport", "room"), [(4, "relayed:tcp", 2), (5, "relayed-dealt:shm", 7)])
def test_large_combines_of_codes(world: int, transport: str, room: int) -> None:
    """Rows of several parts, of which the last may be short, and random shapes."""
    with Crew(world, {**PARTS, **LARGE, "PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7"}) as crew:
        case = Case(
            seed(), world, num_experts=10, top_k=3, hidden=7336, max_tokens=5, transport=transport, combine_wire="fp8", steps=2
        )
        for dtype in ("bfloat16", "float32"):
            crew.run("emulated:across_by_large", module(), replace(case, dtype=dtype, crowd="full"), [])
        for number in numbers(12):
            case = replace(case_of(29_000, number, world, transport), replicas=1, combine_wire="fp8")
            crew.run("emulated:call", module(), "rank_cases:exchange", case, timeout=200)


@pytest.mark.parametrize("room", [1, 2, 7])
def test_large_steps_with_one_resident_thread_block(room: int) -> None:
    """It counts the chunks that the others would have counted, and sends all."""
    with Crew(2, {**LARGE, "PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7"}) as crew:
        for number in numbers(3):
            crew.run("emulated:call", module(), "rank_cases:exchange", case_of(30_000, number, 2, "mapped"))
        for tokens in (3, 60):
            case = Case(seed() + tokens, 2, num_experts=8, top_k=2, hidden=64, max_tokens=tokens, crowd="full", steps=6)
            crew.run("emulated:call", module(), "rank_cases:exchange", case)


@pytest.mark.parametrize(("share", "room"), [(1, 7), (40, 7), (80, 2), (40, 1)])
def test_some_thread_blocks_send_and_others_receive(share: int, room: int) -> None:
    """In percent of seven, of which `room` run at a time."""
    env = {**LARGE, "PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7", "PPLX_COMM_SENDING_SHARE": str(share)}
    with Crew(2, env) as crew:
        for number in numbers(4):
            crew.run("emulated:call", module(), "rank_cases:exchange", case_of(34_000, number, 2, "mapped"))
        for number, layout in enumerate(("compact", "ragged", "padded", "compact")):
            wire = ("fp8", "native")[number % 2]
            case = Case(
                seed() + number, 2, num_experts=8, top_k=3, hidden=320, max_tokens=150, layout=layout, wire=wire, crowd="uneven",
                steps=4, in_flight=1 + number % 2,
            )  # fmt: skip
            crew.run("emulated:call", module(), "rank_cases:exchange", case)


@pytest.mark.parametrize(
    ("layout", "large"), [("compact", "large::combine, rows are copied"), ("ragged", "large::combine, rows are sums")]
)
def test_explain_names_the_kernels_of_a_step(layout: str, large: str) -> None:
    case = Case(seed(), 2, num_experts=8, top_k=2, hidden=64, max_tokens=8, layout=layout, steps=1)
    with Crew(2, {"PPLX_COMM_LARGE_TOKENS": "4", "PPLX_EMULATION_SMS": "7"}) as crew:
        for of_one, of_all in crew.run("emulated:explained", module(), case):
            assert [launch["kernel"] for launch in of_one] == ["decode::dispatch", "decode::combine"]
            assert [launch["kernel"] for launch in of_all] == ["large::dispatch", large]
            assert all(launch["grid"] == 7 and launch["block"] % 32 == 0 for launch in of_one + of_all)
            assert "1 tokens are fewer than 8" in of_one[0]["why"] and "8 tokens are large, from 8 on" in of_all[0]["why"]
            assert "1 tokens are fewer than 4" in of_one[1]["why"] and "8 tokens are large, from 4 on" in of_all[1]["why"]
            assert of_all[0]["shared_bytes"] > of_one[0]["shared_bytes"] > 0


def test_explain_names_the_kernels_of_pieces() -> None:
    case = in_pieces(Case(seed(), 2, num_experts=8, top_k=2, hidden=64, max_tokens=600, steps=1), on_gpu=True)
    with Crew(2, {"PPLX_EMULATION_SMS": "7"}) as crew:
        for of_one, of_all in crew.run("emulated:explained", module(), case):
            assert [launch["kernel"] for launch in of_one] == ["decode::dispatch in pieces", "decode::combine in pieces"]
            assert [launch["kernel"] for launch in of_all] == [
                "large::dispatch in rounds",
                "large::combine, rows are sums, with extras",
            ]


def test_large_steps_of_many_chunks() -> None:
    """More than the thread blocks begin with, and rows of several tiles and parts."""
    counts: list[list[list[int]]] = []
    with Crew(2, LARGE) as crew:
        for number, (wire, dtype, hidden, tokens) in enumerate(
            [
                ("native", "bfloat16", 8192, 30),
                ("fp8", "bfloat16", 8192, 40),
                ("fp8", "bfloat16", 5120, 90),
                ("fp8_ue8m0", "float32", 2304, 70),
                ("mxfp8", "bfloat16", 64, 300),
            ]
        ):
            case = Case(
                seed() + number, 2, num_experts=10, top_k=3, hidden=hidden, max_tokens=tokens, wire=wire, dtype=dtype, steps=3
            )
            counts.append(crew.run("emulated:by_large", module(), case, timeout=200))
    assert all(sum(rank[i] for case_of_ranks in counts for rank in case_of_ranks) > 0 for i in (0, 1)), counts


@pytest.mark.parametrize(("world", "room"), [(1, 7), (2, 1), (2, 7), (4, 2), (9, 7)])
def test_large_steps_of_compact_rows(world: int, room: int) -> None:
    """Rows have numbers without a plan, for up to eight ranks. Some tokens choose no expert, or one expert several times."""
    with Crew(world, {**LARGE, "PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7"}) as crew:
        cases = [("sparse", 3, 150), ("repeats", 8, 70), ("zipf", 1, 90), ("repeats", 6, 80)]
        if (world, room) == (2, 7):
            cases += [("repeats", 8, 1700), ("repeats", 6, 800)]  # more than warps count at once
        for routing, top_k, tokens in cases:
            case = Case(
                seed() + tokens, world, num_experts=2 * world + 1, top_k=top_k, hidden=64, max_tokens=tokens if world < 9 else 20,
                wire="fp8", layout="compact", routing=routing, crowd="uneven", steps=3,
            )  # fmt: skip
            crew.run("emulated:call", module(), "rank_cases:exchange", case, timeout=200)


@pytest.mark.parametrize(("world", "room", "many"), [(1, 7, 1), (2, 1, 1), (2, 7, 30), (4, 2, 12), (4, 7, 1), (9, 7, 5)])
def test_rows_of_several_parts(world: int, room: int, many: int) -> None:
    """Rows of several parts are copied, among those of ranks with few tokens."""
    environment = {"PPLX_COMM_LARGE_TOKENS": str(many), "PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7"}
    with Crew(world, environment) as crew:
        cases = [("fp8", "row", 64, 150), ("native", "row", 64, 90), ("mxfp8", "tma", 320, 60), ("fp8", "tma", 20480, 20)]
        for number, (wire, scale_layout, hidden, tokens) in enumerate(cases):
            case = Case(
                seed() + number, world, num_experts=2 * world + 1, top_k=3, hidden=hidden, max_tokens=tokens if world < 9 else 20,
                wire=wire, scale_layout=scale_layout, layout="compact", crowd="uneven", steps=4, in_flight=1 + number % 2,
            )  # fmt: skip
            crew.run("emulated:call", module(), "rank_cases:exchange", case, timeout=200)


@pytest.mark.parametrize("least", [8, 1000])
@pytest.mark.parametrize("layout", ["compact", "ragged"])
def test_rows_that_are_missing(layout: str, least: int) -> None:
    with Crew(2, {"PPLX_COMM_LARGE_TOKENS": str(least), "PPLX_EMULATION_SMS": "7"}) as crew:
        case = Case(seed(), 2, num_experts=6, top_k=3, hidden=264, max_tokens=40, dtype="bfloat16", layout=layout)
        crew.run("emulated:call", module(), "gpu_cases:missing_rows", case, 4)


@pytest.mark.parametrize("scale_layout", ["row", "tma"])
@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
def test_large_steps_of_tokens_that_are_codes(wire: str, scale_layout: str) -> None:
    """In some steps the caller has quantised. Rows of one scale and of more than a warp has lanes for, and of several parts."""
    with Crew(2, LARGE) as crew:
        for hidden in (272, 20480):
            case = Case(
                seed(), 2, num_experts=6, top_k=2, hidden=hidden, max_tokens=20, wire=wire, scale_layout=scale_layout, steps=6
            )
            crew.run("emulated:call", module(), "rank_cases:exchange", case, timeout=200)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [("float32", "ragged"), ("bfloat16", "ragged"), ("bfloat16", "padded"), ("bfloat16", "compact"), ("float16", "compact")],
)
def test_large_steps_of_sums(dtype: str, layout: str) -> None:
    """Tokens with no rows, one, two and more, of which this rank's own are the first, the last, or between."""
    with Crew(4, LARGE) as crew:
        case = Case(
            seed(), 4, num_experts=10, top_k=2, hidden=144, max_tokens=30, dtype=dtype, layout=layout, routing="sparse", steps=4
        )
        crew.run("emulated:call", module(), "rank_cases:exchange", case)
        crew.run("emulated:call", module(), "gpu_cases:both_devices", replace(case, top_k=5), 4, odd=True)


@pytest.mark.parametrize("room", [1, 7])
def test_large_steps_of_sums_of_many_rows(room: int) -> None:
    """More of them than a thread block's ring has places for. The last part of a row is a part of one."""
    with Crew(2, {**LARGE, "PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "7"}) as crew:
        for number, (top_k, hidden) in enumerate(((14, 1040), (16, 144))):
            case = Case(
                seed() + number, 2, num_experts=20, top_k=top_k, hidden=hidden, max_tokens=20, dtype="bfloat16", crowd="uneven", steps=4,
                layout=("ragged", "padded")[number],
            )  # fmt: skip
            crew.run("emulated:call", module(), "rank_cases:exchange", case, timeout=200)


def test_large_steps_beside_rows_that_show() -> None:
    """Rows that are only copied, of sources with many; those of sources with few go out tile by tile, from the same memory."""
    with Crew(4, {"PPLX_COMM_LARGE_TOKENS": "5"}) as crew:
        for number in numbers(4):
            case = Case(
                seed() + number, 4, num_experts=8, top_k=3, hidden=2048, max_tokens=24, layout="compact", crowd="uneven", steps=4
            )
            crew.run("emulated:call", module(), "rank_cases:exchange", case)


@pytest.mark.parametrize("layout", ["ragged", "compact"])
def test_few_rows_of_ranks_with_many_tokens(layout: str) -> None:
    """Rows that come back have arrival words, though a block has fewer of them than a rank with few tokens may have."""
    with Crew(4, {"PPLX_COMM_LARGE_TOKENS": "10"}) as crew:
        for number, crowd in enumerate(("full", "uneven")):
            case = Case(seed() + number, 4, num_experts=8, top_k=1, hidden=272, max_tokens=30, layout=layout, crowd=crowd, steps=4)
            crew.run("emulated:call", module(), "rank_cases:exchange", case)


@pytest.mark.parametrize("wire", ["native", "fp8"])
def test_large_steps_of_any_bits(wire: str) -> None:
    """Places are blank again for what comes after."""
    with Crew(2, {"PPLX_COMM_LARGE_TOKENS": "5"}) as crew:
        case = Case(seed(), 2, num_experts=8, top_k=3, hidden=272, max_tokens=20, wire=wire)
        crew.run("emulated:call", module(), "gpu_cases:rows_that_look_blank", case, 6)


def test_long_rows_of_many_from_ranks_with_few() -> None:
    """A rank with few tokens returns rows with arrival words, too, when it got many. Warps have five runs of strips of each."""
    with Crew(2, {"PPLX_COMM_LARGE_TOKENS": "6"}) as crew:
        for number, crowd in enumerate(("one_has_none", "uneven", "one_has_all", "uneven")):
            case = Case(seed() + number, 2, num_experts=6, top_k=2, hidden=9216, max_tokens=24, crowd=crowd, steps=4)
            crew.run("emulated:call", module(), "rank_cases:exchange", case)


@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_large_steps_and_steps_of_few_in_turn(layout: str) -> None:
    """As on the CPU device, in the same memory. Dispatches are large from 30 tokens on, combines from 15."""
    with Crew(2, {"PPLX_COMM_LARGE_TOKENS": "15"}) as crew:
        case = Case(seed(), 2, num_experts=8, top_k=3, hidden=144, max_tokens=80, wire="fp8", layout=layout, align=4)
        tokens_of = [40, 3, 3, 80, 29, 30, 14, 15, 1, 1, *[40, 20, 5] * 4]
        crew.run("emulated:call", module(), "gpu_cases:both_devices", case, len(tokens_of), tokens_of=tokens_of)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_large_steps_among_replays(in_flight: int) -> None:
    with Crew(2, LARGE) as crew:
        case = small_case(seed(), 2, in_flight)
        crew.run("emulated:call", module(), "open_step_cases:interleaved", case, list(range(3)), 12, timeout=120)
        run_refused(crew, "refused", case, "replay", None)


def test_large_steps_after_a_reset(tmp_path: Path) -> None:
    case = Case(seed(), 4, num_experts=10, top_k=4, crowd="uneven", in_flight=2)
    with Crew(4, LARGE) as crew:
        reset_after_deaths(crew, ["emulated:call", module()], case, tmp_path)


@pytest.mark.parametrize("near", ["none", "odd"])
@pytest.mark.parametrize("transport", ["nvshmem", "nvshmem-mixed", "mixed:tcp", "relayed:tcp"])
def test_large_steps_between_nodes(transport: str, near: str) -> None:
    with Crew(4, {**LARGE, **PARTS, "PPLX_EMULATION_NEAR": near}) as crew:
        case = Case(seed(), 4, num_experts=8, top_k=3, hidden=64, max_tokens=20, crowd="full", steps=4, transport=transport)
        for remote in crew.run("emulated:across_by_large", module(), case, []):
            assert len(remote) == (1 if near == "odd" and "nvshmem" in transport else 3 if transport == "nvshmem" else 2)


@pytest.mark.parametrize("transport", ["auto:tcp", "nvshmem"])
def test_large_steps_where_others_are_apart(transport: str) -> None:
    """A rank that maps the memory of all others knows that two of them do not map each other's: these return rows their way."""
    with Crew(3, LARGE) as crew:
        case = Case(seed(), 3, num_experts=8, top_k=3, hidden=64, max_tokens=20, crowd="full", steps=4, transport=transport)
        assert crew.run("emulated:across_by_large", module(), case, [(0, 2)]) == [[2], [], [0]]


@pytest.mark.parametrize(("world", "transport"), [(2, "nvshmem"), (2, "nvshmem-mixed"), (4, "nvshmem-mixed")])
def test_large_steps_where_nvshmem_puts_to_no_rank(world: int, transport: str) -> None:
    """All are near, or of one node. Four are of two nodes, by which their rows are added."""
    with Crew(world, {**LARGE, "PPLX_EMULATION_NEAR": "all"}) as crew:
        case = Case(seed(), world, num_experts=8, top_k=8, hidden=64, max_tokens=20, steps=4, transport=transport)
        counts = crew.run("emulated:by_large", module(), case)
    assert all(sum(rank[i] for rank in counts) > 0 for i in (0, 1)), counts


def test_large_steps_of_ids_that_only_the_device_sees() -> None:
    with Crew(2, LARGE) as crew:
        crew.run("emulated:call", module(), "open_step_cases:bad_ids", small_case(seed(), 2, 2), 1)
