"""The processes of this host that tell what they do, for a command that asks them. src/host/desk.h has the other side."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 12.0
"""Seconds for a process to answer: more than it waits for others."""
_NAME = "@pplx_comm-dump."


@dataclass(frozen=True)
class Answer:
    """A process's, and where to ask it again."""

    desk: str
    pid: int
    value: Any


def ask(desk: str, request: str, pid: int | None = None) -> Answer | None:
    """None: it is not that process, belongs to another user, is gone, or is not this library's."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as guest:
        guest.settimeout(PATIENCE)
        guest.connect("\0" + desk[1:])
        process, _, _ = struct.unpack("3i", guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if pid in (None, process):
            guest.sendall(request.encode() + b"\n")
            text = b"".join(iter(lambda: guest.recv(1 << 16), b""))
            return Answer(desk, process, json.loads(text.decode(errors="replace")))
    return None


def ask_all(request: str, pid: int | None = None, job: str | None = None) -> list[Answer]:
    """Asks side by side, and disturbs no others. job: the first letters of its name."""
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    desks = sorted({line.split()[-1] for line in lines if _NAME in line})
    with ThreadPoolExecutor(max(1, len(desks))) as pool:

        def answers(request: str, desks: list[str]) -> list[Answer]:
            return [answer for answer in pool.map(lambda desk: ask(desk, request, pid), desks) if answer is not None]

        if job is not None:
            desks = [one.desk for one in answers("facts", desks) if any(name.startswith(job) for name in jobs_of(one.value))]
        return answers(request, desks)


def jobs_of(account: Any) -> list[str]:
    """Names of the jobs of a process."""
    return [entry["facts"]["job"] for entry in account["entries"] if "job" in entry["facts"]]
