"""The sentences of `python -m pplx_comm top`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from harness import seed

from pplx_comm import cli, desks, metrics, top


def steady(r: random.Random, world_size: int) -> list[top.Rank]:
    """Ranks of which none stands out: waits differ by up to three times, experts' rows by twice."""
    usual = r.choice([0.001, 0.02, 3.0])
    ranks = []
    for rank in range(world_size):
        waits = {peer: usual * r.uniform(0.5, 1.5) for peer in range(world_size) if peer != rank}
        experts = {("0", str(expert)): 1000 * r.uniform(0.7, 1.4) for expert in range(4)}
        nics = {f"efa {nic}": 1e9 * r.uniform(0.5, 1.5) for nic in range(2)}
        ranks.append(top.Rank(rank, 100.0, 1.0, 1.0, world_size, waits, experts, nics))
    return ranks


def test_nothing_stands_out() -> None:
    r = random.Random(seed())
    for _ in range(10_000):
        world_size = r.randint(2, 16)
        assert top.verdicts(steady(r, world_size), world_size) == []


@pytest.mark.parametrize("number", range(20))
def test_each_is_named(number: int) -> None:
    r = random.Random(seed() * 100 + number)
    world_size = r.randint(4, 16)

    def said(change: str) -> list[str]:
        ranks = steady(r, world_size)
        longest = max(ms for rank in ranks for ms in rank.waits.values())
        if change == "rank":
            for rank in ranks:
                rank.waits.update({peer: ms + 6 * longest + 0.1 for peer, ms in rank.waits.items() if peer == one})
        elif change == "link":
            ranks[other].waits[one] += 6 * longest + 0.1
        elif change == "expert":
            ranks[one].experts["0", "2"] *= 60
        elif change == "NIC":
            ranks[one].nics["efa 1"] = 0.0
        elif change == "open":
            ranks[one].steps = 0.0
        elif change == "lost":
            ranks[one].alive -= 1
        return top.verdicts(ranks, world_size)

    one, other = r.sample(range(world_size), 2)
    for change, wanted in (
        ("rank", f"rank {one} is late"),
        ("link", f"link {one} -> {other} is slow"),
        ("expert", f"expert 2 of rank {one} "),
        ("NIC", f"NIC efa 1 of rank {one} "),
        ("open", f"rank {one} has an open step"),
        ("lost", f"rank {one} goes on without 1 of {world_size}"),
    ):
        sentences = said(change)
        assert len(sentences) == 1 and sentences[0].startswith(wanted), (change, wanted, sentences)


@pytest.mark.parametrize(
    ("waits", "wanted"),
    [
        ({(3, 0): 5.0, **{(rank, 3): 5.0 for rank in (0, 1, 2, 4)}}, ["link 0 -> 3 is slow"]),
        (
            {**{(rank, slow): 5.0 for rank in range(5) for slow in (0, 3)}, (3, 0): 10.0, (0, 3): 10.0},
            ["link 3 -> 0 is slow", "link 0 -> 3 is slow"],
        ),
        ({(3, 0): 9.0, (4, 0): 9.0, (0, 3): 9.0, (0, 4): 9.0}, ["NIC of rank 0 is slow"]),
        ({**{(rank, 1): 9.0 for rank in (0, 2, 3, 4)}, (1, 0): 6.0}, ["rank 1 is late", "link 0 -> 1 is slow"]),
    ],
)
def test_the_cause_is_named(waits: dict[tuple[int, int], float], wanted: list[str]) -> None:
    """And no rank that is behind another one. Nodes of three and two ranks, of which some pairs wait long: one link, both ways, a NIC."""
    ranks = [
        top.Rank(r, 9.0, 1.0, 0.0, 5, {peer: waits.get((r, peer), 0.1) for peer in range(5) if peer != r}, {}, {}, r // 3)
        for r in range(5)
    ]
    sentences = top.verdicts(ranks, 5)
    assert [sentence.split(":")[0] for sentence in sentences] == wanted, sentences


def test_matrix() -> None:
    """The longest wait is the darkest, and no rank waits for itself."""
    lines = top.matrix([top.Rank(n, 1.0, 1.0, 0.0, 2, {1 - n: float(n + 1)}, {}, {}) for n in range(2)])
    assert "2 ms" in lines[0] and lines[-1].split() == ["1", "@@"] and "@" not in lines[-2]


def stats(job: str, rank: int, **other: Any) -> dict[str, Any]:
    of: dict[str, Any] = {"job": job, "rank": rank, "node": 0, "world_size": 2, "generation": 0, "alive": [0, 1], "failures": {}}
    return {**of, "proxies": [], "all_to_alls": [], **other}


def written(folder: Path, job: str, rank: int) -> None:
    of = stats(job, rank)
    (folder / f"pplx_comm-{job}-{rank}.prom").write_text(metrics.text(metrics.families(of)))


@pytest.mark.parametrize(
    ("jobs", "arguments", "wanted"),
    [
        ([], [], "there is no job"),
        (["aa", "ab"], [], "2 jobs in .*: name one with --job: aa, ab"),
        (["aa"], ["--job", "b"], "there is no job b in .*, but aa"),
        (["aa"], ["absent"], "is no folder"),
    ],
)
def test_what_is_wrong(tmp_path: Path, jobs: list[str], arguments: list[str], wanted: str) -> None:
    for job in jobs:
        written(tmp_path, job, 0)
    where = [str(tmp_path / arguments.pop())] if arguments == ["absent"] else [str(tmp_path)]
    with pytest.raises(SystemExit, match=wanted):
        cli.main(["top", *where, "--once", *arguments])


def test_picture(tmp_path: Path) -> None:
    top.picture([top.Rank(n, 1.0, 1.0, 0.0, 2, {1 - n: float(n + 1)}, {}, {}) for n in range(2)], tmp_path / "waits.png")
    assert (tmp_path / "waits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("told", [[{}], [7], [stats("b", 0, world_size=float("nan"))], [stats("b", 0, failures={"death": 1e999})]])
def test_what_cannot_be_read_is_left_out(told: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    answers = [desks.Answer("@gone", 4711, told), desks.Answer("@gone", 1, [stats("a", 0), stats("a", 1)])]
    monkeypatch.setattr(desks, "ask_all", lambda *_, **__: answers)
    assert list(top.read_processes(None)) == ["a"]
    assert "process 4711 is left out" in caplog.text
