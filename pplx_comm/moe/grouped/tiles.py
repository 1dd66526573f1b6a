"""The tiles of our kernels, in one place. See bench/notes.md."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from pplx_comm.moe.quantise import BLOCK


@dataclass(frozen=True)
class Shape:
    """Sizes of a kernel's tiles. They follow from sizes that no routing changes, so each size is compiled once."""

    rows: int
    side: int
    inner: int
    group: int
    warps: int
    stages: int
    flat: bool = False
    programs: int = 1
    """On a multiprocessor: several have more of the weights in flight."""
    masked: bool = False
    """Rows are read by pointers, and none behind an expert's last: a descriptor reads whole tiles."""
    ahead: int = 0
    """How many pieces of 128 bytes of each row of weights are requested before the rows that they multiply are there."""


FEW = 64
"""Rows of an expert, on average, up to which a tile has as few rows: a product of few rows reads weights."""
LARGEST_TILES = 227 << 10
"""Bytes of shared memory, for 128 x 256 with four stages and a tile that is stored meanwhile: compute capability 9.0 and 10.0."""
REGISTERS = 64 << 10
"""Per multiprocessor."""

SHAPE_OF_FEW = Shape(64, 128, 64, 8, 4, 4, programs=2)
SHAPE_OF_SOME = Shape(128, 256, 64, 16, 8, 4, flat=True)
SHAPE_OF_MANY = Shape(128, 256, 64, 8, 8, 4, flat=True)
SHAPES_OF_LESS_MEMORY = Shape(128, 256, 64, 8, 8, 3), Shape(128, 128, 64, 8, 8, 3)
SHAPE_OF_WEIGHTS = Shape(128, 256, 64, 8, 8, 3)
# Several programs on a multiprocessor: the tensor cores have one's block while another adds up its last one.
SHAPE_OF_FEW_CODES = Shape(64, 128, BLOCK, 8, 4, 4, flat=True, programs=2)
SHAPE_OF_MANY_CODES = Shape(64, 128, BLOCK, 8, 4, 3, programs=3)
# Both products in one launch. Rows are masked: a tile read whole takes half the bytes of its weights from the L2 cache, for rows.
SHAPE_OF_PAIR = Shape(64, 128, BLOCK, 1, 4, 4, programs=2, masked=True, ahead=4)
ROWS_OF_ACTIVATION = 16
"""That a program of this launch quantises at a time: few rows are there."""


def shape_of_rows(average: int, device: torch.device) -> Shape:
    """Chooses by the rows that an expert has on average: few want small tiles, since padding is computed too."""
    if average <= FEW:
        return SHAPE_OF_FEW
    memory = shared_memory(device)
    if memory < LARGEST_TILES:
        return SHAPES_OF_LESS_MEMORY[memory <= 150 << 10]
    return SHAPE_OF_SOME if average <= 1024 else SHAPE_OF_MANY


def shape_of_codes(average: int, device: torch.device) -> Shape:
    """The same for rows of codes."""
    return SHAPE_OF_FEW_CODES if average <= FEW and shared_memory(device) >= LARGEST_TILES else SHAPE_OF_MANY_CODES


def most_registers(s: Shape) -> dict[str, int]:
    """Limits a thread's registers so that all of a shape's programs fit."""
    each = REGISTERS // (s.programs * s.warps * 32) // 8 * 8
    return {"maxnreg": each} if each < 255 else {}


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    if device.type != "cuda":
        return LARGEST_TILES
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)) or LARGEST_TILES
