"""One rank of test_memcheck, a process of its own, since compute-sanitizer wants to have started it: RANK and WORLD_SIZE say which.

Arguments: the transport, and the numbers of the random cases.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_cases
from crew import Member
from rank_cases import random_case


def main(transport: str, numbers: list[int]) -> None:
    # No pipe to a test: nothing is said in the middle of a case.
    me = Member(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None)  # type: ignore[arg-type]
    for number in numbers:
        gpu_cases.exchange(me, random_case(number, me.world_size, (transport,)))
    me.close()


main(sys.argv[1], [int(number) for number in sys.argv[2:]])
