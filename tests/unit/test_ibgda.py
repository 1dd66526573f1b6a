"""Kernels of a host can post to its ConnectX, or not: by files and an environment made up here."""

from __future__ import annotations

from pathlib import Path

import pytest

from pplx_comm.wiring import ibgda

PARAMS = 'EnableStreamMemOPs: {ops}\nRmMsg: ""\nRegistryDwords: "{dwords}"\nRegistryDwordsPerDevice: ""\n'
OVERRIDE = "PeerMappingOverride=1;"


class Host:
    """One that has all that IBGDA takes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sysfs, self.proc, self.monkeypatch = folder / "sys", folder / "proc", monkeypatch
        (self.sysfs / "class/infiniband/mlx5_0").mkdir(parents=True)
        (self.sysfs / "module/nvidia_peermem").mkdir(parents=True)
        (self.proc / "driver/nvidia").mkdir(parents=True)
        self.driver(1, OVERRIDE)
        self.libraries("libibverbs.so.1", "libmlx5.so.1")
        monkeypatch.setattr(ibgda, "has_gdrcopy", lambda: False)
        for name in ("NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_IBGDA_NIC_HANDLER"):
            monkeypatch.delenv(name, raising=False)

    def driver(self, ops: int, dwords: str) -> None:
        (self.proc / "driver/nvidia/params").write_text(PARAMS.format(ops=ops, dwords=dwords))

    def libraries(self, *names: str) -> None:
        self.monkeypatch.setattr(ibgda, "loads", lambda library: library in names)

    def verdict(self) -> ibgda.Verdict:
        return ibgda.verdict(self.sysfs, self.proc)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_the_gpu_posts(host: Host) -> None:
    found = host.verdict()
    assert (found.rung_by, found.turn_on) == ("gpu", None) and found.says.startswith("the GPU posts:"), found
    host.driver(1, f"RMOther=3;{OVERRIDE}")
    assert host.verdict().rung_by == "gpu"


@pytest.mark.parametrize(
    ("ops", "dwords", "lacks"),
    [
        (0, OVERRIDE, "NVreg_EnableStreamMemOPs is"),
        (1, "", "PeerMappingOverride is"),
        (1, "PeerMappingOverride=0;", "PeerMappingOverride is"),
        (1, "PeerMappingOverride=10;", "PeerMappingOverride is"),
        (0, "", "NVreg_EnableStreamMemOPs is and NVreg_RegistryDwords PeerMappingOverride is"),
    ],
)
def test_options_of_the_driver(host: Host, ops: int, dwords: str, lacks: str) -> None:
    host.driver(ops, dwords)
    found = host.verdict()
    assert found.rung_by == "host" and found.says.startswith("CPU-assisted") and lacks in found.says, found
    assert "host memory, without GDRCopy" in found.says
    assert found.turn_on is not None and ibgda.DRIVER_OPTIONS in found.turn_on and "modprobe.d" in found.turn_on
    host.monkeypatch.setattr(ibgda, "has_gdrcopy", lambda: True)
    assert "by GDRCopy" in host.verdict().says


def test_no_driver(host: Host) -> None:
    (host.proc / "driver/nvidia/params").unlink()
    assert host.verdict().rung_by == "host"


def test_ibgda_by_the_environment(host: Host) -> None:
    for name, value, rung_by in (
        ("NVSHMEM_IBGDA_NIC_HANDLER", "cpu_host_memory", "host"),
        ("NVSHMEM_IBGDA_NIC_HANDLER", "cpu", None),  # without GDRCopy
        ("NVSHMEM_IBGDA_NIC_HANDLER", "gpu", "gpu"),
        ("NVSHMEM_IB_ENABLE_IBGDA", "0", None),
        ("NVSHMEM_IB_ENABLE_IBGDA", "1", "gpu"),
    ):
        host.monkeypatch.setenv(name, value)
        found = host.verdict()
        assert found.rung_by == rung_by and (rung_by == "gpu" or found.turn_on == f"unset {name}"), found
        assert rung_by == "gpu" or f"{name}={value}" in found.says, found
        host.monkeypatch.delenv(name)
    host.monkeypatch.setenv("NVSHMEM_IBGDA_NIC_HANDLER", "cpu")
    host.monkeypatch.setattr(ibgda, "has_gdrcopy", lambda: True)
    assert host.verdict().rung_by == "host"


def test_no_ibgda_and_why(host: Host) -> None:
    """Each by itself, with what gets it; and all of them at once."""
    (host.sysfs / "module/nvidia_peermem").rmdir()
    assert host.verdict().turn_on == "sudo modprobe nvidia_peermem"
    host.libraries("libibverbs.so.1")
    found = host.verdict()
    assert (
        found.rung_by is None and "libmlx5.so.1" in found.says and "nvidia_peermem" in found.says and "libibverbs" not in found.says
    )
    assert found.turn_on is not None and "ibverbs-providers" in found.turn_on and "modprobe nvidia_peermem" in found.turn_on
    (host.sysfs / "class/infiniband/mlx5_0").rename(host.sysfs / "class/infiniband/efa_0")
    host.libraries()
    found = host.verdict()
    assert all(word in found.says for word in ("no mlx5 device", "libibverbs.so.1", "libmlx5.so.1", "dmabuf")), found
    assert (
        found.turn_on is not None
        and found.turn_on.count("apt-get") == 1
        and found.turn_on.startswith("needs a ConnectX, then: apt")
    )
    (host.sysfs / "module/nvidia_peermem").mkdir()
    host.libraries("libibverbs.so.1", "libmlx5.so.1")
    assert host.verdict() == ibgda.Verdict(None, "no mlx5 device in /sys/class/infiniband", "needs a ConnectX")


def test_dmabuf_is_as_good_as_peermem(host: Host) -> None:
    (host.sysfs / "module/nvidia_peermem").rmdir()
    (host.sysfs / "module/nvidia").mkdir()
    (host.sysfs / "module/nvidia/version").write_text("580.1\n")
    for words, rung_by in (("NVIDIA UNIX Open Kernel Module for x86_64  580.1", "gpu"), ("NVIDIA UNIX x86_64 Kernel Module", None)):
        (host.proc / "driver/nvidia/version").write_text(f"NVRM version: {words}\n")
        assert host.verdict().rung_by == rung_by, words


def test_a_library_that_is_nowhere() -> None:
    assert not ibgda.loads("libno_such_thing.so.1")
    assert ibgda.loads("libc.so.6")
