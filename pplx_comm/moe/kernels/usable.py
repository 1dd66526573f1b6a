"""Says if the kernels run here, and how many programs a grid should have."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

from pplx_comm.settings import foreign

INTERPRETED_PROGRAMS = 3
"""Programs of a persistent kernel in Triton's interpreter, which runs them one after the other. Several, so that tiles are shared
out."""


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(device: torch.device) -> bool:
    """On GPUs where triton is installed; on CPUs only in its interpreter, as tests do with TRITON_INTERPRET=1."""
    return _has_triton() and (device.type == "cuda" or foreign("TRITON_INTERPRET") == "1")


# Imported at the first call, since triton is no dependency, and once: an import statement takes a microsecond each time.
@functools.cache
def kernels(module: str) -> Any:
    """Imports a module of kernels."""
    return importlib.import_module(f"pplx_comm.moe.kernels.{module}")


@functools.cache
def programs(device: torch.device) -> int:
    """One for each multiprocessor."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_two_at_least(n: int) -> int:
    """Arrays in kernels have such lengths."""
    return 1 << max(n - 1, 0).bit_length()
