"""The host side of transport="nvshmem" with something in NVSHMEM's place: its start, the PEs of ranks, and its errors.

Ranks are threads. What a GPU runs is tests/gpu/test_nvshmem.py's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import threads

import pplx_comm as pc
from pplx_comm.wiring import ibgda, nvshmem, nvshmem_heap
from pplx_comm.wiring.config import make_config
from pplx_comm.wiring.peers import Peers
from pplx_comm.wiring.record import Wiring

MIB = 1 << 20
GIB = 1 << 30
_here = threading.local()


class World:
    """State that the PEs of one NVSHMEM share."""

    def __init__(
        self, pes: list[int], *, begun: bool = False, n_pes: int | None = None, room: int = GIB, grows: bool = False
    ) -> None:
        self.pes, self.begun, self.n_pes, self.room, self.grows = pes, begun, n_pes or len(pes), room, grows
        self.barrier = threading.Barrier(len(pes), timeout=10)
        self.calls: list[tuple[Any, ...]] = []
        self.allocations: list[int] = []

    def module(self, rank: int) -> Module:
        return Module(self, rank)


class Module:
    """pplx_comm._nvshmem of one rank."""

    version = "3.4.5"

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.begun, self.taken = world, rank, world.begun, 0
        self.unreached: set[int] = set()
        self.gpu, self.free, self.at_most, self.fails, self.ibgda = f"GPU of {rank}", 8 * GIB, 128 * GIB, False, False

    def device_count(self) -> int:
        return 1

    def is_initialized(self) -> bool:
        return self.begun

    def unique_id(self) -> bytes:
        self.world.calls.append(("unique_id", self.rank))
        return b"the id"

    def init(self, device: int, unique_id: bytes, rank: int, world: int) -> None:
        assert unique_id == b"the id"
        self.world.calls.append(("init", self.rank, rank, world))
        self.world.barrier.wait()
        self.begun = True

    def attach(self, device: int) -> None:
        self.world.calls.append(("attach", self.rank))

    def my_pe(self) -> int:
        return self.world.pes[self.rank]

    def n_pes(self) -> int:
        return self.world.n_pes

    def runs_ibgda(self, device: int) -> bool:
        return self.ibgda

    def room(self, device: int) -> dict[str, Any]:
        return {"gpu": self.gpu, "free": self.free, "grows": self.world.grows, "at_most": self.at_most}

    def allocate(self, device: int, nbytes: int) -> int:
        self.world.allocations.append(nbytes)
        self.world.barrier.wait()
        if self.fails or (not self.world.grows and self.taken + nbytes > self.world.room):
            return 0
        self.taken += nbytes
        return 1000 * MIB + self.taken - nbytes

    def reached_at(self, address: int, pe: int) -> int:
        return 0 if pe in self.unreached else address + (pe + 1 << 40)


@pytest.fixture(autouse=True)
def thread_by_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "usable_kernels", lambda: _here.module)


def on_ranks(world: World, call: Callable[[Any, nvshmem.Library, Module], Any]) -> list[Any]:
    """Each rank's result, or the Error that it raises."""

    def rank(me: Any) -> Any:
        library = nvshmem.Library(probed={(0, by_nic): nvshmem.Alone(None) for by_nic in (False, True)})
        try:
            return call(me.comm.control, library, _here.module)
        except pc.Error as error:
            return error

    def prepare(number: int) -> None:
        _here.module = world.module(number)

    return threads.run(len(world.pes), rank, prepare)


def start(control: Any, library: nvshmem.Library, nbytes: int = MIB, given: Any = None, timeout: float = 5.0) -> nvshmem.Reach:
    return library.start(control, 0, nbytes, given, timeout, [], True)


def one(control: Any, library: nvshmem.Library, module: Module) -> nvshmem.Segment:
    nbytes = 5 * MIB + control.rank
    return library.segment(control, 0, nbytes, None, start(control, library, nbytes), 5.0)


def test_started_here() -> None:
    world = World([0, 1, 2])
    segments = on_ranks(world, one)
    assert [s.pes for s in segments] == [[0, 1, 2]] * 3
    assert {s.nbytes for s in segments} == {6 * MIB}, "as much as the rank that needs most, in whole granules"
    for rank, segment in enumerate(segments):
        assert segment.near == {pe: segment.address + (pe + 1 << 40) for pe in range(3) if pe != rank}
    assert world.calls.count(("unique_id", 0)) == 1 and sorted(c for c in world.calls if c[0] == "init") == [
        ("init", rank, rank, 3) for rank in range(3)
    ]


