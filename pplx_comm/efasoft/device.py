"""A fabric of software NICs: the folder that its processes share, and the environment that leads them to it."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pplx_comm.efasoft import counters, libfabrics, machines
from pplx_comm.errors import Error

MEMORY = Path("/dev/shm")
PREFIX, KEPT = "efasoft-", "kept"
LIBRARIES = ("libibverbs.so.1", "libefa.so.1")
BUILT = Path(__file__).resolve().parent / "lib"
CONTROL = struct.Struct("=5I")
CONTROL_MARK, NIC_NAME_AT, PORT_DOWN_AT = 0x45414645, 16, 48
"""proxy/efasoft/README.md has the layout of the control page."""


@dataclass(frozen=True)
class Options:
    """None and the defaults leave a choice to the device, which then behaves as a real EFA."""

    nics: int = 1
    machine: str = "plain"
    host: int | None = None
    seed: int | None = None
    window: int | None = None
    latency_us: float | None = None
    gbit: float | None = None
    receives: int | None = None
    fail: str | None = None
    libfabric: str | None = None
    more: tuple[tuple[str, str], ...] = ()
    """Further variables of the device, ("EFA_SOFT_SQ_DEPTH", "16")."""

    def variables(self) -> dict[str, str]:
        given = {
            "EFA_SOFT_SEED": self.seed, "EFA_SOFT_WINDOW": self.window, "EFA_SOFT_LATENCY_US": self.latency_us,
            "EFA_SOFT_GBIT": self.gbit, "EFA_SOFT_RQ_DEPTH": self.receives, "EFA_SOFT_FAIL": self.fail,
        }  # fmt: skip
        return {**{name: str(value) for name, value in given.items() if value is not None}, **dict(self.more)}


class Host:
    """A machine on a fabric: its NICs. All that join with one number are one host."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder, self.options = folder, options
        number = os.stat("/proc/self/ns/net").st_ino % 2**32 if options.host is None else options.host
        self.sysfs = folder / f"sys-{number}"
        if not self.sysfs.exists():
            machines.make(options.machine, self.sysfs, options.nics, number)

    @property
    def environment(self) -> dict[str, str]:
        fabric = {
            "EFA_SOFT_DIR": str(self.folder),
            "SYSFS_PATH": str(self.sysfs),
            "PPLX_LIBFABRIC": str(self.folder / "lib/libfabric.so.1"),
        }
        return {**fabric, **self.options.variables()}

    @property
    def about(self) -> str:
        """Returns a line for the head of tables: their figures must not pass for a NIC's."""
        nics, seed = len(nics_of(self.sysfs)), 1 if self.options.seed is None else self.options.seed
        return f"software device, {nics} NIC{'s' if nics > 1 else ''} of a {self.options.machine} machine, seed {seed}"


class SoftEfa:
    """Processes with `environment` see the NICs, and reach each other by them. Gone with close(), whatever they do."""

    def __init__(self, options: Options = Options()) -> None:
        found = libfabrics.find(options.libfabric)
        missing = [name for name in LIBRARIES if not (BUILT / name).is_file()]
        if missing:
            raise Error(f"{BUILT} lacks {' and '.join(missing)}: run make build (x86-64 and aarch64 Linux have the device)")
        _check_memory()
        remove_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}.{_start_time(os.getpid())}-", dir=MEMORY))
        # Removes the folder when this process ends, even by kill -9: its pipe ends then, too.
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", f'read -r _; [ -e "$1/{KEPT}" ] || rm -rf -- "$1"', "sh", str(self.folder)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.options = options
        try:
            self.host = Host(self.folder, options)
            self._libraries(found)
        except BaseException:
            self.close()
            raise

    def _libraries(self, found: libfabrics.Libfabric) -> None:
        """Copies, since a library's own folder is where the loader looks for what it needs."""
        lib = self.folder / "lib"
        (lib / "libfabric").mkdir(parents=True)
        shutil.copyfile(found.path, lib / "libfabric.so.1")
        if found.provider is not None:
            shutil.copyfile(found.provider, lib / "libfabric" / found.provider.name)
        for name in LIBRARIES:
            shutil.copyfile(BUILT / name, lib / name)

    @property
    def environment(self) -> dict[str, str]:
        """Returns the variables that a process needs to load libfabric from there, as this library does. That process may run
        already."""
        return self.host.environment

    def counters(self) -> counters.Counts:
        return counters.read(self.folder)

    def set_port(self, nic: str | int, up: bool) -> None:
        set_port(self.folder, nic, up)

    def keep(self) -> None:
        """close() leaves the folder, and nothing else removes it."""
        (self.folder / KEPT).touch()

    @property
    def remover(self) -> int:
        """The process that removes the folder."""
        return self._remover.pid

    def close(self) -> None:
        if self._remover.returncode is None:
            self._remover.communicate(b"\n")  # copies of the pipe in forked processes do not delay it

    def __enter__(self) -> SoftEfa:
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def nics_of(sysfs: Path) -> list[str]:
    """In the device's order: numbers by value."""
    return sorted(os.listdir(sysfs / "class/infiniband"), key=natural)


