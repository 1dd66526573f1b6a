"""The benchmarks of dispatch and combine as their users start them: each runs, and what is wrong or off does not pass for a figure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Crew

from bench import summary
from bench.harness import plot

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LATENCY = ROOT / "bench" / "latency.py"
ON_CPU = HERE / "bench_on_cpu.py"
TINY = ["--hidden", "256", "--experts", "8", "--top-k", "2", "--warmup", "2", "--timeout", "60"]
GPU = ["--device", "cuda", "--pairs", "2", "--replays", "2"]
OVERLAP = ["--gemm-size", "64", "--gemm-experts", "3", "--gemm-rows", "4", "--intermediate", "32", "--delay-us", "30"]
OVERLAP += ["--rounds", "6", "--calm", "3"]
PHASES = {"dispatch", "combine", "round trip"}
HALVES = {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"}


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3) as three:
        yield three


def ranks_of(program: Path, *arguments: str, ranks: int = 2) -> tuple[list[int | None], str]:
    """Ranks of a program, without its launcher: their exit statuses, and what they said."""
    with Crew(ranks, rank_env={rank: {"LOCAL_RANK": str(rank)} for rank in range(ranks)}) as crew:
        crew.start("program_cases:run", str(program), list(arguments), last=True)
        statuses = [crew.wait(rank, 120) for rank in range(ranks)]
        for rank, status in enumerate(statuses):
            assert status is not None, crew.output()
            crew.ended(rank, status)
        return statuses, crew.output()


def written_by(folder: Path, program: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Two ranks' results file and output."""
    file = folder / "bench.json"
    statuses, said = ranks_of(program, *arguments, "--json", str(file))
    assert statuses == [0, 0], said
    return json.loads(file.read_text()), said


def test_latency(tmp_path: Path) -> None:
    transports = ["mapped", "proxy:shm", "proxy:nosuch"]
    arguments = ["--tokens", "3,1", "--wire", "fp8", "--transport", ",".join(transports), "--iters", "6"]
    record, said = written_by(tmp_path, LATENCY, *TINY, *arguments)
    assert [(p["transport"], p["tokens"]) for p in record["points"]] == [(t, n) for n in (1, 3) for t in transports]
    for point in record["points"]:
        if point["transport"] == "proxy:nosuch":
            assert "nosuch" in point["off"] and not point["phases"]
            continue
        assert point["off"] is None and set(point["phases"]) == PHASES | HALVES and set(point["floor"]) == PHASES
        for figure in (*point["phases"].values(), *point["floor"].values()):
            assert figure["n"] == 6 and 0 < figure["least"] <= figure["p50"] <= figure["p90"] <= figure["p99"]
        for phase in PHASES:
            assert point["ratio"][phase] == pytest.approx(point["phases"][phase]["p50"] / point["floor"][phase]["p50"])
        # Combine's rows are two bytes an element, dispatch's one and a scale.
        assert point["bytes_per_rank"]["combine"] > point["bytes_per_rank"]["dispatch"] > 0
    assert {(p["peer"], p["tokens"]) for p in record["peers"]} == {("gloo", 1), ("gloo", 3)}
    lines = [line for line in summary.summary([record] * 3).splitlines() if line.startswith(("| mapped", "| proxy"))]
    assert len(lines) == 2 * (3 + 3 + 1)  # a line a phase, or one that says why there is none
    assert all(words in said for words in ("ours/floor", "halves:", "proxy:nosuch  1 tokens off:", "mpi off:"))


@pytest.mark.slow
def test_latency_of_a_gpu_up_to_its_cuda_calls(tmp_path: Path) -> None:
    """Every transport and number of multiprocessors has a point. Pictures are drawn."""
    pytest.importorskip("matplotlib")
    transports = ["mapped", "proxy:tcp", "nvshmem:1"]
    arguments = ["--tokens", "3,600", "--peers", "nccl,ag_rs,deep_ep,flashinfer", "--num-sms", "all,3", "--wire", "fp8"]
    arguments += ["--slot-bytes", "600000", "--transport", ",".join(transports), "--schedules", "tokens:push,peers:bulk"]
    record, said = written_by(tmp_path, ON_CPU, "latency", "pairs", *GPU, *TINY, *arguments)
    expected = [(tokens, transport, n) for tokens in (3, 600) for transport in transports for n in (3, None)]
    assert [(p["tokens"], p["transport"], p["num_sms"]) for p in record["points"]] == expected and record["in_pieces"] == [600]
    for point in record["points"]:
        phases, floor = ({phase: of[phase]["p50"] for phase in PHASES} for of in (point["phases"], point["floor"]))
        assert phases == {"dispatch": 3.0, "combine": 5.0, "round trip": 8.0} and set(point["phases"]) > PHASES
        assert floor["round trip"] == pytest.approx(floor["dispatch"] + floor["combine"])
        for phase, figures in point["schedules"].items():
            assert set(figures) == {"tokens:push", "peers:bulk"} and floor[phase] == min(f["p50"] for f in figures.values())
    assert said.count("GB/s") == 2 * 2 * 2 * 2  # sizes, multiprocessors, phases, schedules
    assert [(p["peer"], p["tokens"]) for p in record["peers"]] == [(name, n) for n in (3, 600) for name in ("nccl", "ag_rs")]
    for peer in record["peers"]:
        dispatch, combine, both = (peer["phases"][phase]["p50"] for phase in ("dispatch", "combine", "round trip"))
        assert peer["peer"] == "nccl" or combine == pytest.approx(both - dispatch)
    assert {name: why.partition(":")[0] for name, why in record["peers_off"].items()} == {
        "deep_ep": "import deep_ep",
        "flashinfer": "import flashinfer.comm",
    }
    drawn = plot.plot(record, str(tmp_path / "bench.png"))
    assert drawn == [str(tmp_path / name) for name in ("bench.png", "bench-by-sms.png")]
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_crossover(tmp_path: Path) -> None:
    """Dispatches of 1 us a token beside 4 us of large ones, combines of 0.5 beside 3; on 8 multiprocessors plain ones take twice that."""
    record, _ = written_by(tmp_path, ON_CPU, "crossover", "none", *GPU, *TINY, "--tokens", "9,2,5,3", "--num-sms", "all,8")
    assert record["large_wins"] == [
        {"num_sms": 8, "from": {"dispatch": 2, "combine": 3, "round trip": 3}},
        {"num_sms": None, "from": {"dispatch": 5, "combine": 9, "round trip": 5}},
    ]


