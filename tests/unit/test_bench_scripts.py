"""bench/cx7.sh and bench/p5.sh: the command lines that they come to. What stands in for mpirun and Python prints its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
SHOWS = '#!/bin/bash\n[ "$1" != --version ] || {{ echo "{version}" && exit; }}\nprintf "%s\\n" {name} "$@"\n'
OPEN_MPI, MPICH = "mpirun (Open MPI) 4.1.6", "HYDRA build details:"
MEASURED = ["--device", "cuda", "--tokens", "1,8,32,128", "--hidden", "7168", "--experts", "256", "--top-k", "8", "--wire", "fp8"]
SET = {"PPLX_COMM_SECRET": "hunter2", "FI_EFA_FORK_SAFE": "1", "NVSHMEM_IB_TRAFFIC_CLASS": "106", "EDITOR": "vi"}


def run(folder: Path, version: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    for name in ("python", "mpirun"):
        (folder / name).write_text(SHOWS.format(name=name, version=version))
        (folder / name).chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": "python", **SET}
    command = [str(BENCH / script), *arguments]
    return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("version", "ranks_a_host", "file"), [(OPEN_MPI, "-N", "--hostfile"), (MPICH, "-ppn", "-f")])
@pytest.mark.parametrize(("script", "transport"), [("p5.sh", "auto:efa"), ("cx7.sh", "nvshmem,auto:verbs")])
def test_hosts(tmp_path: Path, script: str, transport: str, version: str, ranks_a_host: str, file: str) -> None:
    """One format of hosts serves both MPIs. The ranks get the variables that concern them, by name: a secret is on no command line."""
    (tmp_path / "hosts").write_text("# two\nnode-0\n\n10.0.0.2")
    line = run(tmp_path, version, script, "--hosts", "hosts").stdout.splitlines()
    python = line.index("python")
    options = line[1:python]
    assert options[options.index(file) + 1] == str(tmp_path / "hosts")
    assert options[options.index(ranks_a_host) + 1] == "8" and options[-4:] == ["--bind-to", "none", "-n", "16"]
    if version == OPEN_MPI:
        passed = {options[at + 1] for at, option in enumerate(options) if option == "-x"}
    else:
        passed = set(options[options.index("-genvlist") + 1].split(","))
    assert passed > SET.keys() - {"EDITOR"} and "EDITOR" not in passed and "hunter2" not in " ".join(line)
    assert line[python + 1 :] == ["bench/latency.py", *MEASURED, "--transport", transport, "--node-size", "8"]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node0 slots=2\n")
    for arguments, words in (([], "--hosts FILE, or --p2p N"), (["--hosts", "hosts"], "'node0 slots=2'")):
        done = run(tmp_path, MPICH, "cx7.sh", *arguments)
        assert done.returncode == 2 and words in done.stderr and done.stdout == "", done
