"""The module with the emulated kernels, and the cases that files of tests/emulation draw."""

from __future__ import annotations

import functools
import math
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from cases import Case, random_case
from harness import Crew, Crews, seed
from open_step_cases import STILL_OPEN
from test_cpp import build

CHAOS = "delay=0.3,shuffle=0.5,split=0.3,duplicate=0.1,replay=0.05,again=0.1"
PARTS = {"PPLX_COMM_PART_BYTES": "500"}
"""Blocks for other nodes leave in parts of a few rows."""
LARGE = {"PPLX_COMM_LARGE_TOKENS": "1"}
"""All dispatches are of many tokens."""
# Fibers change stacks in its assembler.
ON_X86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the emulation is for x86-64")
VOLUME = float(os.environ.get("PPLX_TEST_VOLUME", "0.15"))
"""The share of a test's cases that run. `make check-long` takes more than all: it draws new ones."""


def numbers(most: int) -> range:
    """The numbers of a test's cases."""
    return range(math.ceil(most * VOLUME))


@functools.cache
def module() -> str:
    # A folder with mutants, else what is built.
    folder = os.environ.get("PPLX_TEST_EMULATION") or build("pplx_emulation", "-DPPLX_CUDA=OFF") / "emulation"
    [built] = Path(folder).glob("_cuda*.so")
    return str(built)


def case_of(begin: int, number: int, world: int, transport: str) -> Case:
    return random_case(seed() * 100_000 + begin + number, world, (transport,))


def piece_case(number: int, world: int) -> Case:
    """Steps of several rounds, in which a rank may have few tokens and the others many. Printed by what runs it."""
    r = random.Random(f"pieces {seed()} {number} {world}")
    dtype = r.choice(["bfloat16", "float16", "float32"])
    return Case(
        seed() * 1000 + number, world, num_experts=r.choice([1, world, r.randint(1, 12)]), top_k=r.choice([1, 2, 3, 8]),
        hidden=r.choice([16, 32, 48, 144, 272]), max_tokens=r.choice([9, 20, 33, 60]), dtype=dtype,
        wire=r.choice(["native", "fp8", "fp8_ue8m0", "mxfp8"]), layout=r.choice(["ragged", "ragged", "padded", "compact"]),
        align=r.choice([1, 8, 128]), zero_pad=r.random() < 0.5, in_flight=r.choice([1, 1, 2, 4]),
        scale_layout=r.choice(["row", "tma"]), first_step=r.choice([1, 2**32 - 3]),
        routing=r.choice(["uniform", "uniform", "zipf", "to_one", "repeats", "sparse", "local"]),
        crowd=r.choice(["full", "uneven", "uneven", "one_has_none", "one_has_all"]), steps=r.choice([3, 6]),
    )  # fmt: skip


def run_refused(crew: Crews | Crew, name: str, *args: Any, sentence: str = STILL_OPEN) -> list[re.Match[str]]:
    """Checks that all ranks heard the sentence, and no word of a timeout."""
    found = []
    for heard in crew.run("emulated:call", module(), f"open_step_cases:{name}", *args):
        match = re.search(sentence, heard["message"])
        assert match and not heard["timeout"] and str(heard["peer"]) == match[1], heard
        found.append(match)
    return found
