"""How ranks find each other: several jobs side by side, ranks that do not come, and strangers among those that come."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import time
from typing import Any

import pytest
from garbage import SEED, garbage
from harness import Crew, started

from pplx_comm.control.launch import detect
from pplx_comm.control.rendezvous import meet
from pplx_comm.control.sockets import local_addresses
from pplx_comm.errors import Error
from pplx_comm.settings import HOW_TO_SET_SECRET

CASES = "communicator_cases:"
SECRET = "0123456789abcdef0123456789abcdef"
SOON = 2.0
"""Seconds in which a rank that was started comes, and after which others stop waiting for one that does not."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _loopback() -> dict[str, str | None]:
    return {"PPLX_COMM_ADDR": f"127.0.0.1:{_free_port()}"}


def _fail(world_size: int, env: dict[str, str | None]) -> list[Any]:
    with started(world_size, CASES + "fail_to_meet", timeout=5, env=env) as crew:
        return crew.collect()


def _wait_until_it_listens(port: int, crew: Crew) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, crew.output()
            time.sleep(0.01)


def test_jobs_side_by_side() -> None:
    """No address, one user, one host: each job finds its own ranks only. One after the other in one job, too."""
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(started(2, CASES + "meet")) for _ in range(4)]
        seen = [job.collect() for job in jobs]
    pids = [set(job[0]["pids"]) for job in seen]
    assert len(set.union(*pids)) == 8
    with started(3, CASES + "many_starts", times=5) as crew:
        assert crew.collect() == [5] * 3


def test_two_jobs_at_one_address() -> None:
    """The second waits until the first has started, and neither takes in the other's ranks."""
    env = _loopback()
    with started(2, CASES + "meet", rounds=20, env=env) as first, started(2, CASES + "meet", env=env) as second:
        assert not set(first.collect()[0]["pids"]) & set(second.collect()[0]["pids"])


def test_missing_ranks_are_named_by_all() -> None:
    with started(4, CASES + "fail_to_meet", timeout=SOON, only=[0, 2]) as crew:
        results = crew.collect()
    for told in results:
        assert told["kind"] == "StepTimeout"
        assert told["phase"] == "rendezvous"
        assert "ranks 1, 3 of 4 never came" in told["message"]


def test_missing_rank_0() -> None:
    with started(3, CASES + "fail_to_meet", timeout=1, only=[1, 2]) as crew:
        results = crew.collect()
    for rank, told in zip((1, 2), results, strict=True):
        assert f"rank {rank} could not reach rank 0 within 1 s" in told["message"]
        assert "PPLX_COMM_ADDR" in told["message"]


def test_the_shortest_timeout_counts_for_all() -> None:
    """A rank that gives up early is told which ranks are missing, and so are all others, at once."""
    with started(3, CASES + "wait_seconds", only=[0, 1]) as crew:
        results = crew.collect()
    for rank in (0, 1):
        assert "rank 2 of 3 never came" in results[rank]["message"]
        assert results[rank]["seconds"] - results[rank]["starved"] < 20, "rank 0's own timeout is 30 s"


def test_a_rank_that_dies_during_start_up_is_named() -> None:
    job = {"PPLX_COMM_JOB": f"a test of {os.getpid()}"}
    with (
        started(3, CASES + "fail_to_meet", timeout=20, only=[0], env=job) as zero,
        started(3, CASES + "half_way", only=[1, 2], env=job) as others,
    ):
        others.all_heard("met")
        others.tell(1)
        others.kill(2)
        told = [zero.collect()[0], others.collect(ranks=[1])[0]]
    for entry in told:
        assert "rank 2 went away during start-up" in entry["message"]


