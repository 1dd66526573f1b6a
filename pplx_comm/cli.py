"""python -m pplx_comm: what a user runs of the package itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pplx_comm import doctor
from pplx_comm._version import __version__

EPILOG = """\
example:
  python -m pplx_comm doctor --tokens 128 --wire fp8 --ranks 8

The benchmarks are not part of the package: they run from a checkout, for example as python bench/latency.py -n 4.
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m pplx_comm",
        description="Expert-parallel dispatch and combine for Mixture-of-Experts layers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"pplx_comm {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "doctor",
        help="what this machine has, what is off, and how to turn it on",
        description="Says what this machine has for pplx_comm, what is off and how to turn it on, and the memory that "
        "one rank needs for a configuration. Exits 0 whatever is off: nothing of it is needed by everybody.",
    )
    doctor.add_arguments(check)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    return doctor.main(parser().parse_args(arguments))
