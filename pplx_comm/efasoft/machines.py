"""The part of a machine's /sys that programs read to find NICs: PCI devices where they hang, NUMA nodes, and names.

The launcher makes one for the software device, the tests of NIC choice make many more machines of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pplx_comm.settings import foreign

FIRMWARE = "efasoft"
AMAZON, EFA_DEVICE = "0x1d0f", "0xefa2"


def sysfs_here() -> Path:
    """As libfabric's providers find it."""
    return Path(foreign("SYSFS_PATH", "/sys"))


def is_software(nic: str) -> bool:
    """True if the firmware is the software device's. libfabric calls the NIC NAME-rdm, or -dgrm."""
    with contextlib.suppress(OSError):
        return (sysfs_here() / "class/infiniband" / nic.partition("-")[0] / "fw_ver").read_text().strip() == FIRMWARE
    return False


def software_nics() -> int:
    """How many of the NICs that this process sees are the software device's."""
    return sum(is_software(nic.name) for nic in (sysfs_here() / "class/infiniband").glob("*"))


@dataclass
class Machine:
    """`gpus` by PCI address; `nics` by name, in the order in which the library lists them; CPUs by NUMA node."""

    gpus: list[str] = field(default_factory=list)
    nics: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)


class Sysfs:
    def __init__(self, root: Path, nodes: Sequence[str], host: int = 0) -> None:
        self.root, self.host = root, host
        self.machine = Machine(nodes=list(nodes))
        (root / "bus/pci/devices").mkdir(parents=True)
        for node, cpus in enumerate(nodes):
            self._write(root / f"devices/system/node/node{node}/cpulist", cpus)
        self._write(root / "devices/system/node/online", f"0-{len(nodes) - 1}")

    def _write(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def device(self, path: str, node: int) -> Path:
        """`path` as under /sys/devices: the bridges down to the device. Node -1: firmware says nothing, all CPUs are near."""
        folder = self.root / "devices" / path
        self._write(folder / "numa_node", str(node))
        self._write(folder / "local_cpulist", self.machine.nodes[node] if node >= 0 else ",".join(self.machine.nodes))
        (self.root / "bus/pci/devices" / folder.name).symlink_to(folder)
        return folder

    def gpu(self, path: str, node: int) -> None:
        folder = self.device(path, node)
        self._write(folder / "class", "0x030200")
        self._write(folder / "vendor", "0x10de")
        self.machine.gpus.append(folder.name)

    def nic(self, path: str, node: int, name: str, *, domain: str | None = None, kind: str = "infiniband", under: str = "") -> Path:
        """`domain`: what libfabric calls it; `under`: what its driver puts between the PCI device and it, "virtio2"."""
        entry = self.device(path, node) / under / kind / name
        entry.mkdir(parents=True)
        links = self.root / "class" / kind
        links.mkdir(parents=True, exist_ok=True)
        (links / name).symlink_to(entry)
        self.machine.nics.append(domain or name)
        return entry

    def efa(self, path: str, node: int, name: str) -> None:
        """A NIC with all that the verbs libraries and the efa provider read of one."""
        entry = self.nic(path, node, name, domain=f"{name}-rdm")
        number = len(self.machine.nics)
        device = self.root / "devices" / path
        (entry / "device").symlink_to(device)
        driver = self.root / "bus/pci/drivers/efa"
        driver.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(driver)
        for file, text in {
            device / "vendor": AMAZON, device / "device": EFA_DEVICE, device / "class": "0x020000",
            entry / "fw_ver": FIRMWARE, entry / "node_type": "4: unspecified", entry / "hca_type": FIRMWARE,
            entry / "ports/1/state": "4: ACTIVE", entry / "ports/1/link_layer": "Unspecified", entry / "ports/1/rate": "100 Gb/sec",
            entry / "ports/1/gids/0": f"fe80:0000:0000:0000:0efa:{self.host >> 16:04x}:{self.host & 0xFFFF:04x}:{number:04x}",
            self.root / "class/infiniband_verbs/abi_version": "6",
            self.root / f"class/infiniband_verbs/uverbs{number - 1}/ibdev": name,
        }.items():  # fmt: skip
            self._write(file, text)


TWO_SOCKETS = ("0-47,96-143", "48-95,144-191")


def plain(root: Path, nics: int = 1, nodes: Sequence[str] = ("0",), host: int = 0) -> Machine:
    """No GPU, and that many EFA on one root complex."""
    sysfs = Sysfs(root, nodes, host)
    for number in range(nics):
        sysfs.efa(f"pci0000:10/0000:{0x10 + number:02x}:1b.0", 0, f"rdmap{0x10 + number}s27")
    return sysfs.machine


def p5(root: Path, nodes: Sequence[str] = TWO_SOCKETS, host: int = 0) -> Machine:
    """8 GPUs, each behind a switch with four EFA of 100 Gb/s."""
    sysfs = Sysfs(root, nodes, host)
    for gpu, bus in enumerate((0x4F, 0x60, 0x71, 0x82, 0x93, 0xA4, 0xB5, 0xC6)):
        switch = f"pci0000:{bus - 11:02x}/0000:{bus - 11:02x}:01.0/0000:{bus - 10:02x}:00.0"
        for port in range(4):
            path = f"{switch}/0000:{bus - 9:02x}:{port:02x}.0/0000:{bus + port:02x}:00.0"
            sysfs.efa(path, gpu // 4, f"rdmap{bus + port}s0")
        sysfs.gpu(f"{switch}/0000:{bus - 9:02x}:04.0/0000:{bus + 4:02x}:00.0", gpu // 4)
    return sysfs.machine


def p5en(root: Path, nodes: Sequence[str] = TWO_SOCKETS, host: int = 0) -> Machine:
    """8 GPUs, each behind a switch with two EFA of 200 Gb/s."""
    sysfs = Sysfs(root, nodes, host)
    for gpu in range(8):
        bus = 0x50 + 0x10 * gpu
        bridge = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0"
        for port in (1, 2):
            sysfs.efa(f"{bridge}/0000:{bus + port:02x}:00.0", gpu // 4, f"rdmap{bus + port}s0")
        sysfs.gpu(f"{bridge}/0000:{bus + 3:02x}:00.0", gpu // 4)
    return sysfs.machine


def this_hosts_sockets() -> list[str]:
    """This host's CPUs as those of a machine with two sockets. The only one is in both."""
    cpus = os.cpu_count() or 1
    if cpus == 1:
        return ["0", "0"]
    half = cpus // 2
    return [f"0-{half - 1}" if half > 1 else "0", f"{half}-{cpus - 1}" if cpus > half + 1 else f"{half}"]


def make(name: str, root: Path, nics: int, host: int) -> Machine:
    """With this host's CPUs. `nics` is for "plain" alone."""
    nodes = this_hosts_sockets()
    if name == "plain":
        return plain(root, nics, [",".join(dict.fromkeys(nodes))], host)
    return {"p5": p5, "p5en": p5en}[name](root, nodes, host)
