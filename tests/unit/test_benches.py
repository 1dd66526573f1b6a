"""Benchmarks without ranks: each runs, writes what it says, and notices what is wrong; and what a summary makes of several runs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import _instruments, crossover, grouped, l2, summary
from bench.gpu.beside import Steps, enough, nothing
from bench.harness import plot
from bench.harness.batch import Shape
from bench.harness.clock import Figure
from bench.harness.options import from_arguments, parser_of
from bench.harness.report import _best
from bench.harness.results import PeerPoint, Point, Results
from bench.proxy import BAR, percentile
from pplx_comm.errors import Error
from pplx_comm.moe.grouped import tiles
from pplx_comm.moe.grouped.loop import Loop
from pplx_comm.moe.segments import Segments
from pplx_comm.wiring.config import make_config

BENCH = Path(__file__).resolve().parents[2] / "bench"
PHASES = ("dispatch", "combine", "round trip")


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCH / program] if program.endswith(".py") else [BENCH / program]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}, check=False
    )


def test_proxy(tmp_path: Path) -> None:
    """200 ns a peer. On one thread: with two, what else this machine does could be measured."""
    file = tmp_path / "proxy.json"
    done = run("proxy.py", "--threads", "1", "--operations", "100", "--peers", "8,64", "--check", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    points = json.loads(file.read_text())["points"]
    assert [(p["peers"], p["endpoints"]) for p in points] == [(n, e) for e in (1, 2, 4) for n in (8, 64)]
    for point in points:
        assert 0 < point["first_ns"]["p50"] <= point["last_ns"]["p50"] <= BAR * point["peers"] and point["writes"] == point["peers"]
    one = _instruments.proxy_cost(peers=8, endpoints=4, rows=128, shard_bytes=1 << 18, operations=20, threads=True)
    assert len(one["first"]) == len(one["last"]) == 20 and one["writes"] == 32  # blocks of 950 KB, in a shard for each endpoint
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]


def test_stages_where_there_is_no_gpu() -> None:
    """What notes them is a build, and a GPU: the error says which is missing."""
    done = run("stages.py", "--tokens", "1")
    missing = ("PPLX_CUDA_STAGES", "no GPU", "CUDA module")
    assert "dispatch ends" in done.stdout or (done.returncode == 1 and any(words in done.stderr for words in missing)), done


def test_grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "grouped.json"
    tiny = ["--shapes", "128x256", "--experts", "3", "--rows", "16,80", "--rounds", "1", "--between", "16", "--group", "5"]
    monkeypatch.setattr(sys, "argv", ["bench/grouped.py", *tiny, "--json", str(file)])
    seen, forward = [], Loop.forward

    def noted(*arguments: Any) -> torch.Tensor:
        seen.append(tiles.shape_of_rows(16, torch.device("cpu")).group)
        return forward(*arguments)

    monkeypatch.setattr(Loop, "forward", noted)
    assert grouped.main() == 0
    record = json.loads(file.read_text())
    # three products of bfloat16 and two of codes, of two sizes, and both of an expert's for few rows, spread in two ways
    assert len(record["points"]) == (5 * 2 + 1) * 2 and all(point["us"]["loop"] > 0 for point in record["points"])
    assert len(record["between"]) == 8 and set(seen) == {5} == {record["supergroup"]}
    assert tiles.shape_of_rows(16, torch.device("cpu")).group != 5


class WrongLoop(Loop):
    """Leaves out one row."""

    name = "wrong"

    def forward(self, x: torch.Tensor, w: torch.Tensor, where: Segments) -> torch.Tensor:
        made = super().forward(x, w, where)
        made[0] = 0
        return made


@pytest.mark.parametrize("rows", [16, 80])
def test_a_wrong_product(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(grouped, "backends", lambda: [Loop(), WrongLoop()])
    problem = grouped.Problem("forward", "bf16", 128, 256, 3, rows, "even")
    with pytest.raises(Error, match="wrong is wrong by"):
        grouped.measured(problem, grouped.Timer(torch.device("cpu"), 1), 1, None)


NCU = r"""#!/usr/bin/env bash
while [ $# -gt 1 ]; do
    case $1 in --log-file) log=$2 ;; --group) height=$2 ;; esac
    shift
done
height=${height:-$1}
for id in 0 1 2; do
    echo "\"$id\",\"rows_by_weights\",\"gpu__time_duration.sum\",\"nsecond\",\"$((1 + id)),$((400 / height + 100))\""
    echo "\"$id\",\"rows_by_weights\",\"lts__t_sector_hit_rate.pct\",\"%\",\"$((50 + height)).25\""
