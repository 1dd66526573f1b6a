"""The benchmark as its users start it: what it writes, and that what is wrong or off does not pass for a figure."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import Crew

from bench import latency
from bench.harness import report
from pplx_comm.efasoft import machines

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LATENCY = ROOT / "bench" / "latency.py"
TINY = ["--hidden", "256", "--experts", "8", "--top-k", "2", "--warmup", "2", "--timeout", "30"]
PHASES = {"dispatch", "combine", "round trip"}
HALVES = {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"}
LAUNCHERS = ("RANK", "WORLD_SIZE", "PMI_", "PMIX_", "OMPI_", "SLURM_", "MASTER_")


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3) as three:
        yield three


def environment(**more: str) -> dict[str, str]:
    """Ours, as if no launcher had started us."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    # The package that is tested, wherever the tests run from.
    return {**clean, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])), **more}


def ranks_of(program: Path, *arguments: str, ranks: int = 2) -> tuple[list[int | None], str]:
    """Ranks of a program, without its launcher: their exit statuses, and what they said."""
    with Crew(ranks, rank_env={rank: {"LOCAL_RANK": str(rank)} for rank in range(ranks)}) as crew:
        crew.start("program_cases:run", str(program), list(arguments), last=True)
        statuses = [crew.wait(rank, 120) for rank in range(ranks)]
        for rank, status in enumerate(statuses):
            assert status is not None, crew.output()
            crew.ended(rank, status)
        return statuses, crew.output()


def check_figures(phases: dict[str, Any], names: set[str], n: int) -> None:
    assert set(phases) == names
    for figure in phases.values():
        assert figure["n"] == n
        assert 0 < figure["least"] <= figure["p50"] <= figure["p90"] <= figure["p99"]


def test_everything_that_it_writes(tmp_path: Path) -> None:
    written, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    transports = ["mapped", "proxy:shm", "proxy:nosuch"]
    arguments = ["--tokens", "3,1", "--wire", "fp8", "--transport", ",".join(transports), "--iters", "9"]
    statuses, said = ranks_of(LATENCY, *TINY, *arguments, "--json", str(written), "--plot", str(picture))
    assert statuses == [0, 0], said
    record = json.loads(written.read_text())

    assert record["schema"] == 1
    assert record["ranks"] == 2
    assert record["one_host"] is True
    assert record["options"]["tokens"] == [1, 3]
    assert record["options"]["seed"] == 1
    assert record["software_device"] is None
    assert "latency.py --hidden 256" in record["command"]
    assert "--tokens 3,1" in record["command"]
    assert {"cpu", "cores_allowed", "kernel", "isa"} <= set(record["machine"])
    assert {"python", "torch", "libfabric"} <= set(record["versions"])
    assert record["version"] in said
    assert [(p["transport"], p["tokens"]) for p in record["points"]] == [(t, n) for n in (1, 3) for t in transports]
    for point in record["points"]:
        if point["transport"] == "proxy:nosuch":
            assert "nosuch" in point["off"]
            assert not point["phases"]
            continue
        assert point["off"] is None
        check_figures(point["phases"], PHASES | HALVES, 9)
        check_figures(point["floor"], PHASES, 9)
        for phase in PHASES:
            assert point["ratio"][phase] == pytest.approx(point["phases"][phase]["p50"] / point["floor"][phase]["p50"])
        parts = {"copies", "writes"} if point["transport"] == "proxy:shm" else {"copies"}
        assert {phase: set(of) for phase, of in point["floor_parts"].items()} == {"dispatch": parts, "combine": parts}
        # Combine's rows are two bytes an element, dispatch's one and a scale.
        assert point["bytes_per_rank"]["combine"] > point["bytes_per_rank"]["dispatch"] > 0
    assert {(p["peer"], p["tokens"]) for p in record["peers"]} == {("gloo", 1), ("gloo", 3)}
    for peer in record["peers"]:
        check_figures(peer["phases"], PHASES, 5)
    assert set(record["nothing"]) == {"1", "3"}
    assert "mpirun" in record["peers_off"]["mpi"]

    assert picture.read_bytes().startswith(b"\x89PNG")
    for words in ("mapped", "proxy:shm", "ours/floor", "halves:", "proxy:nosuch  1 tokens off:", "mpi off:"):
        assert words in said
    assert max(len(line) for line in said.splitlines() if line.startswith(("mapped", "proxy:shm", "---"))) <= 120


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layout", "compact", "--dtype", "fp32", "--routing", "zipf", "--experts", "7", "--wire", "mxfp8"],
        ["--layout=padded", "--routing=one-hot", "--wire=fp8_ue8m0", "--transport=auto", "--node-size=1", "--provider=tcp"],
    ],
    ids=["compact", "padded"],
)
def test_other_shapes_are_measured_and_right(arguments: list[str]) -> None:
    statuses, said = ranks_of(LATENCY, *TINY, "--tokens", "5", "--iters", "5", "--peers", "gloo", *arguments)
    assert statuses == [0, 0], said


