"""Ranks of the control plane for tests: one fresh process each, which imports neither torch nor the extension modules.

    run_ranks(4, "communicator_cases:sums", {"n": 3})          # sums(me, n=3) on every rank; results by rank

    with Ranks(4, "communicator_cases:until_told") as ranks:   # the same, steered while it runs
        ranks.heard(0, "ready")
        ranks.kill(1)
        ranks.results(expect_dead={1})

`me` is a Rank. Results and words are JSON. For whole AllToAlls, and for processes that run many calls, see crew.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "PMI", "MPI_", "OMPI_", "SLURM_", "TORCHELASTIC_", "PPLX_")


class RanksFailed(AssertionError):
    """What went wrong on which ranks, with what they printed and where they were."""


# ---- in the rank -----------------------------------------------------------------------------------------------------


class Rank:
    """One rank, as the function that it runs sees it."""

    def __init__(self, channel: socket.socket | None) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._channel = channel
        self._file = channel.makefile("r") if channel is not None else None

    def say(self, word: str, value: Any = None) -> None:
        """To the test, which hears it by `Ranks.heard`."""
        assert self._channel is not None
        self._channel.sendall(json.dumps({"word": word, "value": value}).encode() + b"\n")

    def hear(self) -> Any:
        """What the test tells by `Ranks.tell`."""
        assert self._file is not None
        return json.loads(self._file.readline())

    def communicator(self, **arguments: Any) -> Any:
        from pplx_comm.communicator import Communicator

        return Communicator.from_env(**{"timeout": 20, **arguments})


def control_plane_only() -> None:
    """pplx_comm/__init__.py imports torch, which costs every process seconds. The control plane needs none of it."""
    package = types.ModuleType("pplx_comm")
    package.__path__ = [str(TESTS.parent / "pplx_comm")]
    sys.modules["pplx_comm"] = package


def _serve(fd: int, target: str, args: dict[str, Any], parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test that is killed leaves nothing running
    if os.getppid() != parent and "wrapped" not in os.environ:
        os._exit(1)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    os.set_inheritable(fd, False)
    control_plane_only()
    me = Rank(socket.socket(fileno=fd))
    module, _, function = target.partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(me, **args)
    except SystemExit:
        raise
    except BaseException as problem:
        me.say("failed", "".join(traceback.format_exception(problem)))
        raise
    me.say("result", result)


# ---- in the test -----------------------------------------------------------------------------------------------------


def clean_environment() -> dict[str, str]:
    """This process's, without what any launcher may have put there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), environment.get("PYTHONPATH", "")])
    return environment


