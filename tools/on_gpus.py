"""Builds, proves and measures what only GPUs can show, within a time.

    python tools/on_gpus.py --list                                        what there is, and what this machine can run of it
    python tools/on_gpus.py --build --minutes 25 --out DIR --only 'large-*,proof-large'
    python tools/on_gpus.py --out DIR --only 'proof-*' --beside 3         three proofs at a time, which GPUs take by turns
    python tests/gpu/mps.py 2 --room-for 6 -- python tools/on_gpus.py --out DIR --only 'proof-*' --beside 3 --minutes 9
        all proofs, in two such runs: two ranks share each GPU, three proofs run at a time

A run's output, figures and plots lie in DIR under its name; summary.txt has a line each. Runs that have succeeded there are not run
again, so that a plan which did not fit goes on with the same command. The status is 0 if all that was begun succeeded.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpu_runs import RUNS, Run

ROOT = Path(__file__).resolve().parent.parent
BUILD = "make build VENV= PYTHON={python} CMAKE_ARGS='{cmake}'"


@dataclass(frozen=True)
class Machine:
    gpus: int
    ranks: int
    """How many run beside each other: more than GPUs under MPS."""

    def lacks(self, run: Run) -> str:
        """Returns the reason that it cannot run here, or nothing."""
        have = self.gpus if run.figure else self.ranks
        if have < run.gpus:
            return f"needs {run.gpus} GPU{'s' * (run.gpus > 1)}" + ("" if run.figure else f", or {run.gpus} ranks under MPS")
        return ""


def this_machine() -> Machine:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return Machine(0, 0)
    gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    return Machine(gpus, gpus * int(os.environ.get("PPLX_TEST_RANKS_PER_GPU", "1")))


def command_of(run: Run, machine: Machine, out: Path) -> list[str]:
    gpus = machine.gpus if run.gpus > 1 else 1
    filled = run.command.format(
        python=shlex.quote(sys.executable), gpus=gpus, experts=32 * gpus, out=shlex.quote(str(out / run.name))
    )
    return shlex.split(filled)


def chosen(only: str) -> list[Run]:
    globs = only.split(",")
    for glob in globs:
        if not fnmatch.filter([run.name for run in RUNS], glob):
            raise SystemExit(f"on_gpus.py: no run is called {glob}; --list has all")
    return list(dict.fromkeys(run for glob in globs for run in RUNS if fnmatch.fnmatchcase(run.name, glob)))


def follow(command: list[str], log: Path, limit: float, env: dict[str, str]) -> int | None:
    """Its status, or None if it took longer than `limit` seconds and was ended with all that it had started."""
    with log.open("w") as file:
        print(f"$ {shlex.join(command)}", file=file, flush=True)
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def last_line(log: Path) -> str:
    lines = [line.strip("= \n") for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def attempt(run: Run, machine: Machine, out: Path, seconds: float) -> tuple[str, str]:
    """Returns how it ended, and a line about it."""
    log = out / f"{run.name}.log"
    begun = time.monotonic()
    status = follow(
        command_of(run, machine, out),
        log,
        min(seconds, 120 * run.minutes),
        {**os.environ, "PYTHONUNBUFFERED": "1", **dict(run.env)},
    )
    took = f"{time.monotonic() - begun:.0f} s"
    said = last_line(log)
    how = "cut off" if status is None else f"failed ({status})" if status else "skipped" if re.match(r"\d+ skipped", said) else "ok"
    return how, f"{run.name:20} {how:11} {took:>6}  {said[:160]}"


def list_runs(runs: list[Run], machine: Machine) -> None:
    for run in runs:
        lacks = machine.lacks(run)
        print(f"{run.name:20} {run.minutes:4g} min  {run.about}" + (f" [{lacks}]" if lacks else ""))


def build(out: Path, cmake: str) -> None:
    command = shlex.split(BUILD.format(python=shlex.quote(sys.executable), cmake=cmake))
    log = out / "build.log"
    if follow(command, log, 900, dict(os.environ)) != 0:
        print(*log.read_text(errors="replace").splitlines()[-40:], sep="\n")
        raise SystemExit(f"on_gpus.py: it did not build; all of it is in {log}")


def run_one(run: Run, machine: Machine, out: Path, until: float) -> tuple[bool, str]:
    """Returns true if it succeeded, skipped all or was not begun, and its outcome in words."""
    done = out / f"{run.name}.ok"
    left = until - time.monotonic()
    lacks = machine.lacks(run)
    if done.exists():
        return True, f"{run.name:20} ok before"
    if lacks:
        return True, f"{run.name:20} not run: {lacks}"
    if left < 60 * run.minutes:
        return True, f"{run.name:20} not run: takes {run.minutes:g} minutes, and {max(left, 0) / 60:.1f} are left"
    how, line = attempt(run, machine, out, left)
    if how == "ok":
        done.touch()
    return how in ("ok", "skipped"), line


def run_all(runs: list[Run], machine: Machine, out: Path, until: float, beside: int = 1) -> bool:
    """True if all runs that were begun succeeded. `beside` proofs that follow each other run at a time; runs that measure, or
    that kill ranks, run alone."""
    good = True
    for alone, some in itertools.groupby(runs, key=lambda run: run.figure or run.alone):
        with ThreadPoolExecutor(1 if alone else beside) as pool, (out / "summary.txt").open("a") as summary:
            for succeeded, line in pool.map(lambda run: run_one(run, machine, out, until), some):
                good = good and succeeded
                print(line, flush=True)
                print(line, file=summary, flush=True)
    return good


def main() -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the runs, and begin none")
    parser.add_argument("--only", default="*", metavar="GLOB,GLOB", help="some of them, in this order (all)")
    parser.add_argument(
        "--minutes", type=float, default=600, help="none is begun that would take longer, none goes on longer (600)"
    )
    parser.add_argument("--beside", type=int, default=1, metavar="N", help="proofs that run at a time (1)")
    parser.add_argument("--out", type=Path, help="folder for outputs, figures and plots; made where it is not there")
    parser.add_argument("--build", action="store_true", help="build first, with this Python and what the host has")
    parser.add_argument(
        "--cmake", default="-DPPLX_NVSHMEM=ON -DCMAKE_CUDA_ARCHITECTURES=90a-real", help="options of the build (%(default)s)"
    )
    args = parser.parse_args()
    runs, machine = chosen(args.only), this_machine()
    if args.list:
        list_runs(runs, machine)
        return 0
    if args.beside < 1:
        parser.error("--beside is how many proofs run at a time, one or more")
    if args.out is None:
        parser.error("--out says where outputs go")
    if machine.gpus == 0:
        raise SystemExit("on_gpus.py: nvidia-smi shows no GPU here; --list works without one")
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.build:
        build(args.out, args.cmake)
    return 0 if run_all(runs, machine, args.out, begun + 60 * args.minutes, args.beside) else 1


if __name__ == "__main__":
    sys.exit(main())
