"""Grouped products of an MoE layer, and the kernels between them: ours beside other backends, on one device.

python bench/grouped.py --device cuda                              # bfloat16 and e4m3, forward and backward
python bench/grouped.py --device cuda --formats bf16 --ops forward --rows 512 --experts 8 --shapes 2048x7168 --group 1
bench/l2.sh                                                        # L2 hits and time of that product with ncu, by --group

On a GPU a time is that of a replay of a CUDA graph which holds one call: what the device does, and nothing of Python. The loop
asks the device how many rows there are, as its users would, so no graph can hold it: it is called, and what the host waits for is
in its time. Each begins with cold caches, and is the median of rounds in which the backends take turns. Each result is compared
with the loop's, both a call's and a replay's, in memory that holds NaN elsewhere.

"pair" is both products of few rows of codes, with SwiGLU between: a shape is that of the first one. The backend of that name makes
one launch of them, the others three.

"host" is what one call costs the thread that makes it, beside an idle device: the median of calls, each after the one before has
ended. A caller of product after product without a graph gets the larger of both times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import checkout  # noqa: F401

import torch

from bench.harness.plot import pyplot
from bench.proxy import markdown
from pplx_comm._version import __version__
from pplx_comm.errors import Error
from pplx_comm.layer_arguments import positive
from pplx_comm.machine import machine, versions
from pplx_comm.moe.grouped import tiles
from pplx_comm.moe.grouped.backend import ScaledBackend
from pplx_comm.moe.grouped.choose import backends, scaled_backends
from pplx_comm.moe.grouped.loop import Loop, ScaledLoop
from pplx_comm.moe.grouped.pair import TritonPair
from pplx_comm.moe.grouped.products import Apart
from pplx_comm.moe.quantise import dequantise, quantise, quantise_weights, rescale_mx
from pplx_comm.moe.segments import Segments
from pplx_comm.moe.swiglu import swiglu, swiglu_backward, swiglu_quantise

SHAPES = {"7168x4096": "V3, first product", "2048x7168": "V3, second", "4096x4096": "Flash, first", "2048x4096": "Flash, second"}
OPS = ("forward", "dgrad", "wgrad", "pair")
FORMATS = ("bf16", "fp8")
SPREADS = ("even", "zipf")
LIMITS = {"bf16": 0.01, "fp8": 0.01, "pair": 0.03}
"""Relative difference from the loop: both round to bfloat16 once, and add up in other orders. Between two products some codes are
then rounded another way, which is an eighth of each."""
HOST_CALLS = 15
"""Calls behind the median of the host's time, if there are not more rounds."""
CACHE = 256 << 20
"""Bytes that are written before each call, so that it finds nothing in a cache."""
PADDED_UP_TO = 64
"""Rows an expert: up to here they lie as Padded lays them, as in decoding."""


@dataclass(frozen=True)
class Problem:
    op: str
    format: str
    inner: int
    width: int
    experts: int
    rows: int
    """Rows of an expert, on average."""
    spread: str


@dataclass
class Point:
    problem: Problem
    us: dict[str, float] = field(default_factory=dict)
    """Backend -> the median of replays, or of calls where there is no graph."""
    host_us: dict[str, float] = field(default_factory=dict)
    """Backend that does not wait -> the host's cost of a call. Only on a GPU."""
    work: int = 0
    """Rows that there are: padding is not among them."""

    def tflops(self, backend: str) -> float:
        p = self.problem
        halves = 3 if p.op == "pair" else 2  # the second product has half the weights
        return 1e-6 * halves * self.work * p.inner * p.width / self.us[backend]


