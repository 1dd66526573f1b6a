"""The processes of this host that tell what they do, for a command that asks them. src/host/desk.h has the other side."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pplx_comm.log import log

PATIENCE = 12.0
"""Seconds for a whole answer of a process: more than it waits for others."""
LONGEST = 1 << 27
"""The most bytes of an answer."""
_NAME = "@pplx_comm-dump."

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """A process's, and where to ask it again."""

    desk: str
    pid: int
    value: Any


def ask(desk: str, request: str, pid: int | None = None, until: float | None = None) -> Answer | None:
    """None: it is not that process, belongs to another user (root asks all), is gone, late, or is not this library's.

    until: the latest, by time.monotonic(). None: after PATIENCE.
    """
    until = time.monotonic() + PATIENCE if until is None else until
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as guest:
        guest.settimeout(_left(until))
        guest.connect("\0" + desk[1:])
        process, user, _ = struct.unpack("i2I", guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if pid not in (None, process) or os.geteuid() not in (0, user):
            return None
        guest.sendall(request.encode() + b"\n")
        text = bytearray()
        while len(text) <= LONGEST and (piece := guest.recv(1 << 16)):
            text += piece
            guest.settimeout(_left(until))
        if text:
            return understood(Answer(desk, process, text), _decoded)
    return None


def _left(until: float) -> float:
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def understood(of: Answer, read: Callable[[Answer], T]) -> T | None:
    """Returns what `read` makes of the answer. None, and a warning: it is not in the library's form."""
    try:
        return read(of)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as problem:
        said = _one_line(f"{type(problem).__name__}: {problem}"[:200])
        log.warning("process %d is left out, since its answer cannot be read: %s", of.pid, said)
        return None


def _decoded(of: Answer) -> Answer:
    if len(of.value) > LONGEST:
        raise ValueError(f"it is longer than {LONGEST} bytes")
    return Answer(of.desk, of.pid, _plain(json.loads(of.value.decode(errors="replace"))))


def _plain(value: Any) -> Any:
    """Without what a terminal takes as a command."""
    if isinstance(value, dict):
        return {_plain(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return "\n".join(_one_line(line) for line in value.split("\n"))
    return value


def _one_line(text: str) -> str:
    return text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)


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
    """Names of the jobs of a process. None where the account is none."""
    with contextlib.suppress(LookupError, TypeError):
        return [str(entry["facts"]["job"]) for entry in account["entries"] if "job" in entry["facts"]]
    return []
