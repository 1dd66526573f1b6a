"""bench/overlap.py: two steps beside a GEMM. What is launched in which order, what is written, and that what fails fails the run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bench import TINY, ranks_of

from bench import overlap
from bench.gpu import beside
from bench.gpu.beside import WAYS, WITH_STEPS, Beside, Delays, Rounds, Steps, composites, enough
from bench.gpu.gemm import Gemm, Gemms, gemm
from bench.harness.clock import Figure

PROGRAM = Path(__file__).resolve().parent / "overlap_on_cpu.py"
SMALL = ["--gemm-size", "64", "--gemm-experts", "3", "--gemm-rows", "4", "--intermediate", "32", "--delay-us", "30"]
SLOTS = 600000
"""Bytes, of which a step of 600 tokens does not find enough."""
RUN = ["--tokens", "5", "--num-sms", "4,2", "--rounds", "6", "--calm", "3", *SMALL, *TINY]


class Noting:
    """A device that notes what is asked of it, and on which stream."""

    device, multiprocessors = torch.device("cpu"), 132

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = "default"
        self.clock = 0.0

    def say(self, what: str) -> None:
        self.said.append(f"{what} on {self.current}")

    def streams(self, n: int, *, first: bool) -> list[str]:
        return [f"{'steps' if first else 'gemm'}{i}" for i in range(n)]

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def leaving(self, num_sms: int) -> Iterator[None]:
        self.say(f"leaving {num_sms}")
        yield
        self.say("leaving none")

    def delay(self, us: float) -> None:
        self.say(f"delay {us:g}")

    def gate(self, us: float) -> Any:
        self.say("gate")
        return SimpleNamespace(hold=lambda stream: self.say(f"{stream} held"))

    def stopwatch(self, stream: str) -> Any:
        self.say(f"{stream} begins")
        self.clock += 1
        return SimpleNamespace(stop=lambda: self.say(f"{stream} ends"), microseconds=lambda took=self.clock: took)

    def synchronize(self) -> None:
        self.say("synchronize")


def world_of(device: Noting) -> Any:
    return SimpleNamespace(barrier=lambda: device.say("barrier"), rank=0, size=2)


def test_a_round() -> None:
    """All that is timed is queued behind the gate, and the clocks begin there."""
    device = Noting()
    rounds = Rounds(world_of(device), device, Gemm("compute", "", lambda: device.say("gemm")))
    rounds.gemms = 2
    own, others = rounds.round(lambda: device.say("steps"), 48)
    streams = ["steps0", "steps1", "gemm0"]
    assert device.said == [
        "barrier on default", "gate on default", *(f"{s} held on default" for s in streams),
        *(f"{s} begins on default" for s in streams), "steps on default", "leaving 48 on gemm0", "gemm on gemm0", "gemm on gemm0",
        "leaving none on gemm0", *(f"{s} ends on default" for s in streams), "synchronize on default",
    ]  # fmt: skip
    assert (own, others) == (3, 2)


class NotingSteps:
    """An AllToAll, and the size whose steps it takes."""

    def __init__(self, device: Noting) -> None:
        self._device = device
        self.x, self.ids, self.weights = ["x0", "x1"], ["ids0", "ids1"], ["w0", "w1"]
        self.y = torch.zeros(2, 3)
        self.checked = 0

    def answers(self, i: int) -> str:
        return f"answers{i}"

    def _phase(self, name: str, *what: Any) -> Any:
        self._device.say(f"{name} {' '.join(map(str, what))}")
        return what[0] if name == "dispatch_send" else what[-1]

    def dispatch_send(self, x: str, ids: str, weights: str) -> Any:
        return self._phase("dispatch_send", x, ids, weights)

    def dispatch_recv(self, d: Any) -> Any:
        return self._phase("dispatch_recv", d)

    def combine_send(self, answers: str, d: Any) -> Any:
        return self._phase("combine_send", answers, d)

    def combine_recv(self, c: Any) -> Any:
        self._phase("combine_recv", c)
        return self.y

    def check(self) -> None:
        self.checked += 1


def test_the_order_of_the_phases() -> None:
    """Phase by phase, so that both steps are in flight; each phase behind a delay of its own."""
    device = Noting()
    both: Any = NotingSteps(device)
    steps = Steps(both, both, device, ["steps0", "steps1"])
    drawn = iter(range(1, 9))
    steps.launch(lambda: float(next(drawn)))
    calls = [
        [f"dispatch_send x{i} ids{i} w{i}", f"dispatch_recv x{i}", f"combine_send answers{i} x{i}", f"combine_recv x{i}"]
        for i in (0, 1)
    ]
    expected, us = [], 0
    for phase in range(beside.PHASES_OF_STEP):
        for i in (0, 1):
            us += 1
            expected += [f"delay {us} on steps{i}", f"{calls[i][phase]} on steps{i}"]
    assert device.said == expected
    device.said.clear()
    steps.launch(beside.nothing)
    assert len(device.said) == 8 and not [one for one in device.said if "delay" in one]


def test_results_must_stay_the_same_bits() -> None:
    device = Noting()
    both: Any = NotingSteps(device)
    steps = Steps(both, both, device, ["steps0", "steps1"])
    for y in (torch.zeros(2, 3), torch.zeros(2, 3)):
        both.y = y
        steps.launch(beside.nothing)
        steps.check("here")
    both.y = torch.tensor([[0.0, 0, 0], [0, 0, -0.0]])
    steps.launch(beside.nothing)
    assert not steps.wrong
    steps.check("here")
    assert both.checked == 3
    assert steps.wrong == [f"here: the result on stream {i} is not the one of the first round" for i in (0, 1)]


def test_the_bare_kernels_of_both_steps() -> None:
    device = Noting()

    def launch(name: str) -> Any:
        return lambda num_sms: device.say(f"{name} by {num_sms}")

    bare: Any = SimpleNamespace(launches={phase: [launch(f"{phase}{i}") for i in (0, 1)] for phase in ("dispatch", "combine")})
    composites(bare, device, ["steps0", "steps1"], 24)()
    assert device.said == [f"{phase}{i} by 24 on steps{i}" for phase in ("dispatch", "combine") for i in (0, 1)]


def test_delays_differ_by_rank_and_not_by_run() -> None:
    drawn = [[delays() for _ in range(50)] for delays in (Delays(1, 0, 30.0), Delays(1, 1, 30.0), Delays(2, 0, 30.0))]
    again = Delays(1, 0, 30.0)
    assert drawn[0] == [again() for _ in range(50)]
    assert drawn[0] != drawn[1] and drawn[0] != drawn[2]
    assert all(0 <= us <= 30 for of in drawn for us in of) and max(drawn[0]) > 20


@pytest.mark.parametrize(("beside_us", "gemm_us", "gemms"), [(1000, 500, 3), (10, 500, 1), (0, 0, 1), (4000, 1000, 5)])
def test_gemms_last_longer_than_what_is_beside_them(beside_us: float, gemm_us: float, gemms: int) -> None:
    assert enough(beside_us, gemm_us) == gemms


@pytest.mark.parametrize("grouped", [True, False])
def test_the_gemm_that_reads_weights(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert's rows with its weights, also where torch has no grouped GEMM."""
    if not grouped:
        monkeypatch.delattr(torch, "_grouped_mm")
    elif not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no grouped GEMM")
    made: list[torch.Tensor] = []
    randn = torch.randn

    def noted(*size: int, **options: Any) -> torch.Tensor:
        made.append(randn(*size, **options).bfloat16())
        return made[-1]

    monkeypatch.setattr(torch, "randn", noted)
    one = gemm("weights", Gemms(experts=3, rows=8, intermediate=16), 64, torch.device("cpu"))
    out = one.run()
    assert isinstance(out, torch.Tensor) and one.about.endswith("grouped" if grouped else "batched")
    x, weights = made
    expected = torch.stack([x.view(3, 8, 64)[e] @ weights[e].T for e in range(3)])
    assert torch.allclose(out.view(3, 8, 32).float(), expected.float(), rtol=2e-2, atol=1e-1)


