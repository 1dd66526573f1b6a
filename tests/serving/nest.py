"""The process that vLLM's engines are forked from: importing vLLM costs 10 s of CPU, so it is done once, here.

Takes a line of JSON for each request on stdin, and answers with one: {"script", "arguments", "env", "output"} starts a script in a
session of its own and says its pid; {"ended": pid} says its exit code, or null while it runs.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
from typing import Any

IMPORTED = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.mixtral",
    "vllm.model_executor.models.qwen3_moe",
)
"""Beside what LLM imports: what engines import when they start."""


def become(request: dict[str, Any]) -> None:
    """In the child: what a fresh interpreter would be."""
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for at, to in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(at, to)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = [request["script"], *request["arguments"]]
    first = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.path[:0] = [os.path.dirname(request["script"]), *first]


def ended(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def main() -> None:
    from importlib import import_module

    from vllm import LLM  # noqa: F401

    import pplx_comm

    for name in IMPORTED:
        import_module(name)
    for name in pplx_comm.__all__:  # imports what the package leaves for its first use
        getattr(pplx_comm, name)
    threads = [thread.name for thread in threading.enumerate()]
    assert threads == ["MainThread"], f"a fork would lose {threads}"
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output printed here is no answer
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            answers.write(json.dumps(ended(request["ended"])) + "\n")
            continue
        pid = os.fork()
        if pid == 0:
            answers.close()
            become(request)
            break
        answers.write(json.dumps(pid) + "\n")
    else:
        return
    runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    main()
