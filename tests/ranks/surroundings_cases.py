"""Cases of test_surroundings.py."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import struct
from pathlib import Path
from typing import Any

import mounts
from cases import Case
from outcomes import raised
from rank_cases import Good, environment, open_all_to_all

from pplx_comm import doctor
from pplx_comm.control import memfd

CAP_DAC_READ_SEARCH = 2


def make_mounts(me: Any, folders: list[str], nbytes: int) -> int:
    return mounts.make(folders, nbytes)


def enter_mounts(me: Any, pid: int) -> None:
    mounts.enter(pid)


def _steps(me: Any, transport: str = "mapped") -> None:
    case = Case(1, me.world_size, transport=transport)
    with open_all_to_all(me, case) as a2a:
        Good(me, case, a2a).step()


# ---- /dev/shm, memory


def open_without_room(me: Any, case: Case) -> dict[str, Any]:
    """Returns what AllToAll() raises, and what it leaves in /dev/shm. Mapped memory works all the same."""
    told = raised(lambda: open_all_to_all(me, case))
    me.comm.barrier()
    told["left"] = os.listdir("/dev/shm")
    _steps(me)
    return told


def shm_in_use(me: Any, case: Case) -> list[tuple[int, int]]:
    """Bytes and reserved bytes of each file in /dev/shm."""
    with open_all_to_all(me, case):
        me.comm.barrier()
        found = [os.stat(f"/dev/shm/{name}") for name in os.listdir("/dev/shm")]
        me.comm.barrier()
    return [(status.st_size, status.st_blocks * 512) for status in found]


# ---- a full disk


def fill(folder: str) -> None:
    with contextlib.suppress(OSError), open(f"{folder}/filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def on_a_full_disk(me: Any, folder: str, last: str, address: str) -> dict[str, Any]:
    """All that a process may write to is full: home, temporary files, working folder, log and output.

    `last`: what a key falls back to.
    """
    for full in (folder, last):
        fill(full)
    os.chdir(folder)
    output = os.open(f"{folder}/output{me.rank}", os.O_WRONLY | os.O_CREAT)
    for fd in (1, 2):
        os.dup2(output, fd)
    logging.basicConfig(filename=f"{folder}/log{me.rank}", level=logging.DEBUG)
    full_places = {"HOME": folder, "XDG_RUNTIME_DIR": folder, "TMPDIR": folder}
    with environment(**full_places):
        _steps(me)
        me.close()
        with environment(PPLX_COMM_ADDR=address):
            return raised(lambda: me.communicator(timeout=5))


def files_in(_: Any, *folders: str) -> list[str]:
    return sorted(path.name for folder in folders for path in Path(folder).rglob("*") if path.is_file())


# ---- other users


def become(me: Any, uid: int) -> None:
    """Another user, without privileges, but that it may read what root may: Python itself may lie in root's home."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(8, 1)  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    header, kept = struct.pack("Ii", 0x20080522, 0), 1 << CAP_DAC_READ_SEARCH
    if libc.capset(header, struct.pack("6I", kept, kept, 0, 0, 0, 0)) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which the change of user cleared
    if os.access("/etc", os.W_OK):
        raise AssertionError("this user has privileges")


def as_another_user(me: Any, uid: int, home: str, address: str) -> list[str]:
    become(me, uid)
    with environment(HOME=home, XDG_RUNTIME_DIR=f"{home}/run"):
        _steps(me)
        _steps(me, "proxy:tcp")
        me.close()
        with environment(PPLX_COMM_ADDR=address):
            me.comm.barrier()
        return [finding.name for finding in doctor.findings() if finding.on] if me.rank == 0 else []


def hold_shared_memory(me: Any) -> list[int]:
    """The descriptors of memory that this rank shares, while the test looks on."""
    fd = memfd.allocate(4096, "a test")
    theirs = me.comm.control.share_fds([fd], "a test")
    os.pwrite(fd, b"secret", 0)
    me.say("shared", [fd, *(other for fds in theirs.values() for other in fds)])
    me.hear()
    return []
