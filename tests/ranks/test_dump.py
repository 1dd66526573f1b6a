"""`python -m pplx_comm dump`: which rank the others wait for, and what that rank does."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import Case
from dump_cases import LATE
from harness import Crew, until

from pplx_comm import accounts, cli, desks, dump


def started(crew: Crew) -> tuple[list[int], str]:
    """The processes, and the job: others may run beside it."""
    told = crew.all_heard("pid")
    return [pid for pid, _ in told], told[0][1]


def rows(pids: list[int], waits: dict[int, int], since: str) -> str:
    """A pattern of lines of ranks that wait in the dispatch of step 2, each for one other."""
    lines = [rf"^ +{rank}  \S+:{pids[rank]} +2  in dispatch_recv{since} +rank {by}: .*" for rank, by in waits.items()]
    return "(?ms)" + "".join(lines)


def shown(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pplx_comm", "dump", *arguments], capture_output=True, text=True, timeout=100)
    return done.stdout + done.stderr


def when(pattern: str, *arguments: str) -> str:
    """Returns what is shown, once it has the pattern."""
    said = [""]

    def has() -> bool:
        said[0] = shown(*arguments)
        return re.search(pattern, said[0]) is not None

    try:
        until(pattern, has, 60)
    except AssertionError as late:
        raise AssertionError(f"{late}: {said[0]}") from None
    return said[0]


def awaited(transport: str) -> dict[int, int]:
    """With relays rank 1 waits for what rank 0 is to pass on."""
    return {0: LATE, 1: 0 if "relayed" in transport else LATE, 3: LATE}


def late_for(transport: str) -> str:
    return f"ranks {'0' if 'relayed' in transport else '0, 1'} and 3 wait for rank {LATE}"


@pytest.mark.parametrize("transport", ["mapped", "mixed:tcp", "relayed:tcp"])
def test_a_late_rank(transport: str) -> None:
    """It is named, with the function in which it stays; the others, their step and how long."""
    with Crew(4, {"PPLX_COMM_DUMP_SIGNAL": "USR1"}) as crew:
        crew.start("dump_cases:hangs", Case(16, 4, transport=transport, max_tokens=8), LATE, None)
        pids, job = started(crew)
        said = when(rows(pids, awaited(transport), " for [0-9.]+ m?s"), "--job", job)
        assert f"job {job}: 4 ranks" in said and f"{late_for(transport)}, which waits for none: it is in no step" in said, said
        assert re.search(r"; its main thread:\n(  File .*\n)*  File .*dump_cases.py\", line \d+ in dawdle\n", said), said
        os.kill(pids[LATE], signal.SIGUSR1)
        until("it prints its own part", lambda: "in dawdle" in crew.output(LATE))
        assert f"rank {LATE} of 4" in crew.output(LATE) and "does not answer" not in crew.output(LATE), crew.output(LATE)
        one = shown(str(pids[LATE]), "--stacks")
        assert f":{pids[LATE]}" in one and "in no step" in one and f":{pids[0]}" not in one, one
        assert "next step 2" in one and "last step that came, dispatched: " in one and "last steps: 1 " in one, one
        assert bool(re.search(r"proxy over tcp.* takes turns.* writes [1-9]", one)) == (transport != "mapped"), one
        assert all(json.loads(line)["entries"] for line in shown("--json", "--job", job).splitlines())
        assert "no job zzz" in shown("--job", "zzz")
        found = desks.ask_all("account", pids[0])
        ranks = accounts.jobs(one.value for one in found)[job]
        dump.ask_elsewhere(job, ranks, found)  # as if the others were on other hosts
        assert sorted(ranks) == [0, 1, 2, 3] and accounts.verdicts(ranks, 4)[0].startswith(late_for(transport))
        crew.tell(LATE)
        crew.collect()
        crew.leave()
    assert not [one for one in desks.ask_all("facts") if one.pid in pids]


def shows_ranks_between_halves(crew: Crew, entry: list[str], case: Case) -> None:
    """None waits for another one, since all have sent what these need: each says what ended last, and how long ago."""
    crew.start(*entry, "dump_cases:stays_between_halves", case)
    pids, job = started(crew)
    halves = ("dispatch_send", "dispatch_recv", "combine_send")[: case.world_size]
    lines = [rf"^ +{rank}  \S+:{pids[rank]} +3  after {half} [0-9.]+ m?s ago.*" for rank, half in enumerate(halves)]
    said = when("(?ms)" + "".join(lines) + "no rank waits for another one", "--job", job)
    one = shown(str(pids[0]), "--stacks")
    assert re.search(r"last steps: 1 [0-9.]+ [mu]?s, 2 [0-9.]+ [mu]?s\n", one), said + one
    for rank in range(case.world_size):
        crew.tell(rank)
    crew.collect()


@pytest.mark.parametrize("transport", ["mapped", "mixed:tcp"])
def test_between_halves(transport: str) -> None:
    with Crew(3) as crew:
        shows_ranks_between_halves(crew, [], Case(23, 3, transport=transport, max_tokens=8))


def test_frames_of_cpp() -> None:
    """Threads of the program and of the library wait in C++."""
    with Crew(4) as crew:
        crew.start("dump_cases:hangs", Case(22, 4, transport="mixed:tcp", max_tokens=8), LATE, None)
        pids, job = started(crew)
        when(rows(pids, awaited("mixed:tcp"), " for [0-9.]+ m?s"), "--job", job)
        said = shown(str(pids[0]), "--frames")
        main, *others = re.findall(r"  thread (\d+), (.*):\n((?:    .*\n)*)", said)
        assert int(main[0]) == pids[0] and "pplx::cpu::" in main[2] and "_core." in main[2], said
        proxies = [frames for _, name, frames in others if name == "pplx-proxy"]
        assert proxies and all("pplx::" in frames for frames in proxies), said
        assert "does not answer" not in said and "process" not in shown(str(pids[0])).splitlines()[-1], said
        crew.tell(LATE)
        crew.collect()


def test_frames_where_the_signal_has_another_use() -> None:
    done = run(
        """
        import os, signal
        import pplx_comm
        from pplx_comm import desks
        comm = pplx_comm.Communicator.from_env()
        signal.signal(signal.SIGRTMAX, lambda *_: None)
        (mine,) = desks.ask_all("frames", os.getpid())
        assert "has another use" in mine.value["problem"], mine
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("call", ["barrier", "agree", "reset"])
def test_a_collective_call(call: str) -> None:
    """Ranks that are in one say so, and for which rank they wait; none says so when it is over."""
    with Crew(4) as crew:
        crew.start("dump_cases:waits_in", Case(21, 4), call)
        pids, job = started(crew)
        lines = [rf"^ +{rank}  \S+:{pids[rank]} +-  in {call} for [0-9.]+ m?s +rank {LATE}: the same call\n" for rank in (0, 1)]
        said = when(
            "(?ms)" + "".join(lines) + f".*ranks 0, 1 and 3 wait for rank {LATE}, which waits for none: it is in no", "--job", job
        )
        assert "in dawdle" in said, said
        crew.tell(LATE)
        crew.collect()
        assert f"in {call} " not in shown("--job", job)


