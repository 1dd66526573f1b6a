"""Starts engines as processes of the environments that tools/serving_env.sh makes, and reads what they print."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PYTHON = os.environ.get("PPLX_SERVING_PYTHON")
"""vLLM's Python; `make check-serving` sets it."""
SGLANG_PYTHON = os.environ.get("PPLX_SGLANG_PYTHON")
"""SGLang's; `make check-serving` sets it."""
TRAINING_PYTHON = os.environ.get("PPLX_TRAINING_PYTHON")
"""That of torchtitan and Megatron-Core; `make check-serving` sets it."""
SECONDS = 480.0
"""Time for an engine's work. One alone takes 15 s."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shadowed(*names: str) -> str:
    """PYTHONPATH with packages of this library in the places of those."""
    return os.pathsep.join([str(ROOT / "pplx_comm" / "compat" / "shadow" / name) for name in names] + [str(ROOT)])


def environment(metadata: Path, cache: Path) -> dict[str, str]:
    """metadata: a folder with this package's entry points."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("PPLX_COMM_", "SGLANG_", "VLLM_", "PYTHON"))}
    return base | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{metadata}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "HF_HUB_OFFLINE": "1",
    }


class Nest:
    """Forks engines from a process that has imported vLLM."""

    def __init__(self, python: str, env: dict[str, str], said: Path) -> None:
        with said.open("wb") as file:
            self._popen = subprocess.Popen(
                [python, str(HERE / "nest.py")], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )
        self._said = said

    def _ask(self, **request: Any) -> Any:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(json.dumps(request) + "\n")
        self._popen.stdin.flush()
        answer = self._popen.stdout.readline()
        assert answer, f"the nest ended:\n{self._said.read_text(errors='replace')[-6000:]}"
        return json.loads(answer)

    def fork(self, script: str, arguments: Sequence[str], env: dict[str, str], output: Path) -> Forked:
        output.touch()  # read before the child has opened it
        return Forked(self, self._ask(script=script, arguments=list(arguments), env=env, output=str(output)))

    def ended(self, pid: int) -> int | None:
        code: int | None = self._ask(ended=pid)
        return code

    def close(self) -> None:
        self._popen.communicate()


class Forked:
    """As much of a Popen as is asked for here."""

    def __init__(self, nest: Nest, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nest = nest

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nest.ended(self.pid)
        return self.returncode

    def wait(self, seconds: float = 60.0) -> int:
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked engine", seconds)
            time.sleep(0.02)
        return code


class Process:
    """One process, and all that it starts."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, output: Path) -> None:
        self.output = output
        self._popen = process
        self.pid = process.pid

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def said(self, word: str) -> Any:
        """The JSON behind the line's first word; True if there is nothing behind it, None if it was not said."""
        for line in self.text.splitlines():
            if line.split(" ", 1)[0] == word:
                return json.loads(line[len(word) :] or "true")
        return None

    def hears(self, word: str, seconds: float = SECONDS) -> Any:
        end = time.monotonic() + seconds
        while (said := self.said(word)) is None:
            if self._popen.poll() is not None:
                raise AssertionError(f"ended with {self._popen.returncode} before it said {word}:\n{self.text[-6000:]}")
            assert time.monotonic() < end, f"did not say {word} within {seconds:.0f} s:\n{self.text[-6000:]}"
            time.sleep(0.05)
        return said

    def ended(self, seconds: float = SECONDS) -> int:
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(seconds)
        raise AssertionError(f"did not end within {seconds:.0f} s:\n{self.text[-6000:]}")

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()


class Engines:
    """Starts them, and ends them all when the test ends. cache: vLLM's, in which it keeps what it found out about a model."""

    def __init__(self, folder: Path, metadata: Path, cache: Path, python: str | None, nest: Nest | None) -> None:
        assert python is not None
        self._python = python
        self._folder = folder
        self._environment = environment(metadata, cache)
        self._nest = nest
        self._started: list[Process] = []

    def start(self, arguments: Sequence[str], **env: str) -> Process:
        env, output = self._environment | env, self._folder / f"output-{len(self._started)}"
        process: subprocess.Popen[bytes] | Forked
        if self._nest is not None and arguments[0].endswith(".py"):
            process = self._nest.fork(arguments[0], arguments[1:], env, output)
        else:
            with output.open("wb") as file:
                process = subprocess.Popen(
                    [self._python, *arguments], env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
        self._started.append(Process(process, output))
        return self._started[-1]

    def ranks(self, count: int, model: Path, *arguments: str, **env: str) -> list[Process]:
        """The ranks of a job, as torchrun would start them; one alone is an engine without any other."""
        return self.job(count, [str(HERE / "engine.py"), str(model), *arguments], VLLM_ENABLE_V1_MULTIPROCESSING="0", **env)

    def job(self, count: int, arguments: Sequence[str], **env: str) -> list[Process]:
        job = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if count > 1 else {}
        return [
            self.start(arguments, **(job | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}) | env))
            for rank in range(count)
        ]

    def tokens(self, count: int, model: Path, *arguments: str, **env: str) -> dict[int, list[int]]:
        """Returns their output for all prompts, by the number of the prompt."""
        ranks = self.ranks(count, model, *arguments, **env)
        made: dict[int, list[int]] = {}
        for rank in ranks:
            assert rank.ended() == 0, rank.text[-6000:]
            made |= {int(number): tokens for number, tokens in rank.said("TOKENS").items()}
        return made

    def close(self) -> None:
        for process in self._started:
            process.close()


@contextmanager
def engines(folder: Path, metadata: Path, cache: Path, python: str | None = PYTHON, nest: Nest | None = None) -> Iterator[Engines]:
    started = Engines(folder, metadata, cache, python, nest)
    try:
        yield started
    finally:
        started.close()


def same(made: dict[int, list[int]], wanted: dict[int, list[int]]) -> str:
    """How many tokens are, of how many."""
    pairs = [(a, b) for number in made for a, b in zip(made[number], wanted[number], strict=False)]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"