class Operands:
    """Rows and weights of one problem, and the product by each backend."""

    def __init__(self, p: Problem, device: torch.device, seed: int) -> None:
        g = torch.Generator(device=device).manual_seed(seed)
        self.p, self.counts = p, counts(p)
        self.padded = p.rows <= PADDED_UP_TO and p.op in ("forward", "pair")
        align = 128 if p.format == "fp8" else 16
        rooms = [-(-n // align) * align for n in self.counts]
        if self.padded:
            rooms = [max(rooms)] * p.experts
        where = self.counts if self.padded else [0, *torch.tensor(rooms).cumsum(0).tolist()]
        room = rooms[0] if self.padded else 0
        self.where = Segments(torch.tensor(where, dtype=torch.int32, device=device), room, p.rows)
        begins = [0, *torch.tensor(rooms).cumsum(0).tolist()]
        self.used = torch.cat([torch.arange(b, b + n) for b, n in zip(begins, self.counts, strict=False)]).to(device)
        self.total = begins[-1]
        given, made = (p.inner, p.width) if p.op != "dgrad" else (p.width, p.inner)
        self.x, self.dy = self._rows(given, g), self._rows(made, g) if p.op == "wgrad" else None
        self.w = torch.randn(p.experts, p.width, p.inner, device=device, generator=g).mul_(p.inner**-0.5).bfloat16()
        if p.format == "fp8":
            self.codes = quantise(torch.nan_to_num(self.x), self.where)
            self.weights = quantise_weights(self.w, across=p.op == "dgrad")
        if p.op == "pair":
            down = torch.randn(p.experts, p.inner, p.width // 2, device=device, generator=g).mul_((p.width // 2) ** -0.5)
            self.down = quantise_weights(down.bfloat16())

    def _rows(self, width: int, g: torch.Generator) -> torch.Tensor:
        """NaN where no row is, but for what adds rows up, whose padding is zero."""
        fill = 0.0 if self.p.op == "wgrad" else torch.nan
        rows = torch.full((self.total, width), fill, device=self.used.device, dtype=torch.bfloat16)
        rows[self.used] = torch.randn(len(self.used), width, device=self.used.device, generator=g).bfloat16()
        return rows

    def run(self, backend: Any) -> torch.Tensor:
        p = self.p
        if p.op == "pair":
            both = backend if isinstance(backend, TritonPair) else Apart(backend.name)
            return both.through(self.codes, self.weights, self.down, self.where, torch.bfloat16)
        if p.format == "fp8":
            return backend.product(self.codes, self.weights, self.where, p.op == "dgrad", torch.bfloat16)
        if p.op == "wgrad":
            out = torch.empty_like(self.w)
            backend.wgrad(self.dy, self.x, self.where, out, False)
            return out
        return (backend.forward if p.op == "forward" else backend.dgrad)(self.x, self.w, self.where)

    def told(self, result: torch.Tensor) -> torch.Tensor:
        """Returns the part of a result that is defined."""
        return result if self.p.op == "wgrad" else result[self.used]

    def backends(self, only: list[str] | None) -> Iterator[Any]:
        found: list[Any]
        if self.p.format == "fp8":
            found = [each for each in scaled_backends() if not each.mx and self._takes(each)]
        else:
            found = [each for each in backends() if each.takes(self.x.device, torch.bfloat16)]
        return (each for each in found if only is None or each.name in only)

    def _takes(self, backend: ScaledBackend) -> bool:
        if isinstance(backend, TritonPair):
            return self.p.op == "pair" and backend.takes_both(self.codes, self.weights, self.down, self.where)
        return all(backend.takes(w[0], self.where) for w in (self.weights, *((self.down,) if self.p.op == "pair" else ())))


def counts(p: Problem) -> list[int]:
    """Rows of each expert."""
    if p.spread == "even":
        return [p.rows] * p.experts
    parts = torch.tensor([1 / (1 + e) for e in range(p.experts)])
    shares = (parts / parts.sum() * p.experts * p.rows).round().long().tolist()
    return [max(1, n) for n in shares]


@dataclass
class Call:
    """The timed call, or a graph that holds it."""

    call: Callable[[], Any]
    waits: bool = False
    """True if the host waits for the device, so that no graph can hold it."""
    graph: torch.cuda.CUDAGraph | None = None
    result: Any = None
    """Result of a replay. Its memory is the graph's."""

    def capture(self) -> None:
        """After calls that have compiled and chosen what there is to compile and to choose."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self.call()

    def __call__(self) -> Any:
        if self.graph is None:
            return self.call()
        self.graph.replay()
        return self.result


class Timer:
    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self._cache = torch.empty(CACHE if device.type == "cuda" else 1, dtype=torch.uint8, device=device)

    def ready(self, calls: dict[str, Call]) -> None:
        """Calls each, and captures it where that is possible."""
        for call in calls.values():
            for _ in range(2):
                call()
            if self.device.type == "cuda" and not call.waits:
                call.capture()

    def figures(self, calls: dict[str, Call]) -> dict[str, float]:
        """Microseconds of each, in turns."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name, call in calls.items():
                times[name].append(self._once(call))
        return {name: statistics.median(took) for name, took in times.items()}

    def host(self, calls: dict[str, Call]) -> dict[str, float]:
        """Microseconds that a call takes of the host, of those that do not wait."""
        if self.device.type != "cuda":
            return {}
        return {name: self._host(call.call) for name, call in calls.items() if not call.waits}

    def _host(self, call: Callable[[], Any]) -> float:
        times = []
        for _ in range(max(self.rounds, HOST_CALLS)):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - begun))
        return statistics.median(times)

    def _once(self, call: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            begun = time.perf_counter()
            call()
            return 1e6 * (time.perf_counter() - begun)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self._cache.fill_(1)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return 1000 * float(begin.elapsed_time(end))


def measured(p: Problem, timer: Timer, seed: int, only: list[str] | None) -> Point:
    operands = Operands(p, timer.device, seed)
    wanted = operands.told(operands.run(ScaledLoop() if p.format == "fp8" else Loop())).float()
    calls = {backend.name: Call(partial(operands.run, backend), backend.waits) for backend in operands.backends(only)}

    def check() -> None:
        for name, call in calls.items():
            error = float((operands.told(call()).float() - wanted).norm() / wanted.norm())
            if not error <= LIMITS["pair" if p.op == "pair" else p.format]:
                how = "in a graph " if call.graph else ""
                raise Error(f"bench/grouped.py: {name} {how}is wrong by {error:.4f} (seed {seed}): {p}")

    check()
    timer.ready(calls)
    check()
    return Point(p, timer.figures(calls), timer.host(calls), len(operands.used))


@contextlib.contextmanager
def supergroups(height: int | None) -> Iterator[None]:
    """While this lasts, our kernels take `height` tiles of rows before the next column. None: their own choice."""
    if height is None:
        yield
        return
    before = rows, codes, weights = tiles.shape_of_rows, tiles.shape_of_codes, tiles.SHAPE_OF_WEIGHTS
    tiles.shape_of_rows = lambda *size: replace(rows(*size), group=height)
    tiles.shape_of_codes = lambda *size: replace(codes(*size), group=height)
    tiles.SHAPE_OF_WEIGHTS = replace(weights, group=height)
    try:
        yield
    finally:
        tiles.shape_of_rows, tiles.shape_of_codes, tiles.SHAPE_OF_WEIGHTS = before


def passes(timer: Timer, rows: int, width: int) -> list[dict[str, Any]]:
    """The kernels between the products, beside a copy of the same bytes: those of a forward pass, then what training adds."""
    device = timer.device
    where = Segments(torch.tensor([0, rows], dtype=torch.int32, device=device))
    h = torch.randn(rows, 2 * width, device=device).bfloat16()
    x, codes = h[:, :width].contiguous(), torch.randint(0, 120, (rows, width), dtype=torch.uint8, device=device)
    mx = codes.view(torch.float8_e4m3fn), torch.randint(118, 134, (rows, width // 32), dtype=torch.uint8, device=device)
    of_rows, of_weights = torch.rand(rows, device=device), h[None]  # the same number of weights: blocks do not differ by owner
    quantised = quantise(x, where)
    one, scales, squares = rows * width, rows * width // 128 * 4, -(-rows // 128) * (2 * width // 128) * 4
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "swiglu": (lambda: swiglu(h, where), one * 6),
        "swiglu + quantise": (lambda: swiglu_quantise(h, where), one * 5 + scales),
        "quantise": (lambda: quantise(x, where), one * 3 + scales),
        "MXFP8 to 1x128": (lambda: rescale_mx(*mx, where), one * 2 + one // 32 + scales),
        "swiglu, backward": (lambda: swiglu_backward(h, x, of_rows, where), one * 12 + rows * 8),
        "quantise weights": (lambda: quantise_weights(of_weights), one * 6 + squares),
        "quantise weights, across": (lambda: quantise_weights(of_weights, across=True), one * 6 + squares),
        "dequantise": (lambda: dequantise(*quantised, torch.bfloat16, where), one * 3 + scales),
    }
    found = []
    for name, (call, moved) in calls.items():
        source, target = (torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
        both = {"ours": Call(call), "copy": Call(partial(target.copy_, source))}
        timer.ready(both)
        us, host_us = timer.figures(both), timer.host(both)
        found.append({"kernel": name, "rows": rows, "width": width, "bytes": moved, **us, "host_us": host_us})
    return found


def tables(points: list[Point], between: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for point in points for name in point.us))
    others = [name for name in names if name != "triton"]
    on_host = list(dict.fromkeys(name for point in points for name in point.host_us))
    head = [*(f"{n}, us" for n in names), "TFLOP/s", *(f"{n}/triton" for n in others), *(f"host: {n}, us" for n in on_host)]
    cells = [["product", "k x n", "experts", "rows", "spread", *head]]
    for point in points:
        p = point.problem
        ours = point.us.get("triton")
        cells.append([
            f"{p.format} {p.op}", f"{p.inner}x{p.width}", str(p.experts), str(p.rows), p.spread,
            *(f"{point.us[n]:.1f}" if n in point.us else "" for n in names), f"{point.tflops('triton'):.0f}" if ours else "",
            *(f"{point.us[n] / ours:.2f}" if ours and n in point.us else "" for n in others),
            *(f"{point.host_us[n]:.0f}" if n in point.host_us else "" for n in on_host),
        ])  # fmt: skip
    kernels = [["kernel", "rows x width", "us", "a copy, us", "copy/ours", "host, us", "host: a copy, us"]]
    for b in between:
        us = f"{b['ours']:.1f}", f"{b['copy']:.1f}", f"{b['copy'] / b['ours']:.2f}"
        host = (f"{b['host_us'][name]:.0f}" if b["host_us"] else "" for name in ("ours", "copy"))
        kernels.append([b["kernel"], f"{b['rows']}x{b['width']}", *us, *host])
    return "\n".join([*markdown(cells), "", *(markdown(kernels) if between else [])])


def plot(of: dict[str, Any], path: str) -> None:
    """How many times longer each backend takes than ours, by rows."""
    plt = pyplot()
    kinds = list(dict.fromkeys((p["problem"]["format"], p["problem"]["op"]) for p in of["points"]))
    figure, axes = plt.subplots(1, len(kinds), figsize=(4.2 * len(kinds), 4.4), sharey=True, squeeze=False)
    for axis, (precision, op) in zip(axes[0], kinds, strict=True):
        points = [
            p for p in of["points"] if (p["problem"]["format"], p["problem"]["op"]) == (precision, op) and "triton" in p["us"]
        ]
        for i, name in enumerate(n for n in dict.fromkeys(n for p in points for n in p["us"]) if n != "triton"):
            known = [(p["problem"]["rows"], p["us"][name] / p["us"]["triton"]) for p in points if name in p["us"]]
            axis.plot(*zip(*known, strict=True), "o", alpha=0.6, color=f"C{i}", label=name)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=f"{precision} {op}", xscale="log", yscale="log", xlabel="rows an expert")
        axis.grid(True, alpha=0.3)
        if points:
            axis.legend(frameon=False)
    axes[0][0].set_ylabel("time beside our Triton kernel's")
    figure.suptitle(f"{of['device']}; pplx_comm {of['version']}, {of['date']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    p = argparse.ArgumentParser(prog="bench/grouped.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(cpu)")
    p.add_argument("--formats", type=words, default=list(FORMATS), help="bf16, fp8 (both)")
    p.add_argument(
        "--ops", type=words, default=list(OPS), help="forward, dgrad, wgrad, pair (all; no wgrad of fp8, no pair of bf16)"
    )
    p.add_argument("--shapes", type=words, default=list(SHAPES), metavar="KxN,KxN", help=f"({','.join(SHAPES)})")
    p.add_argument("--experts", type=numbers, default=[8, 32], metavar="N,N", help="on this device (8,32)")
    p.add_argument(
        "--rows", type=numbers, default=[16, 64, 256, 1024, 4096], metavar="N,N", help="of an expert (16,64,256,1024,4096)"
    )
    p.add_argument("--spreads", type=words, default=list(SPREADS), help="of rows among experts: even, zipf (both)")
    p.add_argument(
        "--most-rows", type=int, default=1 << 17, metavar="N", help="of all experts together; larger points are left out (131072)"
    )
    p.add_argument("--only", type=words, metavar="NAME,NAME", help="some of the backends (all that are here)")
    p.add_argument(
        "--between", type=numbers, default=[32768], metavar="N,N", help="rows for the kernels between the products; 0: none (32768)"
    )
    p.add_argument(
        "--group", type=positive, metavar="N", help="height of our kernels' supergroups, in tiles (what they choose); 1: none"
    )
    p.add_argument("--rounds", type=int, default=15, help="of which the median is taken (15)")
    p.add_argument("--seed", type=int, default=1, help="(1)")
    p.add_argument("--json", metavar="FILE")
    p.add_argument("--plot", metavar="FILE.png", help="needs matplotlib")
    return p


def problems(args: argparse.Namespace) -> Iterator[Problem]:
    for precision in args.formats:
        for op in args.ops:
            if (precision, op) in (("fp8", "wgrad"), ("bf16", "pair")):
                continue  # gradients of weights are products of bfloat16
            for shape in args.shapes:
                if op == "pair" and SHAPES.get(shape, "").endswith("second"):
                    continue
                inner, width = map(int, shape.split("x"))
                most = PADDED_UP_TO if op == "pair" else args.most_rows
                for experts in args.experts:
                    for rows in (n for n in args.rows if n * experts <= args.most_rows and n <= most):
                        for spread in args.spreads:
                            yield Problem(op, precision, inner, width, experts, rows, spread)


def main() -> int:
    args = parser().parse_args()
    for given, known in ((args.formats, FORMATS), (args.ops, OPS), (args.spreads, SPREADS)):
        if unknown := set(given) - set(known):
            parser().error(f"{', '.join(sorted(unknown))}: there are {', '.join(known)}")
    device = torch.device(args.device)
    timer = Timer(device, args.rounds)
    points = []
    with supergroups(args.group):
        for problem in problems(args):
            points.append(measured(problem, timer, args.seed, args.only))
            took = ", ".join(f"{name} {us:.1f} us" for name, us in points[-1].us.items())
            print(f"{problem}: {took}", file=sys.stderr, flush=True)
    between = [each for rows in args.between if rows for each in passes(timer, rows, 2048)]
    print(tables(points, between))
    name = torch.cuda.get_device_name() if device.type == "cuda" else machine()["cpu"]
    record = {
        "version": __version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "device": name,
        "supergroup": args.group,
        "machine": machine(),
        "versions": versions(),
        "points": [asdict(point) for point in points],
        "between": between,
    }
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    if args.plot:
        plot(record, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
