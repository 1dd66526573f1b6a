"""Host memory that ranks of a node share: nameless, reserved in full, handed over as a file descriptor."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from pplx_comm.errors import Error

_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW = 1, 2, 4


def allocate(nbytes: int, what: str, share: int | None = None) -> int:
    """Returns a memfd of `nbytes` bytes. Every page is reserved, so no rank meets SIGBUS later. The caller closes it.

    Sealed against resizing: no peer that maps it can cut it short under the others.
    share: the most bytes for this rank, where several ranks allocate at once under one limit.
    """
    if nbytes <= 0:
        raise Error(f"{what} asks for {nbytes} bytes of shared memory: it must be more than 0")
    # Asked first, since the kernel would grant page after page until it starts to kill processes.
    free, limit = available_bytes()
    if share is not None and share < free:
        free, limit = share, f"this rank's share; {limit}"
    if nbytes > free:
        raise Error(f"{what} needs {nbytes} bytes of shared memory, {free} are available ({limit}): {_ADVICE}")
    fd = os.memfd_create(f"pplx_comm {what}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, _ADD_SEALS, _SEAL | _SHRINK | _GROW)
    except OSError as problem:
        os.close(fd)
        if problem.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise Error(f"{what} needs {nbytes} bytes of shared memory: {problem.strerror}. {_ADVICE.capitalize()}") from None
        raise
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_of_peer(fd: int, nbytes: int, rank: int) -> None:
    """Raises unless `fd`, which that rank handed over, holds `nbytes` bytes or more for ever: no access meets SIGBUS."""
    size = os.fstat(fd).st_size
    if size < nbytes:
        raise Error(f"the memory that rank {rank} shares has {size} bytes, fewer than the {nbytes} of this AllToAll's blocks")
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError:
        seals = 0  # no file that can be sealed
    if not seals & _SHRINK:
        raise Error(f"the memory that rank {rank} shares is not sealed against shrinking: that rank could cut it short later")


_ADVICE = "use a smaller max_tokens_per_rank or fewer AllToAlls, or give this process more memory"


def available_bytes() -> tuple[int, str]:
    """Returns the bytes still available, and the source of that limit: the machine, or a memory cgroup above this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    best = int(lines["MemAvailable"].split()[0]) * 1024, "MemAvailable of the machine"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                best = min([best, *_cgroup_limits(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current")])
            elif "memory" in controllers.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes"
                best = min([best, *_cgroup_limits(Path("/sys/fs/cgroup/memory"), path, *names)])
    return best


def _cgroup_limits(root: Path, path: str, limit_name: str, usage_name: str) -> list[tuple[int, str]]:
    """One entry for each limited cgroup from ours up to the root. A container may see its own cgroup as the root."""
    limits = []
    folder = root / path.lstrip("/")
    for place in [folder, *folder.parents]:
        if root != place and root not in place.parents:
            break
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            limit = int((place / limit_name).read_text())
            usage = int((place / usage_name).read_text()) - _reclaimable(place)
            limits.append((max(0, limit - usage), f"memory limit of cgroup {place}"))
    return limits


def _reclaimable(place: Path) -> int:
    """File cache, which the kernel gives back when asked."""
    fields = dict(line.split(" ", 1) for line in (place / "memory.stat").read_text().splitlines())
    prefix = "total_" if "total_inactive_file" in fields else ""
    return int(fields.get(f"{prefix}inactive_file", 0)) + int(fields.get(f"{prefix}active_file", 0))