def test_python_is_held_up(tmp_path: Path) -> None:
    """A rank's process answers while a call into C lets no Python run, and its control connection does not."""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    with Crew(4) as crew:
        crew.start("dump_cases:hangs", Case(17, 4, max_tokens=8), LATE, fifo)
        pids, job = started(crew)
        said = when(
            "ranks 0, 1 and 3 wait for rank 2, which waits for none: it is in no step, no Python runs: a call into C", "--job", job
        )
        assert re.search(r"its main thread:\n  File .*dump_cases.py\", line \d+ in hold_python\n", said), said
        found = desks.ask_all("account", pids[0])
        ranks = accounts.jobs(one.value for one in found)[job]
        dump.ask_elsewhere(job, ranks, found)
        assert sorted(ranks) == [0, 1, 3]
        assert accounts.verdicts(ranks, 4) == [
            "ranks 0, 1 and 3 wait for rank 2, which does not answer: it is stopped, dead or cut off"
        ]
        Path(fifo).write_text("x")
        crew.collect()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_timeout(stopped: bool) -> None:
    """Every exception has what the blamed rank does; one rank logs the whole."""
    with Crew(4) as crew:
        crew.start("dump_cases:times_out", Case(18, 4, max_tokens=8), LATE, stopped)
        crew.all_heard("pid")
        if stopped:
            crew.signal(LATE, signal.SIGSTOP)
        for rank in (0, 1, 3):
            crew.heard(rank, "told", 60)
        if stopped:
            crew.signal(LATE, signal.SIGCONT)
        crew.tell(LATE)
        for rank in (3, 1, 0):
            crew.tell(rank)
        told = crew.collect(ranks=[0, 1, 3])
    for r in told:
        assert r["is_timeout"] and r["peer"] == LATE, r
    texts = [r["message"] for r in told if "Rank 2" in r["message"]]
    assert texts, told  # a rank that hears of another's timeout first has its text
    for text in texts:
        assert ("Rank 2 does not say what it does" if stopped else "in dawdle") in text, text


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100, env=env)


