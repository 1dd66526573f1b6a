"""The ranks of a test, as the test sees them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from harness.nest import Forked, Spawned

GRACE = 5.0
"""Seconds that the others get to say what they saw after a rank has failed: those that wait for it may do so for long."""

Environment = Mapping[str, str | None]
"""None removes a variable."""
PATIENCE = 180.0
"""Seconds for what no test gives a time."""
LONGEST = 840.0
"""Seconds for a call on the busiest machine: less than pytest's own limit, which would not say where the ranks are."""


def allowed(seconds: float) -> float:
    """More than `seconds` where more than two threads run a core: the ranks of a busy machine get less of it."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2)


class RankFailed(AssertionError):
    """Errors by rank, with the ranks' output and stacks."""


class Crew:
    """`env` is for all ranks, `rank_env` for one. `wrap`: by rank, a command to start it with; such a rank is a fresh interpreter
    without torch, as all are with spawn=True, and the others are forked from the nest. `only`: the ranks that there are.
    """

    def __init__(
        self,
        world_size: int,
        env: Environment | None = None,
        *,
        rank_env: Mapping[int, Environment] | None = None,
        wrap: Mapping[int, Sequence[str]] | None = None,
        only: Collection[int] | None = None,
        spawn: bool = False,
        grace: float = GRACE,
    ) -> None:
        self.world_size = world_size
        self.ranks = sorted(range(world_size) if only is None else only)
        self.broken = False
        self.job = secrets.token_hex(8)
        self.pids: dict[int, int] = {}
        self.past_pids: list[int] = []
        self._grace = grace
        self._wrap = {rank: (wrap or {}).get(rank, ()) for rank in self.ranks if spawn or rank in (wrap or {})}
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, Forked | Spawned] = {}
        self._exit_codes: dict[int, int] = {}
        self._accepted: dict[int, int] = {}
        self._output = {rank: tempfile.TemporaryFile() for rank in self.ranks}
        self._env: dict[int, dict[str, str | None]] = {
            rank: {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "PPLX_COMM_JOB": self.job,
                **(env or {}),
                **(rank_env or {}).get(rank, {}),
            }
            for rank in self.ranks
        }
        for rank in self.ranks:
            self._start_rank(rank)

    def _start_rank(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        env, output = self._env[rank], self._output[rank].fileno()
        if rank in self._wrap:
            self._processes[rank] = Spawned(self._wrap[rank], env, theirs.fileno(), output)
        else:
            self._processes[rank] = Forked(rank, self.world_size, env, theirs.fileno(), output)
        theirs.close()
        self.pids[rank], self._pipes[rank] = self._processes[rank].pid, Connection(ours.detach())

    def restart(self, rank: int) -> None:
        """A new process in the place of one that was killed: the same rank of the same job."""
        assert self.wait(rank) == -signal.SIGKILL, self.output(rank)
        self._pipes[rank].close()
        self.past_pids.append(self.pids[rank])
        del self._exit_codes[rank]
        self._start_rank(rank)

    # ---- calls

    def start(self, name: str, *args: Any, ranks: Sequence[int] | None = None, last: bool = False, **kwargs: Any) -> None:
        """The call begins; collect() brings what it returns. With `last` its end is the rank's: what it raises ends the process."""
        for rank in self.ranks if ranks is None else ranks:
            try:
                self._pipes[rank].send(("call", (name, args, kwargs, last)))
            except OSError:
                self.broken = True
                raise RankFailed(f"before {name}, {self._gone(rank)}") from None

    def collect(self, timeout: float = PATIENCE, ranks: Sequence[int] | None = None) -> list[Any]:
        """The first rank that fails is named first, and ends the waiting for those that hang for it."""
        wanted = list(self.ranks if ranks is None else ranks)
        waiting: dict[Any, int] = {self._pipes[rank]: rank for rank in wanted}
        begun = time.monotonic()
        deadline, late = begun + min(allowed(timeout), max(timeout, LONGEST)), ""
        results: dict[int, Any] = {}
        problems: list[str] = []
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    results[rank] = self._next(rank, "returned", deadline)
                except RankFailed as problem:
                    if not problems and time.monotonic() + self._grace < deadline:
                        deadline, late = time.monotonic() + self._grace, f"{self._grace:g} s after the first failure"
                    problems.append(str(problem))
            # Beside busy loops, ranks that yield to each other take longer than their share says.
            longer = begun + min(2 * allowed(timeout), LONGEST) if allowed(timeout) > timeout else 0.0
            if not ready and not late and longer > time.monotonic():
                deadline = longer
            elif not ready:
                self.broken = True
                late = late or f"{time.monotonic() - begun:.0f} s"
                problems += [f"rank {rank} is not back in time, {late}:\n{self._stack(rank)}" for rank in waiting.values()]
                break
        if problems:
            raise RankFailed("\n".join(problems))
        return [results[rank] for rank in wanted]

    def run(self, name: str, *args: Any, timeout: float = PATIENCE, ranks: Sequence[int] | None = None, **kwargs: Any) -> list[Any]:
        try:
            self.start(name, *args, ranks=ranks, **kwargs)
            return self.collect(timeout, ranks)
        except BaseException:  # a test that is stopped here leaves ranks in the middle of a call
            self.broken = True
            raise

    def heard(self, rank: int, word: str, timeout: float = 30.0) -> Any:
        """The value of the next that the rank says, which must be that word."""
        try:
            said, value = self._next(rank, "said", time.monotonic() + allowed(timeout))
        except RankFailed as problem:
            # Where the others are explains why this one did not come.
            others = "\n".join(f"rank {other}: {self._stack(other)}" for other in self.ranks if other != rank)
            raise RankFailed(f"waiting for {word!r} of rank {rank}: {problem}\n{others}") from None
        if said != word:
            self.broken = True
            raise RankFailed(f"rank {rank} said {said!r} and not {word!r}: {value}")
        return value

    def all_heard(self, word: str, timeout: float = 30.0) -> list[Any]:
        return [self.heard(rank, word, timeout) for rank in self.ranks]

    def tell(self, rank: int, value: Any = None) -> None:
        """To Member.hear()."""
        self._pipes[rank].send(("told", value))

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

    # ---- processes

    def signal(self, rank: int, number: int) -> float:
        """Returns when, by time.monotonic(), which all processes of a machine share."""
        at = time.monotonic()
        os.kill(self.pids[rank], number)
        return at

    def kill(self, rank: int) -> float:
        return self.signal(rank, signal.SIGKILL)

    def wait(self, rank: int, timeout: float = 10.0) -> int | None:
        """The exit code, negative for a signal; None if it still runs then."""
        deadline = time.monotonic() + allowed(timeout)
        while rank not in self._exit_codes:
            code = self._processes[rank].exit_code()
            if code is not None:
                self._exit_codes[rank] = code
            elif time.monotonic() > deadline:
                return None
            else:
                time.sleep(0.005)
        return self._exit_codes[rank]

    def ended(self, rank: int, code: int, timeout: float = 30.0) -> None:
        """The process has ended with that code, as it should."""
        found = self.wait(rank, timeout)
        assert found == code, f"rank {rank} ended with {found} and not {code}\n{self.output(rank)}"
        self._accepted[rank] = code

    def output(self, rank: int | None = None) -> str:
        """Output of that rank, or of all."""
        if rank is None:
            return "".join(self.output(each) for each in self.ranks)
        self._output[rank].seek(0)
        text = self._output[rank].read().decode(errors="replace")
        return f"--- printed by rank {rank}:\n{text}" if text else ""

    def leave(self, timeout: float = 30.0) -> list[int | None]:
        """Ask every rank that lives to end, and wait: the exit codes. A busy machine takes its time over interpreters that end."""
        for rank, pipe in self._pipes.items():
            if rank not in self._exit_codes:
                with contextlib.suppress(OSError):
                    pipe.send(("end", None))
        return [self.wait(rank, timeout) for rank in self.ranks]

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        for rank in self.ranks:
            if self.wait(rank, 0.5 if self.broken else 10.0) is None:
                os.kill(self.pids[rank], signal.SIGKILL)
        for rank in self.ranks:
            self.wait(rank)
        for file in self._output.values():
            file.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self.broken:
                codes = dict(zip(self.ranks, self.leave(), strict=True))
                bad = {rank: code for rank, code in codes.items() if code not in (0, -signal.SIGKILL, self._accepted.get(rank))}
                if bad:
                    raise RankFailed(f"exit codes {bad}\n" + "\n".join(self.output(rank) for rank in bad))
            elif kind is not None:
                self.broken = True
        finally:
            self.close()

    def _gone(self, rank: int) -> str:
        return f"rank {rank} is gone (exit code {self.wait(rank, 5)}):\n{self.output(rank)}"

    def _stack(self, rank: int) -> str:
        if self.wait(rank, 0) is not None:
            return f"exit code {self._exit_codes[rank]}\n{self.output(rank)}"
        self.signal(rank, signal.SIGCONT)  # a test may have stopped it
        self.signal(rank, signal.SIGUSR2)
        before, same = -1, 0
        for _ in range(100):  # until it has printed everything: a rank without a core stops in the middle
            time.sleep(0.05)
            size = os.fstat(self._output[rank].fileno()).st_size
            same = same + 1 if size == before else 0
            if same == 4 and size > 0:
                break
            before = size
        return self.output(rank)


class Crews:
    """A crew for many tests, made anew after one that broke it. What ranks died of between tests, close() raises."""

    def __init__(self, world_size: int, env: Environment | None = None, *, grace: float = GRACE) -> None:
        self.world_size, self.env, self.grace = world_size, env, grace
        self._crew: Crew | None = None
        self._died: list[str] = []

    @property
    def now(self) -> Crew:
        """The crew that works now."""
        if self._crew is None or self._crew.broken:
            self._end()
            self._crew = Crew(self.world_size, self.env, grace=self.grace)
        return self._crew

    def run(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        if self._crew is not None and not self._crew.broken:
            died = [rank for rank in range(self.world_size) if self._crew.wait(rank, 0) is not None]
            self._crew.broken = bool(died)
            self._died += [f"before {name}, {self._crew._gone(rank)}" for rank in died]
        return self.now.run(name, *args, **kwargs)

    def _end(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            with crew:
                pass

    def __enter__(self) -> Crews:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._end()
        if self._died:
            raise RankFailed("\n".join(self._died))


def started(
    world_size: int,
    name: str,
    *,
    env: Environment | None = None,
    rank_env: Mapping[int, Environment] | None = None,
    wrap: Mapping[int, Sequence[str]] | None = None,
    only: Collection[int] | None = None,
    spawn: bool = False,
    **arguments: Any,
) -> Crew:
    """Ranks that run this call and end with it."""
    crew = Crew(world_size, env, rank_env=rank_env, wrap=wrap, only=only, spawn=spawn)
    crew.start(name, last=True, **arguments)
    return crew


def run_ranks(
    world_size: int, name: str, *args: Any, timeout: float = PATIENCE, env: Environment | None = None, **kwargs: Any
) -> list[Any]:
    """Once, in processes of their own, which must end well."""
    with Crew(world_size, env) as crew:
        return crew.run(name, *args, timeout=timeout, **kwargs)
