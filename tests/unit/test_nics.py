"""The NICs that a rank takes, and the CPU that its proxy runs on, on machines that are made of files: sysfs_trees.py."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import sysfs_trees
from sysfs_trees import Machine

import pplx_comm._core as _core
from pplx_comm.wiring import libfabric


def cpus(text: str) -> list[int]:
    ranges = [part.partition("-") for part in text.split(",")]
    return sorted(itertools.chain.from_iterable(range(int(a), int(b or a) + 1) for a, _, b in ranges))


def everything(machine: Machine) -> list[int]:
    return cpus(",".join(machine.nodes))


def pick(root: Path, machine: Machine, places: list[tuple[str, list[int]]]) -> tuple[list[list[str]], list[str], list[int]]:
    picked = _core.pick_nics(machine.nics, places, str(root))
    return [nics for nics, _, _ in picked], [why for _, why, _ in picked], [cpu for _, _, cpu in picked]


def by_gpu(root: Path, machine: Machine) -> tuple[list[list[str]], list[str], list[int]]:
    return pick(root, machine, [(gpu, everything(machine)) for gpu in machine.gpus])


@pytest.mark.parametrize(
    ("make", "each"), [(sysfs_trees.p5, 4), (sysfs_trees.p5en, 2), (sysfs_trees.p6_b200, 1)], ids=["p5", "p5en", "p6-b200"]
)
def test_efa_instances(tmp_path: Path, make: Callable[[Path], Machine], each: int) -> None:
    machine = make(tmp_path)
    nics, why, cpu = by_gpu(tmp_path, machine)
    assert nics == [machine.nics[each * gpu : each * (gpu + 1)] for gpu in range(8)]
    place = "root complex" if make is sysfs_trees.p6_b200 else "PCIe switch"
    assert all(place in reason and gpu in reason for reason, gpu in zip(why, machine.gpus, strict=True))
    # The proxy of each rank has a CPU for itself, on the socket of its NICs.
    assert len(set(cpu)) == 8
    for gpu, one in enumerate(cpu):
        assert one in cpus(machine.nodes[gpu // 4])


def test_ranks_in_any_order_and_some_of_them(tmp_path: Path) -> None:
    """A GPU's NICs do not depend on other ranks when no other rank has them; CUDA writes addresses in its own way."""
    machine = sysfs_trees.p5(tmp_path)
    order = [5, 0, 7]
    nics, _, _ = pick(tmp_path, machine, [(f"0000{machine.gpus[gpu].upper()}", everything(machine)) for gpu in order])
    assert nics == [machine.nics[4 * gpu : 4 * gpu + 4] for gpu in order]