def test_overlap(tmp_path: Path) -> None:
    record, said = written_by(tmp_path, ON_CPU, "overlap", "none", *TINY, *OVERLAP, "--tokens", "5", "--num-sms", "4,2")
    assert [(p["gemm"], p["num_sms"]) for p in record["points"]] == [(g, n) for g in ("compute", "weights") for n in (2, 4)]
    for point in record["points"]:
        assert point["rounds"] == {way: of["n"] for way, of in point["times"].items()} and point["lost"]["alone"] == 0
    assert "24 rounds of 2 steps with delays: no timeout" in said


@pytest.mark.parametrize(
    ("program", "plant", "says", "arguments"),
    [
        ("latency", "combine", "combine: y[0, 0]", ["--iters", "4", "--peers", "none"]),
        ("latency", "dispatch", "d.src_token", ["--iters", "4", "--peers", "none"]),
        ("latency", "none", "proxy:nosuch is off", ["--transport", "proxy:nosuch", "--peers", "none"]),
        ("latency", "combine", "combine: y[0, 0]", ["--peers", "none", *GPU]),
        ("crossover", "deaf", "0 large launches, where large kernels were asked for", ["--num-sms", "all", *GPU]),
        ("overlap", "later", "is not the one of the first round", [*OVERLAP, "--num-sms", "2", "--gemm", "compute"]),
    ],
)
def test_what_is_wrong_fails_the_run(program: str, plant: str, says: str, arguments: list[str]) -> None:
    statuses, said = ranks_of(ON_CPU, program, plant, *TINY, "--tokens", "2", *arguments)
    assert 0 not in statuses and says in said, said


@pytest.mark.parametrize(("layout", "wire", "row"), [("ragged", "native", 512), ("compact", "mxfp8", 256 + 8)])
def test_the_floor_copies_every_byte_once(crew: Crew, layout: str, wire: str, row: int) -> None:
    """Rows to peers, a row per place; expert rows in, partial rows out and in, tokens out. Own rows are not sent."""
    arguments = ["--tokens", "17", "--hidden", "256", "--experts", "8", "--top-k", "3", "--wire", wire, "--layout", layout]
    token = 512
    for ran in crew.run("bench_cases:floor_copies", arguments, []):
        rest = ran["tokens"] * (token - row)  # a quantised token is read whole, though not copied whole
        assert ran["dispatch written"] == (ran["sent"] + ran["placed"]) * row
        assert ran["dispatch read"] == ran["dispatch written"] + rest
        assert ran["combine written"] == (ran["returned"] + ran["tokens"]) * token
        assert ran["combine read"] == (ran["placed"] + ran["sent"] + ran["only here"]) * token
    crew.run("bench_cases:floor_copies", arguments, [0, 1, 2])  # a proxy's stays in the send area


def test_peers_bring_what_was_sent(crew: Crew) -> None:
    shape = ["--tokens", "5", "--dtype", "fp32", "--hidden", "256", "--experts", "7", "--top-k", "3", "--wire", "fp8"]
    crew.run("bench_cases:gpu_peers", shape)


@pytest.mark.parametrize("wire", ["native", "fp8", "mxfp8"])
def test_flashinfer_is_checked(crew: Crew, wire: str) -> None:
    shape = ["--tokens", "5,9", "--hidden", "256", "--experts", "6", "--top-k", "3", "--wire", wire]
    for plant, says in (("none", ""), ("rows", "rows from rank 0"), ("ids", "have ids"), ("sums", "sums are not")):
        said = crew.run("bench_cases:flashinfer_peer", shape, plant)
        assert all(says in one and bool(says) == bool(one) for one in said), (plant, said)
