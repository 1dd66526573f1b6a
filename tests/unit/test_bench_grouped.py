"""bench/grouped.py on a CPU: it runs, it writes what it says, and it notices a wrong product."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bench import grouped
from pplx_comm.errors import Error
from pplx_comm.moe.grouped.loop import Loop
from pplx_comm.moe.segments import Segments

TINY = ["--shapes", "128x256", "--experts", "3", "--rows", "16,80", "--rounds", "1", "--between", "16"]


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = tmp_path / "grouped.json"
    monkeypatch.setattr(sys, "argv", ["bench/grouped.py", *TINY, "--json", str(wanted)])
    assert grouped.main() == 0
    record = json.loads(wanted.read_text())
    # three products of bfloat16 and two of codes, of two sizes, spread in two ways
    assert len(record["points"]) == 5 * 2 * 2 and all(point["us"]["loop"] > 0 for point in record["points"])
    assert [b["kernel"] for b in record["between"]] == ["swiglu", "swiglu + quantise", "quantise", "MXFP8 to 1x128"]
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
