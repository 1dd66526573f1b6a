"""From open to close: nothing leaks, everything may be closed in any order or not at all, forks are told, idling is cheap."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import Case
from harness import Crew, Crews, clean_environment

TRANSPORTS = ["mapped", "proxy:shm", "proxy:tcp"]
ENDED = 9.0  # two interpreters with torch in them, on a busy machine; a rank that waited for a step would take its timeout, 10 s


@pytest.fixture(scope="module")
def crew() -> Iterator[Crews]:
    with Crews(2) as crews:
        yield crews


def check_no_growth(results: list[dict[str, list[int]]]) -> None:
    """The second half holds no more than the first, but for a few mapped regions, and its end no more memory than its begin, but for 4 MiB."""
    for r in results:
        half, quarter = len(r["fds"]) // 2, len(r["fds"]) // 4
        for name, slack in [("fds", 0), ("threads", 0), ("maps", 8)]:
            assert min(r[name][half:]) <= max(r[name][:half]) + slack, (name, r[name])
        assert min(r["memory"][-quarter:]) <= min(r["memory"][half - quarter : half]) + 4096, ("memory", r["memory"])


def test_growth_is_told_from_steps() -> None:
    def held(memory: list[int]) -> list[dict[str, list[int]]]:
        return [{"fds": [7] * len(memory), "threads": [2] * len(memory), "maps": [478] * len(memory), "memory": memory}]

    check_no_growth(held([270_000] * 12 + [272_100] * 4))
    check_no_growth(held([270_000] * 100 + [290_000, 270_000] * 50))
    check_no_growth(held([270_000 + 500 * n for n in range(16)]))  # less than 4 MiB in eight cycles
    for leak in [
        [270_000 + 600 * n for n in range(16)],
        [270_000 + 600 * (n - n % 5) // 5 for n in range(100)],
        [270_000] * 50 + [275_000] * 50,
    ]:
        with pytest.raises(AssertionError, match="memory"):
            check_no_growth(held(leak))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_open_and_close(crew: Crews, transport: str) -> None:
    """So often that 82 KiB a cycle show on mapped memory, of the others 137 KiB."""
    case = Case(1, 2, transport=transport, max_tokens=32, hidden=1024, threads=2)
    times = {"mapped": 100}.get(transport, 60)
    check_no_growth(crew.run("life_cases:cycles", case, times, "all_to_all", timeout=280))


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_open_and_close_with_communicators(crew: Crews, transport: str) -> None:
    case = Case(1, 2, transport=transport, max_tokens=32, hidden=1024, threads=2)
    times = {"mapped": 60}.get(transport, 16)
    check_no_growth(crew.run("life_cases:cycles", case, times, "communicator", timeout=280))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_dropped_without_close(crew: Crews, transport: str) -> None:
    """The last reference of an AllToAll takes along what close() gives back."""
    case = Case(2, 2, transport=transport, threads=2)
    check_no_growth(crew.run("life_cases:cycles", case, 30, "drop", timeout=100))


@pytest.mark.parametrize(
    ("transport", "how"),
    [("mapped", "kept"), ("mapped", "step_open"), ("mapped", "cycle"), ("proxy:shm", "step_open"), ("proxy:tcp", "step_open"),
     ("proxy:tcp", "dropped")],
)  # fmt: skip
def test_the_interpreter_ends_without_close(transport: str, how: str) -> None:
    with Crew(2) as crew:
        crew.run("life_cases:leave_open", Case(3, 2, transport=transport), how)
        begin = time.monotonic()
        assert crew.leave() == [0, 0], crew.output(0) + crew.output(1)
        assert time.monotonic() - begin < ENDED
        for rank in range(2):
            assert crew.output(rank) == ""


def test_the_interpreter_ends_while_a_thread_closes() -> None:
    """It waits for that. Python ends threads that come back from C++ later, which aborts the process."""
    with Crew(2) as crew:
        crew.run("life_cases:leave_open", Case(3, 2, transport="proxy:tcp"), "slowly_dropped")
        assert crew.leave() == [0, 0], crew.output(0) + crew.output(1)
        assert crew.output(0) + crew.output(1) == ""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_in_any_order(crew: Crews, transport: str) -> None:
    crew.run("life_cases:several_closes", Case(4, 2, transport=transport))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_close_is_prompt(crew: Crews, transport: str) -> None:
    for seconds in crew.run("life_cases:stops_promptly", Case(5, 2, transport=transport)):
        assert seconds < 1.0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_steps_received_in_opposite_orders(crew: Crews, transport: str) -> None:
    """A thread each for two steps in flight: no thread waits for a lock that is held until a peer has received."""
    crew.run("life_cases:opposite_orders", Case(8, 2, transport=transport, in_flight=2))


@pytest.mark.parametrize(
    ("transport", "call"), [("mapped", "dispatch_recv"), ("mapped", "combine_recv"), ("proxy:tcp", "dispatch_recv")]
)
def test_close_ends_a_call_of_another_thread(transport: str, call: str) -> None:
    """It says that the AllToAll was closed, and nothing of the peer that it waited for; closing is prompt."""
    with Crew(2) as crew:
        told, _ = crew.run("life_cases:closed_by_another_thread", Case(9, 2, transport=transport), call)
        assert told["is_error"] and not told["is_peer"] and "was closed" in told["message"], told
        assert told["closing"] < 10.0 and told["ended"] < 10.0, told


@pytest.mark.parametrize(("transport", "others"), [("proxy:shm", 0), ("proxy:tcp", 1)])
def test_a_step_that_is_dropped(transport: str, others: int) -> None:
    """An AllToAll without references, with a step open: its proxy waits for nothing, also after others came and went."""
    with Crew(2) as crew:
        for shares in crew.run("life_cases:dropped_with_a_step", Case(10, 2, transport=transport), others, 0.05, 3):
            assert min(max(share.values()) for share in shares) <= 0.05, shares


def test_a_constructor_that_fails_gives_everything_back(crew: Crews) -> None:
    """After it is attached to its proxy."""
    for users in crew.run("life_cases:fails_when_attached", Case(11, 2, transport="proxy:tcp")):
        assert users == [0, 0, 1, 0], users


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_fork(crew: Crews, transport: str) -> None:
    for r in crew.run("life_cases:fork_in_the_parent", Case(6, 2, transport=transport, threads=3)):
        assert r["codes"] == [0, 0], r
        assert r["told"].count("fork") >= 5, r


FORK_AND_END = """
import os, signal
import torch
import pplx_comm as pc

