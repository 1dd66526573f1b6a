"""--num-sms: what is asked for, which figures stand beside which, and what is drawn and summed up of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import summary
from bench.gpu import peers
from bench.harness import plot
from bench.harness.batch import Shape
from bench.harness.clock import Figure
from bench.harness.options import from_arguments, parser_of
from bench.harness.results import PeerPoint, Point, Results
from pplx_comm.wiring.config import make_config

PHASES = ("dispatch", "combine", "round trip")


def figure(p50: float) -> Figure:
    return Figure(3, p50, p50 + 1, p50 + 2, p50 - 1)


def phases(p50: float) -> dict[str, Figure]:
    return {phase: figure(p50 + i) for i, phase in enumerate(PHASES)}


def results() -> Results:
    """A size of small and one of large steps, on 8 and on all; DeepEP can be set at the large one."""
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


def record(r: Results, run: int = 0) -> dict[str, Any]:
    """As report.record() has it, without what it asks of a world."""
    from bench.harness.report import _best

    points = []
    for point in r.points:
        more = {
            "ratio": {phase: point.ratio(phase) for phase in PHASES},
            "ratio_to_composite": {phase: point.ratio_to_composite(phase) for phase in PHASES},
            "best_peer": {phase: _best(r, point, phase) for phase in PHASES},
        }
        points.append({**asdict(point), **more})
    return {
        "points": points, "peers": [asdict(peer) for peer in r.peers], "multiprocessors": r.multiprocessors,
        "ranks": 2, "threads_per_rank": 1, "version": "1", "date": f"{run}", "command": "latency.py", "versions": {"torch": "2"},
        "machine": {"cpu": "some", "cores_allowed": 2, "isa": "x", "kernel": "6"}, "software_device": None,
        "options": {
            "hidden": 7168, "experts": 256, "top_k": 8, "dtype": "bfloat16", "wire": "fp8", "layout": "Compact()",
            "tokens": [128, 4096],
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "means"), [("all", (None,)), ("24", (24,)), ("32,all,8,8", (8, 32, None)), (None, (None,)), ("all, 4", (4, None))]
)
def test_settings(given: str | None, means: tuple[int | None, ...]) -> None:
    arguments = [] if given is None else ["--num-sms", given]
    assert from_arguments(parser_of("test", None).parse_args(arguments)).num_sms == means


@pytest.mark.parametrize("given", ["0", "8,", "many", "8,-1"])
def test_settings_that_cannot_be(given: str) -> None:
    with pytest.raises(SystemExit):
        parser_of("test", None).parse_args(["--num-sms", given])


@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
@pytest.mark.parametrize("align", [None, "1", "48"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_room_for_the_worst_case_of_any_size(layout: str, align: str | None, world: int) -> None:
    """What the library takes by itself for small steps, and for large ones, where it wants to be asked."""
    aligned = ["--align", align] if align and layout != "compact" else []
    o = from_arguments(parser_of("test", None).parse_args(["--layout", layout, "--wire", "fp8", *aligned]))
    for tokens in (1, 40):
        shape = Shape(o, tokens, 0, world)
        by_itself = make_config(
            world, 0, num_experts=o.experts, top_k=o.top_k, hidden=o.hidden, max_tokens_per_rank=tokens, dtype=o.dtype,
            wire=o.wire, layout=o.layout, in_flight=1, scale_layout="row",
        )  # fmt: skip
        assert shape.out_rows == (by_itself.max_rows or by_itself.local_experts * by_itself.max_per_expert)
        assert (shape.config.max_rows, shape.config.max_per_expert) == (by_itself.max_rows, by_itself.max_per_expert)
    assert Shape(o, 8192, 0, world).out_rows >= 8192 * world


def test_a_peer_stands_beside_the_setting_that_it_was_given() -> None:
    r = results()
    asked = [(name, tokens, n) for name in ("deep_ep", "nccl") for tokens in (128, 4096) for n in (8, None)]
    hows = [point.how for one in asked if (point := r.peer(*one))]
    assert hows == ["low-latency mode"] * 2 + ["normal mode, 8 SMs", "normal mode, 24 SMs"] + ["whole"] * 4
    assert r.peer("deep_ep", 1, 8) is None


def test_the_best_peer_took_no_more_multiprocessors() -> None:
    """Where they can be set. On all, any setting of a peer counts."""
    r = results()

    def best(tokens: int, num_sms: int | None) -> tuple[str, float] | None:
        found = r.best_peer(tokens, num_sms, "combine")
        return found and (found.peer, found.phases["combine"].p50)

    assert best(128, 8) == best(128, None) == ("deep_ep", 31)
    assert best(4096, 8) == ("deep_ep", 501) and best(4096, None) == ("deep_ep", 251)
    assert best(1, None) is None
    r.peers = [peer for peer in r.peers if peer.num_sms != 8]
    assert best(4096, 8) == ("deep_ep", 251)  # then it has no setting, as far as the run knows
    r.peers.append(PeerPoint("deep_ep", 4096, phases(240.0), {}, "normal mode, 16 SMs", 16))
    assert best(4096, 8) == ("nccl", 601) and best(4096, 16) == best(4096, None) == ("deep_ep", 241)


def test_collectives_on_so_many_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of NCCL for each number, made once by all ranks in one order; what gloo carries takes none."""
    made = list[tuple[str, int]]()

    def new_group(backend: str, pg_options: Any) -> object:
        made.append((backend, pg_options.config.max_ctas))
        return object()

    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(peers.dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(peers.dist, "new_group", new_group)
    monkeypatch.setattr(peers, "group_of", lambda *_: "all")
    world: Any = None
    groups = peers.Groups(world, world, torch.device("cuda"))
    assert groups.has_num_sms and groups.on(None) == "all" and not made
    found = [groups.on(8), groups.on(24), groups.on(8)]
    assert found[0] is found[2] is not found[1] and made == [("nccl", 8), ("nccl", 24)]
    assert not peers.Groups(world, world, torch.device("cpu")).has_num_sms


@pytest.mark.parametrize("turn", [1, -1])
def test_what_is_drawn(turn: int) -> None:
    """In whatever order it was measured."""
    whole = record(results())
    whole["peers"] = whole["peers"][::turn]
    for num_sms, us in ((8, 40.0), (None, 12.0)):
        part = plot.by_tokens(whole, num_sms)
        assert [(p["tokens"], p["phases"]["dispatch"]["p50"]) for p in part["points"]] == [(128, us), (4096, us * 10)]
        peers = {(p["peer"], p["tokens"]): p["phases"]["dispatch"]["p50"] for p in part["peers"]}
        assert len(part["peers"]) == 4 and peers["deep_ep", 4096] == (500 if num_sms else 250) and peers["nccl", 128] == 60
    tokens, part = plot.by_sms(whole)
    assert tokens == plot.BY_SMS_TOKENS == 4096
    assert [(p["num_sms"], p["phases"]["combine"]["p50"]) for p in part["points"]] == [(8, 401), (None, 121)]
    drawn = sorted((p["peer"], p["num_sms"] or 132, p["phases"]["dispatch"]["p50"]) for p in part["peers"])
    assert drawn == [("deep_ep", 8, 500), ("deep_ep", 132, 250), ("nccl", 8, 600), ("nccl", 132, 600)]
    small = {**whole, "points": [p for p in whole["points"] if p["tokens"] == 128]}
    assert plot.by_sms(small)[0] == 128


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    r = results()
    written = plot.plot(record(r), str(tmp_path / "a.b.png"))
    assert written == [str(tmp_path / "a.b.png"), str(tmp_path / "a.b-by-sms.png")]
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in written)
    r.points = [point for point in r.points if point.num_sms is None]
    assert plot.plot(record(r), str(tmp_path / "one.png")) == [str(tmp_path / "one.png")]


