"""IBGDA: whether kernels of this host can post to its ConnectX themselves, as far as files and the environment tell."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

from pplx_comm.machine import rdma_devices
from pplx_comm.settings import foreign

DRIVER_OPTIONS = 'NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;"'
_SET_THEM = f"echo 'options nvidia {DRIVER_OPTIONS}' | sudo tee /etc/modprobe.d/nvidia-ibgda.conf; sudo update-initramfs -u; reboot"


@dataclass(frozen=True)
class Verdict:
    rung_by: str | None
    """Rings the NIC's doorbell: "gpu"; "host", which is NVSHMEM's CPU-assisted mode; None: there is no IBGDA."""
    why: str
    turn_on: str | None = None
    """The commands that get this host to "gpu"."""

    @property
    def says(self) -> str:
        modes = {"gpu": "the GPU posts", "host": "CPU-assisted: the GPU posts, a host thread rings the NIC", None: "no"}
        return f"{modes[self.rung_by]}: {self.why}"


def has_connectx(sysfs: Path = Path("/sys")) -> bool:
    return any(name.startswith("mlx5") for name in rdma_devices(sysfs))


def verdict(sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> Verdict:
    """Predicts what NVSHMEM's IBGDA would do here."""
    lacks = _lacks(sysfs, proc)
    fixes = "; ".join(dict.fromkeys(fix for _, fix in lacks))
    if not has_connectx(sysfs):
        lacks.insert(0, ("no mlx5 device in /sys/class/infiniband", ""))
        fixes = "needs a ConnectX" + (f", then: {fixes}" if fixes else "")
    return Verdict(None, "; ".join(why for why, _ in lacks), fixes) if lacks else _doorbell(proc)


def _lacks(sysfs: Path, proc: Path) -> list[tuple[str, str]]:
    """Lists what is missing besides a NIC, each with the command that provides it. Without a NIC there is no IBGDA."""
    found: list[tuple[str, str]] = []
    for library in ("libibverbs.so.1", "libmlx5.so.1"):
        if not loads(library):
            found.append((f"{library} does not load", "apt-get install rdma-core ibverbs-providers"))
    if not ((sysfs / "module/nvidia_peermem").exists() or _dmabuf(sysfs, proc)):
        found.append(("neither nvidia_peermem nor dmabuf, so NICs do not reach GPU memory", "sudo modprobe nvidia_peermem"))
    if (asked := foreign("NVSHMEM_IB_ENABLE_IBGDA", "1"))[:1].lower() in ("0", "n", "f"):
        found.append((f"NVSHMEM_IB_ENABLE_IBGDA={asked}", "unset NVSHMEM_IB_ENABLE_IBGDA"))
    if _handler() == "cpu" and not has_gdrcopy():
        found.append(("NVSHMEM_IBGDA_NIC_HANDLER=cpu needs GDRCopy, which is not here", "unset NVSHMEM_IBGDA_NIC_HANDLER"))
    return found


def _doorbell(proc: Path) -> Verdict:
    if _handler().startswith("cpu"):
        return Verdict("host", f"NVSHMEM_IBGDA_NIC_HANDLER={_handler()} is set", "unset NVSHMEM_IBGDA_NIC_HANDLER")
    unset = _unset_options(proc)
    if unset:
        by = "by GDRCopy" if has_gdrcopy() else "in host memory, without GDRCopy"
        return Verdict("host", f"{by}, since the NVIDIA driver's {' and '.join(unset)} not set", _SET_THEM)
    return Verdict("gpu", f"the driver has {DRIVER_OPTIONS}")


def _unset_options(proc: Path) -> list[str]:
    """Driver options that map a NIC's doorbells into the GPU and are not set."""
    try:
        text = (proc / "driver/nvidia/params").read_text().replace(" ", "")
    except OSError:
        text = ""
    options = {
        "NVreg_EnableStreamMemOPs is": r"^EnableStreamMemOPs:1$",
        "NVreg_RegistryDwords PeerMappingOverride is": r"^RegistryDwords:.*\bPeerMappingOverride=1\b",
    }
    return [name for name, pattern in options.items() if not re.search(pattern, text, re.MULTILINE)]


def _handler() -> str:
    return foreign("NVSHMEM_IBGDA_NIC_HANDLER", "auto").lower()


def _dmabuf(sysfs: Path, proc: Path) -> bool:
    """The open kernel modules hand GPU memory out as dmabufs."""
    try:
        license_of = (proc / "driver/nvidia/version").read_text()
    except OSError:
        return False
    return (sysfs / "module/nvidia/version").exists() and "Open Kernel Module" in license_of


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def has_gdrcopy() -> bool:
    return loads("libgdrapi.so.2") and Path("/dev/gdrdrv").exists()
