"""python -m pplx_comm efa-soft: what COMMAND gets, what comes back, and that nothing is left. Of the NICs themselves little is used here."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import clean_environment, until
from soft import software

from pplx_comm.cli import main
from pplx_comm.efasoft import counters, device, libfabrics, machines
from pplx_comm.efasoft.device import Options, SoftEfa
from pplx_comm.errors import Error

LAUNCH = [sys.executable, "-m", "pplx_comm", "efa-soft"]
TELL_AND_WAIT = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
print(os.environ["EFA_SOFT_DIR"], os.getpid(), flush=True)
number = signal.sigwait({signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
again = signal.sigtimedwait({signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}, 0.2)
sys.exit(40 + number if again is None else 3)
"""
"""Says where it is, and exits with the signal that it gets if it gets it once."""


@pytest.fixture(autouse=True, scope="module")
def available() -> None:
    software().close()


def launched(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCH, *words], capture_output=True, text=True, timeout=60, env={**clean_environment(), **more}, check=False
    )


@contextlib.contextmanager
def running(*words: str) -> Iterator[tuple[subprocess.Popen[str], Path, int]]:
    """The launcher, its folder, and COMMAND's process."""
    command = [*LAUNCH, *words, "--", sys.executable, "-S", "-c", TELL_AND_WAIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()) as launcher:
        try:
            assert launcher.stdout is not None
            folder, pid = launcher.stdout.readline().split()
            yield launcher, Path(folder), int(pid)
        finally:
            launcher.kill()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize(("command", "code"), [("exit 0", 0), ("exit 37", 37), ("kill -9 $$", 137)])
def test_the_exit_code(command: str, code: int) -> None:
    done = launched("--", "sh", "-c", f"echo $EFA_SOFT_DIR; {command}")
    assert done.returncode == code, done.stderr
    assert "software device" in done.stderr and not Path(done.stdout.strip()).exists()


def test_environment_of_the_command() -> None:
    done = launched(
        "--nics",
        "3",
        "--seed",
        "5",
        "--gbit",
        "2.5",
        "--",
        "sh",
        "-c",
        "env; ls $SYSFS_PATH/class/infiniband; ls $EFA_SOFT_DIR/lib",
    )
    for line in ("EFA_SOFT_SEED=5", "EFA_SOFT_GBIT=2.5", "rdmap18s27", "libibverbs.so.1", "libefa.so.1", "libfabric.so.1"):
        assert line in done.stdout.splitlines(), done.stdout
    assert "EFA_SOFT_WINDOW" not in done.stdout  # the device's own default
    assert re.search(r"LD_PRELOAD=\S+libibverbs.so.1:\S+libefa.so.1", done.stdout)
    assert "MPIR_CVAR_OFI_USE_PROVIDER=tcp" in done.stdout


def test_torch_is_not_imported() -> None:
    script = "import sys\nfrom pplx_comm.cli import main\nassert main(['efa-soft', '--', 'true']) == 0\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=clean_environment())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on(number: int) -> None:
    with running() as (launcher, folder, _):
        launcher.send_signal(number)
        assert launcher.wait(20) == 40 + number
        assert not folder.exists()


