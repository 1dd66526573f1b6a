"""Ranks for tests: processes that run named functions, many times each.

    with Crew(4) as crew:
        results = crew.run("rank_cases:exchange", case)     # rank_cases.exchange(me, case) on every rank; results by rank

`me` is the rank's Member: .rank, .world_size, .comm (made at first use, and kept), .say(word) and .hear().
There are three ways to start a rank: forked from the nest, which has torch already (Crew); spawned, as a fresh interpreter without
torch (Crew(wrap=...) or spawn=True); a thread of a process that has them all (threads.run).
"""

from harness.crew import Crew, Crews, RankFailed, allowed, run_ranks, started
from harness.environment import FOLDERS, ROOT, TESTS, clean_environment, control_plane_only, seed
from harness.member import Member, until

__all__ = [
    "FOLDERS", "ROOT", "TESTS", "Crew", "Crews", "Member", "RankFailed", "allowed", "clean_environment", "control_plane_only",
    "run_ranks", "seed", "started", "until",
]  # fmt: skip
