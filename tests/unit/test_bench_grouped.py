"""bench/grouped.py on a CPU: it runs, it writes what it says, and it notices a wrong product."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import grouped, l2
from pplx_comm.errors import Error
from pplx_comm.moe.grouped import tiles
from pplx_comm.moe.grouped.loop import Loop
from pplx_comm.moe.segments import Segments

TINY = ["--shapes", "128x256", "--experts", "3", "--rows", "16,80", "--rounds", "1", "--between", "16"]


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = tmp_path / "grouped.json"
    monkeypatch.setattr(sys, "argv", ["bench/grouped.py", *TINY, "--json", str(wanted)])
    assert grouped.main() == 0
    record = json.loads(wanted.read_text())
    # three products of bfloat16 and two of codes, of two sizes, and both of an expert's for few rows, spread in two ways
    assert len(record["points"]) == (5 * 2 + 1) * 2 and all(point["us"]["loop"] > 0 for point in record["points"])
    forward = ["swiglu", "swiglu + quantise", "quantise", "MXFP8 to 1x128"]
    training = ["swiglu, backward", "quantise weights", "quantise weights, across", "dequantise"]
    assert [b["kernel"] for b in record["between"]] == forward + training
    assert not any(each["host_us"] for each in [*record["points"], *record["between"]])  # nothing is launched on a CPU
    assert "bf16 wgrad |" in capsys.readouterr().out


class Wrong(Loop):
    """Leaves out one row."""

    name = "wrong"

    def forward(self, x: torch.Tensor, w: torch.Tensor, where: Segments, out: torch.Tensor | None = None) -> torch.Tensor:
        made = super().forward(x, w, where, out)
        made[0] = 0
        return made


@pytest.mark.parametrize("rows", [16, 80])
def test_a_wrong_product(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(grouped, "backends", lambda: [Loop(), Wrong()])
    problem = grouped.Problem("forward", "bf16", 128, 256, 3, rows, "even")
    with pytest.raises(Error, match="wrong is wrong by"):
        grouped.measured(problem, grouped.Timer(torch.device("cpu"), 1), 1, None)


def test_rows_of_experts() -> None:
    for experts, rows in ((3, 16), (32, 4096)):
        zipf = grouped.counts(grouped.Problem("forward", "bf16", 128, 128, experts, rows, "zipf"))
        assert min(zipf) >= 1 and abs(sum(zipf) / (experts * rows) - 1) < 0.05 and zipf[0] > 2 * zipf[-1]


@pytest.mark.parametrize("average", [16, 512, 4096])
def test_supergroups(average: int) -> None:
    """Of all our kernels, and of nothing else about their tiles; then what they choose again."""
    device = torch.device("cpu")

    def shapes() -> list[Any]:
        return [tiles.shape_of_rows(average, device), tiles.shape_of_codes(average, device), tiles.SHAPE_OF_WEIGHTS]

    own = shapes()
    with grouped.supergroups(3):
        assert [shape.group for shape in shapes()] == [3, 3, 3]
        assert [replace(shape, group=0) for shape in shapes()] == [replace(shape, group=0) for shape in own]
    assert shapes() == own and min(shape.group for shape in own) > 3


def test_supergroups_are_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, forward = [], Loop.forward

    def noted(*arguments: Any) -> torch.Tensor:
        seen.append(tiles.shape_of_rows(16, torch.device("cpu")).group)
        return forward(*arguments)

    monkeypatch.setattr(Loop, "forward", noted)
    wanted = tmp_path / "grouped.json"
    tiny = [*TINY, "--formats", "bf16", "--ops", "forward", "--between", "0"]
    monkeypatch.setattr(sys, "argv", ["bench/grouped.py", *tiny, "--group", "5", "--json", str(wanted)])
    assert grouped.main() == 0
    assert seen and set(seen) == {5} and json.loads(wanted.read_text())["supergroup"] == 5


NCU = r"""#!/usr/bin/env bash
set -e
while [ $# -gt 1 ]; do
    case $1 in --log-file) log=$2 ;; --metrics) metrics=$2 ;; --shapes) shape=$2 ;; --group) height=$2 ;; esac
    shift
done
height=${height:-$1}
echo "$shape $metrics" >&2
{
    echo '==PROF== Connected to process 1'
    echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    for id in 0 1 2; do
        echo "\"$id\",\"rows_by_weights\",\"gpu__time_duration.sum\",\"nsecond\",\"$((1 + id)),$((400 / height + 100))\""
        echo "\"$id\",\"rows_by_weights\",\"lts__t_sector_hit_rate.pct\",\"%\",\"$((50 + height)).25\""
    done
    echo '==PROF== Disconnected'
} > "$log"
"""


def test_hits_in_the_cache(tmp_path: Path) -> None:
    """bench/l2.sh with an ncu that makes its figures up."""
    ncu = tmp_path / "ncu"
    ncu.write_text(NCU)
    ncu.chmod(0o755)
    script = Path(grouped.__file__).with_name("l2.sh")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    done = subprocess.run([str(script), "1", "4"], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["2048x7168 lts__t_sector_hit_rate.pct,gpu__time_duration.sum"] * 2
    _, _, one, four = ([cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines())
    assert one == ["1", "3", "51.2", "2.5", "1.00"] and four == ["4", "3", "54.2", "2.2", "0.88"]


def test_what_ncu_did_not_measure() -> None:
    with pytest.raises(Error, match=r"supergroups of 8.*ERR_NVGPUCTRPERM"):
        l2.table({"8": "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM"})


def test_what_the_host_pays() -> None:
    """Beside the device's time, and of the backends that a graph holds."""
    problem = grouped.Problem("forward", "bf16", 128, 256, 3, 16, "even")
    point = grouped.Point(problem, {"triton": 20.0, "loop": 90.0}, {"triton": 41.0}, 48)
    between = [{"kernel": "swiglu", "rows": 16, "width": 2048, "ours": 4.0, "copy": 3.0, "host_us": {"ours": 31.0, "copy": 5.0}}]
    lines = grouped.tables([point], between).split("\n")
    head, _, row, _, _, _, kernel = ([cell.strip() for cell in line.split("|")] for line in lines)
    found = dict(zip(head, row, strict=True))
    assert (found["host: triton, us"], found["triton, us"], found["loop/triton"]) == ("41", "20.0", "4.50")
    assert "host: loop, us" not in found and kernel[-3:-1] == ["31", "5"]


def test_calls_that_wait_are_in_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []
    monkeypatch.setattr(grouped.Call, "capture", lambda call: captured.append(call))
    timer = grouped.Timer(torch.device("cpu"), 1)
    calls = {"waits": grouped.Call(int, waits=True), "does not": grouped.Call(int)}
    timer.ready(calls)
    assert not captured
    timer.device = torch.device("cuda")
    timer.ready(calls)
    assert captured == [calls["does not"]]