def test_ctrl_c() -> None:
    """A terminal sends it to COMMAND too, which must not get it twice."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*LAUNCH, "--", sys.executable, "-S", "-c", TELL_AND_WAIT], clean_environment())
    printed = os.read(terminal, 1000).decode()
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 40 + signal.SIGINT
    assert not Path(printed.split()[0]).exists()


def test_the_command_is_killed() -> None:
    with running() as (launcher, folder, pid):
        os.kill(pid, signal.SIGKILL)
        assert launcher.wait(20) == 128 + signal.SIGKILL
        assert not folder.exists()


def test_the_launcher_is_killed() -> None:
    """Nothing is left of it, though COMMAND lives; what is kept stays."""
    kept = launched("--keep", "--", "true")
    folder = re.search(r"kept (\S+);", kept.stderr)
    assert folder is not None
    try:
        with running() as (launcher, left, pid):
            launcher.kill()
            launcher.wait(20)
            until("the folder is gone", lambda: not left.exists(), 20.0)
            os.kill(pid, signal.SIGKILL)
        assert Path(folder[1]).exists()
    finally:
        subprocess.run(["rm", "-r", folder[1]], check=True)


def test_processes_that_outlive_the_command() -> None:
    """Those that do as they are told, and one that does not."""
    script = "sleep 1000 & echo $!; (trap '' TERM; exec sleep 1000) & echo $!"
    done = launched("--", "sh", "-c", script)
    assert done.returncode == 0
    pids = [int(word) for word in done.stdout.split()]
    assert all(is_gone(pid) for pid in pids) and "left 2 processes" in done.stderr, done.stderr


def test_a_port_by_name_and_number(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On a page as the device makes it, of two NICs on two hosts each."""
    machines.plain(tmp_path / "sys-1", 2)
    nics = [b"rdmap16s27", b"rdmap17s27"] * 2
    entries = b"".join(bytes(16) + name.ljust(32, b"\0") + bytes(72) for name in nics)
    (tmp_path / "control").write_bytes(device.CONTROL.pack(device.CONTROL_MARK, 1, 4, 120, 64).ljust(64, b"\0") + entries)

    def down() -> list[int]:
        page = (tmp_path / "control").read_bytes()
        return [struct.unpack_from("=I", page, 64 + 120 * nic + 48)[0] for nic in range(4)]

    device.set_port(tmp_path, 1, False)
    assert down() == [0, 1, 0, 1]
    device.set_port(tmp_path, "rdmap16s27", False)
    device.set_port(tmp_path, "1", True)
    assert down() == [1, 0, 1, 0]
    with pytest.raises(Error, match="no NIC '2': pass a number below 2, or one of rdmap16s27, rdmap17s27"):
        device.set_port(tmp_path, "2", False)
    (tmp_path / "control").unlink()
    with pytest.raises(Error, match="no process has opened rdmap16s27 yet"):
        device.set_port(tmp_path, 0, False)
    with running() as (launcher, folder, _):
        assert main(["efa-soft", "--dir", str(folder), "--set", "port-down=0"]) == 2
        assert "has opened" in capfd.readouterr().err
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(20)


WRITES = """
import ctypes, json, sys
from harness.environment import control_plane_only
control_plane_only()
from mpi4py import MPI
from bench import _instruments
from pplx_comm.wiring import libfabric

world = MPI.COMM_WORLD
rank, size = world.rank, 4096
fabric = libfabric.open_fabric("efa")
memory = ctypes.create_string_buffer(bytes([65 + rank]) * size + bytes(size), 2 * size)
region = fabric.register_memory(ctypes.addressof(memory), 2 * size, shared_bytes=2 * size)
address, description = world.allgather((fabric.address(), region.description))[1 - rank]
fabric.insert_peer(7, address)
there = fabric.import_region(7, description)
world.barrier()
_instruments.bare_writes(fabric, region, [(7, there, size, 0, size)], 1, rounds=10, timeout=20.0)
said = [fabric.endpoint_name(0), memory.raw[size:] == bytes([66 - rank]) * size]
done = world.Ibarrier()
while not done.Test():
    fabric.poll()  # the other's last write may need this side
fabric.close()
said = world.gather(said)
if rank == 0:
    print(json.dumps(said))
"""
"""Ranks that MPI started write to each other on the device."""


