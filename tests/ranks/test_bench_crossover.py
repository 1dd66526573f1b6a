"""bench/crossover.py: from where on bulk copies win, of planted times; and that what ran is what was asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_bench import TINY, ranks_of

from bench import crossover
from bench.crossover import Both
from bench.harness.clock import Figure
from bench.harness.options import from_arguments, parser_of

PROGRAM = Path(__file__).resolve().parent / "crossover_on_cpu.py"
PHASES = ("dispatch", "combine", "round trip")


def point(tokens: int, plain: float, bulk: float, num_sms: int | None = 8) -> Both:
    def phases(us: float) -> dict[str, Figure]:
        return {phase: Figure(3, us, us, us, us) for phase in PHASES}

    return Both(tokens, num_sms, {"plain": phases(plain), "bulk": phases(bulk)})


@pytest.mark.parametrize(
    ("times", "wins"),
    [
        ([(128, 9, 20), (512, 30, 29), (1024, 60, 40)], 512),
        ([(128, 9, 20), (512, 30, 30), (1024, 60, 40)], 512),  # no slower is enough
        ([(128, 20, 9), (512, 30, 31), (1024, 60, 40)], 1024),  # a win that does not last is none
        ([(128, 9, 8), (512, 30, 29)], 128),
        ([(128, 9, 8), (512, 29, 30)], None),
        ([], None),
    ],
)
@pytest.mark.parametrize("turn", [1, -1])
def test_from_where_on(times: list[tuple[int, float, float]], wins: int | None, turn: int) -> None:
    """In whatever order points come."""
    points = [point(*one) for one in times][::turn]
    assert crossover.wins_from(points, "combine") == wins


def test_each_number_of_multiprocessors_has_its_own() -> None:
    points = [point(128, 9, 10), point(512, 30, 20), point(128, 9, 8, None), point(512, 30, 20, None), point(512, 20, 30, 24)]
    points[0].us["bulk"]["dispatch"] = Figure(3, 8, 8, 8, 8)
    found = {one["num_sms"]: one["from"] for one in crossover.crossovers(points)}
    assert found[8] == {"dispatch": 128, "combine": 512, "round trip": 512}
    assert found[None] == dict.fromkeys(PHASES, 128) and found[24] == dict.fromkeys(PHASES)
    o = from_arguments(parser_of("test", None).parse_args(["--device", "cuda"]))
    lines = crossover.table(o, SimpleNamespace(size=2), points, "no GPU").splitlines()  # type: ignore[arg-type]
    last = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[-3:]]
    assert last == [["8", "128", "512", "512"], ["all", "128", "128", "128"], ["24", "never", "never", "never"]]


def test_a_run(tmp_path: Path) -> None:
    """Dispatches of 1 us a token beside 4 us by bulk copies, combines of 0.5 beside 3; on 8 multiprocessors plain ones take twice that."""
    written = tmp_path / "crossover.json"
    arguments = [*TINY, "--tokens", "9,2,5,1,3", "--num-sms", "all,8", "--pairs", "2", "--replays", "1", "--json", str(written)]
    statuses, said = ranks_of(PROGRAM, "none", *arguments)
    assert statuses == [0, 0], said
    record: dict[str, Any] = json.loads(written.read_text())
    assert [(p["num_sms"], p["tokens"]) for p in record["points"]] == [(n, t) for n in (8, None) for t in (1, 2, 3, 5, 9)]
    assert record["bulk_wins"] == [
        {"num_sms": 8, "from": {"dispatch": 2, "combine": 3, "round trip": 3}},
        {"num_sms": None, "from": {"dispatch": 5, "combine": 9, "round trip": 5}},
    ]
    assert all(point["us"]["bulk"]["round trip"]["p50"] == 7 for point in record["points"])
    assert "round trip: bulk from, tokens" in said


def test_kernels_that_were_not_asked_for() -> None:
    statuses, said = ranks_of(PROGRAM, "deaf", *TINY, "--tokens", "3", "--num-sms", "all", "--pairs", "2", "--replays", "1")
    assert 0 not in statuses and "3 tokens: 0 launches by bulk copies, where bulk kernels were asked for" in said, said


def test_the_setting_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "768"):
        monkeypatch.delenv(crossover.VARIABLE, raising=False)
        if before is not None:
            monkeypatch.setenv(crossover.VARIABLE, before)
        with crossover.setting(1):
            assert os.environ[crossover.VARIABLE] == "1"
        assert os.environ.get(crossover.VARIABLE) == before
