"""Another user's process: `python stranger.py UID PID FD...` tries to reach memory that rank PID shares, and prints what it reached."""

from __future__ import annotations

import ctypes
import os
import sys

PIDFD_OPEN, PIDFD_GETFD = 434, 438
PTRACE_SEIZE = 0x4206

uid, pid, *fds = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
reached = []


def attempt(name: str, call: object) -> None:
    try:
        call()  # type: ignore[operator]
    except OSError:
        return
    reached.append(name)


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


for fd in fds:
    attempt(f"fd {fd}", lambda fd=fd: os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)))
    attempt(f"pidfd_getfd {fd}", lambda fd=fd: checked(libc.syscall(PIDFD_GETFD, libc.syscall(PIDFD_OPEN, pid, 0), fd, 0)))
attempt("mem", lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR)))
attempt("maps", lambda: open(f"/proc/{pid}/maps").read(1))
attempt("ptrace", lambda: checked(libc.ptrace(PTRACE_SEIZE, pid, None, None)))
print("; ".join(reached), end="")