class Ranks:
    """`env` for all ranks, `rank_env` for one; None removes a variable. `wrap`: by rank, a command to run the rank
    with.
    """

    def __init__(
        self,
        world_size: int,
        target: str,
        args: Mapping[str, Any] | None = None,
        *,
        env: Mapping[str, str | None] | None = None,
        rank_env: Mapping[int, Mapping[str, str | None]] | None = None,
        wrap: Mapping[int, Sequence[str]] | None = None,
        only: Collection[int] | None = None,
    ) -> None:
        self.world_size = world_size
        self.ranks = sorted(range(world_size) if only is None else only)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: dict[int, socket.socket] = {}
        self._words: dict[int, list[dict[str, Any]]] = {rank: [] for rank in self.ranks}
        self._partial: dict[int, bytes] = dict.fromkeys(self.ranks, b"")
        self._output: dict[int, Any] = {}
        self._selector = selectors.DefaultSelector()
        self._job = secrets.token_hex(8)
        for rank in self.ranks:
            self._start(
                rank,
                target,
                dict(args or {}),
                {**(env or {}), **(rank_env or {}).get(rank, {})},
                (wrap or {}).get(rank, ()),
            )

    def _start(self, rank: int, target: str, args: dict[str, Any], env: Mapping[str, str | None], wrap: Sequence[str]) -> None:
        environment: dict[str, str | None] = {
            **clean_environment(),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "PPLX_COMM_JOB": self._job,
            **env,
        }
        if wrap:
            environment["wrapped"] = "1"
        ours, theirs = socket.socketpair()
        self._output[rank] = tempfile.TemporaryFile()
        call = json.dumps([theirs.fileno(), target, args, os.getpid()])
        self.processes[rank] = subprocess.Popen(
            [*wrap, sys.executable, str(TESTS / "multirank.py"), call],
            pass_fds=[theirs.fileno()],
            env={name: value for name, value in environment.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=self._output[rank],
            stderr=self._output[rank],
        )
        theirs.close()
        self._channels[rank] = ours
        self._selector.register(ours, selectors.EVENT_READ, rank)

    def heard(self, rank: int, word: str, timeout: float = 30.0) -> Any:
        """The value that came with the next `word` of this rank. Whatever it says before that is an error."""
        deadline = time.monotonic() + timeout
        while not self._words[rank]:
            if rank not in self._channels:
                raise RanksFailed(f"rank {rank} ended without saying {word!r}\n{self.output()}")
            if not self._listen(deadline):
                self._fail(f"rank {rank} has not said {word!r} within {timeout} s")
        said = self._words[rank].pop(0)
        if said["word"] != word:
            self._fail(f"rank {rank} said {said['word']!r} and not {word!r}:\n{said['value']}")
        return said["value"]

    def all_heard(self, word: str, timeout: float = 30.0) -> list[Any]:
        return [self.heard(rank, word, timeout) for rank in self.ranks]

    def tell(self, rank: int, value: Any = None) -> None:
        self._channels[rank].sendall(json.dumps(value).encode() + b"\n")

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Returns when, by time.monotonic(), which all processes of a machine share."""
        at = time.monotonic()
        self.processes[rank].send_signal(number)
        return at

    def results(self, timeout: float = 60.0, expect_dead: Collection[int] = ()) -> list[Any]:
        """By rank; None for the dead. All others must have returned and ended well."""
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * self.world_size
        for rank in self.ranks:
            if rank not in expect_dead:
                results[rank] = self.heard(rank, "result", max(0.0, deadline - time.monotonic()))
        for rank, process in self.processes.items():
            try:
                code = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._fail(f"rank {rank} returned but its process does not end")
            if code != 0 and rank not in expect_dead:
                raise RanksFailed(f"rank {rank} ended with exit code {code}\n{self.output()}")
        return results

    def output(self) -> str:
        texts = []
        for rank, file in self._output.items():
            file.seek(0)
            text = file.read().decode(errors="replace")
            texts.append(f"--- rank {rank} (exit code {self.processes[rank].poll()}) printed:\n{text}")
        return "\n".join(texts)

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        for channel in self._channels.values():
            channel.close()
        for file in self._output.values():
            file.close()
        self._selector.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, deadline: float) -> bool:
        for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
            rank = key.data
            data = b""
            with contextlib.suppress(ConnectionResetError):
                data = self._channels[rank].recv(1 << 16)
            if not data:
                self._selector.unregister(self._channels[rank])
                self._channels.pop(rank).close()
            *lines, self._partial[rank] = (self._partial[rank] + data).split(b"\n")
            self._words[rank] += [json.loads(line) for line in lines]
        return time.monotonic() < deadline

    def _fail(self, problem: str) -> None:
        """With every rank's stack: where the others are explains why one did not come."""
        alive = [process for process in self.processes.values() if process.poll() is None]
        for process in alive:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and any(process.poll() is None for process in alive):
            time.sleep(0.05)
        raise RanksFailed(f"{problem}\n{self.output()}")


def run_ranks(
    world_size: int,
    target: str,
    args: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    expect_dead: Collection[int] = (),
) -> list[Any]:
    with Ranks(world_size, target, args, env=env) as ranks:
        return ranks.results(timeout, expect_dead)


if __name__ == "__main__":
    sys.modules["multirank"] = sys.modules["__main__"]
    _serve(*json.loads(sys.argv[1]))
