"""compat.pplx_kernels and compat.pplx_garden: their all-to-all over this library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from gloo import GlooCrews
from harness import Crews, seed

SHAPE = {"hidden": 512, "experts": 8, "top_k": 3, "most": 6}


def case_of(kind: str) -> dict[str, Any]:
    """kind: rows[/elements of a scale][:sums]"""
    given, _, back = kind.partition(":")
    given, _, block = given.partition("/")
    return {**SHAPE, "in": given, "out": back or given, **({"block": int(block)} if block else {})}


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crews]:
    with GlooCrews(4, tmp_path_factory.mktemp, {"PPLX_COMM_COMPAT_TIMEOUT": "20"}) as crews:
        yield crews


@pytest.mark.parametrize(
    ("kind", "same", "across", "halves"),
    [
        ("bfloat16/32", 1, False, False), ("bfloat16:float16", 2, False, True), ("float16", 2, True, False),
        ("float8_e4m3fn:bfloat16", 2, False, False), ("float8_e4m3fn:float16", 1, True, True),
        ("float8_e4m3fn/512:bfloat16", 1, False, True), ("float8_e4m3fn/0:bfloat16", 1, False, False),
    ],
)  # fmt: skip
def test_pplx_kernels(crew: Crews, kind: str, same: int, across: bool, halves: bool) -> None:
    crew.run("pplx_cases:kernels", seed(), case_of(kind), same, across, halves)


@pytest.mark.parametrize(
    ("kind", "same", "padding", "halves", "accumulate"),
    [
        ("float32", 1, 1, False, True), ("bfloat16/8", 2, 16, True, False), ("float8_e4m3fn:bfloat16", 1, 3, True, True),
        ("float8_e4m3fn:float32", 2, 16, False, False), ("float8_e4m3fn/32:bfloat16", 1, 16, True, False),
    ],
)  # fmt: skip
def test_pplx_garden(crew: Crews, kind: str, same: int, padding: int, halves: bool, accumulate: bool) -> None:
    crew.run("pplx_cases:garden", seed(), case_of(kind), same, padding, halves, accumulate)


def test_refusals(crew: Crews) -> None:
    says = {
        "rank": "but the group has", "scales": "scales of torch.float16: send float32", "receive": "there is none",
        "combine": "nothing was dispatched",
    }  # fmt: skip
    for told in crew.run("pplx_cases:refusals"):
        wrong = {name: said for name, said in told.items() if not re.search(says[name], said)}
        assert told.keys() == says.keys() and not wrong