def test_a_signal() -> None:
    """It prints what the process does, and what stood there before runs, too."""
    done = run(
        """
        import io, os, signal, sys, threading
        import pplx_comm

        class Said(io.StringIO):
            whole = threading.Event()

            def flush(self):
                self.whole.set()

        heard = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: heard.set())
        comms = [pplx_comm.Communicator.from_env() for _ in range(2)]
        real, sys.stderr = sys.stderr, Said()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard.wait(50) and Said.whole.wait(50)
        real.write(sys.stderr.getvalue())
        """,
        PPLX_COMM_DUMP_SIGNAL="USR1",
    )
    assert done.returncode == 0, done
    assert done.stderr.count("pplx_comm dump:") == 1 and done.stderr.count("rank 0 of 1") == 2, done.stderr
    assert re.search(r'File "<string>", line \d+ in <module>', done.stderr), done.stderr


@pytest.mark.parametrize("name", ["USR3", "TERM"])
def test_a_signal_that_there_is_not_or_that_ends_a_process(name: str) -> None:
    done = run("import pplx_comm; pplx_comm.Communicator.from_env()", PPLX_COMM_DUMP_SIGNAL=name)
    assert f"PPLX_COMM_DUMP_SIGNAL='{name}' must be USR1, USR2, QUIT or WINCH" in done.stderr, done.stderr


def test_a_fork() -> None:
    """A child does not keep the parent's desk, and opens its own."""
    done = run(
        """
        import os
        import pplx_comm
        from pplx_comm import desks

        def told():
            return [one for one in desks.ask_all("facts") if one.pid in (parent, os.getpid())]

        parent = os.getpid()
        comm = pplx_comm.Communicator.from_env()
        (before,) = told()
        if os.fork() == 0:
            (same,) = told()
            assert same.pid == parent
            mine = pplx_comm.Communicator.from_env()
            (own,) = [one for one in told() if one.pid == os.getpid()]
            assert len(desks.jobs_of(own.value)) == 1, own
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
        comm.close()
        (after,) = told()
        assert desks.jobs_of(before.value) and not desks.jobs_of(after.value)
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user() -> None:
    """Hears nothing."""
    done = run(
        """
        import os
        import pplx_comm
        from pplx_comm import desks
        comm = pplx_comm.Communicator.from_env()
        (mine,) = desks.ask_all("account", os.getpid())
        if os.fork() == 0:
            os.seteuid(65534)
            os._exit(6 if desks.ask(mine.desk, "account") is None else 5)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 6
        """
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def at_a_desk(said: bytes) -> Iterator[str]:
    """A process that says this to all that ask. Its name is one that `dump` does not look for, so others have no part in it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0desk-{os.getpid()}-{threading.get_ident()}")
        listener.listen()

        def serve() -> None:
            with suppress(OSError):
                while True:
                    guest, _ = listener.accept()
                    with guest, suppress(OSError):
                        guest.recv(16)
                        guest.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield "@" + listener.getsockname()[1:].decode()
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_the_desk_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root hears it."""
    with at_a_desk(b"{}") as desk:
        for user, heard in ((0, True), (os.geteuid(), True), (os.geteuid() + 1, False)):
            monkeypatch.setattr(os, "geteuid", lambda user=user: user)
            assert (desks.ask(desk, "account") is not None) == heard, user
            monkeypatch.undo()


@pytest.mark.parametrize("said", [b"{", b"[" * 100_000, b'{"entries": "' + b"x" * 1000 + b'"}'])
def test_an_answer_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: bytes) -> None:
    """It is left out, and a line says so; one that is too long, too."""
    monkeypatch.setattr(desks, "LONGEST", 500 if b"x" in said else desks.LONGEST, raising=False)
    with at_a_desk(said) as desk:
        assert desks.ask(desk, "account") is None
    assert f"process {os.getpid()} is left out" in caplog.text


def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that keeps sending is given up when its time is over."""
    looks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(looks) * desks.PATIENCE / 8)
    monkeypatch.setattr(desks, "time", clock, raising=False)
    with at_a_desk(b" " * (1 << 22) + b"{}") as desk:
        assert desks.ask(desk, "account") is None


def test_nobody_is_there() -> None:
    assert "dump: process 1 does not tell this user anything" in shown("1")


def of(number: int, waits: dict[int, set[int]]) -> accounts.Rank:
    account: dict[str, Any] = {
        "host": "h",
        "pid": number,
        "process": {},
        "python_held": False,
        "entries": [],
        "threads": [],
        "stacks": "",
    }
    steps = [accounts.Step(1, "dispatch_recv", True, 10, sorted(peers), "the block") for peers in [waits.get(number)] if peers]
    return accounts.Rank(number, len(waits), account, steps)


