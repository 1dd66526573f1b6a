"""Benchmarks without ranks: each runs, writes what it says, and notices what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import grouped, l2
from bench.harness.clock import Figure
from bench.harness.results import PeerPoint, Results
from bench.proxy import BAR
from pplx_comm.errors import Error
from pplx_comm.moe.grouped.loop import Loop
from pplx_comm.moe.segments import Segments

BENCH = Path(__file__).resolve().parents[2] / "bench"
PHASES = ("dispatch", "combine", "round trip")


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, BENCH / program, *arguments], capture_output=True, text=True, timeout=300, check=False)


def test_proxy(tmp_path: Path) -> None:
    """200 ns a peer. On one thread: with two, what else this machine does could be measured."""
    file = tmp_path / "proxy.json"
    done = run("proxy.py", "--threads", "1", "--operations", "100", "--peers", "8,64", "--check", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    points = json.loads(file.read_text())["points"]
    assert [(p["peers"], p["endpoints"]) for p in points] == [(n, e) for e in (1, 2, 4) for n in (8, 64)]
    for point in points:
        assert 0 < point["first_ns"]["p50"] <= point["last_ns"]["p50"] <= BAR * point["peers"] and point["writes"] == point["peers"]


def test_stages_where_there_is_no_gpu() -> None:
    """A build and a GPU note them: the error says which is missing."""
    done = run("stages.py", "--tokens", "1")
    missing = ("PPLX_CUDA_STAGES", "no GPU")
    assert "dispatch ends" in done.stdout or (done.returncode == 1 and any(words in done.stderr for words in missing)), done


def test_quantise() -> None:
    """A line for each dtype of each instruction set that runs here, a multiple of FP8's time for each wire. How large, a busy machine cannot say."""
    done = run("quantise.py", "--rows", "1", "--hidden", "328", "--repeats", "1")
    lines = [line.split() for line in done.stdout.splitlines()[2:]]
    assert done.returncode == 0 and {line[0] for line in lines} == {"baseline", "avx2", "avx512"}, done
    assert all(len(line) == 8 and line[3] == "1.00x" for line in lines if line[1] != "off:"), done.stdout


def test_grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "grouped.json"
    tiny = ["--shapes", "128x256", "--experts", "3", "--rows", "16,80", "--rounds", "1", "--between", "16", "--group", "5"]
    monkeypatch.setattr(sys, "argv", ["bench/grouped.py", *tiny, "--json", str(file)])
    assert grouped.main() == 0
    record = json.loads(file.read_text())
    # three products of bfloat16 and two of codes, of two sizes, and both of an expert's for few rows, spread in two ways
    assert len(record["points"]) == (5 * 2 + 1) * 2 and all(point["us"]["loop"] > 0 for point in record["points"])
    assert len(record["between"]) == 8 and record["supergroup"] == 5


class WrongLoop(Loop):
    """Leaves out one row."""

    name = "wrong"

    def forward(self, x: torch.Tensor, w: torch.Tensor, where: Segments) -> torch.Tensor:
        made = super().forward(x, w, where)
        made[0] = 0
        return made


def test_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "backends", lambda: [Loop(), WrongLoop()])
    problem = grouped.Problem("forward", "bf16", 128, 256, 3, 16, "even")
    with pytest.raises(Error, match="wrong is wrong by"):
        grouped.measured(problem, grouped.Timer(torch.device("cpu"), 1), 1, None)


def test_hits_in_the_cache() -> None:
    """Medians of ncu's launches; and what ncu did not measure."""
    log = '==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    for launch, us in enumerate((2, 9, 1)):
        log += f'"{launch}","k","{l2.TIME}","nsecond","{us},500"\n"{launch}","k","{l2.HITS}","%","5{us}.25"\n'
    *_, one, four = (line.replace(" ", "") for line in l2.table({"1": log, "4": log.replace("2,500", "1,800")}).splitlines())
    assert one == "|1|3|52.2|2.5|1.00|" and four == "|4|3|52.2|1.8|0.72|"
    with pytest.raises(Error, match=r"supergroups of 8.*ERR_NVGPUCTRPERM"):
        l2.table({"8": "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM"})


def phases(p50: float) -> dict[str, Figure]:
    return {phase: Figure(3, p50, p50, p50, p50) for phase in PHASES}


def test_the_best_peer_took_no_more_multiprocessors() -> None:
    """A peer whose multiprocessors can be set counts beside a setting that is no smaller. On all, every peer counts."""
    r = Results(multiprocessors=132)
    r.peers = [PeerPoint("nccl", 4096, phases(600.0), {}, "whole")]
    r.peers += [PeerPoint("deep_ep", 4096, phases(us), {}, f"{n} SMs", n) for n, us in ((16, 240.0), (None, 250.0))]

    def best(num_sms: int | None) -> tuple[str, float] | None:
        found = r.best_peer(4096, num_sms, "combine")
        return found and (found.peer, found.phases["combine"].p50)

    assert [best(num_sms) for num_sms in (8, 16, None)] == [("nccl", 600), ("deep_ep", 240), ("deep_ep", 240)]
    assert r.best_peer(1, None, "combine") is None
