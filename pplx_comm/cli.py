"""python -m pplx_comm: what a user runs of the package itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pplx_comm._version import __version__

EPILOG = """\
examples:
  python -m pplx_comm doctor --tokens 128 --wire fp8 --ranks 8
  python -m pplx_comm top /var/lib/node_exporter/textfile
  python -m pplx_comm dump
  python -m pplx_comm efa-soft --nics 2 -- mpirun -n 4 python examples/hello.py
  python -m pplx_comm compat run deep_ep -- python train.py

The benchmarks are not part of the package: they run from a checkout, for example as python bench/latency.py -n 4.
"""
DOCTOR = """\
Says what this machine has for pplx_comm, what is off and how to turn it on, and the memory that one rank needs for a configuration.
Exits 0 whatever is off: no part is needed by all users.
"""


def parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Only the chosen command is imported: doctor imports torch, which takes seconds that efa-soft needs not wait."""
    top = argparse.ArgumentParser(
        prog="python -m pplx_comm",
        description="Expert-parallel dispatch and combine for Mixture-of-Experts layers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"pplx_comm {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", dest="chosen")
    check = commands.add_parser("doctor", help="what this machine has, what is off, and how to turn it on", description=DOCTOR)
    from pplx_comm import top as watching

    watching.add_arguments(commands.add_parser("top", help=watching.HELP, description=watching.DESCRIPTION))
    from pplx_comm import dump

    dump.add_arguments(commands.add_parser("dump", help=dump.HELP, description=dump.DESCRIPTION))
    from pplx_comm.efasoft import launch

    launch.add_arguments(commands.add_parser("efa-soft", help=launch.HELP, description=launch.DESCRIPTION))
    from pplx_comm.compat import command

    command.add_arguments(commands.add_parser("compat", help=command.HELP, description=command.DESCRIPTION))
    if chosen == "doctor":
        from pplx_comm import doctor

        doctor.add_arguments(check)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in words if not word.startswith("-")), None)
    end = words.index("--") if chosen in ("efa-soft", "compat") and "--" in words else len(words)
    given = parser(chosen).parse_args(words[:end])
    given.command = words[end + 1 :]
    if chosen == "efa-soft":
        from pplx_comm.efasoft import launch

        return launch.main(given)
    if chosen == "compat":
        from pplx_comm.compat import command

        return command.main(given)
    if chosen == "top":
        from pplx_comm import top as watching

        return watching.main(given)
    if chosen == "dump":
        from pplx_comm import dump

        return dump.main(given)
    from pplx_comm import doctor

    return doctor.main(given)