@pytest.mark.parametrize(("name", "host"), [("PPLX_COMM_ADDR", "a..b"), ("MASTER_ADDR", "h" * 64)])
def test_an_address_that_is_no_name(name: str, host: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", name: host}
    with pytest.raises(Error, match=rf"cannot resolve '{host}' \({name}\): .* Set PPLX_COMM_ADDR=<host of rank 0>:<port>"):
        meet(detect(environ), 1.0, environ)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (None, ("export PPLX_COMM_ADDR=", HOW_TO_SET_SECRET)),
        ("PPLX_COMM_ADDR", ("export PPLX_COMM_SECRET=$(openssl rand -hex 32)",)),
        ("MASTER_ADDR", ("export PPLX_COMM_SECRET=$(openssl rand -hex 32)",)),
    ],
)
def test_no_address_and_no_secret_beyond_loopback(name: str | None, says: tuple[str, ...]) -> None:
    host = (local_addresses() or ["192.0.2.1"])[0]
    for told in _fail(2, {"LOCAL_WORLD_SIZE": None, **({name: host} if name else {})}):
        assert told["seconds"] - told["starved"] < 3
        assert all(words in told["message"] for words in (*says, *([host] if name else [])))


def test_short_secret() -> None:
    for told in _fail(2, {"PPLX_COMM_SECRET": "short"}):
        assert "5 characters" in told["message"]


def test_wrong_secret() -> None:
    """The rank that has the wrong one hears it at once; rank 0 goes on waiting and says what it refused."""
    rank_env = {0: {"PPLX_COMM_SECRET": SECRET}, 1: {"PPLX_COMM_SECRET": SECRET[::-1]}}
    with started(2, CASES + "fail_to_meet", timeout=SOON, env=_loopback(), rank_env=rank_env) as crew:
        zero, one = crew.collect()
    assert "does not know this job's secret" in one["message"]
    assert one["seconds"] - one["starved"] < SOON
    assert "rank 1 of 2 never came" in zero["message"]
    assert "does not know this job's secret (x1)" in zero["message"]


def test_another_job_at_one_of_two_addresses() -> None:
    """localhost is 127.0.0.1 and ::1, say, and another job's rank 0 holds one of them: ours takes the other."""
    port = _free_port()
    other = {"PPLX_COMM_ADDR": f"127.0.0.1:{port}", "PPLX_COMM_SECRET": SECRET[::-1], "PPLX_COMM_JOB": None}
    ours = {"PPLX_COMM_ADDR": f"two-addresses.test:{port}", "PPLX_COMM_SECRET": SECRET, "PPLX_COMM_JOB": None}
    with started(2, CASES + "fail_to_meet", timeout=30, env=other, only=[0]) as first:
        _wait_until_it_listens(port, first)
        with started(3, CASES + "meet_at", hosts=["127.0.0.1", "127.0.0.2"], env=ours) as second:
            assert [seen["rank"] for seen in second.collect()] == [0, 1, 2]
        first.kill(0)  # it would wait for its rank 1


def test_jobs_of_two_launchers_at_one_address() -> None:
    """One address, one secret and no id: rank 1 of the other job must not complete this one."""
    launcher = (
        "import os, subprocess, sys; sys.exit(subprocess.call(sys.argv[1:], env={**os.environ, 'RANK': '1'}, close_fds=False))"
    )
    wrap = {1: ["env", "-u", "RANK", sys.executable, "-c", launcher]}
    env = {**_loopback(), "PPLX_COMM_SECRET": SECRET, "PPLX_COMM_JOB": None}
    with started(2, CASES + "fail_to_meet", timeout=3, env=env, wrap=wrap, spawn=True) as crew:
        zero, one = crew.collect()
    assert "rank 1 of 2 never came" in zero["message"]
    assert "another launcher process" in zero["message"]
    assert "another launcher process" in one["message"]


def test_a_job_that_nothing_names_is_warned_of() -> None:
    env = {**_loopback(), "LOCAL_WORLD_SIZE": "1", "PPLX_COMM_JOB": None}
    with started(2, CASES + "meet", env=env) as crew:
        crew.collect()
        assert crew.output().count("Set PPLX_COMM_JOB") == 1
    with started(2, CASES + "meet", env={**env, "PPLX_COMM_JOB": "named"}) as crew:
        crew.collect()
        assert "PPLX_COMM_JOB" not in crew.output()


