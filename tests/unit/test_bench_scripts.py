"""bench/cx7.sh and bench/p5.sh: the command lines that they come to. What stands in for mpirun and Python prints its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
TOOLS = ("bash", "basename", "dirname", "grep", "realpath", "sed")
SHOWS = '#!/bin/bash\n[ "$1" != --version ] || {{ echo "{version}" && exit; }}\nprintf "%s\\n" "{name} of $PWD" "$@" "NVLS=$NVSHMEM_DISABLE_NVLS"\n'
OPEN_MPI, MPICH = "mpirun (Open MPI) 4.1.6", "HYDRA build details:"
MEASURED = ["--device", "cuda", "--tokens", "1,8,32,128", "--hidden", "7168", "--experts", "256", "--top-k", "8", "--wire", "fp8"]


class Shell:
    """A PATH of its own, with no more in it than the scripts need."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)
        self.command("python", "")

    def command(self, name: str, version: str) -> None:
        (self.bin / name).write_text(SHOWS.format(name=name, version=version))
        (self.bin / name).chmod(0o755)

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {"PATH": str(self.bin), "PYTHON": "python", **environment}
        return subprocess.run(
            [self.bin / "bash", BENCH / script, *arguments],
            env=variables, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def line(self, script: str, *arguments: str, **environment: str) -> list[str]:
        done = self.run(script, *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_two_ranks_over_p2p(shell: Shell) -> None:
    """By an mpirun if there is one."""
    latency = ["bench/latency.py", *MEASURED, "--transport", "mapped,nvshmem", "--node-size", "1", "--json", "a b.json", "NVLS=1"]
    for version, options in ((OPEN_MPI, ["--allow-run-as-root", "--oversubscribe"]), (MPICH, [])):
        shell.command("mpirun", version)
        line = shell.line("cx7.sh", "--p2p", "2", "--json", "a b.json")
        assert line == [f"mpirun of {BENCH.parent}", *options, "--bind-to", "none", "-n", "2", "python", *latency]


def test_without_an_mpirun(shell: Shell) -> None:
    line = shell.line("cx7.sh", "--p2p", "2", "--tokens", "128")
    assert line == [
        f"python of {BENCH.parent}", "bench/latency.py", "-n", "2", *MEASURED, "--transport", "mapped,nvshmem", "--node-size", "1",
        "--tokens", "128", "NVLS=1",
    ]  # fmt: skip
    line = shell.line("p5.sh", "--ranks", "4", "--node-size", "2", "--provider", "tcp")
    assert line[1:4] == ["bench/latency.py", "-n", "4"] and line[-5:-1] == ["--transport", "mapped,auto:tcp", "--node-size", "2"]


SET = {
    "LD_LIBRARY_PATH": "/opt/lib", "PPLX_COMM_SECRET": "hunter2", "PPLX_LIBFABRIC": "/opt/libfabric.so.1", "FI_EFA_FORK_SAFE": "1",
    "NCCL_DEBUG": "WARN", "NVSHMEM_IB_TRAFFIC_CLASS": "106", "EDITOR": "vi", "MY_FI_X": "1",
}  # fmt: skip
PASSED = {"PATH", "MPIR_CVAR_OFI_USE_PROVIDER", *SET} - {"EDITOR", "MY_FI_X"}


@pytest.mark.parametrize(("version", "ranks_a_host", "file"), [(OPEN_MPI, "-N", "--hostfile"), (MPICH, "-ppn", "-f")])
@pytest.mark.parametrize(("script", "transport"), [("p5.sh", "auto:efa"), ("cx7.sh", "nvshmem,auto:verbs")])
def test_hosts(shell: Shell, script: str, transport: str, version: str, ranks_a_host: str, file: str) -> None:
    """One format of hosts for both MPIs, found from wherever one stands. The ranks get the variables that concern them, by name."""
    shell.command("mpirun", version)
    (shell.folder / "hosts").write_text("# two\nnode-0\n\n10.0.0.2")
    line = shell.line(script, "--hosts", "hosts", **SET)
    python = line.index("python")
    options = line[1:python]
    assert line[0] == f"mpirun of {BENCH.parent}" and ("--allow-run-as-root" in options) == (version == OPEN_MPI)
    assert options[options.index(file) + 1] == str(shell.folder / "hosts")
    assert options[options.index(ranks_a_host) + 1] == "8" and options[-4:] == ["--bind-to", "none", "-n", "16"]
    if version == OPEN_MPI:
        passed = [options[at + 1] for at, option in enumerate(options) if option == "-x"]
    else:
        passed = options[options.index("-genvlist") + 1].split(",")
    assert sorted(passed) == sorted(PASSED | ({"NVSHMEM_DISABLE_NVLS"} if script == "cx7.sh" else set()))
    assert "hunter2" not in " ".join(line)
    assert line[python + 1 : -1] == ["bench/latency.py", *MEASURED, "--transport", transport, "--node-size", "8"]
    line = shell.line(script, "--hosts", "hosts", "--ranks", "12", "--node-size", "6")
    assert line[line.index(ranks_a_host) + 1] == "6" and line[line.index("-n") + 1] == "12"


def test_multicast_is_off_but_where_the_caller_says_so(shell: Shell) -> None:
    assert shell.line("cx7.sh", "--p2p", "2")[-1] == "NVLS=1"
    assert shell.line("cx7.sh", "--p2p", "2", NVSHMEM_DISABLE_NVLS="0")[-1] == "NVLS=0"


@pytest.mark.parametrize("mpirun", [None, "some other launcher"])
def test_hosts_want_an_mpirun(shell: Shell, mpirun: str | None) -> None:
    if mpirun is not None:
        shell.command("mpirun", mpirun)
    (shell.folder / "hosts").write_text("a\n")
    for script in ("cx7.sh", "p5.sh"):
        done = shell.run(script, "--hosts", "hosts")
        assert done.returncode == 2 and "Open MPI's or MPICH's" in done.stderr and done.stdout == "", done


@pytest.mark.parametrize("line", ["node0:2", "node0 slots=2", "-x"])
def test_forms_of_one_mpi_alone_are_refused(shell: Shell, line: str) -> None:
    shell.command("mpirun", MPICH)
    (shell.folder / "hosts").write_text(f"a\n{line}\n")
    done = shell.run("p5.sh", "--hosts", "hosts")
    assert done.returncode == 2 and f"'{line}'" in done.stderr and "--node-size" in done.stderr and done.stdout == "", done
    (shell.folder / "hosts").write_text("# none\n")
    assert "names no host" in shell.run("p5.sh", "--hosts", "hosts").stderr


def test_what_is_missing_is_said(shell: Shell) -> None:
    shell.command("mpirun", OPEN_MPI)
    for arguments, words in (
        ([], "--hosts FILE, or --p2p N"),
        (["--p2p"], "--p2p needs a value"),
        (["--hosts", "nowhere"], "cannot read nowhere"),
    ):
        done = shell.run("cx7.sh", *arguments)
        assert done.returncode == 2 and words in done.stderr and done.stdout == "", done
    assert "--p2p 2" in shell.run("cx7.sh", "--help").stdout
