"""python -m pplx_comm doctor: what it must find on any machine, and what it says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import pplx_comm
from pplx_comm import doctor
from pplx_comm.cli import main
from pplx_comm.settings import Settings
from pplx_comm.wiring import ibgda, libfabric, nvshmem
from pplx_comm.wiring.placement import OWNER, placement

LAYER = {"num_experts": 64, "top_k": 4, "hidden": 1024}


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["doctor", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def finding(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["findings"] if one["name"] == name)


def test_findings_of_every_machine(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys)
    assert found["version"] == pplx_comm.__version__
    names = [one["name"] for one in found["findings"]]
    assert len(names) == len(set(names))
    assert {"cpu", "memory", "mapped", "/dev/shm", "torch", "mpi", "libfabric", "cuda", "nvshmem", "environment"} <= set(names)
    assert finding(found, "cpu")["on"] is True
    assert f"{len(os.sched_getaffinity(0))} " in finding(found, "cpu")["says"]
    assert finding(found, "mapped")["on"] is True
    assert all(one["says"] for one in found["findings"])


def test_memory_is_what_construction_reserves(capsys: pytest.CaptureFixture[str]) -> None:
    layer = ["--experts", "64", "--top-k", "4", "--hidden", "1024", "--wire", "fp8", "--ranks", "4"]
    found = report(capsys, "--tokens", "16,64", *layer)["memory_per_rank"]
    assert [row["max_tokens_per_rank"] for row in found] == [16, 64]
    for row in found:
        same = {"world_size": 4, "max_tokens_per_rank": row["max_tokens_per_rank"], "wire": "fp8", **LAYER}
        assert row["mapped"] == pplx_comm.AllToAll.required_bytes(**same)
        assert row["proxy"] == pplx_comm.AllToAll.required_bytes(**same, remote_peers=3)
        assert row["proxy"] > row["mapped"]


@pytest.mark.parametrize(
    ("wire", "token"), [("native", 2 * 1024), ("fp8", 1024 + 32), ("fp8_ue8m0", 1024 + 32), ("mxfp8", 1024 + 32)]
)
def test_memory_of_what_a_dispatch_returns(capsys: pytest.CaptureFixture[str], wire: str, token: int) -> None:
    layer = ["--experts", "64", "--top-k", "4", "--hidden", "1024", "--wire", wire, "--ranks", "4", "--layout", "compact"]
    (row,) = report(capsys, "--tokens", "16", *layer)["memory_per_rank"]
    assert row["output_at_most"] == 4 * 16 * token


def test_a_configuration_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = report(capsys, "--tokens", "8", "--hidden", "7")["memory_per_rank"]
    assert "hidden=7" in row["error"]


@pytest.mark.parametrize("ranks", ["0", "-3", "1025"])
def test_ranks_that_cannot_be(capsys: pytest.CaptureFixture[str], ranks: str) -> None:
    (row,) = report(capsys, "--tokens", "8", "--ranks", ranks)["memory_per_rank"]
    assert f"world_size={ranks} must be 1 to 1024" in row["error"]


def test_text_shows_every_finding_and_how_to_turn_it_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--tokens", "8"]) == 0
    text = capsys.readouterr().out
    for one in doctor.findings():
        assert one.name in text
        if one.turn_on:
            assert f"-> {one.turn_on}\n" in text
    assert "memory of one of 8 ranks" in text


def test_a_build_or_host_without_libfabric(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status: dict[str, Any] = {"compiled_in": False, "path": None, "version": None, "error": None, "providers": {}}
    monkeypatch.setattr(libfabric, "status", lambda: status)
    off = finding(report(capsys), "libfabric")
    assert (off["on"], "libfabric-dev" in off["turn_on"]) == (False, True)
    status.update(compiled_in=True, error="no libfabric.so.1 found")
    off = finding(report(capsys), "libfabric")
    assert (off["on"], off["says"]) == (False, "no libfabric.so.1 found")
    assert "PPLX_LIBFABRIC" in off["turn_on"]


@pytest.mark.parametrize(
    ("release", "says", "turn_on"),
    [
        ("12.2, V12.2.140", "is CUDA 12.2, and 12.3 or newer is needed", "install CUDA 12.3 or newer"),
        ("12.3, V12.3.52", "is CUDA 12.3", "make build"),
        ("13.0, V13.0.88", "is CUDA 13.0", "make build"),
        (None, "no nvcc in PATH", "install CUDA 12.3 or newer"),
        ("?", "does not tell its version", "CUDA 12.3"),
    ],
)
def test_a_build_without_cuda(
    release: str | None, says: str, turn_on: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Names the nvcc that is there, and the release that is wanted: one that is too old is not none."""
    monkeypatch.setitem(sys.modules, "pplx_comm._cuda", None)
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if release is not None:
        (tmp_path / "nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}'\n")
        (tmp_path / "nvcc").chmod(0o755)
    elif Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("this machine has an nvcc where it is looked for in any case")
    (found,) = doctor._gpus()
    assert found.on is False and says in found.says and ("needed" in found.says) == ("needed" in says), found
    assert found.turn_on is not None and found.turn_on.startswith(turn_on), found
    if release is not None:
        assert str(tmp_path / "nvcc") in found.says


