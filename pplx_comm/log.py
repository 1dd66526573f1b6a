"""The library's log, logging's "pplx_comm". PPLX_COMM_LOG sends it to stderr or a file from every process that has the library."""

from __future__ import annotations

import logging
import os
import socket

from pplx_comm.settings import Log, read

log = logging.getLogger("pplx_comm")


class _Ranked(logging.Formatter):
    """A line has its time, and the rank that this process has in its latest Communicator."""

    rank: int | None = None

    def format(self, record: logging.LogRecord) -> str:
        record.rank = f"pid {os.getpid()}" if self.rank is None else f"rank {self.rank}"
        return super().format(record)


_lines = _Ranked("%(asctime)s %(rank)s pplx_comm %(levelname)s: %(message)s")


def start() -> None:
    """Does what PPLX_COMM_LOG says, once: where the package is imported."""
    asked = read(Log).log
    if asked is None:
        return
    level, path = asked
    path = path.replace("%p", str(os.getpid())).replace("%h", socket.gethostname())
    handler = logging.FileHandler(path, delay=True) if path else logging.StreamHandler()
    handler.setFormatter(_lines)
    log.addHandler(handler)
    log.setLevel(level.upper())
    log.propagate = False  # else an application that logs to stderr, too, has every line twice


def name_rank(rank: int) -> None:
    """Lines have this rank from now on."""
    _lines.rank = rank
