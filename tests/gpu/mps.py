"""Runs a command under NVIDIA's MPS, in which the processes that share a GPU run beside each other instead of in turns.

    python tests/gpu/mps.py 2 -- python -m pytest tests/gpu       # two ranks on each GPU
    python tests/gpu/mps.py 2 --room-for 6 -- ...                 # three such runs side by side

Each process gets its part of the multiprocessors, as long as no more than that share a GPU: what spins never keeps out what it waits for.
The daemon is one of this run's own, and is gone when the command is. Of one GPU's ranks bench figures say nothing: they share its memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"


def main() -> int:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--room-for N] ranks -- command ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ranks", type=int, help="how many processes share a GPU")
    parser.add_argument("--room-for", type=int, metavar="N", help="parts that the multiprocessors are dealt in (one a rank)")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args, command = parser.parse_args(given[:cut]), given[cut + 1 :]
    parts = args.room_for or args.ranks
    if not command:
        parser.error("say after -- what to run")
    if args.ranks < 1 or parts < args.ranks:
        parser.error("at least one rank a GPU, and a part for each of them")
    if shutil.which(CONTROL) is None:
        sys.exit(f"mps.py: no {CONTROL} on this machine; it comes with the driver")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for name in ("pipe", "log"):
            (Path(folder) / name).mkdir()
        subprocess.run([CONTROL, "-d"], env=env, check=True)
        try:
            share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // parts), "PPLX_TEST_RANKS_PER_GPU": str(args.ranks)}
            return subprocess.run(command, env={**env, **share}).returncode
        finally:
            subprocess.run([CONTROL], input="quit -t 5\n", text=True, env=env, check=False)


if __name__ == "__main__":
    sys.exit(main())