comm = pc.Communicator.from_env()
a2a = pc.AllToAll(comm, num_experts=2, top_k=1, hidden=8, max_tokens_per_rank=4, device="cpu")
d = a2a.dispatch(torch.ones(4, 8, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.int32))
pid = os.fork()
if pid == 0:
    signal.alarm(20)
else:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, code
"""


def test_a_forked_child_runs_off_its_end() -> None:
    """With everything that it inherited still alive: threads that it has not, and memory that it has not."""
    env = {**clean_environment(), "RANK": "0", "WORLD_SIZE": "1", "PPLX_COMM_THREADS": "3"}
    subprocess.run([sys.executable, "-c", FORK_AND_END], env=env, check=True, timeout=120)


@pytest.mark.parametrize("transport", ["proxy:shm", "proxy:tcp"])
def test_an_idle_proxy_takes_next_to_nothing(transport: str) -> None:
    """5 % of a core at most, once no step was open for a second. The best of three looks: other programs run here too."""
    with Crew(2) as crew:
        for shares in crew.run("life_cases:idle", Case(7, 2, transport=transport), 0.05, 3):
            best = min(max(share.values()) for share in shares)
            assert best <= 0.05, shares
            assert any("pplx" in name for name in shares[0]), shares


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_small_dev_shm(tmp_path: Path) -> None:
    """Memory between ranks has no name: /dev/shm may be as small as a container's, and stays empty."""
    script = (
        "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
        f"{sys.executable} -c 'import cases, harness; "
        'case = cases.Case(1, 2, max_tokens=32, hidden=7168, layout="compact"); '
        'harness.run_ranks(2, "life_cases:big_step", case)\' && '
        "ls -A /dev/shm | wc -l"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[-1] == "0", done.stdout
