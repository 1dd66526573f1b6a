"""Padded(align=): rows of an expert for kernels that write whole tiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Crew

import pplx_comm as pc

TILE = 64
"""Rows of a tile of DeepGEMM's masked kernels."""


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as two:
        yield two


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        (pc.Padded(), 16), (pc.Padded(align=64), 64), (pc.Padded(64, 64), 64), (pc.Padded(65, 64), 128),
        (pc.Padded(17, 3), 18), (pc.Padded(17), 17),
    ],
    ids=repr,
)  # fmt: skip
def test_rows_of_an_expert(crew: Crew, layout: pc.Padded, most: int) -> None:
    assert crew.run("layout_cases:shape_of", layout) == [(2, most, 64)] * 2


def test_a_kernel_that_writes_whole_tiles(crew: Crew) -> None:
    """Where an expert's rows do not fill whole tiles, the next one's are overwritten: that is what align is for."""
    assert max(crew.run("layout_cases:whole_tiles", TILE, TILE)) < 1e-4
    assert max(crew.run("layout_cases:whole_tiles", 1, TILE)) > 1e3


@pytest.mark.parametrize("align", [0, -64, 1.5, True, 2**33])
@pytest.mark.parametrize("layout", [pc.Padded, pc.Ragged])
def test_alignments_that_are_refused(align: int, layout: type[pc.Padded] | type[pc.Ragged]) -> None:
    with pytest.raises(pc.Error, match=rf"{layout.__name__}\(align=\) must be an integer from 1 to 1048576"):
        layout(align=align)