def test_ibgda_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Missing parts of the host, and the traffic class, are reported without NVSHMEM."""
    monkeypatch.setattr(nvshmem, "library_path", lambda: None)
    monkeypatch.setattr(ibgda, "loads", lambda library: True)
    monkeypatch.setenv("SYSFS_PATH", str(tmp_path / "sys"))
    monkeypatch.setattr(doctor, "PROC", tmp_path / "proc")
    monkeypatch.setenv("NVSHMEM_IB_TRAFFIC_CLASS", "106")
    found = report(capsys)
    assert "not installed" in finding(found, "nvshmem")["says"]
    off = finding(found, "ibgda")
    assert off["on"] is False and off["says"].startswith("no: no mlx5 device"), off
    says = finding(found, "nvshmem settings")["says"]
    assert "traffic class 106, service level 0" in says and "NVSHMEM_IB_TRAFFIC_CLASS=106" in says, says
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    on = finding(report(capsys), "ibgda")
    assert on["on"] is True and on["says"].startswith("CPU-assisted") and "PeerMappingOverride" in on["turn_on"], on


@pytest.mark.parametrize(
    ("alone", "on", "words"),
    [
        (nvshmem.Alone(None, ibgda=True), True, "one PE alone has started with it"),
        (nvshmem.Alone(None), False, "no: one PE alone has started without it"),
        (nvshmem.Alone("one PE alone ended with status 255"), False, "no: one PE alone ended with status 255"),
    ],
    ids=["runs", "does not run", "ends"],
)
def test_ibgda_where_nvshmem_can_be_started(alone: nvshmem.Alone, on: bool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome of a process of its own decides, not files."""
    tried: list[bool] = []
    usable: Any = type("Module", (), {"device_count": staticmethod(lambda: 1)})
    monkeypatch.setattr(nvshmem, "usable_kernels", lambda: usable)
    monkeypatch.setattr(nvshmem, "try_alone", lambda gpu, *, by_nic: tried.append(by_nic) or alone)
    monkeypatch.setattr(ibgda, "verdict", lambda *_: ibgda.Verdict("gpu", "the driver has what it takes"))
    found = doctor._ibgda()
    assert found.on is on and words in found.says and "the driver has what it takes" in found.says and tried == [True], found
    monkeypatch.setattr(ibgda, "verdict", lambda *_: ibgda.Verdict(None, "no mlx5 device"))
    assert doctor._ibgda().on is False and tried == [True], "nothing to start without a NIC"


def test_the_secret_stays_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PPLX_COMM_SECRET", "hunter2")
    monkeypatch.setenv("PPLX_COMM_THREADS", "3")
    says = finding(report(capsys), "environment")["says"]
    assert "PPLX_COMM_THREADS=3" in says
    assert "hunter2" not in says


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--version"], pplx_comm.__version__),
        (["doctor", "--help"], "--top-k"),
        (["--help"], "bench/latency.py"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert words in capsys.readouterr().out


@pytest.mark.skipif(libfabric.status()["error"] is not None, reason="needs libfabric")
def test_the_nics_a_rank_would_take_and_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_gpu_addresses", list)
    monkeypatch.setenv("PPLX_COMM_PROVIDER", "tcp")
    monkeypatch.setenv("PPLX_COMM_NICS", "lo, lo")
    says = finding(report(capsys), "NICs")["says"]
    assert says.startswith("lo 127.0.0.1, lo 127.0.0.1 by tcp")
    assert "asked for by name" in says and "proxy on" in says
    monkeypatch.delenv("PPLX_COMM_NICS")
    monkeypatch.setenv("PPLX_COMM_IFACE", "lo")
    assert finding(report(capsys), "NICs")["says"].startswith("lo 127.0.0.1 by tcp")
    monkeypatch.delenv("PPLX_COMM_IFACE")
    assert "default route" in finding(report(capsys), "NICs")["says"]
    monkeypatch.setenv("PPLX_COMM_NICS", "eth77")
    off = finding(report(capsys), "NICs")
    assert (off["on"], "eth77" in off["says"], "it has" in off["says"]) == (False, True, True)


def test_gpus_of_a_host(tmp_path: Path) -> None:
    """GPUs come in the order of their addresses, without other display adapters."""
    devices = {
        "0000:9b:00.0": ("0x10de", "0x030200"), "0000:1b:00.0": ("0x10de", "0x030200"), "0000:02:00.0": ("0x1a03", "0x030000"),
        "0000:1c:00.0": ("0x10de", "0x068000"),
    }  # fmt: skip
    for address, (vendor, kind) in devices.items():
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    (tmp_path / "bus/pci/devices/0000:ff:00.0").mkdir()
    assert doctor._gpu_addresses(tmp_path) == ["0000:1b:00.0", "0000:9b:00.0"]


def test_placement() -> None:
    """GPU memory only where the GPU is open to NICs, the provider takes it without CUDA calls, and writes become visible in order."""
    assert placement(OWNER, "efa", None).where == "device"
    assert placement(200, "efa", None).where == "device"
    for ordering, refusal, word in [
        (None, None, "GPUDirect"),
        (0, None, "order"),
        (200, "provider tcp does not reach GPU memory", "provider tcp"),
        (None, "provider tcp does not reach GPU memory", "GPUDirect"),
    ]:
        chosen = placement(ordering, "efa", refusal)
        assert chosen.where == "host" and word in chosen.why, chosen


def test_placement_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU, doctor says where its remote blocks would lie, and why; here sysfs says that there is one."""
    monkeypatch.setattr(doctor, "_gpu_addresses", lambda: ["0000:53:00.0"])
    said = [one for one in doctor._choices(Settings()) if one.name == "placement of GPU 0"]
    if libfabric.status()["error"] is None:
        assert len(said) == 1 and "host memory" in said[0].says, said
