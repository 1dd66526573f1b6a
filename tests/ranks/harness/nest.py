"""The process that ranks are forked from. Importing torch costs seconds of CPU, so it is done once, here.

The nest has one thread and never opens anything of the library, so a rank starts as if it had been started alone.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from harness.environment import clean_environment
from harness.member import serve


def keep(control: socket.socket) -> None:
    """The nest's own work: forks ranks and says how they ended."""
    import emulated  # noqa: F401
    import moe_cases  # noqa: F401
    import numpy  # noqa: F401
    import torch

    import pplx_comm

    for name in pplx_comm.__all__:  # imports what the package leaves for its first use
        getattr(pplx_comm, name)

    torch.set_num_threads(1)
    # Imported objects need not be searched for garbage at every rank's end: that took 0.4 s of CPU each.
    gc.collect()
    gc.freeze()
    control.sendall(b"!")
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not data:
            return
        request = pickle.loads(data)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            control.sendall(pickle.dumps(os.waitstatus_to_exitcode(status) if pid else None))
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            os.dup2(fds[1], 1)
            os.dup2(fds[1], 2)
            os.close(fds[1])
            os.setpgid(0, 0)  # Ctrl-C at the test is not for its ranks
            for name, value in request["env"].items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            # Autograd's threads must not be the first to find torch's thread pool gone after a fork: two at once, and one gets none.
            torch.set_num_threads(1)
            if serve(Connection(fds[0]), request["rank"], request["world_size"]):
                # An interpreter with torch takes 0.3 s of CPU to take itself apart, and here nothing of the library is left.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
            return
        for fd in fds:
            os.close(fd)
        control.sendall(pickle.dumps(pid))


class Nest:
    _one: Nest | None = None

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness", "nest", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**clean_environment(), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._control.settimeout(600)
        if self._control.recv(1) != b"!":
            raise RuntimeError("the process that ranks are forked from did not start")
        atexit.register(self.close)

    @classmethod
    def get(cls) -> Nest:
        if cls._one is None:
            cls._one = cls()
        return cls._one

    def fork(self, request: dict[str, Any], fds: Sequence[int]) -> int:
        socket.send_fds(self._control, [pickle.dumps(request)], fds)
        return int(pickle.loads(self._control.recv(1 << 16)))

    def exit_code(self, pid: int) -> int | None:
        self._control.sendall(pickle.dumps({"wait": pid}))
        answer: int | None = pickle.loads(self._control.recv(1 << 16))
        return answer

    def close(self) -> None:
        self._control.close()
        self._process.wait(10)


class Forked:
    """A rank with torch, at once."""

    def __init__(self, rank: int, world_size: int, env: Mapping[str, str | None], pipe: int, output: int) -> None:
        self.pid = Nest.get().fork({"rank": rank, "world_size": world_size, "env": dict(env)}, [pipe, output])

    def exit_code(self) -> int | None:
        return Nest.get().exit_code(self.pid)


class Spawned:
    """A fresh interpreter without torch, which the command `wrap` starts."""

    def __init__(self, wrap: Sequence[str], env: Mapping[str, str | None], pipe: int, output: int) -> None:
        whole: dict[str, str | None] = {**clean_environment(), **env}
        self._process = subprocess.Popen(
            [*wrap, sys.executable, "-m", "harness", "rank", str(pipe)],
            pass_fds=[pipe],
            env={name: value for name, value in whole.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()
