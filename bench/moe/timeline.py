"""When each half of dispatch and of combine ran, and each product: of one call of our layer, as it was measured.

On a GPU these are kernels, from torch's profiler, by stream. On a CPU they are calls, by thread.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.harness.world import World
from bench.moe.layers import Ours
from bench.moe.problem import Problem
from pplx_comm.all_to_all import AllToAll
from pplx_comm.moe.grouped import products
from pplx_comm.moe.grouped.beside import Beside

HALVES = ("dispatch, send", "dispatch, receive", "combine, send", "combine, receive")
PRODUCTS = ("up", "down")
ROUNDS = 9
WARMING = 3


@dataclass(frozen=True)
class Span:
    """Microseconds since the call began."""

    what: str
    lane: int
    """Of a stream or a thread; 0 is the one that calls."""
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    layer: str
    precision: str
    tokens: int
    spans: tuple[tuple[Span, ...], ...]
    """By rank, of the round whose length is the median."""

    def described(self) -> dict[str, Any]:
        """As the JSON has it."""
        return asdict(self)


def measured(layer: Ours, problem: Problem, precision: str, world: World, device: Any) -> Timeline:
    """Collective."""
    record = _kernels if device.device.type == "cuda" else _calls
    rounds: list[tuple[Span, ...]] = []
    with torch.no_grad():
        for _ in range(WARMING):
            layer.in_halves()
        for _ in range(ROUNDS):
            device.synchronize()
            world.barrier()
            rounds.append(record(layer, problem))
    of_ranks = world.gather([[asdict(span) for span in spans] for spans in rounds], "timeline")
    lengths = [max(span["end"] for spans in of_ranks for span in spans[turn]) for turn in range(ROUNDS)]
    middle = lengths.index(statistics.median_high(lengths))
    chosen = tuple(tuple(Span(**span) for span in spans[middle]) for spans in of_ranks)
    return Timeline(layer.name, precision, problem.tokens, chosen)


# ---- calls of a CPU --------------------------------------------------------------------------------------------------------


def _calls(layer: Ours, problem: Problem) -> tuple[Span, ...]:
    found: list[tuple[str, int, int, int]] = []

    def timed(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return call(*arguments, **options)
            finally:
                found.append((what, threading.get_ident(), begin, time.perf_counter_ns()))

        return run

    with _instead(layer.a2a, timed, problem.weights.gate_up.shape[1:]):
        begun = time.perf_counter_ns()
        layer.in_halves()
    here = threading.get_ident()
    return tuple(
        Span(what, int(thread != here), (begin - begun) / 1000, (end - begun) / 1000) for what, thread, begin, end in found
    )


@contextlib.contextmanager
def _instead(a2a: AllToAll, timed: Callable[[str, Callable[..., Any]], Callable[..., Any]], up: torch.Size) -> Iterator[None]:
    """While this lasts, the halves and the products are timed. up: the shape of the first product's weights."""

    def by_shape(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any, w: Any, *arguments: Any, **options: Any) -> Any:
            codes = w if isinstance(w, torch.Tensor) else w[0]
            return timed(PRODUCTS[codes.shape[1:] != up], call)(x, w, *arguments, **options)

        return run

    device: Any = a2a._steps.device
    calls = ("dispatch", "dispatch_recv", "combine", "combine_recv")
    places = [(device, name, timed(what, getattr(device, name))) for name, what in zip(calls, HALVES, strict=True)]
    places += [(products, name, by_shape(getattr(products, name))) for name in ("forward", "scaled")]
    places += [(Beside, name, timed(name, getattr(Beside, name))) for name in PRODUCTS]
    before = [(where, name, getattr(where, name)) for where, name, _ in places]
    for where, name, call in places:
        setattr(where, name, call)
    try:
        yield
    finally:
        for where, name, call in before:
            setattr(where, name, call)


# ---- kernels of a GPU ------------------------------------------------------------------------------------------------------

