"""Two hosts: a cable that breaks, one that is slow, and the walk-through of docs/across-nodes.md under mpirun."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import Case
from harness import TESTS, Crew, clean_environment
from networks import Networks, require_namespaces
from test_failure import CLOSED, left_in_shm

ROOT = TESTS.parent
BIN = Path(sys.executable).parent
SIDES = [[0, 1], [2, 3]]
LOST = 20.0  # seconds from the cut: the kernel gives a silent host up after 5, its probes and a busy machine add to that


@pytest.fixture
def networks() -> Iterator[Networks]:
    with Networks() as networks:
        yield networks


def crew_of(networks: Networks) -> Crew:
    """Ranks 0 and 1 on one side, 2 and 3 on the other."""
    address, secret = f"{networks.addresses[0]}:29713", "0123456789abcdef0123456789abcdef"
    crew = Crew(4, {"PPLX_COMM_ADDR": address, "PPLX_COMM_SECRET": secret, "LOCAL_WORLD_SIZE": "2"})
    for side, ranks in enumerate(SIDES):
        crew.run("fault_cases:move_to", networks.names[side], ranks=ranks)
    return crew


def test_a_cut_cable(networks: Networks) -> None:
    """Each side names the other, goes on alone, and when the cable is whole again both are one."""
    case = Case(1, 4, transport="relayed:tcp", max_tokens=32, hidden=1024, in_flight=2)
    with crew_of(networks) as crew:
        crew.run("fault_cases:join", case, 30.0)
        crew.start("fault_cases:until_failure", case)
        for rank in range(4):
            crew.heard(rank, "running")
        cut = time.monotonic()
        networks.cut()
        for rank, told in enumerate(crew.collect(30)):
            there = SIDES[rank < 2]
            assert told.get("is_peer") and told["peer"] in there, told
            assert any(f"rank {other} died" in told["message"] for other in there), told
            assert told["at"] - cut < LOST + told["starved"], (told["at"] - cut, told)
        for side in SIDES:
            crew.start("fault_cases:go_on", case, side, None, ranks=side)
        for told in crew.collect(30):
            assert told["seconds"] < LOST, told
        networks.mend()
        for told in crew.run("fault_cases:join", case, 10.0):
            assert told["closing"] < CLOSED, told
        assert crew.leave() == [0] * 4
        assert left_in_shm(crew) == []


@pytest.mark.parametrize(("rate", "bits_per_second"), [("20mbit", 20e6), pytest.param("2mbit", 2e6, marks=pytest.mark.slow)])
def test_a_slow_cable(networks: Networks, rate: str, bits_per_second: float) -> None:
    """Results are right, at the cable's speed, and no rank is taken for dead, even where a step takes longer than a death is
    given."""
    case = Case(2, 4, transport="mixed:tcp", max_tokens=32, hidden=4096, top_k=4, num_experts=4)
    with crew_of(networks) as crew:
        crew.run("fault_cases:join", case, 60.0)
        networks.limit(rate)
        results = crew.run("fault_cases:timed_step", case)
        # Each way goes what two ranks send. The cable's bucket lets the first 32 KiB pass at once.
        crossed = 8 * sum(r["bytes"] for r in results) / 2 - 8 * 32768
        assert crossed > 1e7, results
        for r in results:
            assert r["seconds"] > 0.9 * crossed / bits_per_second, (crossed, results)
        assert crew.leave() == [0] * 4


def _plain(text: str) -> str:
    """Without what depends on the machine: the provider's name and libfabric's version."""
    return re.sub(r"over tcp\S* \(libfabric [\d.]+\)", "over tcp", text)


@pytest.mark.slow
def test_two_hosts_under_mpirun() -> None:
    """The commands of docs/across-nodes.md under "Several hosts", word for word, on two namespaces that share nothing but a
    network."""
    require_namespaces()
    if not (BIN / "mpirun").exists():
        pytest.skip("no mpirun in this environment")
    page = (ROOT / "docs" / "across-nodes.md").read_text()
    walk = re.search(r"\$ cat hosts\n((?:[^$].*\n)+)\$ export PPLX_COMM_ADDR=(\S+) .*\n\$ (.*)\n(.*)\n(.*)\n```", page)
    assert walk is not None
    hosts, address, command, about, last = walk.groups()
    script = (ROOT / "tools" / "two_hosts.sh").read_text()
    assert repr(hosts) in script and f"PPLX_COMM_ADDR={address}\n" in script
    assert command == "mpirun -f hosts -ppn 2 -n 4 python examples/hosts.py"
    tag = f"pplx{os.getpid()}"
    try:
        done = subprocess.run(
            [str(ROOT / "tools" / "two_hosts.sh"), "python", "examples/hosts.py"],
            cwd=ROOT,
            env={**clean_environment(), "PATH": f"{BIN}:{os.environ['PATH']}:/usr/sbin:/sbin", "PPLX_TWO_HOSTS_TAG": tag},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert _plain(about.removesuffix("...")) in _plain(done.stderr), done.stderr
        assert last in done.stdout.splitlines(), done.stdout
        left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
        assert tag not in left
    finally:
        for host in ("node0", "node1"):  # the script has done this already, unless it was killed
            pids = subprocess.run(["ip", "netns", "pids", f"{tag}-{host}"], capture_output=True, text=True, check=False).stdout
            for pid in pids.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", f"{tag}-{host}"], capture_output=True, check=False)