done | sed '1i "ID","Kernel Name","Metric Name","Metric Unit","Metric Value"' > "$log"
"""


def test_hits_in_the_cache(tmp_path: Path) -> None:
    """bench/l2.sh with an ncu that makes its figures up; and what ncu did not measure."""
    (tmp_path / "ncu").write_text(NCU)
    (tmp_path / "ncu").chmod(0o755)
    done = run("l2.sh", "1", "4", PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    _, _, one, four = ([cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines())
    assert one == ["1", "3", "51.2", "2.5", "1.00"] and four == ["4", "3", "54.2", "2.2", "0.88"]
    with pytest.raises(Error, match=r"supergroups of 8.*ERR_NVGPUCTRPERM"):
        l2.table({"8": "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM"})


def test_results_beside_a_gemm_must_stay_the_same_bits() -> None:
    """Of both steps in flight, also where a zero changes its sign."""
    size: Any = SimpleNamespace(x="xx", ids="ii", weights="ww", answers=lambda i: None, y=torch.zeros(2, 3))
    a2a: Any = SimpleNamespace(
        dispatch_send=lambda *_: 0, dispatch_recv=lambda d: d, combine_send=lambda *_: 0, combine_recv=lambda _: size.y,
        check=lambda: None,
    )  # fmt: skip
    steps = Steps(size, a2a, SimpleNamespace(on=lambda stream: contextlib.nullcontext()), ["a", "b"])
    for y in (torch.zeros(2, 3), torch.zeros(2, 3)):
        size.y = y
        steps.launch(nothing)
        steps.check("here")
    assert not steps.wrong
    size.y = torch.tensor([[0.0, 0, 0], [0, 0, -0.0]])
    steps.launch(nothing)
    steps.check("here")
    assert steps.wrong == [f"here: the result on stream {i} is not the one of the first round" for i in (0, 1)]
    assert [enough(*us) for us in ((1000, 500), (10, 500), (0, 0), (4000, 1000))] == [3, 1, 1, 5]


def phases(p50: float) -> dict[str, Figure]:
    return {phase: Figure(3, p50 + i, p50 + i + 1, p50 + i + 2, p50 + i - 1) for i, phase in enumerate(PHASES)}


@pytest.mark.parametrize(
    ("times", "wins"),
    [
        ([(128, 9, 20), (512, 30, 29), (1024, 60, 40)], 512),
        ([(128, 9, 20), (512, 30, 30), (1024, 60, 40)], 512),  # no slower is enough
        ([(128, 20, 9), (512, 30, 31), (1024, 60, 40)], 1024),  # a win that does not last is none
        ([(128, 9, 8), (512, 29, 30)], None),
    ],
)
def test_from_where_on_bulk_copies_win(times: list[tuple[int, float, float]], wins: int | None) -> None:
    """In whatever order points come."""
    points = [crossover.Both(tokens, 8, {"plain": phases(plain), "bulk": phases(bulk)}) for tokens, plain, bulk in times]
    assert crossover.wins_from(points, "combine") == crossover.wins_from(points[::-1], "combine") == wins


@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
@pytest.mark.parametrize("world", [1, 3, 8])
def test_room_for_the_worst_case_of_any_size(layout: str, world: int) -> None:
    """What the library takes by itself for small steps, and for large ones, where it wants to be asked."""
    o = from_arguments(parser_of("test", None).parse_args(["--layout", layout, "--wire", "fp8"]))
    for tokens in (1, 40):
        shape = Shape(o, tokens, 0, world)
        by_itself = make_config(
            world, 0, num_experts=o.experts, top_k=o.top_k, hidden=o.hidden, max_tokens_per_rank=tokens, dtype=o.dtype,
            wire=o.wire, layout=o.layout, in_flight=1, scale_layout="row",
        )  # fmt: skip
        assert shape.out_rows == (by_itself.max_rows or by_itself.local_experts * by_itself.max_per_expert)
    assert Shape(o, 8192, 0, world).out_rows >= 8192 * world


def results() -> Results:
    """A size of small and one of large steps, on 8 multiprocessors and on all; DeepEP can be set at the large one."""
    r = Results(multiprocessors=132)
    for tokens, scale in ((128, 1.0), (4096, 10.0)):
        for num_sms, us in ((8, 40.0), (None, 12.0)):
            point = Point("mapped", tokens, num_sms, phases=phases(us * scale), floor=phases(5 * scale))
            point.composite = phases(us * scale / 2)
            r.points.append(point)
        r.peers.append(PeerPoint("nccl", tokens, phases(60 * scale), {}, "whole"))
    r.peers.append(PeerPoint("deep_ep", 128, phases(30.0), {}, "low-latency mode"))
    r.peers.append(PeerPoint("deep_ep", 4096, phases(500.0), {}, "normal mode, 8 SMs", 8))
    r.peers.append(PeerPoint("deep_ep", 4096, phases(250.0), {}, "normal mode, 24 SMs", None))
    return r


def record(r: Results, number: int = 0) -> dict[str, Any]:
    """As report.record() has it, without what it asks of a world."""
    points = [
        {
            **asdict(point), "ratio": {phase: point.ratio(phase) for phase in PHASES},
            "ratio_to_composite": {phase: point.ratio_to_composite(phase) for phase in PHASES},
            "best_peer": {phase: _best(r, point, phase) for phase in PHASES},
        }
        for point in r.points
    ]  # fmt: skip
    return {
        "points": points, "peers": [asdict(peer) for peer in r.peers], "multiprocessors": r.multiprocessors,
        "ranks": 2, "threads_per_rank": 1, "version": "1", "date": f"{number}", "command": "latency.py", "versions": {"torch": "2"},
        "machine": {"cpu": "some", "cores_allowed": 2, "isa": "x", "kernel": "6"}, "software_device": None,
        "options": {
            "hidden": 7168, "experts": 256, "top_k": 8, "dtype": "bfloat16", "wire": "fp8", "layout": "Compact()",
            "tokens": [128, 4096],
        },
    }  # fmt: skip


def test_the_best_peer_took_no_more_multiprocessors() -> None:
    """Where they can be set. On all, any setting of a peer counts. A peer stands beside the setting that it was given."""
    r = results()

    def best(tokens: int, num_sms: int | None) -> tuple[str, float] | None:
        found = r.best_peer(tokens, num_sms, "combine")
        return found and (found.peer, found.phases["combine"].p50)

    assert best(128, 8) == best(128, None) == ("deep_ep", 31) and best(1, None) is None
    assert best(4096, 8) == ("deep_ep", 501) and best(4096, None) == ("deep_ep", 251)
    r.peers = [peer for peer in r.peers if peer.num_sms != 8]
    r.peers.append(PeerPoint("deep_ep", 4096, phases(240.0), {}, "normal mode, 16 SMs", 16))
    assert best(4096, 8) == ("nccl", 601) and best(4096, 16) == best(4096, None) == ("deep_ep", 241)


def test_what_is_drawn() -> None:
    whole = record(results())
    for num_sms, us in ((8, 40.0), (None, 12.0)):
        part = plot.by_tokens(whole, num_sms)
        assert [(p["tokens"], p["phases"]["dispatch"]["p50"]) for p in part["points"]] == [(128, us), (4096, us * 10)]
        assert {(p["peer"], p["tokens"]): p["phases"]["dispatch"]["p50"] for p in part["peers"]} == {
            ("nccl", 128): 60, ("nccl", 4096): 600, ("deep_ep", 128): 30, ("deep_ep", 4096): 500 if num_sms else 250,
        }  # fmt: skip
    tokens, part = plot.by_sms(whole)
    drawn = sorted((p["peer"], p["num_sms"] or 132, p["phases"]["dispatch"]["p50"]) for p in part["peers"])
    assert tokens == 4096 and drawn == [("deep_ep", 8, 500), ("deep_ep", 132, 250), ("nccl", 8, 600), ("nccl", 132, 600)]


def test_the_summary() -> None:
    """Ratios are taken within a run, then the median of the runs."""
    runs = [record(results(), number) for number in range(3)]
    for point in runs[2]["points"]:
        point["phases"]["dispatch"]["p50"] *= 100  # an outlier
    lines = {tuple(line.split(" | ")[1:4]): line for line in summary.summary(runs).splitlines() if line.startswith("| mapped")}
    assert len(lines) == 2 * 2 * 3
    of = lines["4096", "8", "dispatch"]
    assert of == "| mapped | 4096 | 8 | dispatch | 400.0 | 50.0 | 8.00 | 200.0 | 2.00 | 0.80 (deep_ep on 8) | 1.25 | 1.50 |"
