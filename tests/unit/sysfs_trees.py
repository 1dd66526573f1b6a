"""Machines for the tests of NIC choice, beside those that the software EFA device offers itself (pplx_comm/efasoft/machines.py)."""

from __future__ import annotations

from pathlib import Path

from pplx_comm.efasoft.machines import Machine, Sysfs, p5, p5en

__all__ = [
    "Machine", "Sysfs", "dgx_h100", "far_nics", "flat_p4d", "hidden_p5", "laptop", "nested_switches", "p5", "p5en", "p6_b200", "pairs",
    "virtual_machine",
]  # fmt: skip


def p6_b200(root: Path) -> Machine:
    """8 GPUs and 8 EFA of 400 Gb/s: one each, on a root complex of their own and no switch between."""
    sysfs = Sysfs(root, ["0-47,96-143", "48-95,144-191"])
    for gpu in range(8):
        bus = 0x20 + 0x1A * gpu
        sysfs.nic(f"pci0000:{bus:02x}/0000:{bus:02x}:02.0", gpu // 4, f"rdmap{bus}s2", domain=f"rdmap{bus}s2-rdm")
        sysfs.gpu(f"pci0000:{bus:02x}/0000:{bus:02x}:03.0", gpu // 4)
    return sysfs.machine


def dgx_h100(root: Path) -> Machine:
    """8 GPUs with a ConnectX each, and four more ConnectX for storage that are near no GPU. The numbers follow the slots, not the
    GPUs."""
    sysfs = Sysfs(root, ["0-55,112-167", "56-111,168-223"])
    compute = {
        0x1A: "mlx5_0",
        0x40: "mlx5_3",
        0x53: "mlx5_4",
        0x66: "mlx5_5",
        0x9C: "mlx5_6",
        0xC0: "mlx5_9",
        0xD2: "mlx5_10",
        0xE4: "mlx5_11",
    }
    for index, (bus, name) in enumerate(compute.items()):
        switch = f"pci0000:{bus - 2:02x}/0000:{bus - 2:02x}:01.0/0000:{bus - 1:02x}:00.0"
        sysfs.nic(f"{switch}/0000:{bus:02x}:00.0/0000:{bus + 1:02x}:00.0", index // 4, name)
        sysfs.gpu(f"{switch}/0000:{bus:02x}:02.0/0000:{bus + 3:02x}:00.0", index // 4)
    for bus, names in ((0x2A, ("mlx5_1", "mlx5_2")), (0xAA, ("mlx5_7", "mlx5_8"))):
        for function, name in enumerate(names):
            sysfs.nic(f"pci0000:{bus - 1:02x}/0000:{bus - 1:02x}:01.0/0000:{bus:02x}:00.{function}", int(bus > 0x80), name)
    return sysfs.machine


def pairs(root: Path) -> Machine:
    """8 GPUs in pairs, each pair behind one switch with four NICs."""
    sysfs = Sysfs(root, ["0-31", "32-63"])
    for pair in range(4):
        bus = 0x10 + 0x20 * pair
        switch = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        for port in range(4):
            sysfs.nic(
                f"{switch}/0000:{bus + 2:02x}:{port:02x}.0/0000:{bus + 3 + port:02x}:00.0", pair // 2, f"mlx5_{4 * pair + port}"
            )
        for port in (4, 5):
            sysfs.gpu(f"{switch}/0000:{bus + 2:02x}:{port:02x}.0/0000:{bus + 3 + port:02x}:00.0", pair // 2)
    return sysfs.machine


def nested_switches(root: Path) -> Machine:
    """One switch for all, behind it one for each of 4 GPUs with its NIC: all share bridges, a GPU and its own NIC the most."""
    sysfs = Sysfs(root, ["0-31"])
    for gpu in range(4):
        below = f"pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:{gpu:02x}.0/0000:{0x20 + 4 * gpu:02x}:00.0"
        sysfs.nic(f"{below}/0000:{0x21 + 4 * gpu:02x}:00.0", 0, f"mlx5_{3 - gpu}")
        sysfs.gpu(f"{below}/0000:{0x22 + 4 * gpu:02x}:00.0", 0)
    return sysfs.machine


def flat_p4d(root: Path) -> Machine:
    """8 GPUs, 4 EFA: two GPUs and one EFA side by side on each root bus, no bridge anywhere."""
    sysfs = Sysfs(root, ["0-23,48-71", "24-47,72-95"])
    for index, bus in enumerate((0x10, 0x20, 0x90, 0xA0)):
        sysfs.nic(f"pci0000:{bus:02x}/0000:{bus:02x}:1b.0", index // 2, f"rdmap{bus}s27", domain=f"rdmap{bus}s27-rdm")
        for slot in (0x1C, 0x1D):
            sysfs.gpu(f"pci0000:{bus:02x}/0000:{bus:02x}:{slot:02x}.0", index // 2)
    return sysfs.machine


def far_nics(root: Path) -> Machine:
    """4 GPUs on root complexes of their own; two NICs on each socket, near no GPU but by their NUMA node."""
    sysfs = Sysfs(root, ["0-15", "16-31"])
    for node in (0, 1):
        for gpu in (0, 1):
            bus = 0x10 + 0x80 * node + 0x10 * gpu
            sysfs.gpu(f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0", node)
        bus = 0x40 + 0x80 * node
        for function in (0, 1):
            sysfs.nic(
                f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.{function}", node, f"mlx5_{2 * node + function}"
            )
    return sysfs.machine


def hidden_p5(root: Path) -> Machine:
    """A container that shows no PCI devices at all: the NICs have only their names, the GPUs only their addresses."""
    machine = p5(root / "host")
    # In the order of a directory listing, which is none.
    nics = [machine.nics[(11 * i) % 32] for i in range(32)]
    (root / "devices/system").mkdir(parents=True)
    return Machine(machine.gpus, nics, machine.nodes)


def laptop(root: Path) -> Machine:
    sysfs = Sysfs(root, ["0-7"])
    sysfs.nic("pci0000:00/0000:00:1c.0/0000:02:00.0", -1, "wlp2s0", kind="net")
    return sysfs.machine


def virtual_machine(root: Path) -> Machine:
    """Its interface hangs on a virtio device, not on the PCI device itself."""
    sysfs = Sysfs(root, ["0-1"])
    sysfs.nic("pci0000:00/0000:00:03.0", -1, "eth0", kind="net", under="virtio2")
    return sysfs.machine