def test_begun_by_another_library() -> None:
    world = World([2, 0, 1], begun=True)
    segments = on_ranks(world, one)
    assert [s.pes for s in segments] == [[2, 0, 1]] * 3
    assert sorted(world.calls) == [("attach", rank) for rank in range(3)]


def test_near_is_what_stores_reach_both_ways() -> None:
    def call(control: Any, library: nvshmem.Library, module: Module) -> list[int]:
        module.ibgda = True
        if control.rank == 0:
            module.unreached = {5}
        return sorted(one(control, library, module).near)

    assert on_ranks(World([4, 5, 6], begun=True), call) == [[2], [2], [0, 1]]


def test_a_rank_that_does_not_look() -> None:
    """PPLX_COMM_NVSHMEM_NEAR=0 on one rank: to it, and by it, blocks are put."""

    def call(control: Any, library: nvshmem.Library, module: Module) -> list[int]:
        reach = library.start(control, 0, MIB, None, 5.0, [], control.rank != 1)
        return sorted(library.segment(control, 0, MIB, None, reach, 5.0).near)

    assert on_ranks(World([4, 5, 6], begun=True), call) == [[2], [], [0]]


def reach_of(mapped: list[set[int]], near: list[set[int]]) -> list[set[int]]:
    reach = nvshmem.Reach([*range(len(mapped))], mapped, near)
    return [reach.near_of(rank) for rank in range(len(mapped))]


def test_near_peers_beside_those_of_the_node() -> None:
    """A heap has one place for all ranks that map it."""
    nodes, all_of_them = [{1}, {0}, {3}, {2}], [{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}]
    assert reach_of(nodes, all_of_them) == [{2, 3}, {2, 3}, {0, 1}, {0, 1}]
    assert reach_of(nodes, nodes) == [set()] * 4, "no rank of another node: heaps stay where they are"
    assert reach_of(nodes, [{1, 2}, {0}, {0, 3}, {2}]) == [{2}, set(), {0}, set()]
    assert reach_of(nodes, [{2, 3}, {2, 3}, {0, 1, 3}, {0, 1, 2}]) == [set()] * 4, "ranks of a node cannot"
    assert reach_of(nodes, [{1, 2, 3}, {2, 3}, {0, 1, 3}, {0, 1, 2}]) == [set()] * 4, "one of a node cannot"


def test_memory_that_is_mapped_in_part() -> None:
    """NVSHMEM has said that stores reach the peer."""

    def call(control: Any, library: nvshmem.Library, module: Module) -> Any:
        reach = start(control, library)
        module.unreached = {0} if control.rank == 1 else set()
        return library.segment(control, 0, MIB, None, reach, 5.0)

    for error in on_ranks(World([0, 1]), call):
        assert isinstance(error, pc.Error) and "rank 0" in str(error) and "not all" in str(error), error


def test_a_queue_that_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "512")
    for error in on_ranks(World([0, 1]), one):
        assert "NVSHMEM_QP_DEPTH=512" in str(error) and "880" in str(error), error


def queue_of(in_flight: int, **options: Any) -> int:
    config = make_config(
        2, 0, num_experts=8, top_k=2, hidden=64, max_tokens_per_rank=4096, dtype=torch.bfloat16, wire="native",
        layout=pc.Compact(), in_flight=in_flight, scale_layout="row", on_gpu=True, **options,
    )  # fmt: skip
    return nvshmem.queue_of(config)


