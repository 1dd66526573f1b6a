"""Describes this machine, for the benchmark's record and for doctor."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import pplx_comm._core as _core


def _field(path: str, name: str) -> str | None:
    try:
        for line in Path(path).read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    except OSError:
        pass
    return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def cpu_model() -> str:
    return _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _chosen(path: str) -> str | None:
    """The word in brackets."""
    text = _read(path)
    return text.partition("[")[2].partition("]")[0] or text if text else None


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "isa": _core.isa(),
        "memory_bytes": memory_bytes(),
        "transparent_hugepages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "transparent_hugepages_shmem": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "kernel": platform.release(),
        "architecture": platform.machine(),
    }


def rdma_devices(sysfs: Path = Path("/sys")) -> list[str]:
    """Names of those that the kernel knows, as mlx5_0."""
    return sorted(device.name for device in (sysfs / "class/infiniband").glob("*"))


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": str(torch.__version__)}