@pytest.mark.slow
def test_under_mpirun_mpi_is_a_peer(tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    pytest.importorskip("mpi4py")
    if mpirun is None:
        pytest.skip("no mpirun")
    written = tmp_path / "bench.json"
    command = [mpirun, "-n", "3", sys.executable, str(LATENCY), *TINY, "--tokens", "4", "--iters", "5", "--json", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(written.read_text())
    assert record["ranks"] == 3
    assert {peer["peer"] for peer in record["peers"]} == {"gloo", "mpi"}


def test_figures_of_the_software_device_are_named_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes over it by a proxy, and nothing else."""
    world: Any = SimpleNamespace(rank=0, size=4, comm=SimpleNamespace(control=SimpleNamespace(same_node=lambda rank: True)))

    def named(transports: str, *more: str) -> str | None:
        given = latency.parser_of("latency.py", "").parse_args(["--transport", transports, *more])
        return report.software_device(latency.from_arguments(given), world)

    machines.p5(tmp_path)
    monkeypatch.setenv("SYSFS_PATH", str(tmp_path))
    assert "(pplx_comm efa-soft, 32 NICs) under proxy:efa-direct, proxy: " in (
        named("mapped,proxy:tcp,proxy:efa-direct,proxy") or ""
    )
    assert "under auto:efa: no NIC's figures" in (named("auto:efa", "--node-size", "2") or "")
    assert named("mapped,auto,proxy:tcp") is None
    (tmp_path / "class/infiniband/rdmap79s0/fw_ver").write_text("1.0\n")
    assert "31 NICs" in (named("proxy:efa") or "")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_blocks_in_pieces(device: str, tmp_path: Path) -> None:
    """--slot-bytes reaches the library, right results come of it, and table and JSON say at which sizes blocks go in pieces."""
    written = tmp_path / "bench.json"
    arguments = ["--tokens", "200,600", "--slot-bytes", "600000", "--peers", "none", "--iters", "8", "--json", str(written)]
    arguments += ["--device", device, "--pairs", "2", "--replays", "1", "--transport", "mapped"]
    statuses, said = ranks_of(HERE / "bench_on_cpu.py", *TINY, *arguments)
    assert statuses == [0, 0], said
    record = json.loads(written.read_text())
    assert record["options"]["slot_bytes"] == 600000 and record["in_pieces"] == [600]
    assert "slots of 600000 bytes: in pieces at 600" in said
    assert [point["off"] for point in record["points"]] == [None, None]


@pytest.mark.parametrize(("plant", "says"), [("combine", "combine: y[0, 0]"), ("dispatch", "d.src_token")])
def test_a_wrong_result_fails_the_run(plant: str, says: str) -> None:
    statuses, said = ranks_of(HERE / "bench_planted.py", plant, *TINY, "--tokens", "2", "--iters", "4", "--peers", "none")
    assert statuses == [1, 1], said
    assert "wrong results" in said
    assert "rank 1" in said
    assert says in said


def test_a_rank_that_fails_ends_the_others() -> None:
    begun = time.monotonic()
    statuses, said = ranks_of(HERE / "bench_planted.py", "dies", *TINY, "--tokens", "2", "--iters", "400", "--peers", "none")
    assert 0 not in statuses, said
    assert "planted" in said
    assert time.monotonic() - begun < 30


def test_nothing_to_measure_is_a_failure() -> None:
    statuses, said = ranks_of(LATENCY, *TINY, "--tokens", "1", "--transport", "proxy:nosuch", "--iters", "4", "--peers", "none")
    assert 0 not in statuses, said
    assert "proxy:nosuch is off" in said


@pytest.mark.parametrize("layout", ["ragged", "compact"])
@pytest.mark.parametrize("wire", ["native", "fp8", "mxfp8"])
def test_the_floor_copies_every_byte_once(crew: Crew, layout: str, wire: str) -> None:
    """Rows to peers, a row per place; expert rows in, partial rows out and in, tokens out. Own rows are not sent."""
    arguments = ["--tokens", "17", "--hidden", "256", "--experts", "8", "--top-k", "3", "--wire", wire, "--layout", layout]
    token, row = 512, 512 if wire == "native" else 256 + 8
    for ran in crew.run("bench_cases:floor_copies", arguments, []):
        rest = ran["tokens"] * (token - row)  # of a token that is quantised, all is read, though not all is copied
        assert ran["dispatch written"] == (ran["sent"] + ran["placed"]) * row
        assert ran["dispatch read"] == ran["dispatch written"] + rest
        assert ran["combine written"] == (ran["returned"] + ran["tokens"]) * token
        assert ran["combine read"] == (ran["placed"] + ran["sent"] + ran["only here"]) * token


@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
@pytest.mark.parametrize("wire", ["native", "fp8", "mxfp8"])
def test_the_composite_floor_moves_what_a_step_does(crew: Crew, layout: str, wire: str) -> None:
    arguments = ["--tokens", "17", "--hidden", "2048", "--experts", "8", "--top-k", "3", "--wire", wire, "--layout", layout]
    for ran in crew.run("bench_cases:composite", arguments, "host", None):
        assert ran["says"] == ran["counted"] and all(ran["says"].values())


def test_the_floor_of_a_proxy_stays_in_the_send_area(crew: Crew) -> None:
    arguments = ["--tokens", "5", "--hidden", "64", "--experts", "6", "--top-k", "2"]
    assert len(crew.run("bench_cases:floor_copies", arguments, [0, 1, 2])) == 3


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("end", ["rank killed", pytest.param("launcher killed", marks=pytest.mark.slow)])
def test_no_rank_is_left_behind(end: str) -> None:
    command = [
        sys.executable,
        str(LATENCY),
        "-n",
        "2",
        *TINY,
        "--tokens",
        "2",
        "--seconds",
        "100",
        "--transport",
        "proxy:shm",
    ]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    assert launcher.stderr is not None
    try:
        launcher.stderr.readline()  # "measuring ..."
        ranks = children_of(launcher.pid)
        assert len(ranks) == 2
        if end == "rank killed":
            os.kill(ranks[1], signal.SIGKILL)
            _, said = launcher.communicate(timeout=30)
            assert launcher.returncode != 0
            assert "rank 1 was killed by SIGKILL" in said
        else:
            launcher.kill()
            launcher.communicate(timeout=30)
        given_up = time.monotonic() + 5
        while any(alive(rank) for rank in ranks) and time.monotonic() < given_up:
            time.sleep(0.05)
        assert not any(alive(rank) for rank in ranks)
        if end == "rank killed":
            assert not [name for name in os.listdir("/dev/shm") if any(f".{rank}." in name for rank in ranks)]
    finally:
        launcher.kill()


def test_the_gpu_benchmark_up_to_its_cuda_calls(tmp_path: Path) -> None:
    written, picture = tmp_path / "gpu.json", tmp_path / "gpu.png"
    arguments = ["--device", "cuda", "--tokens", "1,5", "--wire", "fp8", "--pairs", "4", "--replays", "3", "--hidden", "256"]
    arguments += ["--json", str(written), "--plot", str(picture), "--timeout", "30", "--experts", "8", "--top-k", "2"]
    arguments += ["--transport", "mapped,proxy:tcp,proxy:nosuch"]
    statuses, said = ranks_of(HERE / "bench_on_cpu.py", *arguments)
    assert statuses == [0, 0], said
    record = json.loads(written.read_text())
    assert record["options"]["device"] == "cuda" and record["options"]["pairs"] == 4
    assert [p["tokens"] for p in record["points"]] == [1, 1, 1, 5, 5, 5]
    assert [p["transport"] for p in record["points"]] == ["mapped", "proxy:tcp", "proxy:nosuch"] * 2
    for point in record["points"]:
        phases = point["phases"]
        if point["transport"] == "proxy:nosuch":
            assert "nosuch" in point["off"]
            continue
        assert set(phases) == PHASES | {"wall", "halves", "eager", "host", "host dispatch", "host combine"}
        assert phases["host"]["n"] == 4 * phases["eager"]["n"] and phases["eager"]["p50"] > 0
        assert all(0 < phases[f"host {phase}"]["p50"] < phases["host"]["p50"] for phase in ("dispatch", "combine"))
        assert phases["dispatch"]["p50"] == 3.0 and phases["combine"]["p50"] == 5.0 and phases["round trip"]["p50"] == 8.0
        assert phases["dispatch"]["n"] == 3 * 4 and phases["combine"]["n"] == 3 * 3  # the last combine has nothing after it
        assert phases["wall"]["n"] == 3
        assert set(point["floor"]) == PHASES
        if point["transport"] == "proxy:tcp":
            for phase, kernels in (("dispatch", 3.0), ("combine", 5.0)):
                parts = {name: part["p50"] for name, part in point["floor_parts"][phase].items()}
                assert parts["kernels"] == kernels and parts["handover"] == 2.0 and parts["writes"] > 0
                assert point["floor"][phase]["p50"] == pytest.approx(sum(parts.values()))
        assert point["floor"]["round trip"]["p50"] == pytest.approx(sum(point["floor"][p]["p50"] for p in ("dispatch", "combine")))
        assert point["bytes_per_rank"]["combine"] > point["bytes_per_rank"]["dispatch"] > 0
    assert [(p["peer"], p["tokens"]) for p in record["peers"]] == [("nccl", 1), ("ag_rs", 1), ("nccl", 5), ("ag_rs", 5)]
    assert set(record["peers_off"]) == {"symm_mem", "deep_ep"}
    assert "deep_ep" in record["peers_off"]["deep_ep"]
    for words in ("of its kernels", "in halves", "eagerly", "symm_mem off:", "of kernels, of the slowest rank"):
        assert words in said, said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_several_numbers_of_multiprocessors(tmp_path: Path) -> None:
    """Each with floors of as many, which for kernels that post are mapped's; peers that have no such setting once."""
    written, picture = tmp_path / "gpu.json", tmp_path / "gpu.png"
    arguments = ["--device", "cuda", "--tokens", "5,3", "--pairs", "3", "--replays", "2", "--peers", "ag_rs", "--num-sms", "all,3"]
    arguments += [
        "--transport",
        "mapped,proxy:tcp,nvshmem:1",
        "--layout",
        "compact",
        "--json",
        str(written),
        "--plot",
        str(picture),
        *TINY,
    ]
    statuses, said = ranks_of(HERE / "bench_on_cpu.py", *arguments)
    assert statuses == [0, 0], said
    record = json.loads(written.read_text())
    assert record["options"]["num_sms"] == [3, None] and record["multiprocessors"] == 132
    points = record["points"]
    transports = ["mapped", "proxy:tcp", "nvshmem:1"]
    expected = [(tokens, transport, n) for tokens in (3, 5) for transport in transports for n in (3, None)]
    assert [(p["tokens"], p["transport"], p["num_sms"]) for p in points] == expected
    for point in points:
        assert set(point["floor"]) == PHASES and all(of["p50"] > 0 for of in point["floor"].values())
        inside = point["transport"] != "proxy:tcp"
        mapped = next(p for p in points if (p["tokens"], p["num_sms"]) == (point["tokens"], point["num_sms"]))
        posts = point["transport"] == "nvshmem:1"
        assert point["beside"] == ({phase: mapped["phases"][phase] for phase in PHASES} if posts else {})
        assert not posts or all(point[name] == mapped[name] for name in ("floor", "composite", "traffic"))
        assert set(point["composite"]) == set(point["ratio_to_composite"]) == (PHASES if inside else set())
        assert bool(point["traffic"]) == inside
        assert {best["peer"] for best in point["best_peer"].values() if best} == {"ag_rs"}
    assert points[0]["traffic"] == points[1]["traffic"] != points[6]["traffic"]
    # x is read, and rows are stored and stored again; the same bytes go back.
    assert all(0 < of["pushed"] < of["written"] for of in points[0]["traffic"].values())
    assert [(p["peer"], p["tokens"], p["num_sms"]) for p in record["peers"]] == [("ag_rs", 3, None), ("ag_rs", 5, None)]
    header = next(line.split() for line in said.splitlines() if line.startswith("transport"))
    assert header[:3] == ["transport", "tokens", "SMs"] and "composite" in header
    assert [line.split()[2] for line in said.splitlines() if line.startswith(tuple(transports))] == ["3", "all"] * 6
    assert said.count("in multiples of mapped: dispatch 1.00x, combine 1.00x, round trip 1.00x; ") == 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (picture, tmp_path / "gpu-by-sms.png"))


def test_a_wrong_result_fails_the_gpu_benchmark() -> None:
    arguments = ["--device", "cuda", "--tokens", "2", "--peers", "none", "--pairs", "2", "--replays", "1", *TINY]
    statuses, said = ranks_of(HERE / "bench_planted.py", "gpu", *arguments)
    assert statuses == [1, 1], said
    assert "wrong results" in said and "combine: y[0, 0]" in said, said


@pytest.mark.parametrize("who", ["one", "all"])
def test_a_peer_that_fails_is_left_out(who: str, tmp_path: Path) -> None:
    """At the second size, on rank 1 or on all ranks: the rest is measured, and the table says why."""
    written = tmp_path / "gpu.json"
    arguments = ["--device", "cuda", "--tokens", "2,3", "--pairs", "2", "--replays", "2", "--json", str(written), *TINY]
    arguments += ["--timeout", "6", "--peers", "nccl"]
    statuses, said = ranks_of(HERE / "bench_planted.py", f"peer of {who}", *arguments)
    assert statuses == [0, 0], said
    assert "nccl off: at 3 tokens: planted: too many experts\n" in said, said
    record = json.loads(written.read_text())
    assert [p["tokens"] for p in record["points"]] == [2, 3]
    assert [(p["peer"], p["tokens"]) for p in record["peers"]] == [("nccl", 2)]
    assert "nccl" in record["peers_off"]


def test_the_peer_for_many_experts_brings_rows_to_them(crew: Crew) -> None:
    arguments = ["--tokens", "5", "--hidden", "8", "--experts", "60", "--top-k", "4", "--wire", "native", "--dtype", "fp32"]
    crew.run("bench_cases:symmetric_by_rank", arguments)


@pytest.mark.parametrize("wire", ["native", "fp8"])
def test_the_peers_of_gpus_bring_what_was_sent(crew: Crew, wire: str) -> None:
    arguments = ["--tokens", "5", "--hidden", "256", "--experts", "7", "--top-k", "3", "--wire", wire, "--dtype", "fp32"]
    crew.run("bench_cases:gpu_peers", arguments)


def test_without_a_gpu_it_says_so() -> None:
    statuses, said = ranks_of(LATENCY, *TINY, "--device", "cuda", "--tokens", "1", ranks=1)
    assert statuses == [1] and "sees no GPU" in said, said


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--peer", "nosuch"], "deep_ep"), (["--pairs", "1"], "at least 2"), (["--device", "tpu"], "cuda")]
)
def test_arguments_that_cannot_be(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        latency.main(["-n", "1", *TINY, *arguments])
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_stages_where_there_is_no_gpu() -> None:
    """What notes them is a build, and a GPU: the error says which is missing."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "stages.py"), "--tokens", "1"], capture_output=True, text=True, env=environment(),
        timeout=120,
    )  # fmt: skip
    if torch.cuda.is_available() and run.returncode == 0:
        assert "dispatch ends" in run.stdout
    else:
        assert run.returncode == 1 and (
            "PPLX_CUDA_STAGES" in run.stderr or "no GPU" in run.stderr or "CUDA module" in run.stderr
        ), run
