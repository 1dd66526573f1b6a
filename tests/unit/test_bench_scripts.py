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
    line = shell.line("cx7.sh", "--p2p", "2", "--tokens", "128")
    assert line == [
        f"python of {BENCH.parent}", "bench/latency.py", "-n", "2", *MEASURED, "--transport", "mapped,nvshmem", "--node-size", "1",
        "--tokens", "128", "NVLS=1",
    ]  # fmt: skip


SET = {"PPLX_COMM_SECRET": "hunter2", "FI_EFA_FORK_SAFE": "1", "NVSHMEM_IB_TRAFFIC_CLASS": "106", "EDITOR": "vi"}


@pytest.mark.parametrize(("version", "ranks_a_host", "file"), [(OPEN_MPI, "-N", "--hostfile"), (MPICH, "-ppn", "-f")])
@pytest.mark.parametrize(("script", "transport"), [("p5.sh", "auto:efa"), ("cx7.sh", "nvshmem,auto:verbs")])
def test_hosts(shell: Shell, script: str, transport: str, version: str, ranks_a_host: str, file: str) -> None:
    """One format of hosts serves both MPIs. The ranks get the variables that concern them, by name: a secret is on no command line."""
    shell.command("mpirun", version)
    (shell.folder / "hosts").write_text("# two\nnode-0\n\n10.0.0.2")
    line = shell.line(script, "--hosts", "hosts", **SET)
    python = line.index("python")
    options = line[1:python]
    assert options[options.index(file) + 1] == str(shell.folder / "hosts")
    assert options[options.index(ranks_a_host) + 1] == "8" and options[-4:] == ["--bind-to", "none", "-n", "16"]
    if version == OPEN_MPI:
        passed = {options[at + 1] for at, option in enumerate(options) if option == "-x"}
    else:
        passed = set(options[options.index("-genvlist") + 1].split(","))
    assert passed > SET.keys() - {"EDITOR"} and "EDITOR" not in passed and "hunter2" not in " ".join(line)
    assert line[python + 1 : -1] == ["bench/latency.py", *MEASURED, "--transport", transport, "--node-size", "8"]


def test_what_is_wrong_is_said(shell: Shell) -> None:
    (shell.folder / "hosts").write_text("node0 slots=2\n")
    for arguments, words in (
        ([], "--hosts FILE, or --p2p N"),
        (["--hosts", "nowhere"], "cannot read nowhere"),
        (["--hosts", "hosts"], "'node0 slots=2'"),
    ):
        shell.command("mpirun", MPICH)
        done = shell.run("cx7.sh", *arguments)
        assert done.returncode == 2 and words in done.stderr and done.stdout == "", done