def test_the_summary() -> None:
    """Ratios are taken within a run, then the median of the runs."""
    runs = [record(results(), run) for run in range(3)]
    for point in runs[2]["points"]:
        point["phases"]["dispatch"]["p50"] *= 100  # an outlier
    lines = {tuple(line.split(" | ")[1:4]): line for line in summary.summary(runs).splitlines() if line.startswith("| mapped")}
    assert len(lines) == 2 * 2 * 3
    of = lines["4096", "8", "dispatch"]
    assert of == "| mapped | 4096 | 8 | dispatch | 400.0 | 50.0 | 8.00 | 200.0 | 2.00 | 0.80 (deep_ep on 8) | 1.25 | 1.50 |"
    assert "| 120.0 | 50.0 | 2.40 | 60.0 | 2.00 | 0.48 (deep_ep) | 2.08 | 5.00 |" in lines["4096", "all", "dispatch"]


def test_the_summary_of_older_runs() -> None:
    """Without settings and without a composite floor."""
    run = record(results())
    run["points"] = [
        {name: of for name, of in point.items() if name not in ("num_sms", "composite", "ratio_to_composite", "best_peer")}
        for point in run["points"] if point["num_sms"] is None
    ]  # fmt: skip
    run["peers"] = [{name: of for name, of in peer.items() if name != "num_sms"} for peer in run["peers"] if not peer["num_sms"]]
    text = summary.summary([run])
    assert "| mapped | 128 | all | dispatch | 12.0 | 5.0 | 2.40 | off | off | off | 2.50 | 5.00 |" in text
    assert plot.by_tokens(run, None)["points"] == run["points"]
