"""A fabric of software NICs: the folder that its processes share, and the environment that leads them to it."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
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
CONTROL_MARK, CONTROL_BYTES, PORTS_AT, PORTS = b"EFASOFTX", 4096, 64, 256


@dataclass(frozen=True)
class Options:
    """What None and the defaults leave out, the device decides: it is then as a real EFA is."""

    nics: int = 1
    machine: str = "plain"
    host: int | None = None
    seed: int | None = None
    window: int | None = None
    latency_us: float | None = None
    gbit: float | None = None
    fail: str | None = None
    libfabric: str | None = None
    more: tuple[tuple[str, str], ...] = ()
    """Further variables of the device, ("EFA_SOFT_SQ_DEPTH", "16")."""

    def variables(self) -> dict[str, str]:
        given = {
            "EFA_SOFT_HOST": self.host, "EFA_SOFT_SEED": self.seed, "EFA_SOFT_WINDOW": self.window,
            "EFA_SOFT_LATENCY_US": self.latency_us, "EFA_SOFT_GBIT": self.gbit, "EFA_SOFT_FAIL": self.fail,
        }  # fmt: skip
        return {**{name: str(value) for name, value in given.items() if value is not None}, **dict(self.more)}


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
        self.options = options
        try:
            self.machine = machines.make(options.machine, self.folder / "sys", options.nics)
            self._library = self._libraries(found)
            control = bytearray(CONTROL_BYTES)
            struct.pack_into("<8sI", control, 0, CONTROL_MARK, 1)
            (self.folder / "control").write_bytes(control)
        except BaseException:
            self.close()
            raise

    def _libraries(self, found: libfabrics.Libfabric) -> Path:
        """Copies, since a library's own folder is where the loader looks for what it needs."""
        lib = self.folder / "lib"
        (lib / "libfabric").mkdir(parents=True)
        shutil.copyfile(found.path, lib / "libfabric.so.1")
        if found.provider is not None:
            shutil.copyfile(found.provider, lib / "libfabric" / found.provider.name)
        for name in LIBRARIES:
            shutil.copyfile(BUILT / name, lib / name)
        return lib / "libfabric.so.1"

    @property
    def environment(self) -> dict[str, str]:
        """For a process that will load libfabric from there, as this library does; it may run already."""
        device = {
            "EFA_SOFT_DIR": str(self.folder),
            "EFA_SOFT_NETNS": str(os.stat("/proc/self/ns/net").st_ino),
            "SYSFS_PATH": str(self.folder / "sys"),
            "PPLX_LIBFABRIC": str(self._library),
        }
        return {**device, **self.options.variables()}

    def counters(self) -> counters.Counts:
        return counters.read(self.folder)

    def set_port(self, nic: str | int, up: bool) -> None:
        set_port(self.folder, nic, up)

    @property
    def about(self) -> str:
        what = f"{len(self.machine.nics)} NICs" if len(self.machine.nics) != 1 else "1 NIC"
        return f"{self.options.machine} machine with {what}, seed {self.options.seed if self.options.seed is not None else 1}"

    def keep(self) -> None:
        """close() leaves the folder, and nothing else removes it."""
        (self.folder / KEPT).touch()

    def close(self) -> None:
        if not (self.folder / KEPT).exists():
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> SoftEfa:
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def nics_of(folder: Path) -> list[str]:
    """In the device's order: numbers by value."""
    names = os.listdir(folder / "sys/class/infiniband")
    return sorted(names, key=lambda name: [int(part) for part in name.removeprefix("rdmap").split("s")])


def set_port(folder: Path, nic: str | int, up: bool) -> None:
    """All hosts' port of that name or number goes down or up, at once."""
    names = nics_of(folder)
    if str(nic) not in names and not (str(nic).isdecimal() and int(nic) < len(names)):
        raise Error(f"there is no NIC {nic!r}: it is a number below {len(names)}, or one of {', '.join(names)}")
    number = names.index(str(nic)) if str(nic) in names else int(nic)
    with open(folder / "control", "r+b") as file, mmap.mmap(file.fileno(), CONTROL_BYTES) as page:
        struct.pack_into("<I", page, PORTS_AT + 4 * number, int(not up))


def is_folder(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return (folder / "control").read_bytes()[: len(CONTROL_MARK)] == CONTROL_MARK
    return False


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
    """Folders of this user's launchers that were killed."""
    for folder in MEMORY.glob(f"{PREFIX}*.*-*"):
        pid, _, rest = folder.name.removeprefix(PREFIX).partition(".")
        with contextlib.suppress(OSError):
            mine = pid.isdecimal() and folder.stat().st_uid == os.getuid() and not (folder / KEPT).exists()
            if mine and _start_time(int(pid)) != rest.partition("-")[0]:
                shutil.rmtree(folder, ignore_errors=True)
