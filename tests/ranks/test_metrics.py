"""Metrics: files, a collector, and a real Prometheus that scrapes two ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import Case
from harness import ROOT, Crew, until

from pplx_comm import metrics, top

OBSERVE = ROOT / "docs" / "observe"


@pytest.mark.parametrize("transport", ["mapped", "mixed:tcp"])
@pytest.mark.parametrize("slot_bytes", [None, 1024])
def test_waits(transport: str, slot_bytes: int | None) -> None:
    with Crew(4) as crew:
        case = Case(14, 4, transport=transport, max_tokens=5, slot_bytes=slot_bytes, steps=2)
        crew.run("rank_cases:a_late_rank", case, 2)


def test_files(tmp_path: Path) -> None:
    with Crew(2, {"PPLX_COMM_METRICS": str(tmp_path), "PPLX_COMM_METRICS_SECONDS": "1"}) as crew:
        crew.run("metrics_cases:a_file", Case(11, 2, transport="proxy:tcp", steps=3), str(tmp_path))


def test_no_folder(tmp_path: Path) -> None:
    with Crew(2, {"PPLX_COMM_METRICS": str(tmp_path / "absent"), "PPLX_COMM_METRICS_SECONDS": "1"}) as crew:
        for lines in crew.run("metrics_cases:no_such_folder", Case(12, 2, steps=2)):
            assert len(lines) == 1 and "absent" in lines[0], lines


def test_of_several() -> None:
    with Crew(2) as crew:
        crew.run("metrics_cases:of_several", Case(16, 2, transport="proxy:tcp", steps=2))


def test_a_killed_process(tmp_path: Path) -> None:
    """Its file is removed when the next Communicator of this host starts. Those of a living process and of another host are not."""
    program = "import sys, pplx_comm; comm = pplx_comm.Communicator.from_env(); sys.stdin.read()"
    environment = {**os.environ, "PPLX_COMM_METRICS": str(tmp_path), "PPLX_COMM_METRICS_SECONDS": "86400"}
    other = tmp_path / "pplx_comm-000000000000-1-aaaaaaaa-0.prom"
    other.touch()

    def files(pid: int | str = "*") -> list[Path]:
        return list(tmp_path.glob(f"pplx_comm-*-{pid}-*.prom"))

    def start() -> subprocess.Popen[bytes]:
        process = stack.enter_context(subprocess.Popen([sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE))
        until("it has a file", lambda: process.poll() is not None or bool(files(process.pid)), 60.0)
        return process

    with ExitStack() as stack:
        living, killed = start(), start()
        killed.kill()
        killed.wait()
        assert len(files()) == 3
        last = start()
        assert set(files()) == {other, *files(living.pid), *files(last.pid)} and len(files()) == 3


def test_what_a_file_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's link is not followed. The thread removes its file even when the Communicator raises an unknown error."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:12]
    path, victim = tmp_path / f"pplx_comm-{boot}-{os.getpid()}-aa-0.prom", tmp_path / "victim"
    victim.write_text("whole")
    path.with_suffix(".new").symlink_to(victim)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    class Raises:
        rank, control, written = 0, SimpleNamespace(job="aa"), ""

        def stats(self) -> dict[str, Any]:
            if path.exists():
                self.written = path.read_text()
                raise RuntimeError
            empty: dict[str, Any] = {"failures": {}, "proxies": [], "all_to_alls": []}
            return {"job": "aa", "rank": 0, "node": 0, "world_size": 1, "generation": 0, "alive": [0], **empty}

    comm: Any = Raises()
    metrics._File(comm, tmp_path, 0.001)._thread.join(60)
    assert comm.written.startswith("# HELP pplx_comm_job") and 'pplx_comm_world_size{pplx_job="aa",rank="0"} 1' in comm.written
    assert list(tmp_path.iterdir()) == [victim] and victim.read_text() == "whole"


@pytest.mark.parametrize("files", [True, False])
def test_top(tmp_path: Path, files: bool) -> None:
    """It names the rank that is late to every step, for which the others wait longest: from files, and from what processes say."""
    environment = {"PPLX_COMM_METRICS": str(tmp_path), "PPLX_COMM_METRICS_SECONDS": "1"} if files else {}
    command = [sys.executable, "-m", "pplx_comm", "top", *([str(tmp_path)] if files else []), "--once", "--matrix"]
    with Crew(4, environment) as crew:
        crew.start("metrics_cases:with_a_late_rank", Case(15, 4, max_tokens=4, steps=1), 2)
        command += ["--job", crew.heard(0, "job")]
        deadline = time.monotonic() + 100
        while True:  # the first readings may be from before the first step
            shown = subprocess.run(command, capture_output=True, text=True)
            if "rank 2 is late" in shown.stdout:
                break
            assert time.monotonic() < deadline, shown
        late = {int(rank): float(ms) for rank, ms in re.findall(r"rank (\d+) is late: the others wait (\S+) ms", shown.stdout)}
        assert "4 ranks" in shown.stdout and max(late, key=late.__getitem__) == 2, shown.stdout
        for rank in range(4):
            crew.tell(rank, "enough")
        assert min(crew.collect()) > 0


WANTED = {"rank": "rank 1 is late", "nic": "NIC of node 1 is slow", "link": "link 1 -> 4 is slow"}


def named_when_late(what: str, late_us: int) -> tuple[int, int]:
    """Ranks on three nodes, of which a rank, a link, or all links of a node are late. Returns after how many of 12 groups of steps top
    names it, and anything else."""
    times, steps, node = 12, 4, {2, 3}
    pairs = {"rank": [], "link": [(1, 4)], "nic": [(a, b) for a in range(6) for b in range(6) if (a in node) != (b in node)]}
    late = "".join(f",late={a}-{b}@{late_us}" for a, b in pairs[what])
    calm = "delay=0,shuffle=0,split=0,duplicate=0,replay=0,again=0"
    case = Case(19, 6, transport="mixed:tcp", max_tokens=8)
    with Crew(6, {"PPLX_COMM_CHAOS": calm + late, "PPLX_TEST_STEP_TIMEOUT": "100"}) as crew:
        told = crew.run("metrics_cases:told_of_steps", case, 1 if what == "rank" else None, late_us, times, steps, timeout=300)
    named: Counter[str] = Counter()
    for at in range(times):
        ranks = []
        for of_rank in told:
            before, after = (top.parse(metrics.text(metrics.families(of_rank[i])), i) for i in (at, at + 1))
            ranks.append(top.between(before, after))
        assert all(rank.steps == steps for rank in ranks), ranks
        named.update({sentence.partition(":")[0] for sentence in top.verdicts(ranks, 6)})
    print(late_us, dict(named))
    return named.pop(WANTED[what], 0), max(named.values(), default=0)


@pytest.mark.parametrize("what", WANTED)
def test_who_is_slow(what: str) -> None:
    """It is named after most groups of steps, and more often than anything else. A busy machine makes all ranks late: then by more."""
    for late_us in (40_000, 400_000, 2_000_000):
        right, wrong = named_when_late(what, late_us)
        if right > max(6, wrong):
            return
    raise AssertionError(f"{WANTED[what]}: {right} times of 12, anything else: {wrong}")


def test_text() -> None:
    """As the format wants it: escapes, and buckets that add up."""
    family = metrics.Family("a", "counter", "What.", [("_total", {"nic": 'x"\\\n'}, 3.0)])
    assert metrics.text([family]) == '# HELP a_total What.\n# TYPE a_total counter\na_total{nic="x\\"\\\\\\n"} 3\n'


@pytest.mark.slow
def test_rules() -> None:
    """Every rule fires when it should, and not when it should not."""
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: tools/install_deps.sh installs Debian's prometheus"
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"]):
        done = subprocess.run([promtool, *command], cwd=OBSERVE, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    named = set(re.findall(r"alert: (\w+)", (OBSERVE / "alerts.yml").read_text()))
    fired = set(re.findall(r"alertname: (\w+)\n\s+exp_alerts", (OBSERVE / "alerts.test.yml").read_text()))
    assert fired == named


class Prometheus:
    def __init__(self, port: int) -> None:
        self._host = f"http://127.0.0.1:{port}/"
        self._at = self._host + "api/v1/"

    def ready(self) -> bool:
        """It listens before it has read what it stored."""
        try:
            with urllib.request.urlopen(self._host + "-/ready", timeout=20) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False

    def get(self, path: str, **arguments: str) -> Any:
        with urllib.request.urlopen(self._at + path + "?" + urllib.parse.urlencode(arguments), timeout=20) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def until(self, expression: str, holds: Any) -> None:
        deadline = time.monotonic() + 60
        while not holds(found := self.query(expression)):
            assert time.monotonic() < deadline, (expression, found)
            time.sleep(0.2)  # between scrapes


@contextmanager
def prometheus(folder: Path, ports: list[int]) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    assert program, "prometheus is missing: tools/install_deps.sh installs Debian's"
    targets = [f"127.0.0.1:{port}" for port in ports]
    scraped = {"job_name": "pplx_comm", "scrape_interval": "1s", "static_configs": [{"targets": targets}]}
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scraped], "rule_files": [str(OBSERVE / "alerts.yml")]}))
    log = folder / "log"
    with log.open("w") as out:
        command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 60
        while not (port := re.search(r"Listening on.*127\.0\.0\.1:(\d+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        server = Prometheus(int(port[1]))
        while not server.ready():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.slow
def test_prometheus(tmp_path: Path) -> None:
    """It scrapes two ranks: what it answers is what they did, and every panel of the dashboard has something to show."""
    case = Case(13, 2, transport="proxy:tcp", steps=3)
    with Crew(2) as crew:
        crew.start("metrics_cases:served", case)
        with prometheus(tmp_path, [crew.heard(rank, "port") for rank in range(2)]) as server:
            server.until("sum(pplx_comm_steps_total)", lambda found: found and float(found[0]["value"][1]) > 0)
            panels = json.loads((OBSERVE / "dashboard.json").read_text())["panels"]
            for target in (target for panel in panels for target in panel["targets"]):
                server.until(target["expr"].replace("$__rate_interval", "30s"), bool)
            assert all(rule["health"] in ("ok", "unknown") for group in server.get("rules")["groups"] for rule in group["rules"])
            for rank in range(2):
                crew.tell(rank, "enough")
            for rank in range(2):
                stats = crew.heard(rank, "stats")
                (a2a,) = stats["all_to_alls"]
                for expression, value in (
                    ("pplx_comm_steps_total", a2a["steps"]),
                    ("pplx_comm_tokens_total", a2a["tokens"]),
                    (f'pplx_comm_sent_bytes_total{{peer="{1 - rank}"}}', a2a["bytes_sent"][1 - rank]),
                    ("pplx_comm_network_bytes_total", a2a["proxy"]["bytes"]),
                    ("pplx_comm_alive_ranks", 2),
                ):
                    name, _, labels = expression.partition("{")
                    of_rank = f'{name}{{pplx_job="{stats["job"]}",rank="{rank}"' + (f",{labels}" if labels else "}")
                    server.until(of_rank, lambda found, value=value: found and float(found[0]["value"][1]) == value)
            for rank in range(2):
                crew.tell(rank, "read")
        assert all(result["turns"] > 0 for result in crew.collect())
