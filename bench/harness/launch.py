"""Starts the ranks of a benchmark on this host, when no launcher did."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

PATIENCE = 5.0
"""Seconds that ranks get to notice a failure, which takes them one, and to close."""

PR_SET_PDEATHSIG = 1


def launch(ranks: int, script: Sequence[str]) -> int:
    """Runs this script with its arguments as `ranks` ranks. Returns the first failure's exit status, or 0."""
    libc = ctypes.CDLL(None)

    def end_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    job = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "PPLX_COMM_JOB": job,
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, *script],
                    env=environment,
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    preexec_fn=end_with_parent,
                )
            )
        return _first_failure(processes)
    except KeyboardInterrupt:
        for process in processes:
            process.terminate()
        return 130
    finally:
        _end(processes)


def _first_failure(processes: list[subprocess.Popen[bytes]]) -> int:
    while True:
        states = [process.poll() for process in processes]
        # A rank that was killed is the cause when another one failed because of it.
        failed = sorted((state > 0, rank, state) for rank, state in enumerate(states) if state)
        if failed:
            _, rank, state = failed[0]
            if state < 0:
                print(f"bench: rank {rank} was killed by {signal.Signals(-state).name}", file=sys.stderr, flush=True)
            return state if state > 0 else 128 - state
        if all(state == 0 for state in states):
            return 0
        time.sleep(0.05)  # any of several processes may end first: a poll that leaves them the cores


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Waits for all: first asks, then insists. A rank that is asked still removes its provider's files in /dev/shm."""
    for patience, ask in ((PATIENCE, subprocess.Popen.terminate), (2.0, subprocess.Popen.kill)):
        given_up = time.monotonic() + patience
        for process in processes:
            try:
                process.wait(max(0.0, given_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                ask(process)
    for process in processes:
        process.wait()
