"""A carrier that kernels drive, with a stand-in for its five calls that delays and reorders: whole blocks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cases import Case
from emulation_cases import ON_X86_64, PARTS, case_of, module, numbers
from harness import Crew, Crews, allowed, seed

pytestmark = [ON_X86_64, pytest.mark.slow]

PHASES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_send (weights)", "combine_recv")


@pytest.mark.parametrize("near", ["none", "all", "odd"])
@pytest.mark.parametrize("transport", ["nvshmem", "nvshmem-mixed"])
def test_random_shapes_by_kernels(transport: str, near: str) -> None:
    """near: peers whose memory is mapped; to the others blocks are put. Some of both in one job, too."""
    for world in (2, 4):
        with Crew(world, {"PPLX_EMULATION_NEAR": near, **PARTS}) as crew:
            for number in numbers(5):
                crew.run("emulated:call", module(), "rank_cases:exchange", case_of(26_000, number, world, transport))


@pytest.mark.parametrize(
    ("near", "transport", "remote"),
    [
        ("none", "nvshmem", [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]),
        ("all", "nvshmem", [[], [], [], []]),
        ("all", "nvshmem-mixed", [[], [], [], []]),
        ("odd", "nvshmem", [[2], [3], [0], [1]]),
        ("odd", "nvshmem-mixed", [[2], [3], [0], [1]]),
        ("one way", "nvshmem", [[1, 3], [0, 2, 3], [1, 3], [0, 1, 2]]),
        ("one way", "nvshmem-mixed", [[2, 3], [2, 3], [0, 1], [0, 1]]),
        ("across", "nvshmem-mixed", [[2, 3], [2, 3], [0, 1], [0, 1]]),
    ],
)
def test_near_peers_are_mapped(near: str, transport: str, remote: list[list[int]]) -> None:
    """Peers are mapped if stores reach both ways; none are where ranks of a node do not reach each other so."""
    case = Case(seed(), 4, num_experts=9, top_k=3, hidden=64, max_tokens=8, in_flight=2, steps=8, transport=transport)
    for environment, wanted in (({}, remote), ({"PPLX_COMM_NVSHMEM_NEAR": "0"}, None)):
        if wanted is None:
            wanted = [[peer for peer in range(4) if rank_apart(peer, rank, transport)] for rank in range(4)]
        with Crew(4, {"PPLX_EMULATION_NEAR": near, **environment}) as crew:
            assert crew.run("emulated:call", module(), "nvshmem_cases:remote", case) == wanted


def rank_apart(a: int, b: int, transport: str) -> bool:
    return a // 2 != b // 2 if transport == "nvshmem-mixed" else a != b


@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
def test_the_bits_of_mapped_memory(crew: Crews, layout: str) -> None:
    wire = {"ragged": "fp8", "padded": "native", "compact": "mxfp8"}[layout]
    for transport in ("nvshmem", "nvshmem-mixed"):
        case = Case(
            seed(), crew.world_size, num_experts=9, top_k=3, hidden=96, max_tokens=12, wire=wire, layout=layout, transport=transport
        )
        crew.run("emulated:call", module(), "nvshmem_cases:against_mapped", case, 6)


def test_several_all_to_alls_by_kernels(crew: Crews) -> None:
    """Several AllToAlls of one Communicator, in steps that interleave, each of its own shape, among some of mapped memory and a
    proxy."""
    transports = ["nvshmem", "nvshmem-mixed", "nvshmem", "mapped", "proxy:tcp"]
    cases = [replace(case_of(27_000, i, crew.world_size, t), in_flight=1, steps=4) for i, t in enumerate(transports)]
    crew.run("emulated:call", module(), "rank_cases:interleaved", cases)


def test_across_the_wrap_of_steps_by_kernels(crew: Crews) -> None:
    """A turn follows from a step's number, of which only the low bits are a set's own."""
    for in_flight, first in ((4, 2**32 - 5), (8, 2**32 - 9), (2, 2**31 - 5)):
        case = Case(seed(), crew.world_size, first_step=first, in_flight=in_flight, steps=24, crowd="uneven", transport="nvshmem")
        crew.run("emulated:call", module(), "rank_cases:exchange", case)


@pytest.mark.parametrize("near", ["none", "odd"])
def test_a_put_that_lands_after_its_generation(near: str) -> None:
    """A step gives up on a put that comes later than the reset: it must not count in the new generation, nor lie in its blocks."""
    case = Case(seed(), 3, num_experts=9, top_k=3, hidden=64, max_tokens=8, in_flight=2, transport="nvshmem")
    timeout = allowed(3.0)
    with Crew(3, {"PPLX_EMULATION_NEAR": near, "PPLX_EMULATION_LATE": f"{2500 * timeout:.0f}@100"}) as crew:
        for r in crew.run("emulated:call", module(), "chaos_cases:until_failure", case, timeout, again=True):
            assert r.get("is_peer") and r["is_timeout"], r


@pytest.mark.parametrize(("how", "landed"), [("whole", True), ("open", False), ("sent", False)])
def test_whose_memory_may_be_taken_again(how: str, landed: bool) -> None:
    """Puts of a step that was not received may land after close(): the next AllToAll there would take them for its own."""
    case = Case(seed(), 2, num_experts=6, top_k=3, hidden=64, max_tokens=8, transport="nvshmem")
    with Crew(2, {"PPLX_EMULATION_NEAR": "none"}) as crew:
        assert crew.run("emulated:call", module(), "nvshmem_cases:landed_at_close", case, how)[:-1] == [landed]


@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize(("world", "near"), [(2, "none"), (3, "none"), (4, "odd")])
@pytest.mark.parametrize("how", ["lost", "unheard"])
def test_a_carrier_with_an_error(how: str, world: int, near: str, pieces: bool) -> None:
    """Puts are lost, or land without a completion. Waits look at the carrier's error, so none ends by its timeout, and all ranks say
    what the rank of the error does: the peer, its phase and its step."""
    peer, timeout = world // 2, 30.0  # but for three ranks, the only one that rank 0 puts to
    case = Case(seed(), world, num_experts=9, top_k=3, hidden=64, max_tokens=30 if pieces else 8, crowd="full", transport="nvshmem")
    for put in random.Random(f"error {seed()} {how} {world} {pieces}").sample(range(2, 100 if pieces else 12), 2):
        print(f"{how}=0-{peer}@{put}")
        with Crew(world, {"PPLX_EMULATION_NEAR": near, "PPLX_EMULATION_CUT": f"{how}=0-{peer}@{put}"}) as crew:
            call = ["emulated:in_pieces", module(), 4] if pieces else ["emulated:call", module()]
            results = crew.run(*call, "pieces_cases:until_cut", case, timeout, timeout=100)
        first = results[0]
        for r in results:
            assert r.get("is_peer") and not r["is_timeout"], r
            assert r["peer"] == peer and (r["message"], r["step"]) == (first["message"], first["step"]), (r, first)
            assert r["closing"] < 5, r
        assert first["phase"] in PHASES, first
        assert first["message"] == f"rank 0 lost the network to rank {peer} ({first['phase']}, step {first['step']})", first