def test_the_queue_that_pieces_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that we start gets it; of another's, unless it says how deep it is, it has NVSHMEM's own 1024."""
    monkeypatch.delenv("NVSHMEM_QP_DEPTH", raising=False)
    assert queue_of(8) == 880
    assert [queue_of(n, slot_bytes=1 << 20) for n in (1, 4, 8)] == [880, 928, 1792]

    def begin(control: Any, library: nvshmem.Library, module: Module) -> tuple[int, dict[str, str]]:
        library.start(control, 0, MIB, None, 5.0, [], True, 1792)
        start(control, library)
        return library.depth, nvshmem.variables(MIB, by_nic=True, depth=library.depth)

    for depth, variables in on_ranks(World([0, 1]), begin):
        assert depth == 2048 and variables["NVSHMEM_QP_DEPTH"] == "2048"
    assert "NVSHMEM_QP_DEPTH" not in nvshmem.variables(MIB, by_nic=True)

    def later(control: Any, library: nvshmem.Library, module: Module) -> Any:
        start(control, library)
        return library.start(control, 0, MIB, None, 5.0, [], True, 1792)

    for world in (World([0, 1]), World([0, 1], begun=True)):
        for error in on_ranks(world, later):
            assert isinstance(error, pc.Error) and "NVSHMEM_QP_DEPTH=1024 must be at least 1792" in str(error), error


def test_memory_is_taken_again_if_nothing_failed() -> None:
    def call(control: Any, library: nvshmem.Library, module: Module) -> list[int]:
        first = one(control, library, module)
        second = one(control, library, module)
        first.close(True)
        third = one(control, library, module)
        second.close(control.rank != 1)  # one rank has seen it fail
        third.close(True)
        fourth, fifth = one(control, library, module), one(control, library, module)
        return [(s.address - 1000 * MIB) // (6 * MIB) for s in (first, second, third, fourth, fifth)]

    assert on_ranks(World([0, 1, 2]), call) == [[0, 1, 0, 0, 2]] * 3


@dataclass
class Exchange:
    """As a Wiring knows it when it closes."""

    ends: bool = True
    open_steps: int = 0
    trouble: bool = False

    def ended(self, seconds: float) -> bool:
        return self.ends

    def raise_trouble(self) -> None:
        if self.trouble:
            raise pc.Error("a kernel gave up")


@pytest.mark.parametrize("exchange", [Exchange(), Exchange(ends=False), Exchange(open_steps=1), Exchange(trouble=True)], ids=repr)
@pytest.mark.parametrize("failed", [False, True])
def test_memory_is_another_s_if_all_puts_were_heard(exchange: Exchange, failed: bool) -> None:
    said: list[bool] = []
    segment = nvshmem.Segment(0, MIB, [0], close=said.append)
    symmetric: Any = SimpleNamespace(segment=segment)
    Wiring(exchange, Peers([], []), {}, {}, blocks_on_gpu=False, symmetric=symmetric).close(0.0, failed)
    assert said == [exchange == Exchange() and not failed]


def test_a_part_of_a_larger_job() -> None:
    """All PEs make symmetric memory, or none: the error says how much, and how."""
    for error in on_ranks(World([4, 5], begun=True, n_pes=8), one):
        assert isinstance(error, pc.Error) and f"{5 * MIB + 1} bytes" in str(error) and "symmetric_memory=" in str(error), error
        assert "8 PEs" in str(error) and "2 ranks" in str(error)


def test_leftovers_of_a_job() -> None:
    """Memory that is there is taken, also when PEs have died since; none can be made any more."""
    world = World([0, 1])

    def call(control: Any, library: nvshmem.Library, module: Module) -> tuple[int, int]:
        first = one(control, library, module)
        first.close(True)
        world.n_pes = 3
        second = one(control, library, module)
        with pytest.raises(pc.Error, match=r"3 PEs and 2 ranks"):
            one(control, library, module)
        return first.address, second.address

    for addresses in on_ranks(world, call):
        assert addresses[0] == addresses[1]


class Given:
    """Looks like a tensor on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def numel(self) -> int:
        return self.nbytes

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return 4096


def test_memory_that_the_caller_has() -> None:
    def call(nbytes: int) -> Callable[[Any, nvshmem.Library, Module], Any]:
        given: Any = Given(nbytes)
        return lambda control, library, module: library.segment(
            control, 0, 5 * MIB, given, start(control, library, 5 * MIB, given), 5.0
        )

    segments = on_ranks(World([4, 5], begun=True, n_pes=8), call(8 * MIB))
    assert [(s.address, s.nbytes, s.pes) for s in segments] == [(4096, 8 * MIB, [4, 5])] * 2
    for error in on_ranks(World([4, 5], begun=True, n_pes=8), call(MIB)):
        assert f"{5 * MIB}" in str(error), error
    for error in on_ranks(World([0, 1]), call(8 * MIB)):
        assert "initialised" in str(error), error