@pytest.mark.parametrize(
    ("waits", "wanted"),
    [
        ({0: set(), 1: set()}, "no rank waits for another one"),
        ({0: {1}, 1: {2}, 2: set()}, "rank 1 waits for rank 2, which waits for none: it is in no step"),
        ({0: {1}, 1: {0, 2}, 2: set()}, "rank 1 waits for rank 2, "),
        ({0: {1}, 1: {0}}, "ranks 0 -> 1 -> 0 wait for each other: rank 0 is in dispatch_recv of step 1; rank 1 is "),
        (
            {0: {3}, 1: {0}, 2: {1}, 3: {1}},
            "ranks 0 -> 3 -> 1 -> 0 wait for each other: rank 0 is in dispatch_recv of step 1; rank 3 is ",
        ),
    ],
)
def test_where_the_chain_ends(waits: dict[int, set[int]], wanted: str) -> None:
    said = accounts.verdicts({number: of(number, waits) for number in waits}, len(waits))
    assert said[0].startswith(wanted), said


def test_ranks_that_do_not_answer() -> None:
    ranks = {number: of(number, {0: {2}, 1: {2}, 2: set(), 3: set()}) for number in (0, 1)}
    assert accounts.verdicts(ranks, 4) == ["ranks 0 and 1 wait for rank 2, which does not answer: it is stopped, dead or cut off"]
    assert accounts.verdicts({}, 2) == ["ranks 0 and 1 do not answer"]
    assert [line.strip() for line in accounts.table(ranks, range(4))[-2:]] == ["2  does not answer", "3  does not answer"]


def test_an_all_to_all_that_does_not_tell() -> None:
    """A copy from a GPU keeps CUDA's calls out: what it waits for is not known."""
    ranks = {number: of(number, {0: set(), 1: {0}}) for number in (0, 1)}
    ranks[0].all_to_alls.append({"what": "AllToAll 0", "problem": "a call here does not end"})
    assert accounts.verdicts(ranks, 2)[0].startswith(
        "rank 1 waits for rank 0, which may wait for any other: an AllToAll does not tell; "
    )
    assert accounts.verdicts({0: ranks[0]}, 1)[0] == "rank 0: an AllToAll does not tell; its main thread:"
    assert accounts.table(ranks, [0])[1].endswith("-  does not tell")


def account_of(rank: Any, world_size: Any, **other: Any) -> dict[str, Any]:
    entry = {"facts": {"job": "aaaaaaaa", "rank": rank, "world_size": world_size}, "told": None}
    return {**of(0, {}).account, "entries": [entry], **other}


@pytest.mark.parametrize(
    "said",
    [
        {}, [], 7, {"entries": 3}, {"entries": [{"facts": {"job": 1}}]}, account_of("0", 2), account_of(0, 10**9), account_of(3, 2),
        account_of(0, 2, stacks=None), account_of(0, 2, threads=[1]),
        account_of(
            0, 2, entries=[{"facts": {"job": "b", "rank": 0, "world_size": 2, "call": "c", "begun": 0, "peers": [2]}, "told": None}]
        ),
    ],
)  # fmt: skip
def test_dump_leaves_out_what_it_cannot_show(
    said: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """And shows the others, without what a terminal takes as a command."""
    good = account_of(1, 2, host="\x1b[2Jh\x9b1m", now=0)
    with at_a_desk(json.dumps(good).encode()) as desk:
        answer = desks.ask(desk, "account")
    answers = [desks.Answer("@gone", 4711, said), answer]
    monkeypatch.setattr(desks, "ask_all", lambda *_: answers)
    assert cli.main(["dump", "--stacks", "--frames"]) == 0
    shown = capsys.readouterr().out
    assert "job aaaaaaaa: 2 ranks" in shown and re.search(r"^ +1  .*h.*:0 ", shown, re.MULTILINE), shown
    assert all(line.isprintable() for line in shown.splitlines())
    assert "process 4711 is left out" in caplog.text


def test_other_hosts_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose answer cannot be read is passed over, and all of them share one deadline."""
    said = {"@0": [{}], "@1": [account_of(1, 2)]}
    asked = []

    def ask(desk: str, request: str, until: float) -> desks.Answer:
        asked.append(until)
        return desks.Answer(desk, 4711, said[desk])

    monkeypatch.setattr(desks, "ask", ask)
    ranks = accounts.jobs([account_of(0, 2)])["aaaaaaaa"]
    dump.ask_elsewhere("aaaaaaaa", ranks, [desks.Answer(desk, 4711, account_of(0, 2)) for desk in said], 7.0)
    assert sorted(ranks) == [0, 1] and asked == [7.0, 7.0]


def test_a_frame_is_cut() -> None:
    """Its pattern takes the square of its length."""
    [(_, frames)] = accounts.stacks({"stacks": "Thread 0x1 (most recent call first):\n  " + "/" * 10_000 + "\n"})
    assert [len(frame) for frame in frames] == [1000]
