"""Shared memory that is reserved in full, sealed, nameless, and refused with a reason."""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pplx_comm.control import memfd
from pplx_comm.control.memfd import allocate, available_bytes
from pplx_comm.errors import Error
from pplx_comm.wiring.peers import Peers, mapped_range, node_ranks, remote_of_all


def test_reserved_sealed_and_nameless() -> None:
    fd = allocate(3 << 20, "a test")
    try:
        status = os.fstat(fd)
        assert status.st_size == 3 << 20
        assert status.st_blocks * 512 >= 3 << 20, "pages are not reserved"
        assert status.st_nlink == 0
        assert not os.get_inheritable(fd)
        with mmap.mmap(fd, 3 << 20) as memory:
            assert memory[:16] == bytes(16)
            memory[:4] = b"here"
        for size in (1, 4 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_too_much_says_how_much_and_for_what() -> None:
    """Absurd sizes are refused before a page is touched: the kernel would kill a process."""
    for size in (1 << 45, 1 << 62):
        with pytest.raises(Error, match=rf"blocks of layer 3 needs {size} bytes .* are available .* smaller max_tokens_per_rank"):
            allocate(size, "blocks of layer 3")
    with pytest.raises(Error, match="more than 0"):
        allocate(0, "nothing")


def test_the_kernels_refusal_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "available_bytes", lambda: (1 << 62, "nothing"))
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(Error, match=rf"a test needs {2 << 20} bytes"):
            allocate(2 << 20, "a test")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_cgroup_limit_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    for folder, limit, usage in [
        (tmp_path, "max", 9 << 30),
        (tmp_path / "a", str(8 << 30), 5 << 30),
        (inner, "max", 1),
    ]:
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(usage))
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {1 << 30}\nactive_file 0\n")
    limits = memfd._cgroup_limits(tmp_path, "/a/b", "memory.max", "memory.current")
    assert limits == [(4 << 30, f"memory limit of cgroup {tmp_path / 'a'}")]


def test_available() -> None:
    free, why = available_bytes()
    assert 0 < free < 1 << 50
    assert why


def asked(*nodes: int, rank: int = 0, transport: str = "auto", replicas: int = 1) -> tuple[Any, Any]:
    request = SimpleNamespace(node_size=None, transport=transport, config=SimpleNamespace(replicas=replicas))
    return request, SimpleNamespace(node_of=list(nodes), rank=rank, world_size=len(nodes))


def test_slots_of_mapped_peers() -> None:
    """They begin with the node's first rank, and have room for the widest node."""
    assert [mapped_range(*asked(0, 0, 1, 1, rank=rank)) for rank in range(4)] == [(0, 2), (0, 2), (2, 2), (2, 2)]
    assert [mapped_range(*asked(0, 0, 0, 1, rank=rank)) for rank in (2, 3)] == [(0, 3), (3, 3)]
    assert [mapped_range(*asked(0, 1, 0, 1, rank=rank)) for rank in range(4)] == [(0, 3), (1, 3), (0, 3), (1, 3)]
    assert mapped_range(*asked(0, 0, 0, 0, rank=3, transport="proxy")) == (3, 1)
    assert mapped_range(*asked(0, 0, 0, 0, rank=3, transport="proxy", replicas=2)) == (2, 2)


def test_remote_peers_of_all_ranks() -> None:
    assert remote_of_all(*asked(0, 0, 1, 1), [0, 1, 2, 3], []) == {0: {2, 3}, 1: {2, 3}, 2: {0, 1}, 3: {0, 1}}
    assert remote_of_all(*asked(0, 0, 1, 1), [0, 1, 3], {(1, 0): "why"}) == {0: {1, 3}, 1: {0, 3}, 3: {0, 1}}


@pytest.mark.parametrize("dedup", ["auto", "node"])
def test_ranks_of_a_node_that_others_send_to(dedup: str) -> None:
    """None where all that live are of one node: there is nothing to relay, and no proxy."""
    request, control = asked(0, 0, 1, 1)
    request.dedup, request.config.experts_per_rank = dedup, 1
    assert node_ranks(request, control, Peers([1], [2, 3])) == 2
    assert node_ranks(request, control, Peers([], [3])) == 2
    assert node_ranks(request, control, Peers([1], [])) == 0
    request.dedup = "rank"
    assert node_ranks(request, control, Peers([1], [2, 3])) == 0
