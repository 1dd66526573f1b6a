"""python -m pplx_comm: bench and doctor."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import doctor
from ._launch import detect
from ._version import __version__
from .bench import options as bench_options

EXAMPLES = """\
examples:
  python -m pplx_comm doctor
  python -m pplx_comm bench -n 4 --wire fp8 --transport mapped,proxy:shm,proxy:tcp
  mpirun -n 4 python -m pplx_comm bench --tokens 1,128 --json result.json --plot result.png
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m pplx_comm",
        description="Expert-parallel dispatch and combine for Mixture-of-Experts layers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"pplx_comm {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    bench = commands.add_parser(
        "bench",
        help="latency of dispatch and combine, beside the floor and the peers",
        description="Measures dispatch and combine beside bare copies or writes of the same bytes (the floor) and "
        "beside all-to-all of gloo and MPI with the permutes a user would write. Results are checked on the way.",
    )
    bench.add_argument(
        "-n",
        "--ranks",
        type=int,
        metavar="N",
        help="start so many ranks on this host (2); not under mpirun or torchrun",
    )
    bench_options.add_arguments(bench)

    check = commands.add_parser(
        "doctor",
        help="what this machine has, what is off, and how to turn it on",
        description="Says what this machine has for pplx_comm, what is off and how to turn it on, and the memory that "
        "one rank needs for a configuration. Exits 0 whatever is off: nothing of it is needed by everybody.",
    )
    doctor.add_arguments(check)
    return top


def _without_ranks(arguments: Sequence[str]) -> list[str]:
    """The arguments of a rank: all but -n."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("-n", "--ranks")
    return own.parse_known_args(list(arguments))[1]


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    top = parser()
    parsed = top.parse_args(given)
    if parsed.command == "doctor":
        return doctor.main(parsed)
    of_bench = _without_ranks(given[given.index("bench") + 1 :])
    if detect(os.environ).source == "no launcher":
        ranks = 2 if parsed.ranks is None else parsed.ranks
        if ranks < 1:
            top.error("bench: -n must be at least 1")
        if ranks > 1:
            from .bench.launch import launch

            return launch(ranks, of_bench)
    elif parsed.ranks is not None and parsed.ranks != detect(os.environ).world_size:
        top.error(f"bench: -n {parsed.ranks}, but the launcher started {detect(os.environ).world_size} ranks: leave -n out")
    from .bench.main import leave, measure

    leave(measure(bench_options.from_arguments(parsed), ["bench", *of_bench]))
    return 0
