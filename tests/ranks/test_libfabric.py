"""The libfabric back end from Python: what there is, two processes, two networks, a process that was killed.

The thorough tests are tests/cpp/test_libfabric.cpp; here they run with the MPI wheel's library too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import Case
from harness import Crew
from networks import Networks

import pplx_comm._core as _core
from pplx_comm.control.sockets import local_addresses
from pplx_comm.wiring import libfabric

ROOT = Path(__file__).resolve().parents[2]
STATUS = libfabric.status()
# A process has one libfabric; the wheels' copies are tested in processes of their own.
LIBRARIES = ([""] if STATUS["path"] else []) + libfabric.wheel_candidates()

needs_libfabric = pytest.mark.skipif(STATUS["error"] is not None, reason=str(STATUS["error"]))


PEER = [sys.executable, str(Path(__file__).with_name("libfabric_peer.py")), str(Path(libfabric.__file__).parents[1])]


def environment(library: str) -> dict[str, str]:
    return {**os.environ, "PPLX_LIBFABRIC": library} if library else dict(os.environ)


def status_with(library: str) -> dict[str, Any]:
    done = subprocess.run(PEER, env=environment(library), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Peer:
    def __init__(self, seed: int, *, library: str = "", prefix: tuple[str, ...] = (), **options: Any) -> None:
        self.seed = seed
        program = [*PEER, str(seed), json.dumps(options)]
        self.process = subprocess.Popen(
            [*prefix, *program], env=environment(library), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.hello = self.hear()

    def say(self, **what: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait(20)}"
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def exchange(one: Peer, other: Peer) -> None:
    try:
        for a, b in ((one, other), (other, one)):
            a.say(seed=b.seed, address=b.hello["address"], description=b.hello["description"])
        for peer in (one, other):
            assert peer.hear() == {"met": True}
        for peer in (one, other):
            peer.say(go=True)
        for peer in (one, other):
            assert peer.hear() == {"rounds": 20, "positive": True, "early": 0, "right": True}
        for peer in (one, other):
            peer.say(leave=True)
        for peer in (one, other):
            assert peer.hear() == {"late": []}
            assert peer.process.wait(20) == 0
    finally:
        one.end()
        other.end()


def available(library: str) -> list[str]:
    return [name for name, provider in status_with(library)["providers"].items() if provider["available"]]


def test_status_says_why() -> None:
    assert set(STATUS) == {"compiled_in", "path", "version", "error", "providers"}
    if STATUS["error"] is not None:
        assert STATUS["path"] is None
        assert "libfabric" in STATUS["error"]
        return
    assert os.path.isabs(STATUS["path"])
    assert {"efa", "efa-direct", "verbs;ofi_rxm", "tcp", "shm"} <= set(STATUS["providers"])
    for provider in STATUS["providers"].values():
        assert provider["available"] == (provider["why_not"] is None)
        assert provider["available"] == bool(provider["nics"])


def test_a_wrong_path_is_an_error_not_a_search() -> None:
    assert "/nowhere/libfabric.so.1 cannot be loaded" in status_with("/nowhere/libfabric.so.1")["error"]
    assert "absolute path" in status_with("libfabric.so.1")["error"]
    # A library, but not that one.
    assert "cannot be loaded" in status_with(str(Path(_core.__file__)))["error"]


@needs_libfabric
@pytest.mark.parametrize("library", LIBRARIES)
def test_two_processes(library: str) -> None:
    names = available(library)
    assert names
    for name in names:
        for endpoints in (1, 2):
            one, other = (Peer(seed, library=library, provider=name, endpoints=endpoints) for seed in (1, 2))
            exchange(one, other)


@needs_libfabric
@pytest.mark.parametrize("library", LIBRARIES)
def test_small_buffers(library: str) -> None:
    """rxm's buffers for short messages, of which we send none, stay small: 137 MB of them cost as long to touch as to open."""
    for name in {"tcp", "tcp;ofi_rxm"} & set(available(library)):
        peer = Peer(1, library=library, provider=name, endpoints=2)
        peer.end()
        assert peer.hello["opening"] < 64 * 2**20, peer.hello


