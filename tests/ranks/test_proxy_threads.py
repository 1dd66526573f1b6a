"""proxy_threads=2: the peers of a rank split between two proxies, each with a thread, a fabric and endpoints of its own."""

from __future__ import annotations

import pytest
from cases import Case, random_case
from harness import Crew, seed
from test_failure import check_all_gone, check_survivors

TRANSPORTS = ("proxy:shm", "proxy:tcp", "mixed:tcp", "relayed:tcp")
CHAOS = "delay=0.2,delay_us=500,shuffle=0.3,split=0.3,duplicate=0.1,replay=0.05,again=0.1"


@pytest.mark.parametrize(("world_size", "chaos"), [(2, ""), (3, CHAOS)])
def test_exchange(world_size: int, chaos: str) -> None:
    """The bits of one proxy; of two ranks, one proxy has nothing to carry."""
    begin = seed() * 100_000 + 60_000
    settings = {"PPLX_COMM_ENDPOINTS": "2", "PPLX_COMM_SHARD_BYTES": "400"}
    if chaos:
        settings["PPLX_COMM_CHAOS"] = f"seed={seed()},{chaos}"
    with Crew(world_size, settings) as crew:
        for number in range(10):
            crew.run("rank_cases:two_proxies", random_case(begin + number, world_size, TRANSPORTS))


@pytest.mark.parametrize(("world_size", "transport"), [(4, "proxy:tcp"), (8, "relayed:tcp")])
def test_both_carry(world_size: int, transport: str) -> None:
    """Half of the peers each, and no peer both; beside an AllToAll with one proxy on the same Communicator. Rails are ranks of one
    number on nodes of two."""
    with Crew(world_size) as crew:
        crew.run("rank_cases:both_proxies_carry", Case(1, world_size, transport=transport, hidden=256))


@pytest.mark.parametrize("transport", ["proxy:shm", "proxy:tcp"])
def test_death(transport: str) -> None:
    """Kills a peer that rank 2's first proxy carries to, and the second one of the others."""
    case = Case(31, 4, transport=transport, max_tokens=64, hidden=512, proxy_threads=2)
    with Crew(4) as crew:
        crew.start("failure_cases:endless", case)
        for rank in range(4):
            crew.heard(rank, "running")
        died = crew.kill(1)
        check_survivors(crew.collect(30, [0, 2, 3]), 1, died)
        check_all_gone(crew, 1)