def test_under_mpirun(tmp_path: Path) -> None:
    """MPI loads a libfabric and the host's libibverbs before ours; nevertheless the writes go over the device."""
    pytest.importorskip("mpi4py")
    mpirun = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if mpirun is None:
        pytest.skip("no mpirun")
    (tmp_path / "writes.py").write_text(WRITES)
    done = launched("--receives", "256", "--", mpirun, "-n", "2", sys.executable, str(tmp_path / "writes.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == [["rdmap16s27-rdm", True]] * 2
    names, figures = (line.split() for line in done.stderr.splitlines() if line.startswith(("NIC ", "rdmap16s27 ")))
    assert int(dict(zip(names, figures, strict=True))["writes_with_immediate"]) >= 20, done.stderr


def test_another_host_joins() -> None:
    """With NICs of its own on the same fabric, which its end does not end."""
    with running("--nics", "2") as (launcher, folder, _):
        show = "cat $SYSFS_PATH/class/infiniband/*/ports/1/gids/0; echo $EFA_SOFT_DIR $PPLX_LIBFABRIC"
        done = launched("--dir", str(folder), "--host", "7", "--", "sh", "-c", show + "; exit 5")
        assert done.returncode == 5, done.stderr
        gid, where = done.stdout.splitlines()
        assert gid == "fe80:0000:0000:0000:0efa:0000:0007:0001" and where == f"{folder} {folder}/lib/libfabric.so.1"
        assert folder.exists()
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(20)


MISTAKES = [
    ((), {}, 2, "no COMMAND: "),
    (("--nics", "2"), {}, 2, "no COMMAND: "),
    (("--", "/no/such/program"), {}, 127, "/no/such/program: No such file"),
    (("--", "/etc/hostname"), {}, 126, "/etc/hostname: "),
    (("--nics", "0", "--", "true"), {}, 2, "'0' must be a whole number, 1 to 32"),
    (("--gbit", "fast", "--", "true"), {}, 2, "'fast' must be a number"),
    (("--fail", "garbage", "--", "true"), {}, 2, "'garbage' must be faults with ; between them"),
    (("--fail", "silent;error=16", "--", "true"), {}, 2, "'silent;error=16' must be faults"),
    (("--fail", "rnr,nic=x", "--", "true"), {}, 2, "'rnr,nic=x' must be faults"),
    (("--fail", ";", "--", "true"), {}, 2, "';' must be faults"),
    (("--machine", "p5", "--nics", "2", "--", "true"), {}, 2, "--nics needs --machine plain"),
    (("--libfabric", "/no/libfabric.so.1", "--", "true"), {}, 2, "--libfabric names /no/libfabric.so.1, which is not a file"),
    (("--", "true"), {"PPLX_LIBFABRIC": "/no/libfabric.so.1"}, 2, "PPLX_LIBFABRIC names /no/libfabric.so.1"),
    (("--libfabric", "/etc/hostname", "--", "true"), {}, 2, "is built without efa: pip install mpich"),
    (("--set", "port-down=0"), {}, 2, "--dir $EFA_SOFT_DIR --set port-down=NIC"),
    (("--dir", "/tmp", "--set", "port-down=0"), {}, 2, "/tmp is not the folder of a fabric that runs"),
]


@pytest.mark.parametrize(("words", "more", "code", "says"), MISTAKES, ids=[mistake[3] for mistake in MISTAKES])
def test_mistakes(
    words: tuple[str, ...],
    more: dict[str, str],
    code: int,
    says: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    if code == 2:
        try:
            found = main(["efa-soft", *words])
        except SystemExit as end:  # argparse
            found = int(end.code or 0)
        said = capfd.readouterr().err
    else:
        done = launched(*words)
        found, said = done.returncode, done.stderr
    assert found == code and says in said, said


def test_a_libfabric_of_a_newer_system(tmp_path: Path) -> None:
    (tmp_path / "libfabric.so.1").write_bytes(b"\0libefa.so.1\0GLIBC_2.17\0GLIBC_9.41\0")
    with pytest.raises(Error, match=r"needs glibc 9\.41, this system has .*pip install mpich"):
        libfabrics.find(str(tmp_path / "libfabric.so.1"))


def test_no_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(Error, match=r"there is no libfabric here: pip install mpich"):
        libfabrics.find(environ={})


def test_a_machine_without_tmpfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "MEMORY", tmp_path)
    with pytest.raises(Error, match=rf"memory in {tmp_path}, which must be a tmpfs and is not mounted: mount -t tmpfs"):
        SoftEfa(Options())


def test_a_build_without_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "BUILT", tmp_path)
    with pytest.raises(Error, match=r"lacks libibverbs.so.1 and libefa.so.1: run make build"):
        SoftEfa(Options())


def page(rows: dict[str, list[int]], names: list[str]) -> bytes:
    rows_at, size = 32 + 32 * len(names), 48 + 8 * len(names)
    head = struct.pack("=8I", 0x43414645, 1, 1, len(names), len(rows), 32, rows_at, size)
    texts = b"".join(name.encode().ljust(32, b"\0") for name in names)
    return head + texts + b"".join(nic.encode().ljust(48, b"\0") + struct.pack(f"={len(names)}Q", *v) for nic, v in rows.items())


def test_counters_add_up(tmp_path: Path) -> None:
    """Adds up two processes, one of another version with a counter more, and two that were killed as they began."""
    (tmp_path / "counters-1-a").write_bytes(page({"rdmap2s0": [1, 0, 7], "rdmap10s0": [0, 0, 0]}, ["sends", "reads", "bytes"]))
    (tmp_path / "counters-2-b").write_bytes(page({"rdmap2s0": [2, 0, 5, 1]}, ["sends", "reads", "bytes", "error_13"]))
    (tmp_path / "counters-3-c").write_bytes(b"")
    (tmp_path / "counters-4-d").write_bytes(bytes(32))
    counts = counters.read(tmp_path)
    assert counts["rdmap2s0"] == {"sends": 3, "reads": 0, "bytes": 12, "error_13": 1}
    assert counters.table(counts).splitlines() == ["NIC       sends  bytes  error_13", "rdmap2s0      3     12         1"]


def test_nothing_is_left() -> None:
    """After all the tests above, this user's launchers that still live are those of other programs."""
    device.remove_abandoned()
    until("no folder of this process is left", lambda: not list(device.MEMORY.glob(f"{device.PREFIX}{os.getpid()}.*")), 1.0)
