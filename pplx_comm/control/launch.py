"""Reads the launcher's environment: this rank, the world size, the job, and the address of rank 0."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pplx_comm.errors import Error
from pplx_comm.settings import Start, read

DEFAULT_PORT = 29713


@dataclass(frozen=True)
class Launch:
    rank: int
    world_size: int
    source: str
    """The variables that gave rank and world size, for messages."""
    job: str
    """The same on every rank of the job, on every host. Differs between jobs if the launcher gives them ids."""
    local_job: str | None
    """Set if all ranks are known to be on this host: then it differs from every other job's. It names the abstract socket."""
    has_id: bool
    """True if `job` alone tells this job from every other one."""
    launcher: tuple[str, str] | None
    """(scope, process) if all ranks are on this host and the job has no id: its launcher's process, in that PID namespace."""
    address: tuple[str, int] | None
    address_source: str


@dataclass(frozen=True)
class _Launcher:
    rank: str
    world_size: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[str, ...]
    unique: tuple[str, ...]
    """The variables of `job` that together tell it from every other one on the host."""


LAUNCHERS = (
    _Launcher(
        "RANK",
        ("WORLD_SIZE",),
        ("LOCAL_WORLD_SIZE",),
        ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
        ("MASTER_ADDR", "MASTER_PORT"),
    ),
    _Launcher(
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE",),
        ("PMIX_NAMESPACE",),
    ),
    _Launcher("PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), (), ()),
    _Launcher(
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        (),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


def detect(environ: Mapping[str, str]) -> Launch:
    for launcher in LAUNCHERS:
        size_name = next((name for name in launcher.world_size if environ.get(name)), None)
        if environ.get(launcher.rank) and size_name:
            return _read(environ, launcher, size_name)
    return Launch(0, 1, "no launcher", "", None, False, None, None, "")


def _read(environ: Mapping[str, str], launcher: _Launcher, size_name: str) -> Launch:
    rank, world_size = _integer(environ, launcher.rank), _integer(environ, size_name)
    if not 0 <= rank < world_size:
        raise Error(f"{launcher.rank}={rank} is not a rank of {size_name}={world_size}: fix what starts this process")
    start = read(Start, environ)
    ids = [f"PPLX_COMM_JOB={start.job}"] if start.job else []
    ids += [f"{name}={environ[name]}" for name in launcher.job if environ.get(name)]
    job = ";".join([launcher.rank, *ids])
    has_id = bool(start.job or (launcher.unique and all(environ.get(name) for name in launcher.unique)))
    local_job, process = None, None
    if world_size == _local_size(environ, launcher, world_size):
        # Without an id from the launcher, the launcher's own process is the id.
        process = None if has_id else _launcher_process(launcher.rank)
        local_job = job if process is None else f"{job};{process}"
    address, address_source = _address(environ, start)
    return Launch(
        rank=rank,
        world_size=world_size,
        source=f"{launcher.rank} and {size_name}",
        job=job,
        local_job=local_job,
        has_id=has_id,
        launcher=None if process is None else (_process_scope(), process),
        address=address,
        address_source=address_source,
    )


def _local_size(environ: Mapping[str, str], launcher: _Launcher, world_size: int) -> int | None:
    for name in launcher.local_size:
        if environ.get(name):
            return _integer(environ, name)
    if launcher.rank == "SLURM_PROCID":
        nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES")
        if nodes == "1" or environ.get("SLURM_NTASKS_PER_NODE") == str(world_size):
            return world_size
    return None


def _address(environ: Mapping[str, str], start: Start) -> tuple[tuple[str, int] | None, str]:
    if start.address is not None:
        host, port = start.address
        return (host, port or start.port or DEFAULT_PORT), "PPLX_COMM_ADDR"
    if environ.get("MASTER_ADDR"):
        # torchrun's agent or rank 0's store holds MASTER_PORT itself.
        after_master = _integer(environ, "MASTER_PORT") + 1 if environ.get("MASTER_PORT") else DEFAULT_PORT
        return (environ["MASTER_ADDR"], start.port or _checked_port(after_master)), "MASTER_ADDR"
    if environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        return (environ["SLURM_LAUNCH_NODE_IPADDR"], start.port or DEFAULT_PORT), "SLURM_LAUNCH_NODE_IPADDR"
    return None, ""


def _checked_port(port: int) -> int:
    if not 0 < port < 65536:
        raise Error(f"port {port}, which follows MASTER_PORT, is not between 1 and 65535: fix MASTER_PORT or set PPLX_COMM_PORT")
    return port


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise Error(f"{name}={environ.get(name)!r} is not a number: fix what starts this process") from None


def _launcher_process(rank_name: str) -> str:
    """The nearest ancestor that was not itself started as a rank. Wrapper scripts carry the rank's variables, launchers
    do not.
    """
    marker = f"{rank_name}=".encode()
    pid = os.getppid()
    while pid > 1:
        parent, started = _parent_and_start(pid)
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return f"{pid}@{started}"  # another user's: a launcher daemon
        if not any(variable.startswith(marker) for variable in variables):
            return f"{pid}@{started}"
        pid = parent
    return "1"


def _process_scope() -> str:
    """The same for processes of one kernel and one PID namespace, in which a process id means the same."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    scope = f"{boot_id} {os.stat('/proc/self/ns/pid').st_ino}"
    return hashlib.sha256(scope.encode()).hexdigest()[:32]


def _parent_and_start(pid: int) -> tuple[int, str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0, "?"
    return int(fields[1]), fields[19]