def figure(p50: float) -> Figure:
    return Figure(3, p50, p50 + 1, p50 + 2, p50 - 1)


def points() -> list[Beside]:
    made = []
    for name in ("compute", "weights"):
        for num_sms in (4, 8):
            point = Beside(name, f"{name}-bound", 4096, num_sms, 3)
            for i, way in enumerate(WAYS):
                point.times[way], point.rounds[way] = figure(1000 + 10 * i * num_sms), 1000 if way == "delayed steps" else 50
                if i >= 2:
                    point.beside[way] = figure(700 + i)
            made.append(point)
    return made


def test_what_is_lost() -> None:
    point = points()[1]
    assert [point.lost(way) for way in WAYS] == [0, 80, 160, 240, 320]
    assert point.slowdown("alone") == 1 and point.slowdown("steps") == pytest.approx(1.24)


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    o = overlap.from_arguments(overlap.parser().parse_args([]))
    said = overlap.table(o, SimpleNamespace(size=2), points(), "a GPU")  # type: ignore[arg-type]
    lines = [[cell.strip() for cell in line.split("|")][1:-1] for line in said.splitlines() if line.startswith("|")]
    assert [line for line in lines if "steps" in line][0] == [
        "",
        "",
        "",
        "steps",
        "50",
        "1120",
        "1122",
        "1.120",
        "120",
        "703",
        "705",
    ]
    assert "4000 rounds of 2 steps with delays: no timeout" in said and said.count("2 x 4") == said.count("2 x 8") == 2
    assert ["4096", "2 x 8", "3", "alone", "50", "1000", "1002", "1.000", "0", "", ""] in lines
    record: dict[str, Any] = {
        "points": [
            {
                "gemm": p.gemm, "about": p.about, "tokens": p.tokens, "num_sms": p.num_sms,
                "times": {way: {"p50": t.p50, "p99": t.p99} for way, t in p.times.items()}, "lost": {w: p.lost(w) for w in WAYS},
            }
            for p in reversed(points())
        ],
        "options": {"hidden": 7168, "experts": 256, "top_k": 8, "wire": "fp8", "layout": "Compact()"},
        "ranks": 2, "version": "1", "date": "today",
    }  # fmt: skip
    drawn = overlap.lines_of(record, "weights", 4096)
    assert list(drawn) == list(WAYS[1:])
    assert drawn["bytes"] == [(4, 80, 2), (8, 160, 2)] and drawn["delayed steps"] == [(4, 160, 2), (8, 320, 2)]
    pytest.importorskip("matplotlib")
    overlap.plot(record, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_it_asks_for_by_itself() -> None:
    p = overlap.parser()
    o, asked = overlap.from_arguments(p.parse_args([])), overlap.asked_of(p.parse_args([]))
    assert (o.tokens, o.num_sms, o.device, o.peers) == ((4096,), (4, 8, 16, 24), "cuda", ())
    assert asked == beside.Asked() and asked.rounds == 1000 and asked.shapes.size == 8192
    asked = overlap.asked_of(p.parse_args(["--rounds", "7", "--gemm", "weights", "--gemm-rows", "32", "--delay-us", "0"]))
    assert (asked.rounds, asked.gemms, asked.shapes.rows, asked.delay_us) == (7, ("weights",), 32, 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--num-sms", "8,all"], "the rest is the GEMM's"),
        (["--gemm", "none"], "compute and weights"),
        (["--device", "cpu"], "a GPU's"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_arguments_that_cannot_be(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        overlap.main(arguments)
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_up_to_its_cuda_calls(tmp_path: Path) -> None:
    written, picture = tmp_path / "overlap.json", tmp_path / "overlap.png"
    statuses, said = ranks_of(PROGRAM, "none", *RUN, "--json", str(written), "--plot", str(picture), "--wire", "fp8")
    assert statuses == [0, 0], said
    record = json.loads(written.read_text())
    assert record["asked"]["rounds"] == 6 and record["ranks"] == 2 and "overlap_on_cpu.py" in record["command"]
    assert [(p["gemm"], p["num_sms"]) for p in record["points"]] == [(g, n) for g in ("compute", "weights") for n in (2, 4)]
    for point in record["points"]:
        assert point["gemms"] >= 1 and set(point["times"]) == set(point["slowdown"]) == set(point["lost"]) == set(WAYS)
        assert {way: of["n"] for way, of in point["times"].items()} == point["rounds"]
        assert point["rounds"] == {way: 6 if way == "delayed steps" else 3 for way in WAYS}
        assert set(point["beside"]) == {"bytes", *WITH_STEPS}
        assert point["slowdown"]["alone"] == 1 and point["lost"]["alone"] == 0
        assert 0 < point["traffic"]["pushed"] < point["traffic"]["written"]
    assert "24 rounds of 2 steps with delays: no timeout" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_steps_in_pieces(tmp_path: Path) -> None:
    written = tmp_path / "overlap.json"
    arguments = [*RUN, "--tokens", "600", "--num-sms", "2", "--gemm", "compute", "--slot-bytes", str(SLOTS)]
    statuses, said = ranks_of(PROGRAM, "none", *arguments, "--json", str(written))
    assert statuses == [0, 0] and f"slots of {SLOTS} bytes: in pieces at 600" in said, said
    record = json.loads(written.read_text())
    assert record["options"]["slot_bytes"] == SLOTS and record["in_pieces"] == [600]


@pytest.mark.parametrize(("plant", "says"), [("wrong", "is not the one of the first round"), ("late", "planted: a step timed out")])
def test_what_fails_fails_the_run(plant: str, says: str) -> None:
    statuses, said = ranks_of(PROGRAM, plant, *RUN, "--gemm", "compute")
    assert 0 not in statuses and says in said and "rank 1" in said, said


def test_steps_must_leave_room_for_the_gemm() -> None:
    statuses, said = ranks_of(PROGRAM, "none", *RUN, "--num-sms", "65")
    assert statuses == [1, 1] and "must leave 4 of 132" in said, said