@needs_libfabric
def test_auto_and_its_name() -> None:
    fabric = libfabric.open_fabric()
    assert fabric.provider in STATUS["providers"]
    assert fabric.name == f"{fabric.provider} (libfabric {STATUS['version']})"
    assert fabric.endpoints >= 1
    fabric.close()
    with pytest.raises(_core.FabricError, match="closed"):
        fabric.address()
    with pytest.raises(TypeError, match="no option 'nic'"):
        _core.Fabric("auto", {"nic": "eth0"})
    with pytest.raises(_core.FabricError, match="unknown provider 'tpc'"):
        libfabric.open_fabric("tpc")


@needs_libfabric
@pytest.mark.parametrize("transport", ["proxy:tcp", "proxy:sockets"])
def test_ranks_of_one_host_listen_on_loopback(transport: str) -> None:
    """No process on another host can connect to their endpoints, which ask for no secret, unless a rank names an interface."""
    name = transport.partition(":")[2]
    if not any(name in provider and STATUS["providers"][provider]["available"] for provider in STATUS["providers"]):
        pytest.skip(f"no {name}")
    with Crew(2) as crew:
        assert crew.run("rank_cases:nics", Case(1, 2, transport=transport)) == [["lo 127.0.0.1"]] * 2
    addresses = local_addresses()
    if addresses:
        with Crew(2, {"PPLX_COMM_IFACE": addresses[0]}) as crew:
            assert all(nic.endswith(addresses[0]) for (nic,) in crew.run("rank_cases:nics", Case(1, 2, transport=transport)))


@needs_libfabric
def test_efa_is_refused_with_a_reason() -> None:
    for name in ("efa", "efa-direct", "verbs"):
        provider = STATUS["providers"]["verbs;ofi_rxm" if name == "verbs" else name]
        if provider["available"]:
            continue
        with pytest.raises(_core.FabricError) as refused:
            libfabric.open_fabric(name)
        assert provider["why_not"] in str(refused.value)


@needs_libfabric
@pytest.mark.skipif(not STATUS["providers"].get("shm", {}).get("available"), reason="no shm provider")
def test_files_of_a_killed_process() -> None:
    one, other = Peer(1, provider="shm"), Peer(2, provider="shm")
    try:
        files = [Path("/dev/shm", name) for peer in (one, other) for name in peer.hello["shm"]]
        assert len(files) == 2
        assert all(file.exists() for file in files)
        address = bytes.fromhex(one.hello["address"])
        assert _core.cleanup_dead_peer(address) == 0
        one.process.send_signal(signal.SIGKILL)
        one.process.wait(20)
        assert [file.exists() for file in files] == [True, True]
        assert _core.cleanup_dead_peer(address) == 1
        assert [file.exists() for file in files] == [False, True]
        other.process.send_signal(signal.SIGTERM)  # the provider sees to it
        other.process.wait(20)
        assert not files[1].exists()
    finally:
        one.end()
        other.end()


@pytest.fixture
def two_networks() -> Iterator[Networks]:
    with Networks() as networks:
        yield networks


@needs_libfabric
@pytest.mark.parametrize("library", LIBRARIES)
def test_two_networks(two_networks: Networks, library: str) -> None:
    """No interface is named: loopback would be the wrong one."""
    for name in available(library):
        if name == "shm":
            continue
        one, other = (
            Peer(seed, library=library, prefix=("ip", "netns", "exec", network), provider=name)
            for seed, network in enumerate(two_networks.names, start=1)
        )
        assert one.hello["endpoint"].endswith(two_networks.addresses[0])
        assert other.hello["endpoint"].endswith(two_networks.addresses[1])
        exchange(one, other)


@needs_libfabric
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_cpp_with_the_wheels_library(library: str) -> None:
    program = ROOT / "build" / "dev" / "tests" / "test_libfabric"
    if not program.exists():
        pytest.skip("tests/unit/test_cpp.py builds it")
    done = subprocess.run(
        [str(program)],
        env=environment(library),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
