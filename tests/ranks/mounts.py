"""Small file systems that only the ranks of a test see: a mount namespace of their own. Only root can make one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def make(folders: Iterable[str], nbytes: int) -> int:
    """Mounts an empty tmpfs of `nbytes` on each folder, for this process alone. Returns its process id, for enter()."""
    _check(_libc.unshare(CLONE_NEWNS), "unshare")
    _check(_libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount / privately")
    for folder in folders:
        _check(_libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, f"size={nbytes},mode=700".encode()), f"mount {folder}")
    return os.getpid()


def enter(pid: int) -> None:
    """Sees what that process has mounted. Call it while this process has one thread: the kernel refuses it later."""
    with open(f"/proc/{pid}/ns/mnt") as file:
        _check(_libc.setns(file.fileno(), CLONE_NEWNS), "setns")
