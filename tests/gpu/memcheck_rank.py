"""One rank of test_memcheck, a process of its own, since compute-sanitizer wants to have started it: RANK and WORLD_SIZE say which.

Arguments: which steps, and the numbers of the random cases.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from dataclasses import replace

from cases import Case, in_pieces, random_case
from harness import Member

SIZES = {"few": ("mapped", "proxy:tcp"), "large": ("mapped",), "pieces": ("mapped", "proxy:tcp")}
"""Few tokens; the same by the large kernels; and enough that blocks go in pieces. Cases take the transports in turn. The test sets where
large begins."""


def drawn(size: str, number: int, world: int, transport: str) -> Case:
    case = random_case(number, world, (transport,))
    if size != "pieces":
        return case
    r = random.Random(f"pieces {number}")
    case = replace(
        case, replicas=1, max_tokens=r.randint(257, 400), num_experts=r.choice([world, 3 * world]), top_k=r.choice([1, 2, 3]),
        hidden=16 * r.choice([1, 3, 9, 33]), steps=3,
    )  # fmt: skip
    return in_pieces(case, on_gpu=True)


def main(size: str, numbers: list[int]) -> None:
    import gpu_cases

    me = Member(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    transports = itertools.cycle(SIZES[size])
    for number in numbers:
        gpu_cases.exchange(me, drawn(size, number, me.world_size, next(transports)))
    me.close()


if __name__ == "__main__":
    main(sys.argv[1], [int(number) for number in sys.argv[2:]])
