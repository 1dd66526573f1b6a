"""bench/proxy.py: the bar it holds the proxy to, what it writes, and that its clock is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench import _instruments
from bench.proxy import BAR, percentile

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(ROOT / "bench" / "proxy.py"), *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=120)


def test_the_bar(tmp_path: Path) -> None:
    """200 ns a peer. On one thread: with two, what else this machine does could be measured."""
    file = tmp_path / "proxy.json"
    done = run("--threads", "1", "--operations", "200", "--check", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert [(p["peers"], p["endpoints"]) for p in report["points"]] == [(n, e) for e in (1, 2, 4) for n in (8, 16, 32, 64)]
    for point in report["points"]:
        assert 0 < point["first_ns"]["p50"] <= point["last_ns"]["p50"] <= BAR * point["peers"]
        assert point["writes"] == point["peers"]
        assert f"| {point['ns_per_peer']:>7.1f} |" in done.stdout


def test_two_threads_and_shards() -> None:
    done = run("--threads", "2", "--operations", "20", "--turns", "1", "--peers", "8", "--endpoints", "4", "--rows", "128")
    assert done.returncode == 0, done.stderr
    assert "|     8 |         4 |     32 |" in done.stdout  # blocks of 950 KB, in a shard for each endpoint


def test_operations_are_counted_whole() -> None:
    """Eight AllToAlls and eight sets cost more than one of each; every operation is measured once."""

    def idle(**sizes: int) -> float:
        runs = [
            _instruments.proxy_cost(peers=64, endpoints=1, rows=1, shard_bytes=1 << 18, operations=50, threads=False, **sizes)
            for _ in range(3)
        ]
        assert all(len(one["first"]) == len(one["last"]) == 50 and one["writes"] == 64 for one in runs)
        return min(one["idle"] for one in runs)

    assert idle() < idle(objects=8, in_flight=8)


def test_help_and_percentiles() -> None:
    done = run("--help")
    assert done.returncode == 0 and "--endpoints" in done.stdout
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]
