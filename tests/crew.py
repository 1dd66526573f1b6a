"""Ranks for tests: real processes that run named functions, many times each.

Importing torch costs seconds of CPU per process, so one process (the nest) imports everything once and forks the ranks. It
has one thread and never opens anything of the library, so a rank starts as if it had been started alone.

    with Crew(4) as crew:
        results = crew.run("rank_cases:sums", 3)      # rank_cases.sums(me, 3) on every rank; results by rank

`me` is the rank's Member: .rank, .world_size, .comm (made at first use, and kept).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from multirank import clean_environment

TESTS = Path(__file__).resolve().parent

GRACE = 5.0
"""Seconds that the others get to say what they saw after a rank has failed: those that wait for it may do so for long."""


def seed() -> int:
    """PPLX_SEED, so that a failure can be run again; else always the same."""
    value = int(os.environ.get("PPLX_SEED", "1"), 0)
    print(f"seed {value} (again with PPLX_SEED={value})")
    return value


class RankFailed(AssertionError):
    """What went wrong on which ranks, with what they printed."""


class Member:
    """One rank, as the functions that it runs see it."""

    def __init__(self, rank: int, world_size: int, pipe: Connection) -> None:
        self.rank = rank
        self.world_size = world_size
        self._pipe = pipe
        self.kept: dict[str, Any] = {}
        """What a function leaves for the next one."""
        self._comm: Any = None

    @property
    def comm(self) -> Any:
        if self._comm is None:
            import pplx_comm

            self._comm = pplx_comm.Communicator.from_env(timeout=30)
        return self._comm

    def say(self, word: Any) -> None:
        """To the test, in the middle of a call: Crew.heard brings it."""
        self._pipe.send(("said", word))

    def close(self) -> None:
        self.kept.clear()
        if self._comm is not None:
            self._comm.close()
            self._comm = None


# ---- in the rank -----------------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, rank: int, world_size: int) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    me = Member(rank, world_size, pipe)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if job is None:
            me.close()
            return
        name, args, kwargs = job
        try:
            module, _, function = name.partition(":")
            answer = "returned", getattr(importlib.import_module(module), function)(me, *args, **kwargs)
        except SystemExit:  # of a child that the function forked
            raise
        except BaseException:
            answer = "raised", traceback.format_exc()
        with contextlib.suppress(BrokenPipeError):
            pipe.send(answer)


# ---- the nest ----------------------------------------------------------------------------------------------------------------


def _nest(control: socket.socket) -> None:
    import numpy  # noqa: F401
    import rank_cases  # noqa: F401
    import torch

    import pplx_comm  # noqa: F401

    torch.set_num_threads(1)
    # What is imported here need not be searched for garbage at every rank's end: that took 0.4 s of CPU each.
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
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test that is killed leaves nothing running
            os.environ.update(request["env"])
            # Not os._exit: what a program does at its end is tested, too.
            _serve(Connection(fds[0]), request["rank"], request["world_size"])
            return
        for fd in fds:
            os.close(fd)
        control.sendall(pickle.dumps(pid))


class _Nest:
    _one: _Nest | None = None

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "crew.py"), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**clean_environment(), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._control.settimeout(120)
        if self._control.recv(1) != b"!":
            raise RuntimeError("the process that ranks are forked from did not start")
        atexit.register(self.close)

    @classmethod
    def get(cls) -> _Nest:
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


# ---- in the test -------------------------------------------------------------------------------------------------------------


class Crew:
    def __init__(self, world_size: int, env: dict[str, str] | None = None) -> None:
        self.world_size = world_size
        self.broken = False
        self._pipes: list[Connection] = []
        self.pids: list[int] = []
        self.past_pids: list[int] = []
        self._exit_codes: dict[int, int] = {}
        self._output = [tempfile.TemporaryFile() for _ in range(world_size)]
        self._env = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "PPLX_COMM_JOB": secrets.token_hex(8),
            **(env or {}),
        }
        for rank in range(world_size):
            pid, pipe = self._start_rank(rank)
            self.pids.append(pid)
            self._pipes.append(pipe)

    def _start_rank(self, rank: int) -> tuple[int, Connection]:
        ours, theirs = socket.socketpair()
        request = {"rank": rank, "world_size": self.world_size, "env": {**self._env, "RANK": str(rank)}}
        pid = _Nest.get().fork(request, [theirs.fileno(), self._output[rank].fileno()])
        theirs.close()
        return pid, Connection(ours.detach())

    def restart(self, rank: int) -> None:
        """A new process in the place of one that was killed: the same rank of the same job."""
        assert self.wait(rank) == -signal.SIGKILL, self.output(rank)
        self._pipes[rank].close()
        self.past_pids.append(self.pids[rank])
        del self._exit_codes[rank]
        self.pids[rank], self._pipes[rank] = self._start_rank(rank)

    def start(self, name: str, *args: Any, ranks: Sequence[int] | None = None, **kwargs: Any) -> None:
        """The call begins; collect() brings what it returns."""
        for rank in range(self.world_size) if ranks is None else ranks:
            try:
                self._pipes[rank].send((name, args, kwargs))
            except OSError:
                self.broken = True
                raise RankFailed(f"before {name}, {self._gone(rank)}") from None

    def collect(self, timeout: float = 60.0, ranks: Sequence[int] | None = None) -> list[Any]:
        """Whoever fails first is named first, and ends the waiting for those that hang for it."""
        wanted = list(range(self.world_size) if ranks is None else ranks)
        waiting: dict[Any, int] = {self._pipes[rank]: rank for rank in wanted}
        deadline, late = time.monotonic() + timeout, f"{timeout:g} s"
        results: dict[int, Any] = {}
        problems: list[str] = []
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    results[rank] = self._next(rank, "returned", deadline)
                except RankFailed as problem:
                    if not problems and time.monotonic() + GRACE < deadline:
                        deadline, late = time.monotonic() + GRACE, f"{GRACE:g} s after the first failure"
                    problems.append(str(problem))
            if not ready:
                self.broken = True
                problems += [f"rank {rank} is not back in time, {late}:\n{self._stack(rank)}" for rank in waiting.values()]
                break
        if problems:
            raise RankFailed("\n".join(problems))
        return [results[rank] for rank in wanted]

    def heard(self, rank: int, timeout: float = 30.0) -> Any:
        """The next that the rank says."""
        return self._next(rank, "said", time.monotonic() + timeout)

    def _next(self, rank: int, wanted: str, deadline: float) -> Any:
        try:
            if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                problem = f"rank {rank} is not back in time:\n{self._stack(rank)}"
            else:
                kind, value = self._pipes[rank].recv()
                if kind == wanted:
                    return value
                problem = f"rank {rank} {kind}:\n{value}{self.output(rank)}"
        except (EOFError, ConnectionResetError):
            problem = self._gone(rank)
        self.broken = True
        raise RankFailed(problem)

    def _gone(self, rank: int) -> str:
        return f"rank {rank} is gone (exit code {self.wait(rank, 5)}):\n{self.output(rank)}"

    def run(self, name: str, *args: Any, timeout: float = 60.0, ranks: Sequence[int] | None = None, **kwargs: Any) -> list[Any]:
        try:
            self.start(name, *args, ranks=ranks, **kwargs)
            return self.collect(timeout, ranks)
        except BaseException:  # a test that is stopped here leaves ranks in the middle of a call
            self.broken = True
            raise

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def kill(self, rank: int) -> float:
        """kill -9. Returns when, by time.monotonic(), which all processes of a machine share."""
        at = time.monotonic()
        os.kill(self.pids[rank], signal.SIGKILL)
        return at

    def wait(self, rank: int, timeout: float = 10.0) -> int | None:
        """The exit code, negative for a signal; None if it still runs then."""
        deadline = time.monotonic() + timeout
        while rank not in self._exit_codes:
            code = _Nest.get().exit_code(self.pids[rank])
            if code is not None:
                self._exit_codes[rank] = code
            elif time.monotonic() > deadline:
                return None
            else:
                time.sleep(0.005)
        return self._exit_codes[rank]

    def output(self, rank: int) -> str:
        self._output[rank].seek(0)
        text = self._output[rank].read().decode(errors="replace")
        return f"--- printed by rank {rank}:\n{text}" if text else ""

    def leave(self, timeout: float = 30.0) -> list[int | None]:
        """Ask every rank that lives to end, and wait: the exit codes. A busy machine takes its time over interpreters that end."""
        for rank, pipe in enumerate(self._pipes):
            if rank not in self._exit_codes:
                with contextlib.suppress(OSError):
                    pipe.send(None)
        return [self.wait(rank, timeout) for rank in range(self.world_size)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for rank in range(self.world_size):
            if self.wait(rank, 0.5 if self.broken else 10.0) is None:
                os.kill(self.pids[rank], signal.SIGKILL)
        for rank in range(self.world_size):
            self.wait(rank)
        for file in self._output:
            file.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self.broken:
                codes = self.leave()
                bad = {rank: code for rank, code in enumerate(codes) if code not in (0, -signal.SIGKILL)}
                if bad:
                    raise RankFailed(f"exit codes {bad}\n" + "\n".join(self.output(rank) for rank in bad))
        finally:
            self.close()

    def _stack(self, rank: int) -> str:
        if self.wait(rank, 0) is not None:
            return f"exit code {self._exit_codes[rank]}\n{self.output(rank)}"
        os.kill(self.pids[rank], signal.SIGUSR2)
        before = -1
        for _ in range(20):  # until it has printed everything
            time.sleep(0.05)
            size = os.fstat(self._output[rank].fileno()).st_size
            if size == before and size > 0:
                break
            before = size
        return self.output(rank)


class Crews:
    """A crew for many tests, made anew after one that broke it. What ranks died of between tests, close() raises."""

    def __init__(self, world_size: int, env: dict[str, str] | None = None) -> None:
        self.world_size, self.env = world_size, env
        self._crew: Crew | None = None
        self._died: list[str] = []

    def run(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        if self._crew is not None and not self._crew.broken:
            died = [rank for rank in range(self.world_size) if self._crew.wait(rank, 0) is not None]
            self._crew.broken = bool(died)
            self._died += [f"before {name}, {self._crew._gone(rank)}" for rank in died]
        if self._crew is None or self._crew.broken:
            self._end()
            self._crew = Crew(self.world_size, self.env)
        return self._crew.run(name, *args, **kwargs)

    def _end(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            with crew:
                pass

    def close(self) -> None:
        self._end()
        if self._died:
            raise RankFailed("\n".join(self._died))


def run_ranks(
    world_size: int, name: str, *args: Any, timeout: float = 60.0, env: dict[str, str] | None = None, **kwargs: Any
) -> list[Any]:
    """Once, in processes of their own, which must end well."""
    with Crew(world_size, env) as crew:
        return crew.run(name, *args, timeout=timeout, **kwargs)


if __name__ == "__main__":
    sys.modules["crew"] = sys.modules["__main__"]
    _nest(socket.socket(fileno=int(sys.argv[1])))
