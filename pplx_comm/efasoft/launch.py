"""python -m pplx_comm efa-soft: runs a command on software NICs."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pplx_comm.efasoft import counters, device
from pplx_comm.efasoft.device import Host, Options, SoftEfa
from pplx_comm.errors import Error
from pplx_comm.settings import foreign, whole_environment

USAGE = "python -m pplx_comm efa-soft [options] -- COMMAND [ARGUMENT ...]"
DESCRIPTION = """\
Runs COMMAND on software EFA NICs: libfabric's own efa provider, unmodified, on libraries that play the NIC and its driver. It
needs no EFA, no RDMA kernel module and no root. All processes that COMMAND starts on this host share one fabric. What the NICs
did is printed on stderr at the end. The exit code is COMMAND's, or 128 + N if signal N ended it.
"""
EPILOG = """\
examples:
  python -m pplx_comm efa-soft --machine p5 -- python -m pplx_comm doctor
  python -m pplx_comm efa-soft -- mpirun -n 4 python examples/hello.py
  python -m pplx_comm efa-soft --latency-us 15 --gbit 100 -- python bench/latency.py -n 4 --transport proxy:efa
  python -m pplx_comm efa-soft --fail error=13,nic=0,after=100 -- ./my_program

While it runs, from elsewhere:
  python -m pplx_comm efa-soft --dir $EFA_SOFT_DIR --set port-down=0          (and port-up=0; a number, or a name)
  ip netns exec host2 python -m pplx_comm efa-soft --dir $EFA_SOFT_DIR -- ./another_program

docs/efa-soft.md says what is modelled, and what is not.
"""
HELP = "run a command on software EFA NICs"

PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
ENDING = PASSED_ON - {signal.SIGUSR1, signal.SIGUSR2}
BY_THE_TERMINAL = 128  # SI_KERNEL: its whole foreground group has it, COMMAND too
PR_SET_CHILD_SUBREAPER = 36
GRACE = 2.0  # seconds that processes get which outlive COMMAND
FOR_MPI = {
    # MPI needs no EFA, and its libfabric must not take the NICs that the program measures.
    "MPIR_CVAR_OFI_USE_PROVIDER": "tcp",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^openib,ofi",
}


def _number(kind: Callable[[str], float], least: float, most: float, words: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= kind(text) <= most:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r} must be {words}")

    return parse


_FAULT = re.compile(r"(error=0*([1-9]|1[0-5])|port-down|silent|rnr|full|cq-overrun)(,(nic|after|count|every)=\d+)*", re.ASCII)
"""As proxy/efasoft/faults.c reads one, which only a process that opens a NIC would do."""


def _faults(text: str) -> str:
    if not all(_FAULT.fullmatch(one) for one in text.split(";")):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be faults with ; between them: error=CODE (1 to 15), port-down, silent, rnr, full or cq-overrun, "
            "each with any of ,nic=N ,after=K ,count=C ,every=K"
        )
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage, parser.epilog, parser.formatter_class = USAGE, EPILOG, argparse.RawDescriptionHelpFormatter
    whole = _number(int, 0, 2**63 - 1, "a whole number, 0 or more")
    size = _number(float, 0, 1e9, "a number, 0 or more")
    machine = parser.add_argument_group("the machine")
    nics = _number(int, 1, 32, "a whole number, 1 to 32")
    machine.add_argument("--nics", type=nics, metavar="N", help="NICs of a plain machine (1)")
    machine.add_argument(
        "--machine", choices=("plain", "p5", "p5en"), default="plain", help="p5: 8 GPUs, 4 NICs each; p5en: 2 each"
    )
    host = _number(int, 0, 2**32 - 1, "a whole number below 2^32")
    machine.add_argument("--host", type=host, metavar="N", help="number of this host (a network namespace is a host)")
    network = parser.add_argument_group("the network")
    network.add_argument("--seed", type=whole, metavar="S", help="seed of the order in which work and packets go out (1)")
    window = _number(int, 1, 4096, "a whole number, 1 to 4096")
    network.add_argument("--window", type=window, metavar="W", help="draw the next from W waiting work requests (16); 1: in order")
    network.add_argument("--latency-us", type=size, metavar="L", help="latency of each packet (0)")
    network.add_argument("--gbit", type=size, metavar="G", help="Gbit/s of each NIC (0: as fast as memory)")
    receives = _number(int, 16, 2**20, "a whole number, 16 or more")
    network.add_argument(
        "--receives", type=receives, metavar="R", help="receives that a queue takes (8192); efa fills it, 9 KiB each"
    )
    network.add_argument(
        "--fail", type=_faults, metavar="SPEC", help="faults, with ; between them, for example error=13,nic=0,after=100"
    )
    software = parser.add_argument_group("the software")
    software.add_argument("--libfabric", metavar="PATH", help="a libfabric.so.1 with efa (PPLX_LIBFABRIC, else the mpich wheel's)")
    software.add_argument("--keep", action="store_true", help="leave the fabric's folder, and say where it is")
    running = parser.add_argument_group("a fabric that runs")
    running.add_argument("--dir", type=Path, metavar="D", help="join a running fabric: its folder, EFA_SOFT_DIR of its COMMAND")
    running.add_argument("--set", metavar="WORD=NIC", help="port-down=NIC or port-up=NIC")


def options_of(arguments: argparse.Namespace) -> Options:
    if arguments.nics is not None and arguments.machine != "plain":
        raise Error(f"--nics needs --machine plain: the NICs of {arguments.machine} are fixed")
    names = ("host", "seed", "window", "latency_us", "gbit", "receives", "fail", "libfabric")
    return Options(nics=arguments.nics or 1, machine=arguments.machine, **{name: getattr(arguments, name) for name in names})


def main(arguments: argparse.Namespace) -> int:
    try:
        if arguments.dir and not device.is_fabric(arguments.dir):
            raise Error(f"{arguments.dir} is not the folder of a fabric that runs: COMMAND has it as EFA_SOFT_DIR")
        if arguments.set:
            return _set(arguments)
        if not arguments.command:
            raise Error(f"no COMMAND: {USAGE}")
        return run(arguments.command, options_of(arguments), keep=arguments.keep, joined=arguments.dir)
    except Error as problem:
        _say(str(problem))
        return 2


def _set(arguments: argparse.Namespace) -> int:
    word, _, nic = (arguments.set or "").partition("=")
    if arguments.dir is None or word not in ("port-down", "port-up") or not nic or arguments.command:
        raise Error("a running fabric is changed with --dir $EFA_SOFT_DIR --set port-down=NIC or port-up=NIC, and no COMMAND")
    device.set_port(arguments.dir, nic, word == "port-up")
    return 0


def environment(host: Host) -> dict[str, str]:
    """COMMAND's. Preloaded, since a library of MPI's may want the host's libibverbs first, which would then serve libfabric too."""
    preload = [*(str(host.folder / "lib" / name) for name in device.LIBRARIES), foreign("LD_PRELOAD")]
    return {**FOR_MPI, **whole_environment(), **host.environment, "LD_PRELOAD": ":".join(filter(None, preload))}


