"""Chooses the backend of a product: the one asked for, else the fastest usable one, measured once per shape and device."""

from __future__ import annotations

import functools
import importlib.util
import statistics
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from pplx_comm.errors import Error
from pplx_comm.moe.grouped.backend import Backend, ScaledBackend
from pplx_comm.moe.grouped.deepgemm import DeepGemm
from pplx_comm.moe.grouped.loop import Loop, ScaledLoop
from pplx_comm.moe.grouped.pair import TritonPair
from pplx_comm.moe.grouped.torch_mm import TorchGroupedMm
from pplx_comm.moe.grouped.triton_mm import TritonGroupedMm
from pplx_comm.moe.grouped.triton_mx import TritonMx
from pplx_comm.moe.grouped.triton_scaled import TritonScaledMm


class Candidate(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def waits(self) -> bool: ...


Either = TypeVar("Either", Backend, ScaledBackend)
Some = TypeVar("Some", bound=Candidate)

_chosen: dict[tuple[Any, ...], str] = {}
_measuring = threading.RLock()  # a measured function may choose for itself
REPEATS = 5
AHEAD = 2_000_000
"""Cycles for which the GPU does nothing before a call that is timed, so that the host has made it by then: a millisecond."""


@functools.cache
def backends() -> list[Backend]:
    """In the order in which they are taken where nothing may be measured."""
    found: list[Backend] = [TorchGroupedMm(), Loop()]
    return [TritonGroupedMm(), *found] if importlib.util.find_spec("triton") else found


@functools.cache
def scaled_backends() -> list[ScaledBackend]:
    """In the order in which they are taken where nothing may be measured."""
    found: list[ScaledBackend] = [ScaledLoop()]
    if importlib.util.find_spec("triton"):
        found = [TritonScaledMm(), *found, TritonMx(), TritonPair()]
    if importlib.util.find_spec("deep_gemm"):
        found.insert(0, DeepGemm())
    return found


def named(found: list[Some], name: str) -> Some:
    for backend in found:
        if backend.name == name:
            return backend
    raise Error(f"backend {name!r} is not usable here; usable are {', '.join(repr(b.name) for b in found)}")


def pick(found: list[Some], key: tuple[Any, ...], device: torch.device, run: Callable[[Some], object]) -> Some:
    """found: those that take this product; run: takes it, into scratch memory.

    On CPUs all are loops, and the first measurement would cost more than they differ. With deterministic algorithms, and while a
    CUDA graph is captured, nothing is measured: what is known or the first of the list is taken.
    """
    if device.type == "cpu":
        return next((one for one in found if one.name == "loop"), found[0])
    quick = [backend for backend in found if not backend.waits] or found
    if len(quick) == 1:
        return quick[0]
    key = (*key, torch.cuda.get_device_name(device), tuple(backend.name for backend in quick))
    if key not in _chosen:
        if torch.are_deterministic_algorithms_enabled() or torch.cuda.is_current_stream_capturing():
            return quick[0]
        with _measuring:
            times = {backend.name: _microseconds(functools.partial(run, backend)) for backend in quick}
            _chosen.setdefault(key, min(times, key=lambda name: times[name]))
    return named(quick, _chosen[key])


def choices() -> dict[tuple[Any, ...], str]:
    """Returns the measured choices: the backend by (product, dtype, shape of the weights, rows, device, candidates)."""
    return dict(_chosen)


def rows_class(rows: int) -> int:
    """Row counts with the same answer: the next power of two."""
    return 1 << max(rows - 1, 0).bit_length()


def _microseconds(call: Callable[[], object]) -> float:
    """Returns the median time on the GPU of a few calls, the first of which compiles. In a graph the host costs nothing."""
    call()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return statistics.median(times)
