"""python -m pplx_comm compat: runs programs written for other libraries over this one."""

from __future__ import annotations

import argparse
import os
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pplx_comm._version import __version__
from pplx_comm.errors import Error
from pplx_comm.settings import whole_environment

HELP = "run programs written for DeepEP, pplx_kernels or pplx_garden over this library"
DESCRIPTION = """\
Puts a package of this library in the place of another one's: a program's `import deep_ep` then finds pplx_comm. Programs that are
started otherwise do not change. docs/migrate.md says, call by call, what is supported, different and refused.
"""
EPILOG = """\
examples:
  python -m pplx_comm compat run deep_ep -- vllm serve MODEL --enable-expert-parallel --all2all-backend deepep_low_latency
  PYTHONPATH=$(python -m pplx_comm compat path deep_ep) torchrun --nproc-per-node 8 train.py
  python -m pplx_comm compat test deep_ep --source DeepEP --processes 8
"""
SHADOW = Path(__file__).resolve().parent / "shadow"
REFUSAL = "pplx_comm does not support"


@dataclass(frozen=True)
class Suite:
    """The tests of a package's own checkout."""

    scripts: tuple[tuple[str, ...], ...]
    """Path and arguments; {n} is the number of processes."""
    refused: dict[str, str] = field(default_factory=dict)
    """Those that cannot run: why."""
    pytest: bool = False
    sources: str = ""
    """A folder of the checkout that has the rest of the package."""
    stand_ins: dict[str, str] = field(default_factory=dict)
    """Modules that tests import and do not need here: path and text."""


SUITES = {
    "deep_ep": Suite(
        (
            ("tests/test_low_latency.py", "--num-processes", "{n}", "--num-experts", "256"),
            ("tests/test_intranode.py", "--num-processes", "{n}"),
        ),
        {
            "tests/test_internode.py": "it wants nodes of 8 GPUs; the semantics are in tests/ranks/test_deep_ep.py of pplx_comm",
            "tests/test_low_latency.py --shrink-test": "enable_shrink=True",
            "tests/test_low_latency.py --use-logfmt": "use_logfmt=True",
        },
    ),
    "pplx_garden": Suite(
        (("tests/p2p_all_to_all/test_p2p_all_to_all.py",),),
        {"tests/fabric_lib": "its transfer engine has no counterpart here"},
        pytest=True,
        sources="python",
    ),
    "pplx_kernels": Suite(
        (("tests/test_all_to_all.py",),),
        {"tests/test_nvshmem.py": "there is no NVSHMEM to test"},
        pytest=True,
        stand_ins={
            "nvshmem/__init__.py": "",
            "nvshmem/core.py": "class direct:\n    init_status = staticmethod(lambda: 2)\n\n\ndef finalize(): ...\n",
            "cuda/core/experimental.py": (
                "import torch\n\n\nclass Device:\n    def __init__(self, index): self.index = index\n"
                "    def set_current(self): torch.cuda.set_device(self.index)\n"
            ),
        },
    ),
}


def search_path(package: str) -> str:
    """Folders for PYTHONPATH: the package's, and that of a pplx_comm which is not installed."""
    home = Path(__file__).resolve().parents[2]
    installed = {Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())}
    return os.pathsep.join(map(str, [SHADOW / package, *([] if home in installed else [home])]))


def environment(package: str, further: str = "") -> dict[str, str]:
    """Our environment, with the package's folders first. further: a folder behind them."""
    env = dict(whole_environment())
    paths = search_path(package), further, env.get("PYTHONPATH", "")
    return env | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def run(package: str, command: list[str]) -> int:
    """Becomes the command. Returns only where there is none."""
    if not command:
        raise Error(f"compat run {package}: give a command behind --")
    print(f"pplx_comm {__version__} stands for {package} in: {' '.join(command)}", file=sys.stderr, flush=True)
    try:
        os.execvpe(command[0], command, environment(package))
    except OSError as problem:
        print(f"{command[0]}: {problem.strerror}", file=sys.stderr)
        return 127


def verdicts(package: str, source: Path, processes: int, verbose: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yields test, "passed", "failed" or "refused", and why. verbose: what the tests print is printed."""
    suite = SUITES[package]
    with tempfile.TemporaryDirectory() as folder:
        for name, text in suite.stand_ins.items():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_text(text)
        yield from _run_all(package, suite, source, processes, folder, verbose)
    for name, reason in suite.refused.items():
        yield name, "refused", reason


def _run_all(
    package: str, suite: Suite, source: Path, processes: int, further: str, verbose: bool
) -> Iterator[tuple[str, str, str]]:  # fmt: skip
    for script, *arguments in suite.scripts:
        words = [word.format(n=processes) for word in arguments]
        name = " ".join([script, *words])
        if not (source / script).is_file():
            yield name, "failed", f"{source / script} is not there"
            continue
        folders = os.pathsep.join([further, str(source / suite.sources) if suite.sources else str((source / script).parent)])
        command = [sys.executable, *(["-m", "pytest", "-q"] if suite.pytest else []), script, *words]
        env = environment(package, folders)
        done = subprocess.run(
            command, cwd=source, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if verbose:
            print(done.stdout, end="", file=sys.stderr, flush=True)
        said = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        refusals = [line for line in said if REFUSAL in line]
        verdict = "passed" if done.returncode == 0 else "refused" if refusals else "failed"
        why = (refusals[-1:] or said[-1:] or [f"exit code {done.returncode}"])[0]
        yield name, verdict, why if verdict != "passed" or suite.pytest else ""


def test(package: str, source: Path, processes: int, verbose: bool) -> int:
    """Prints the verdicts. Returns 1 if a test failed."""
    worst = 0
    for name, verdict, why in verdicts(package, source, processes, verbose):
        print(f"{verdict:8} {name}{': ' if why else ''}{why}", flush=True)
        worst |= verdict == "failed"
    return int(worst)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    packages = sorted(SUITES)
    for name, words in (
        ("run", "run the command behind --, its child processes included, over this library"),
        ("path", "print what to put into PYTHONPATH for that"),
        ("test", "run a checkout's own tests over this library: what passed, failed, was refused"),
    ):
        action = actions.add_parser(name, help=words, description=words)
        action.add_argument("package", choices=packages)
    action.add_argument("--source", type=Path, required=True, help="the checkout")
    action.add_argument("--processes", type=int, default=8, help="ranks, a GPU each (8)")
    action.add_argument("--verbose", action="store_true", help="print what the tests print, as well: errors, their times")


def main(given: argparse.Namespace) -> int:
    if given.action == "run":
        return run(given.package, given.command)
    if given.action == "path":
        print(search_path(given.package))
        return 0
    return test(given.package, given.source.resolve(), given.processes, given.verbose)
