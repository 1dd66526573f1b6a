"""Ranks in bad surroundings: no room in /dev/shm, in memory or on the disk; other users; hosts that share an address."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cases import Case
from harness import Crew, threads, until
from networks import require_namespaces

from pplx_comm.control import assemble, connecting
from pplx_comm.control.probe import Locality
from pplx_comm.control.sockets import Address, listen_tcp, start_connect

CASES = "surroundings_cases:"
UID = 61234
"""A user that no machine has."""
STRANGER = Path(__file__).with_name("stranger.py")
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


def share_mounts(crew: Crew, folders: list[str], nbytes: int) -> None:
    """All ranks see a tmpfs of that size on each folder; no other process does."""
    (pid,) = crew.run(CASES + "make_mounts", folders, nbytes, ranks=[0])
    crew.run(CASES + "enter_mounts", pid, ranks=crew.ranks[1:])


def loopback() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


# ---- room


@pytest.mark.parametrize("mib", [1, 40])
def test_a_dev_shm_without_room(mib: int) -> None:
    """No room for the files of any rank, or of one: the provider shm would look at the free space, and end in SIGBUS when it is
    used up."""
    require_namespaces()
    with Crew(3) as crew:
        share_mounts(crew, ["/dev/shm"], mib << 20)
        for told in crew.run(CASES + "open_without_room", Case(1, 3, transport="proxy:shm")):
            assert told.get("is_error"), told
            assert "/dev/shm has" in told["message"] and "--shm-size=1g" in told["message"], told
            assert told["left"] == [], told


def test_memory_in_dev_shm_is_reserved() -> None:
    """A /dev/shm that fills up later takes no page from under a rank."""
    require_namespaces()
    with Crew(2) as crew:
        share_mounts(crew, ["/dev/shm"], 128 << 20)
        for files in crew.run(CASES + "shm_in_use", Case(1, 2, transport="proxy:shm")):
            assert len(files) == 2 and all(reserved >= size for size, reserved in files), files


def test_a_full_disk(tmp_path: Path) -> None:
    """Steps write nothing to a disk. A start that needs a key's file says which folders are full."""
    require_namespaces()
    last = Path(f"/tmp/pplx_comm-{os.geteuid()}")
    last.mkdir(mode=0o700, exist_ok=True)
    with Crew(2) as crew:
        share_mounts(crew, [str(tmp_path), str(last)], 64 << 10)
        for told in crew.run(CASES + "on_a_full_disk", str(tmp_path), str(last), loopback()):
            assert told.get("is_error"), told
            assert told["message"].count("No space left on device") == 3 and "PPLX_COMM_SECRET" in told["message"], told
        for left in crew.run(CASES + "files_in", str(tmp_path), str(last)):  # now that no rank tries to write a key
            assert left == ["filler", "filler", "log0", "log1", "output0", "output1"], left


# ---- users


@root
def test_another_user_without_a_home(tmp_path: Path) -> None:
    """A start, steps over both carriers, a key and doctor, where all that the user may write to is /tmp."""
    key = Path(f"/tmp/pplx_comm-{UID}")
    try:
        with Crew(2) as crew:
            on, _ = crew.run(CASES + "as_another_user", UID, str(tmp_path), loopback())
        assert {"cpu", "mapped", "torch"} <= set(on), on
        assert key.stat().st_uid == UID
    finally:
        shutil.rmtree(key, ignore_errors=True)


def reached_by(uid: int, pid: int, fds: list[int]) -> list[str]:
    command = [sys.executable, str(STRANGER), str(uid), str(pid), *map(str, fds)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split("; ")


@root
def test_a_stranger_at_shared_memory() -> None:
    """Another user reaches neither a rank's memory nor that of its peers through /proc; the rank's own user reaches all of it."""
    with Crew(2) as crew:
        crew.start(CASES + "hold_shared_memory")
        held = crew.all_heard("shared")
        for rank in range(2):
            assert reached_by(UID, crew.pids[rank], held[rank]) == [""], "it reached these"
        assert len(reached_by(0, crew.pids[0], held[0])) == 2 * len(held[0]) + 3
        for rank in range(2):
            crew.tell(rank)
        crew.collect()


def listening(pid: int) -> list[str]:
    """The abstract sockets at which a process listens."""
    mine = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            mine.add(os.readlink(link))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [entry[7][1:] for entry in lines if len(entry) > 7 and entry[3] == "00010000" and f"socket:[{entry[6]}]" in mine]


@root
def test_a_stranger_at_a_start() -> None:
    """It hears not a word at either socket of rank 0, and keeps no rank out. Once all are there, no rank listens."""
    call = (
        f"import contextlib, os, socket, sys; os.setresuid({UID}, {UID}, {UID}); s = socket.socket(socket.AF_UNIX); "
        "s.settimeout(60); s.connect('\\0' + sys.argv[1]); print('connected', flush=True)\n"
        "with contextlib.suppress(ConnectionResetError): sys.exit(len(s.recv(9)))"
    )
    with Crew(2) as crew, contextlib.ExitStack() as strangers:
        crew.start("communicator_cases:meet", ranks=[0])
        # One for the start, and one for the mesh, whose callers wait until all ranks are there.
        until("rank 0 listens", lambda: len(listening(crew.pids[0])) == 2)
        calls = [
            strangers.enter_context(subprocess.Popen([sys.executable, "-c", call, name], stdout=subprocess.PIPE, text=True))
            for name in listening(crew.pids[0])
        ]
        for stranger in calls:
            assert stranger.stdout is not None and stranger.stdout.readline() == "connected\n"
        crew.start("communicator_cases:meet", ranks=[1])
        crew.collect()
        assert [stranger.wait(60) for stranger in calls] == [0, 0], "they heard something, or no rank hung up"
        crew.start(CASES + "hold_shared_memory")
        crew.all_heard("shared")
        assert all(name.startswith("pplx_comm-dump.") for name in listening(crew.pids[0]))
        for rank in range(2):
            crew.tell(rank)
        crew.collect()


# ---- addresses


HOSTS, PER_HOST = 8, 8
SHARED = "172.17.0.1"


def test_64_ranks_whose_hosts_share_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every host the ranks listen on the same ports, so the address that all hosts have leads each caller to a rank of its own host.

    The hosts are loopback addresses of this process, and the shared one is the caller's own.
    """
    here = threading.local()
    met: list[int] = []

    def call(address: Address) -> Any:
        if isinstance(address, str):
            return start_connect(address)
        if address[0] == SHARED:
            met.append(here.host)
        return start_connect((f"127.0.1.{here.host + 1}" if address[0] == SHARED else address[0], address[1]))

    def prepare(rank: int) -> None:
        here.host, here.port = rank // PER_HOST, 43000 + rank % PER_HOST

    monkeypatch.setattr(connecting, "start_connect", call)
    monkeypatch.setattr(assemble, "local_addresses", lambda: [SHARED, f"127.0.1.{here.host + 1}"])
    monkeypatch.setattr(assemble, "_listen_everywhere", lambda: listen_tcp(f"127.0.1.{here.host + 1}", here.port))
    monkeypatch.setattr(Locality, "here", classmethod(lambda cls: Locality("boot", here.host, 1)))
    found = threads.run(HOSTS * PER_HOST, lambda me: me.comm.control.node_of, prepare)
    assert found == [[rank // PER_HOST for rank in range(HOSTS * PER_HOST)]] * (HOSTS * PER_HOST)
    assert len(met) >= HOSTS * (HOSTS - 1) // 2 * PER_HOST**2
