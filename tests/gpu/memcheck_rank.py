"""One rank of test_memcheck, a process of its own, since compute-sanitizer wants to have started it: RANK and WORLD_SIZE say which.

Arguments: the transport, and the numbers of the random cases.
"""

from __future__ import annotations

import os
import sys

import gpu_cases
from cases import random_case
from harness import Member


def main(transport: str, numbers: list[int]) -> None:
    me = Member(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    for number in numbers:
        gpu_cases.exchange(me, random_case(number, me.world_size, (transport,)))
    me.close()


main(sys.argv[1], [int(number) for number in sys.argv[2:]])