NAMES = {
    "wait": ("await_experts", "until_raised", "until_reached"),
    "dispatch": ("dispatch",),
    "combine": ("combine",),
    "activation": ("swiglu",),
    "product": ("rows_by_weights", "gemm", "grouped", "nvjet", "cutlass"),
}
"""Parts of kernels' names; the first that fits counts. Others are left out: they are small."""


def _kernels(layer: Ours, problem: Problem) -> tuple[Span, ...]:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        layer.in_halves()
        torch.cuda.synchronize()
    events: Any = profile.profiler.kineto_results.events()
    kernels = [
        (each.name().lower(), each.device_resource_id(), each.start_ns(), each.duration_ns())
        for each in events
        if each.device_type() == torch.autograd.DeviceType.CUDA
    ]
    return spans_of_kernels(kernels)


def spans_of_kernels(kernels: list[tuple[str, int, int, int]]) -> tuple[Span, ...]:
    """Of (name, stream, begin and duration in nanoseconds). The first kernel of a step is its send half; so is the first product of
    a group the one of gates and ups, the first of its two."""
    named = [(kind, stream, begin, took) for name, stream, begin, took in kernels if (kind := _kind(name)) is not None]
    named.sort(key=lambda each: each[2])
    if not named:
        return ()
    origin = named[0][2]
    here = next((stream for kind, stream, *_ in named if kind == "product"), named[0][1])
    seen: dict[str, int] = {}
    spans = []
    for kind, stream, begin, took in named:
        number = seen[kind] = seen.get(kind, -1) + 1
        what = {
            "dispatch": HALVES[min(number, 1)], "combine": HALVES[2 + min(number, 1)], "product": PRODUCTS[number % 2],
        }.get(kind, kind)  # fmt: skip
        spans.append(Span(what, int(stream != here), (begin - origin) / 1000, (begin - origin + took) / 1000))
    return tuple(spans)


def _kind(name: str) -> str | None:
    return next((kind for kind, parts in NAMES.items() if any(part in name for part in parts)), None)


# ---- the picture -----------------------------------------------------------------------------------------------------------

COLOURS = {
    "dispatch, send": "#9ecae1", "dispatch, receive": "#3182bd", "combine, send": "#fdae6b", "combine, receive": "#e6550d",
    "up": "#31a354", "down": "#a1d99b", "activation": "#dddddd", "wait": "#f2f2f2",
}  # fmt: skip


def plot(timelines: list[dict[str, Any]], title: str, path: str) -> None:
    """Rank 0's, of one size and precision each, the ways of overlap below each other."""
    from bench.moe.report import pyplot

    plt = pyplot()
    pictures = list(dict.fromkeys((one["precision"], one["tokens"]) for one in timelines))
    figure, axes = plt.subplots(len(pictures), 1, figsize=(11, 1.2 + 2.4 * len(pictures)), squeeze=False)
    for axis, (precision, tokens) in zip(axes[:, 0], pictures, strict=True):
        some = [one for one in timelines if (one["precision"], one["tokens"]) == (precision, tokens)]
        labels, height = [], 0.0
        for one in some:
            spans = one["spans"][0]
            for lane in sorted({span["lane"] for span in spans}):
                labels.append((height, f"{one['layer']}: {'beside' if lane else 'current'}"))
                for span in (span for span in spans if span["lane"] == lane):
                    axis.barh(
                        height, span["end"] - span["begin"], left=span["begin"], height=0.8, color=COLOURS[span["what"]],
                        edgecolor="white", linewidth=0.4,
                    )  # fmt: skip
                height += 1
            height += 0.4
        axis.set_yticks([at for at, _ in labels], [name for _, name in labels])
        axis.invert_yaxis()
        axis.set_title(f"{precision}, {tokens} tokens per rank", fontsize=10)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel("us since rank 0 began")
    seen = {span["what"] for one in timelines for span in one["spans"][0]}
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for what, colour in COLOURS.items() if what in seen]
    figure.legend(handles, [what for what in COLOURS if what in seen], loc="lower center", ncol=8, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
