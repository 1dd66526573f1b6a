"""Invariants 5 and 6 (docs/design.md): what a caller can get wrong raises before anything is sent and takes no step; constructors agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import Case
from harness import Crew, Crews

import pplx_comm as pc
import pplx_comm._core as _core

CASES = [
    Case(11, 3, routing="uniform", num_experts=7, top_k=3, crowd="uneven"),
    Case(12, 3, transport="relayed:tcp", wire="fp8_ue8m0", hidden=136, layout="padded", top_k=2, crowd="uneven"),
    Case(13, 3, transport="proxy:shm", dtype="float32", wire="fp8", layout="compact", num_experts=9, top_k=1),
    Case(14, 3, dtype="float16", wire="mxfp8", layout="ragged", scale_layout="tma", align=8, num_experts=5, top_k=4),
]


def test_bad_replicas() -> None:
    with Crew(4) as four:
        four.run("misuse_cases:bad_replicas")


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.transport}-{c.wire}-{c.layout}")
@pytest.mark.parametrize("clumsy", [0, 2])
def test_bad_dispatches(crew: Crews, case: Case, clumsy: int) -> None:
    crew.run("misuse_cases:bad_dispatches", case, clumsy)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.transport}-{c.wire}-{c.layout}")
@pytest.mark.parametrize("clumsy", [0, 2])
def test_bad_combines(crew: Crews, case: Case, clumsy: int) -> None:
    crew.run("misuse_cases:bad_combines", case, clumsy)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.transport}-{c.wire}-{c.layout}")
def test_after_close(crew: Crews, case: Case) -> None:
    crew.run("misuse_cases:after_close", case)


def test_large_tokens_that_differ(crew: Crews) -> None:
    for r in crew.run("misuse_cases:construct", {}, {}, {1: {"PPLX_COMM_LARGE_TOKENS": "5"}}):
        assert r["is_error"] and "PPLX_COMM_LARGE_TOKENS" in r["message"] and "rank 1" in r["message"], r


def test_odd_views(crew: Crews) -> None:
    crew.run("misuse_cases:numbers_of_tokens")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("num_experts", (8, 9)),
        ("top_k", (2, 3)),
        ("hidden", (64, 72)),
        ("max_tokens_per_rank", (8, 16)),
        ("wire", ("native", "fp8")),
        ("transport", ("auto", "mapped")),
        ("in_flight", (1, 2)),
        ("timeout", (100.0, 5.0)),
        ("provider", ("tcp", "shm")),
        ("scale_layout", ("row", "tma")),
        ("node_size", (None, 3)),
        ("slot_bytes", (None, 1 << 30)),
        ("dedup", ("rank", "node")),
        ("layout", (pc.Ragged(align=8), pc.Ragged(align=1))),
        ("layout", (pc.Compact(), pc.Padded())),
        ("layout", (pc.Padded(align=64), pc.Padded())),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_ranks_that_differ(crew: Crews, field: str, values: tuple[Any, Any]) -> None:
    """Every rank names the field, the ranks and both values."""
    for r in crew.run("misuse_cases:construct", {field: values[0]}, {1: {field: values[1]}}, {}):
        assert r["is_error"], r
        for part in (
            field,
            "rank 1",
            "ranks 0, 2",
            str(getattr(values[0], "align", values[0])),
            str(getattr(values[1], "align", values[1])),
        ):
            assert part.split("(")[0] in r["message"], r


def test_ranks_with_other_nodes(crew: Crews) -> None:
    """Sums depend on the table of nodes, so a difference raises on all ranks."""
    for r in crew.run("misuse_cases:other_nodes"):
        assert r["is_error"] and "nodes is [0, 0, 0] on ranks 0, 2, [0, 1, 1] on rank 1" in r["message"], r


def test_same_wire_by_two_names(crew: Crews) -> None:
    """A string and the enumeration's member are the same thing."""
    for r in crew.run("misuse_cases:construct", {"wire": "fp8"}, {1: {"wire": pc.Wire.FP8}, 2: {"wire": "FP8"}}, {}):
        assert r["type"] == "", r


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"hidden": 12}, ["hidden=12", "16 bytes"]),
        ({"hidden": 0}, ["hidden=0"]),
        ({"hidden": 64.0}, ["hidden", "integer"]),
        ({"top_k": 0}, ["top_k=0", "1 to 16"]),
        ({"top_k": 17}, ["top_k=17", "1 to 16"]),
        ({"num_experts": 0}, ["num_experts=0"]),
        ({"num_experts": True}, ["num_experts"]),
        ({"max_tokens_per_rank": 0}, ["max_tokens_per_rank=0"]),
        ({"max_tokens_per_rank": 2**20 + 1}, ["max_tokens_per_rank"]),
        ({"in_flight": 3}, ["in_flight"]),
        ({"in_flight": 16}, ["in_flight=16"]),
        ({"timeout": 0}, ["timeout=0"]),
        ({"timeout": float("nan")}, ["timeout=nan"]),
        ({"timeout": float("inf")}, ["timeout=inf"]),
        ({"timeout": 1e10}, ["timeout=10000000000.0", "at most 1000000"]),
        ({"timeout": "5"}, ["timeout='5'"]),
        ({"wire": "fp9"}, ["fp9", "native"]),
        ({"wire": 8}, ["wire=8"]),
        ({"transport": "pigeon"}, ["pigeon", "mapped"]),
        ({"transport": "proxy", "provider": "pigeon"}, ["pigeon"]),
        ({"placement": "moon"}, ["placement='moon'", "host"]),
        ({"placement": "device"}, ["placement='device'", "device='cuda'"]),
        ({"device": "tpu"}, ["tpu"]),
        ({"device": "meta"}, ["meta", "cpu"]),
        ({"layout": "ragged"}, ["layout", "Ragged"]),
        ({"scale_layout": "column"}, ["scale_layout='column'", "tma"]),
        ({"node_size": 0}, ["node_size=0"]),
        ({"node_size": 4}, ["node_size=4"]),
        ({"num_sms": 0}, ["num_sms=0"]),
        ({"dedup": "all"}, ["dedup='all'", "'auto', 'rank' or 'node'"]),
        ({"dedup": True}, ["dedup=True", "'auto', 'rank' or 'node'"]),
        ({"dedup": "node", "max_tokens_per_rank": 4096, "slot_bytes": 1 << 19}, ["dedup='node'", "slot_bytes=524288", "at least"]),
        ({"combine_wire": "fp4"}, ["combine_wire='fp4'", "'native' or 'fp8'"]),
        ({"combine_wire": "fp8"}, ["combine_wire='fp8'", "needs dedup='node', not 'auto'"]),
        ({"dedup": "node", "transport": "proxy"}, ["dedup='node'", "transport='proxy'", "node_size="]),
        # The dtype is not 'supported', whatever it is.
        ({"dtype": None}, ["dtype=None"]),
        ({"dtype": "bfloat16"}, ["bfloat16"]),
        ({"hidden": 7168, "max_tokens_per_rank": 65536, "top_k": 8}, ["max_rows=", "GiB", "bytes"]),
        ({"hidden": 7168, "max_tokens_per_rank": 65536, "top_k": 8, "layout": pc.Padded()}, ["max_tokens_per_expert=", "GiB"]),
        ({"max_tokens_per_rank": 2**20}, ["max_tokens_per_rank", "top_k", str(2**20)]),
        ({"num_experts": 3 * 4096 + 1}, ["4096"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
@pytest.mark.parametrize("who", ["all", "one"])
def test_bad_configurations(crew: Crews, arguments: dict[str, Any], parts: list[str], who: str) -> None:
    """Wrong on all ranks or on one of them: all raise, and say what and where. What comes next works."""
    everywhere, on_one = (arguments, {}) if who == "all" else ({}, {1: arguments})
    results = crew.run("misuse_cases:construct", everywhere, on_one, {})
    for rank, r in enumerate(results):
        assert r.get("is_error"), r
        assert r["seconds"] < 15, r
        for part in parts:
            assert part in r["message"], r
        if who == "one" and rank != 1:
            assert "rank 1" in r["message"], r


def test_more_memory_than_there_is(crew: Crews) -> None:
    huge = {"max_tokens_per_rank": 2**19, "hidden": 2**20, "layout": pc.Ragged(max_rows=8)}
    for r in crew.run("misuse_cases:construct", huge, {}, {}):
        assert r.get("is_error"), r
        for part in ("bytes", "available", "max_tokens_per_rank"):
            assert part in r["message"], r


def test_one_rank_fails_to_construct(crew: Crews) -> None:
    """Something that goes wrong on one rank only, in the middle."""
    for setting in ({"PPLX_COMM_THREADS": "none"}, {"PPLX_COMM_THREADS": "0"}):
        for r in crew.run("misuse_cases:construct", {}, {}, {2: setting}):
            assert r.get("is_error"), r
            assert "PPLX_COMM_THREADS" in r["message"], r
    for r in crew.run("misuse_cases:other_first_step", 0):
        assert r.get("is_error"), r
        assert "first_step" in r["message"], r


def test_the_cpu_by_number(crew: Crews) -> None:
    """torch's index of a CPU is no GPU's."""
    assert not any(r.get("is_error") for r in crew.run("misuse_cases:construct", {"device": "cpu:0"}, {}, {}))


def test_a_gpu_on_one_rank(crew: Crews) -> None:
    for r in crew.run("misuse_cases:sees_a_gpu", [1]):
        assert r.get("is_error") and "device is 'cpu' on ranks 0, 2, 'cuda' on rank 1" in r["message"], r
    assert not any(r.get("is_error") for r in crew.run("misuse_cases:sees_a_gpu", []))


def test_a_missing_provider() -> None:
    """No libfabric on one rank, or no NIC for the provider on any: all soon hear which rank lacks what, and later calls work."""
    proxy = {"transport": "proxy", "provider": "tcp"}
    missing = "/nowhere/libfabric.so.1"
    with Crew(3) as crew:
        for rank, r in enumerate(crew.run("misuse_cases:construct", proxy, {}, {1: {"PPLX_LIBFABRIC": missing}})):
            assert r.get("is_error") and r["seconds"] < 15, r
            assert missing in r["message"] and "cannot be loaded" in r["message"], r
            assert rank == 1 or (r["peer"] == 1 and "rank 1" in r["message"]), r
        if _core.libfabric_status()["providers"]["efa"]["available"]:
            return  # on a machine with EFA no provider is missing
        for r in crew.run("misuse_cases:construct", {"transport": "proxy", "provider": "efa"}, {}, {}):
            assert r.get("is_error") and r["seconds"] < 15, r
            assert "efa" in r["message"], r


def test_another_version(crew: Crews) -> None:
    for r in crew.run("misuse_cases:other_version", 1):
        assert r.get("is_error"), r
        for part in ("version", "rank 1", "0.0.1+other"):
            assert part in r["message"], r


def test_a_ninth_all_to_all(crew: Crews) -> None:
    for r in crew.run("misuse_cases:ninth"):
        assert r.get("is_error") and not r["is_peer"], r
        assert "8" in r["message"], r


@pytest.mark.parametrize("layout", [{"align": 0}, {"align": 1.5}, {"max_rows": 0}, {"max_rows": -1}, {"align": True}])
def test_bad_layouts(layout: dict[str, Any]) -> None:
    with pytest.raises(pc.Error, match=next(iter(layout))):
        pc.Ragged(**layout)


def test_steps_of_relays_received_in_another_order(crew: Crews) -> None:
    for first, second in crew.run("pieces_cases:out_of_order", Case(1, 3, transport="relayed:tcp", in_flight=2)):
        assert "dispatch_recv: step 2 before step 1" in first and "received in order" in first, first
        assert "combine_recv: step 2 before step 1" in second and "dedup='node'" in second, second


def test_required_bytes() -> None:
    """Grows with everything that it depends on, and refuses what the constructor refuses."""
    usual: dict[str, Any] = {"world_size": 4, "num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 8}
    base = pc.AllToAll.required_bytes(**usual)
    assert base > 4 * 8 * 64 * 2
    grows = [{"hidden": 4096}, {"max_tokens_per_rank": 512}, {"world_size": 64}, {"in_flight": 8}, {"remote_peers": 3}]
    for more in [*grows, {"remote_peers": 2, "dedup": "node"}]:
        assert pc.AllToAll.required_bytes(**{**usual, **more}) > base, more
    bad_ones = (
        {"hidden": 12},
        {"world_size": 2000},
        {"remote_peers": 4},
        {"slot_bytes": 0},
        {"slot_bytes": 1.5},
        {"dedup": "all"},
    )
    for bad in bad_ones:
        with pytest.raises(pc.Error):
            pc.AllToAll.required_bytes(**{**usual, **bad})


@pytest.mark.parametrize(("ranks", "most"), [(16, 0.0408), (64, 0.1546)])
def test_slots_of_rails(ranks: int, most: float) -> None:
    """GiB of 128 tokens on nodes of eight: slots for a rank's node, and for its rails."""
    required = pc.AllToAll.required_bytes(
        world_size=ranks, num_experts=256, top_k=8, hidden=7168, max_tokens_per_rank=128, wire="fp8", remote_peers=ranks - 8,
        dedup="node", layout=pc.Ragged(max_rows=1 << 17),
    )  # fmt: skip
    assert most * 0.99 < required / 2**30 < most


@pytest.mark.parametrize(
    ("changes", "by_node"),
    [({}, True), ({"slot_bytes": 1 << 30}, True), ({"slot_bytes": 400_000, "max_tokens": 600}, False), ({"in_flight": 2}, False)],
)
def test_what_auto_is(changes: dict[str, Any], by_node: bool) -> None:
    """dedup="auto" is "node" where its limits change nothing."""
    case = Case(7, 4, transport="undecided:tcp", num_experts=16, top_k=4, **changes)
    with Crew(4) as crew:
        assert crew.run("rank_cases:goes_by_node", case) == [by_node] * 4
        assert not any(crew.run("rank_cases:goes_by_node", replace(case, transport="proxy:tcp")))


@pytest.mark.parametrize("transport", ["relayed:tcp", "relayed-dealt:shm", "mixed:tcp", "undecided:tcp"])
def test_required_bytes_are_those_that_ranks_map(transport: str) -> None:
    """To the page."""
    with Crew(4) as crew:
        for in_flight, hidden in ((1, 64), (2, 1024)):
            case = Case(1, 4, num_experts=16, top_k=4, hidden=hidden, max_tokens=64, in_flight=in_flight, transport=transport)
            for mapped, required in crew.run("rank_cases:mapped_bytes", case):
                assert mapped == required > 0, (transport, mapped, required)


@pytest.mark.parametrize(("ranks", "most"), [(8, 0.0211), (16, 0.0632), (64, 0.3156)])
def test_slots_on_gpus(ranks: int, most: float) -> None:
    """GiB of 128 tokens: slots for eight mapped ranks, and slots and send blocks for remote peers."""
    required = pc.AllToAll.required_bytes(
        world_size=ranks, num_experts=256, top_k=8, hidden=7168, max_tokens_per_rank=128, wire="fp8", remote_peers=ranks - 8,
        device="cuda", dedup="rank", layout=pc.Ragged(max_rows=1 << 17),
    )  # fmt: skip
    assert most * 0.99 < required / 2**30 < most


def test_slots_of_less_than_a_block() -> None:
    """slot_bytes bounds what large steps take, and leaves room for those that never go in pieces."""
    layer: dict[str, Any] = {
        "world_size": 64, "num_experts": 256, "top_k": 8, "hidden": 7168, "max_tokens_per_rank": 4096, "wire": "fp8",
        "layout": pc.Ragged(max_rows=1 << 17), "remote_peers": 56, "dedup": "rank",
    }  # fmt: skip
    required = pc.AllToAll.required_bytes
    whole = required(**layer)
    assert whole > 8 << 30
    assert required(**layer, slot_bytes=1 << 30) < 3 << 30
    assert required(**layer, slot_bytes=1 << 40) == whole  # while it fits, nothing changes
    with pytest.raises(pc.Error, match=r"must be at least [0-9]+ here: steps of up to 256 tokens") as told:
        required(**layer, slot_bytes=1 << 20)
    least = int(str(told.value).split("at least ")[1].split()[0])
    assert 1 << 20 < least < 1 << 30
    required(**layer, slot_bytes=least)
    with pytest.raises(pc.Error, match="must be at least"):
        required(**layer, slot_bytes=least - 1)
    small = {**layer, "max_tokens_per_rank": 256}
    assert required(**small, slot_bytes=1) == required(**small)  # never in pieces