def test_some_have_an_nvshmem() -> None:
    def call(control: Any, library: nvshmem.Library, module: Module) -> Any:
        module.begun = control.rank == 2
        return one(control, library, module)

    for error in on_ranks(World([0, 1, 2]), call):
        assert "rank 2" in str(error) and "ranks 0, 1" in str(error), error


def test_two_ranks_with_one_pe() -> None:
    for error in on_ranks(World([0, 0], begun=True), one):
        assert "same PE" in str(error), error


def test_a_heap_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", "4M")
    for error in on_ranks(World([0, 1], room=4 * MIB), one):
        assert "NVSHMEM_SYMMETRIC_SIZE" in str(error) and f"{6 * MIB} bytes" in str(error), error


def test_a_heap_without_room_is_no_loss() -> None:
    """One that does not grow: nothing of it has changed, and a smaller AllToAll finds room."""

    def call(control: Any, library: nvshmem.Library, module: Module) -> nvshmem.Segment:
        with pytest.raises(pc.Error, match="has no room"):
            library.segment(control, 0, 64 * MIB, None, start(control, library), 5.0)
        return one(control, library, module)

    for segment in on_ranks(World([0, 1], room=16 * MIB), call):
        assert isinstance(segment, nvshmem.Segment), segment


def allocated(world: World) -> list[int]:
    """But for the place that the first start takes."""
    return [nbytes for nbytes in world.allocations if nbytes > 4096]


