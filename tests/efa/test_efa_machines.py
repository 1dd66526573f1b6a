"""Our EFA path on whole machines: which NICs ranks take on a p5 and a p5en, shards over them, two hosts, several versions of libfabric."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest
from cases import Case, random_case
from harness import Crew, seed
from networks import Networks
from soft import EFA, crew_on, software

from pplx_comm.efasoft.device import Host, Options
from pplx_comm.efasoft.machines import FIRMWARE

SHARDS = {"PPLX_COMM_SHARD_BYTES": "1024", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(("machine", "each"), [pytest.param("p5", 4, marks=pytest.mark.slow), ("p5en", 2)])
def test_all_nics_of_a_machine(machine: str, each: int) -> None:
    """Eight ranks take four or two NICs each, no two the same, and every block is dealt over them; by two proxies of each rank."""
    case = Case(seed(), 8, transport="proxy:efa", hidden=1024, max_tokens=16, proxy_threads=2, steps=2)
    with crew_on(8, SHARDS, machine=machine, seed=seed()) as (efa, crew):
        taken = crew.run("efa_cases:shards", case, timeout=120)
        crew.leave()
        counts = efa.counters()
    assert all(len(nics) == each and min(nics.values()) > 0 for nics in taken), taken
    assert len({nic for nics in taken for nic in nics}) == 8 * each
    assert len(counts) == 8 * each and all(nic["bytes"] > 0 for nic in counts.values()), counts


@pytest.mark.parametrize("machine", ["p5", "p5en"])
def test_doctor(machine: str) -> None:
    """It names the device as what it is, and what a rank on each GPU would take."""
    with crew_on(1, machine=machine) as (_, crew):
        (found,) = crew.run("efa_cases:findings")
        crew.leave()
    for provider in ("efa", "efa-direct"):
        assert "software device" in found[provider], found[provider]
    assert "software device" not in found["tcp"]
    for gpu in range(8):
        assert "behind one PCIe switch" in found[f"NICs of GPU {gpu}"], found
        assert found[f"NICs of GPU {gpu}"].count("rdmap") == {"p5": 4, "p5en": 2}[machine], found


def test_the_firmware_says_what_it_is() -> None:
    with software() as efa:
        (version,) = Path(efa.environment["SYSFS_PATH"]).glob("class/infiniband/*/fw_ver")
        assert version.read_text().strip() == FIRMWARE


@pytest.mark.parametrize("provider", ["efa", pytest.param("efa-direct", marks=pytest.mark.slow)])
def test_two_hosts(provider: str) -> None:
    """Two network namespaces: the control connections cross a cable, the rows the NICs. Mapped memory inside a host."""
    case = Case(seed(), 4, transport=f"mixed:{provider}", max_tokens=32, hidden=1024, in_flight=2)
    with Networks() as networks, software(host=1, seed=seed()) as efa:
        here, there = efa.environment, Host(efa.folder, Options(host=2, seed=seed())).environment
        assert here["SYSFS_PATH"] != there["SYSFS_PATH"]
        env = {"PPLX_COMM_ADDR": f"{networks.addresses[0]}:29713", "PPLX_COMM_SECRET": uuid.uuid4().hex, "LOCAL_WORLD_SIZE": "2"}
        with Crew(4, {**env, **here}, rank_env={2: there, 3: there}) as crew:
            for side, ranks in enumerate([[0, 1], [2, 3]]):
                crew.run("fault_cases:move_to", networks.names[side], ranks=ranks)
            crew.run("fault_cases:join", case, 30.0)
            assert all(r["bytes"] > 0 for r in crew.run("fault_cases:timed_step", case))
            assert crew.leave() == [0] * 4
        assert sum(nic["bytes"] for nic in efa.counters().values()) > 0


OLDER = Path(sys.prefix) / "libfabric-1.22"


@pytest.mark.slow
def test_an_older_libfabric() -> None:
    """1.22, of the mpich 4.3.2 wheel, which tools/install_deps.sh puts beside: it has efa and not efa-direct."""
    found = next(OLDER.rglob("libfabric.so.1"), None)
    if found is None:
        pytest.skip(f"no {OLDER}: tools/install_deps.sh makes it")
    with crew_on(3, libfabric=str(found), nics=2, seed=seed()) as (_, crew):
        for number in range(6):
            crew.run("rank_cases:exchange", random_case(seed() * 100_000 + 44_000 + number, 3, EFA[:1]))
        crew.run("failure_cases:leave_at_once", Case(62, 3, transport=EFA[0]), 2)