def run(command: list[str], options: Options, *, keep: bool = False, joined: Path | None = None) -> int:
    """COMMAND's exit code. Whatever comes, nothing is left: neither processes nor memory. `joined`: another one's fabric."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # a process that outlives COMMAND becomes this process's child
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    try:
        if joined is not None:
            code = _command(command, Host(joined, options))
            _end_the_rest()
            return code
        with SoftEfa(options) as efa:
            stop = signal.sigpending() & ENDING
            if stop:
                return 128 + min(stop)
            code = _command(command, efa.host)
            _end_the_rest(efa.remover)
            print(f"efa-soft: {efa.host.about}\n{counters.table(efa.counters())}", file=sys.stderr)
            if keep:
                efa.keep()
                _say(f"kept {efa.folder}; remove it when it is not needed any more")
            return code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _command(command: list[str], host: Host) -> int:
    try:
        child = os.posix_spawnp(
            command[0], command, environment(host), setsigmask=(), setsigdef=(signal.SIGPIPE, signal.SIGXFSZ)
        )  # fmt: skip
    except OSError as problem:
        _say(f"{command[0]}: {problem.strerror}")
        return 127 if isinstance(problem, FileNotFoundError) else 126
    while True:
        for pid, status in _ended():
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
        came = signal.sigwaitinfo({*PASSED_ON, signal.SIGCHLD})
        if came.si_signo != signal.SIGCHLD and came.si_code != BY_THE_TERMINAL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, came.si_signo)


def _ended() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _children(remover: int) -> list[int]:
    """All but the fabric's own. By /proc, since orphans came to be children without being started here."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid() and state not in "ZX" and int(stat.parent.name) != remover:
                found.append(int(stat.parent.name))
    return found


def _end_the_rest(remover: int = 0) -> None:
    """Ends processes that COMMAND left running: they would hold on to a fabric that no longer exists."""
    list(_ended())
    left = _children(remover)
    if left:
        _say(f"COMMAND has ended and left {len(left)} processes running, which are ended: {', '.join(map(str, left))}")
    begin = time.monotonic()
    while left:
        number = signal.SIGTERM if time.monotonic() - begin < GRACE else signal.SIGKILL
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        list(_ended())
        left = _children(remover)  # a child's own children have become ours


def _say(text: str) -> None:
    print(f"efa-soft: {text}", file=sys.stderr, flush=True)