def test_dgx_leaves_the_storage_alone(tmp_path: Path) -> None:
    machine = sysfs_trees.dgx_h100(tmp_path)
    nics, why, _ = by_gpu(tmp_path, machine)
    assert nics == [[name] for name in ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11")]
    assert all("switch" in reason for reason in why)


def test_gpus_that_are_equally_near_share(tmp_path: Path) -> None:
    machine = sysfs_trees.pairs(tmp_path)
    nics, why, _ = by_gpu(tmp_path, machine)
    assert nics == [machine.nics[2 * gpu : 2 * gpu + 2] for gpu in range(8)]
    assert all("2 of these 4, which 2 processes share" in reason for reason in why)
    # One alone has them all.
    assert pick(tmp_path, machine, [(machine.gpus[0], everything(machine))])[0] == [machine.nics[:4]]
    # Three processes, two of them on one GPU.
    three = [(machine.gpus[i], everything(machine)) for i in (0, 0, 1)]
    assert [len(nics) for nics in pick(tmp_path, machine, three)[0]] in ([2, 1, 1], [1, 1, 2], [1, 2, 1])


def test_the_innermost_switch_counts(tmp_path: Path) -> None:
    machine = sysfs_trees.nested_switches(tmp_path)
    assert by_gpu(tmp_path, machine)[0] == [["mlx5_3"], ["mlx5_2"], ["mlx5_1"], ["mlx5_0"]]


def test_fewer_nics_than_gpus(tmp_path: Path) -> None:
    machine = sysfs_trees.flat_p4d(tmp_path)
    nics, why, _ = by_gpu(tmp_path, machine)
    assert nics == [[machine.nics[gpu // 2]] for gpu in range(8)]
    assert all("root complex" in reason for reason in why)


def test_numa_node_where_no_bridge_is_shared(tmp_path: Path) -> None:
    machine = sysfs_trees.far_nics(tmp_path)
    nics, why, _ = by_gpu(tmp_path, machine)
    assert nics == [["mlx5_0"], ["mlx5_1"], ["mlx5_2"], ["mlx5_3"]]
    assert "NUMA node 1" in why[3]


def test_ranks_without_gpu_go_by_their_cpus(tmp_path: Path) -> None:
    machine = sysfs_trees.p5(tmp_path)
    near, far = (cpus(node) for node in machine.nodes)
    # Bound to sockets by the launcher: two on the first, one on the second.
    places = [("", near[:24]), ("", far), ("", near[24:])]
    nics, why, cpu = pick(tmp_path, machine, places)
    assert nics == [machine.nics[:8], machine.nics[16:], machine.nics[8:16]]
    assert "NUMA node 0 with CPUs" in why[0]
    assert [one in place[1] for one, place in zip(cpu, places, strict=True)] == [True] * 3
    # Bound to nothing: all share all.
    nics, why, _ = pick(tmp_path, machine, [("", everything(machine))] * 8)
    assert nics == [machine.nics[4 * rank : 4 * rank + 4] for rank in range(8)]
    assert "no NUMA node is this process's own" in why[0]


def test_a_container_that_hides_the_topology(tmp_path: Path) -> None:
    """Only names are left: dealt in the order of their numbers, which is the order of the buses, fairly for any number of ranks."""
    machine = sysfs_trees.hidden_p5(tmp_path)
    by_number = sorted(machine.nics, key=lambda name: int(name.removeprefix("rdmap").partition("s")[0]))
    assert by_number != machine.nics
    nics, why, _ = by_gpu(tmp_path, machine)
    assert nics == [by_number[4 * gpu : 4 * gpu + 4] for gpu in range(8)]
    assert all("does not say where" in reason for reason in why)
    for ranks in (*range(1, 34), 64, 65):
        nics, _, _ = pick(tmp_path, machine, [("", [0])] * ranks)
        users = Counter(itertools.chain.from_iterable(nics))
        assert set(users) == set(machine.nics) or ranks < 1
        shares = [len(mine) for mine in nics]
        assert min(shares) >= 1 and max(shares) - min(shares) <= 1
        assert max(users.values()) - min(users.values()) <= 1


def test_one_cpu_allowed(tmp_path: Path) -> None:
    """No proxy is tied to the one CPU that all need; where each has two of its own, the proxy gets one."""
    machine = sysfs_trees.p5en(tmp_path)
    nics, _, cpu = pick(tmp_path, machine, [(gpu, [7]) for gpu in machine.gpus])
    assert nics == [machine.nics[2 * gpu : 2 * gpu + 2] for gpu in range(8)]
    assert cpu == [-1] * 8
    assert pick(tmp_path, machine, [(machine.gpus[0], [7])])[2] == [-1]
    assert pick(tmp_path, machine, [(gpu, [2 * i, 2 * i + 1]) for i, gpu in enumerate(machine.gpus)])[2] == [
        2 * i + 1 for i in range(8)
    ]
    # May not run near its NICs: then where it may.
    assert pick(tmp_path, machine, [(machine.gpus[7], [3, 4])])[2] == [4]


def test_each_proxy_of_a_process_gets_a_cpu() -> None:
    """If there are two for each; and the first proxies' are those that they would have alone, so that ranks need not ask how many."""
    eight, four = list(range(8)), list(range(4))
    assert _core.pick_cpus([("", eight), ("", eight)], [eight, eight], 1) == [7, 6]
    assert _core.pick_cpus([("", eight), ("", eight)], [eight, eight], 2) == [7, 6, 5, 4]
    assert _core.pick_cpus([("", four), ("", four)], [four, four], 2) == [-1] * 4
    assert _core.pick_cpus([("", eight)], [[2, 3]], 2) == [3, 2]


def test_small_machines(tmp_path: Path) -> None:
    machine = sysfs_trees.laptop(tmp_path / "laptop")
    assert pick(tmp_path / "laptop", machine, [("", everything(machine))] * 2) == ([["wlp2s0"]] * 2, ["the only one"] * 2, [7, 6])
    machine = sysfs_trees.virtual_machine(tmp_path / "vm")
    assert pick(tmp_path / "vm", machine, [("", [0, 1])]) == ([["eth0"]], ["the only one"], [1])
    # No sysfs at all, and names that lead out of it.
    assert pick(tmp_path / "none", Machine(nics=["../x", "a"]), [("", [0])])[0] == [["../x", "a"]]
    assert pick(tmp_path / "none", Machine(), [("", [0])]) == ([[]], ["no NUMA node is this process's own"], [-1])


@pytest.mark.skipif(libfabric.status()["error"] is not None, reason="needs libfabric")
def test_a_name_that_is_none_lists_those_there_are() -> None:
    provider = next(name for name in ("tcp", "tcp;ofi_rxm") if libfabric.status()["providers"][name]["available"])
    with pytest.raises(_core.FabricError, match=r"no interface or address 'eth77' on this machine; it has .*lo"):
        libfabric.open_fabric(provider, nics=["lo", "eth77"])
    fabric = libfabric.open_fabric(provider, nics=["lo", "lo"], localities=[libfabric.this_locality()])
    assert (fabric.endpoints, fabric.why) == (2, "asked for by name")
    assert fabric.proxy_cpu in {-1, *os.sched_getaffinity(0)}
    fabric.close()