@pytest.mark.parametrize("share", [False, True], ids=["a GPU each", "one GPU"])
def test_a_gpu_without_room_for_a_heap_that_grows(share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVSHMEM unmaps the whole heap where that fails: so it is not asked. Ranks that share a GPU need room for all of them."""
    monkeypatch.delenv("NVSHMEM_CUMEM_GRANULARITY", raising=False)
    world = World([0, 1, 2], grows=True)

    def call(free: int) -> Callable[[Any, nvshmem.Library, Module], Any]:
        def one_with(control: Any, library: nvshmem.Library, module: Module) -> Any:
            reach = start(control, library)
            module.gpu = "shared" if share and control.rank else module.gpu
            module.free = free if control.rank else 8 * GIB
            try:
                return library.segment(control, 0, 5 * MIB + control.rank, None, reach, 5.0)
            except pc.Error as error:
                assert library.lost is None
                return error

        return one_with

    needed = 512 * MIB * (1 + share) + 64 * MIB
    for error in on_ranks(world, call(needed - 1)):
        assert isinstance(error, pc.Error) and f"{needed} bytes" in str(error) and f"{needed - 1} are free" in str(error), error
        assert ("ranks 1, 2" if share else "rank 1") in str(error) and "NVSHMEM_CUMEM_GRANULARITY" in str(error), error
    assert allocated(world) == [], "NVSHMEM is asked all the same"
    for segment in on_ranks(world, call(needed)):
        assert isinstance(segment, nvshmem.Segment), segment


def test_a_heap_that_may_not_grow_so_far() -> None:
    world = World([0, 1], grows=True)

    def call(control: Any, library: nvshmem.Library, module: Module) -> Any:
        reach = start(control, library)
        module.at_most = 64 * MIB + 512 * MIB + control.rank
        return library.segment(control, 0, 5 * MIB, None, reach, 5.0)

    for error in on_ranks(world, call):
        assert "NVSHMEM_MAX_MEMORY_PER_GPU" in str(error) and f"{512 * MIB} more" in str(error), error
    assert allocated(world) == []


def test_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, by in (("2M", 6), ("", 512), ("1g", 1024), ("8G", 2048), ("1", 6), ("0.5G", 512), ("nonsense", 512)):
        monkeypatch.setenv("NVSHMEM_CUMEM_GRANULARITY", setting)
        assert nvshmem_heap.growth(5 * MIB) == by * MIB, setting
    monkeypatch.delenv("NVSHMEM_CUMEM_GRANULARITY")
    assert nvshmem_heap.growth(512 * MIB + 1) == 1024 * MIB


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("how", ["nothing", "an error"])
def test_an_allocation_that_fails_on_one_rank(grows: bool, how: str) -> None:
    """The heap's contents then differ between ranks, or it is gone: no AllToAll may have of it, on any rank."""

    def call(control: Any, library: nvshmem.Library, module: Module) -> Any:
        reach = start(control, library)
        if control.rank == 1 and how == "nothing":
            module.fails = True
        elif control.rank == 1:
            module.allocate = lambda *_: (module.world.barrier.wait(), 1 / 0)  # type: ignore[assignment, method-assign, return-value]
        with pytest.raises(pc.Error) as failed:
            library.segment(control, 0, 5 * MIB, None, reach, 5.0)
        module.fails = False
        with pytest.raises(pc.Error) as later:
            start(control, library)
        return f"{failed.value}", f"{later.value}"

    for failed, later in on_ranks(World([0, 1, 2], grows=grows), call):
        assert "rank 1 could not" in failed or "ZeroDivision" in failed or "NVSHMEM's heap" in failed, failed
        assert "cannot use NVSHMEM any more" in later and "start the ranks again" in later, later


def test_a_growth_that_fails_everywhere() -> None:
    def call(control: Any, library: nvshmem.Library, module: Module) -> Any:
        reach = start(control, library)
        module.fails = True
        with pytest.raises(pc.Error, match="could not grow"):
            library.segment(control, 0, 5 * MIB, None, reach, 5.0)
        return library.lost

    assert all(lost and "start the ranks again" in lost for lost in on_ranks(World([0, 1], grows=True), call))


def test_far_peers_without_ibgda() -> None:
    """NVSHMEM starts without, and would give their puts to a thread that kernels wait for."""

    def call(ibgda_on: set[int], mapped: dict[int, list[int]], looks: bool = True) -> Callable[..., Any]:
        def on(control: Any, library: nvshmem.Library, module: Module) -> Any:
            module.ibgda = control.rank in ibgda_on
            module.unreached = {0: {6}, 1: set(), 2: {4}}[control.rank]
            reach = library.start(control, 0, MIB, None, 5.0, mapped.get(control.rank, []), looks)
            return sorted(reach.near[control.rank])

        return on

    def world() -> World:
        return World([4, 5, 6], begun=True)

    for error in on_ranks(world(), call({0, 1}, {})):
        assert isinstance(error, pc.Error) and "only a NIC reaches rank 0" in str(error) and "doctor" in str(error), error
    for error in on_ranks(world(), call(set(), {})):
        assert "only a NIC reaches rank 2" in str(error) and "NVSHMEM_IB_ENABLE_IBGDA=1" in str(error), error
    assert on_ranks(world(), call({0, 2}, {})) == [[1], [0, 2], [1]], "IBGDA has them"
    assert on_ranks(world(), call(set(), {0: [2], 2: [0]})) == [[1], [0, 2], [1]], "the node maps them"
    assert on_ranks(World([4, 5, 6], begun=True), call({0, 2}, {}, looks=False)) == [[], [], []]


def test_some_hosts_without_a_connectx(monkeypatch: pytest.MonkeyPatch) -> None:
    has: set[int] = set()
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(ibgda, "has_connectx", lambda: _here.module.rank in has)
    monkeypatch.setattr(nvshmem, "_environment", lambda values: asked.append(values) or contextlib.nullcontext())

    def call(one_network: bool) -> Callable[[Any, nvshmem.Library, Module], Any]:
        def on(control: Any, library: nvshmem.Library, module: Module) -> Any:
            control.one_network = one_network
            return one(control, library, module)

        return on

    has.update({0, 2})
    for error in on_ranks(World([0, 1, 2, 3]), call(False)):
        assert isinstance(error, pc.Error) and "ranks 1, 3" in str(error) and "ranks 0, 2" in str(error), error
    assert asked == []
    for has_all, one_network, remote in (({0, 2}, True, "none"), ({0, 1, 2, 3}, False, None), (set(), False, "none")):
        has.clear()
        has.update(has_all)
        asked.clear()
        assert all(isinstance(s, nvshmem.Segment) for s in on_ranks(World([0, 1, 2, 3]), call(one_network)))
        assert [values.get("NVSHMEM_REMOTE_TRANSPORT") for values in asked] == [remote] * 4


def test_the_start_is_tried_as_it_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """With IBGDA where kernels will post to a NIC."""
    tried: list[bool] = []
    connectx = True
    monkeypatch.setattr(ibgda, "has_connectx", lambda: connectx)
    monkeypatch.setattr(nvshmem, "try_alone", lambda gpu, by_nic: tried.append(by_nic) or nvshmem.Alone(None))

    def call(one_network: bool) -> Callable[[Any, nvshmem.Library, Module], Any]:
        def on(control: Any, library: nvshmem.Library, module: Module) -> Any:
            library.probed, control.one_network = {}, one_network
            return one(control, library, module)

        return on

    for one_network in (False, True):
        on_ranks(World([0, 1]), call(one_network))
    assert tried == [True, True, False, False]


@pytest.mark.parametrize("by_nic", [False, True])
def test_variables_of_a_process_of_its_own(by_nic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_IB_ENABLE_IBGDA"):
        monkeypatch.delenv(name, raising=False)
    show = "import os; print(os.environ.get('NVSHMEM_REMOTE_TRANSPORT'), os.environ.get('NVSHMEM_IB_ENABLE_IBGDA'));"
    monkeypatch.setattr(nvshmem, "MODULE_PROBE", show + " raise SystemExit(5)")
    refused = nvshmem.try_alone(0, by_nic=by_nic).refused
    assert refused is not None and "status 5" in refused and ("None 1" if by_nic else "none None") in refused, refused
    for said in (True, False):
        monkeypatch.setattr(nvshmem, "MODULE_PROBE", f"print('some text of NVSHMEM'); print('{'' if said else 'no '}IBGDA')")
        assert nvshmem.try_alone(0, by_nic=by_nic) == nvshmem.Alone(None, ibgda=said)


def test_a_start_that_does_not_end() -> None:
    """It waits for a rank that does not come: every rank goes on, and says so again later."""
    left = threading.Event()

    def call(control: Any, library: nvshmem.Library, module: Module) -> Any:
        if control.rank == 0:
            module.init = lambda *_: left.wait(20)  # type: ignore[assignment, method-assign, misc]
        else:
            module.init = lambda *_: None  # type: ignore[method-assign]
        begun = time.monotonic()
        with pytest.raises(pc.Error, match=r"nvshmem_init has not come back within 2 s"):
            start(control, library, timeout=2.0)
        assert time.monotonic() - begun < 15
        return library.lost

    try:
        lost = on_ranks(World([0, 1]), call)
    finally:
        left.set()
    assert lost[0] is not None and "cannot use NVSHMEM any more" in lost[0] and lost[1] is None


def test_an_nvshmem_that_does_not_start_alone() -> None:
    def call(control: Any, library: nvshmem.Library, module: Module) -> Any:
        if control.rank == 1:
            library.probed = {(0, False): nvshmem.Alone("one PE alone ended with status 255: no driver")}
        return one(control, library, module)

    for error in on_ranks(World([0, 1]), call):
        assert "status 255" in str(error), error


def test_variables_of_an_nvshmem_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVSHMEM_SYMMETRIC_SIZE", "NVSHMEM_DISABLE_NVLS", "NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_IB_ENABLE_IBGDA"):
        monkeypatch.delenv(name, raising=False)
    here = nvshmem.variables(3 << 30, by_nic=False)
    assert int(here["NVSHMEM_SYMMETRIC_SIZE"]) > 3 << 30 and here["NVSHMEM_DISABLE_NVLS"] == "1"
    assert here["NVSHMEM_REMOTE_TRANSPORT"] == "none" and "NVSHMEM_IB_ENABLE_IBGDA" not in here
    across = nvshmem.variables(MIB, by_nic=True)
    assert across["NVSHMEM_IB_ENABLE_IBGDA"] == "1" and "NVSHMEM_REMOTE_TRANSPORT" not in across
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", "9G")
    assert "NVSHMEM_SYMMETRIC_SIZE" not in nvshmem.variables(MIB, by_nic=False)


def test_without_nvshmem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "library_path", lambda: None)
    with pytest.raises(pc.Error, match=r"pip install nvidia-nvshmem-cu13==3\.4\.5"):
        nvshmem.kernels()
    comm = pc.Communicator.from_env()
    arguments = {"num_experts": 2, "top_k": 1, "hidden": 64, "max_tokens_per_rank": 2, "transport": "nvshmem", "device": "cpu"}
    with pytest.raises(pc.Error, match=r"needs device='cuda'"):
        pc.AllToAll(comm, **arguments)  # type: ignore[arg-type]
    comm.close()