def test_strangers_take_all_descriptors() -> None:
    """Rank 0 may open 100 files, and 150 silent strangers come before its own rank does."""
    env = _loopback()
    port = int(str(env["PPLX_COMM_ADDR"]).rpartition(":")[2])
    with started(2, CASES + "meet_with_few_descriptors", limit=100, env=env, only=[0]) as zero, contextlib.ExitStack() as crowd:
        zero.heard(0, "ready")
        _wait_until_it_listens(port, zero)
        for _ in range(150):
            crowd.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        with started(2, CASES + "meet", env={**env, "PPLX_COMM_JOB": zero.job}, only=[1]) as one:
            assert one.collect()[0]["rank"] == 1
            assert zero.collect()[0]["rank"] == 0


def test_secret_over_every_address() -> None:
    """With a secret, addresses that other hosts can reach are used too; over TCP and over AF_UNIX."""
    addresses = local_addresses()
    for env in ({}, {"PPLX_COMM_ADDR": f"{addresses[0]}:{_free_port()}"} if addresses else {}):
        with started(2, CASES + "meet", env={**env, "PPLX_COMM_SECRET": SECRET}) as crew:
            assert [seen["rank"] for seen in crew.collect()] == [0, 1]


def test_world_sizes_differ() -> None:
    with started(2, CASES + "fail_to_meet", timeout=SOON, rank_env={1: {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}}) as crew:
        zero, one = crew.collect()
    assert "world size 2" in one["message"]
    assert "world size 2, this rank with 3 (x1)" in zero["message"]


def test_one_rank_twice() -> None:
    """Another process holds what rank 0 needs; a second rank 1 is told that there is one."""
    with started(3, CASES + "half_way", only=[1]) as first:
        job = {"PPLX_COMM_JOB": first.job}
        with started(3, CASES + "fail_to_meet", timeout=60, env=job, only=[0]) as zero:
            first.heard(1, "met")
            with started(3, CASES + "fail_to_meet", timeout=SOON, env=job, only=[0, 1]) as second:
                told = second.collect()
            assert "another process holds the address" in told[0]["message"]
            assert "two processes were started as this rank" in told[1]["message"]
            zero.kill(0)
        first.kill(1)


def test_garbage_at_the_door_disturbs_no_rank() -> None:
    """Strangers bombard rank 0 while it waits, some of them silent; then the other ranks come, and all is well."""
    env = _loopback()
    port = int(str(env["PPLX_COMM_ADDR"]).rpartition(":")[2])
    rng = random.Random(SEED)
    with started(3, CASES + "meet", timeout=30, env=env, only=[0]) as zero:
        silent: list[socket.socket] = []
        thrown = 0
        deadline = time.monotonic() + 15
        while thrown < 400 and time.monotonic() < deadline:
            try:
                stranger = socket.create_connection(("127.0.0.1", port), 5)
            except OSError:
                assert zero.wait(0, 0) is None, f"seed {SEED}\n{zero.output(0)}"
                continue
            thrown += 1
            with contextlib.suppress(OSError):
                stranger.sendall(garbage(rng))
            silent.append(stranger)
            if rng.random() < 0.8:
                silent.pop(rng.randrange(len(silent))).close()
        assert thrown > 100
        with started(3, CASES + "meet", timeout=30, env={**env, "PPLX_COMM_JOB": zero.job}, only=[1, 2]) as others:
            try:
                assert others.collect()[1]["rank"] == 2
                assert zero.collect()[0]["rank"] == 0
            except AssertionError as problem:
                raise AssertionError(f"seed {SEED}: {problem}") from problem
        for stranger in silent:
            stranger.close()