def natural(name: str) -> list[int]:
    """rdmap9s0 before rdmap16s27."""
    return [int(digits) for digits in re.findall(r"\d+", name)]


def set_port(folder: Path, nic: str | int, up: bool) -> None:
    """That NIC's port on all hosts goes down or up, at once."""
    every = sorted({name for sysfs in folder.glob("sys-*") for name in nics_of(sysfs)}, key=natural)
    name = every[int(nic)] if str(nic).isdecimal() and int(nic) < len(every) else str(nic)
    if name not in every:
        raise Error(f"there is no NIC {nic!r}: pass a number below {len(every)}, or one of {', '.join(every)}")
    found = 0
    with contextlib.suppress(FileNotFoundError), open(folder / "control", "r+b") as file, mmap.mmap(file.fileno(), 0) as page:
        mark, _, nics, size, first = CONTROL.unpack_from(page)
        for at in range(first, first + nics * size if mark == CONTROL_MARK else first, size):
            if page[at + NIC_NAME_AT : at + PORT_DOWN_AT].split(b"\0")[0].decode() == name:
                struct.pack_into("=I", page, at + PORT_DOWN_AT, int(not up))
                found += 1
    if not found:
        raise Error(f"no process has opened {name} yet")


def is_fabric(folder: Path) -> bool:
    return (folder / "lib/libfabric.so.1").is_file() and any(folder.glob("sys-*"))


def _check_memory() -> None:
    """The processes share mutexes in it, and a disk's pages would be written back."""
    kind = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, where, what, *_ = line.split()
            if where == str(MEMORY):
                kind = what
    if kind not in ("tmpfs", "ramfs") or not os.access(MEMORY, os.W_OK | os.X_OK):
        state = f"is {kind}" if kind else "is not mounted"
        state = "cannot be written by this user" if kind == "tmpfs" else state
        raise Error(f"the NICs share memory in {MEMORY}, which must be a tmpfs and {state}: mount -t tmpfs tmpfs {MEMORY}")
    free = shutil.disk_usage(MEMORY).free
    if free < 32 << 20:
        raise Error(f"{MEMORY} has {free >> 20} MiB left, the NICs need 32: free some, or docker run --shm-size=1g")


def _start_time(pid: int) -> str:
    """Tells a process from a later one of the same number; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def remove_abandoned() -> None:
    """Folders of this user's launchers that were killed together with their removers."""
    for folder in MEMORY.glob(f"{PREFIX}*.*-*"):
        pid, _, rest = folder.name.removeprefix(PREFIX).partition(".")
        with contextlib.suppress(OSError):
            mine = pid.isdecimal() and folder.stat().st_uid == os.getuid() and not (folder / KEPT).exists()
            if mine and _start_time(int(pid)) != rest.partition("-")[0]:
                shutil.rmtree(folder, ignore_errors=True)
