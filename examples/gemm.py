"""Tries the layout, wire and scales that each grouped GEMM takes: mpirun -n 2 python examples/gemm.py --device cuda

Tokens are dispatched, every expert multiplies its rows with its weights, and combine brings the results back. The GEMM reads
what dispatch wrote, with no copy between. docs/gemm.md says why each wants what it gets.

The end is compared with float32 arithmetic on the tokens as they were: what differs is what the formats round. Magnitudes vary
from block to block, so that a scale in the wrong place shows. One expert gets every token, another gets none.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is built is found without being installed

import pplx_comm as pc

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

for cache in ("DG_JIT_CACHE_DIR", "TRITON_CACHE_DIR"):  # home may be read-only
    os.environ.setdefault(cache, str(Path(tempfile.gettempdir(), f"pplx_comm-gemm-{os.getuid()}", cache)))

BLOCK = 128
"""Elements of a row that share a scale on wire="fp8"; of the weights, rows and columns."""
CALLS = 20
"""That are timed together."""
BF16_ERROR, FP8_ERROR = 0.01, 0.04
"""The most that formats explain: bfloat16 rounds the sums, and wire="fp8" makes 2.6 % of the tokens."""


class Missing(Exception):
    """Raised if something that a GEMM needs is missing."""


@dataclass
class Layer:
    """A rank's tokens, and the weights of its experts: W_e [hidden, hidden], and the experts compute rows @ W_e^T."""

    device: torch.device
    x: torch.Tensor
    ids: torch.Tensor
    topk_weights: torch.Tensor
    bf16: torch.Tensor
    """[local experts, out, in]"""
    fp8: torch.Tensor
    """float8_e4m3fn, of the same shape."""
    fp8_scale: torch.Tensor
    """float32 [local experts, out / 128, in / 128]"""
    rows_expected: int
    """Rows of an expert, on average."""
    reference: dict[str, torch.Tensor]
    """float32 [tokens, hidden] by weights: "bf16" or "fp8"."""


@dataclass(frozen=True)
class Gemm:
    name: str
    layout: pc.Ragged | pc.Padded
    run: Callable[[pc.Dispatched, Layer], torch.Tensor]
    needs: Callable[[Layer], None] = lambda layer: None
    """Raises Missing."""
    wire: str = "native"
    scale_layout: str = "row"
    weights: str = "bf16"
    """Format of its inputs: "bf16" or "fp8"."""
    in_graph: bool = True
    """True if a CUDA graph can capture it: the host knows nothing of the counts."""

    @property
    def limit(self) -> float:
        return BF16_ERROR if self.wire == "native" else FP8_ERROR


# ---- the GEMMs -----------------------------------------------------------------------------------------------------------


def loop(d: pc.Dispatched, layer: Layer) -> torch.Tensor:
    """A GEMM an expert. The host reads the offsets: it waits for the GPU."""
    out = torch.empty_like(d.x)
    begins = d.offsets.tolist()
    for expert, count in enumerate(d.counts.tolist()):
        rows = slice(begins[expert], begins[expert] + count)
        out[rows] = d.x[rows] @ layer.bf16[expert].T
    return out


def batched(d: pc.Dispatched, layer: Layer) -> torch.Tensor:
    """All rows of Padded, filled or not. The codes become bfloat16 first, since bmm takes no scales."""
    x = d.x.float().unflatten(-1, (-1, BLOCK)) * d.scale[..., None]
    return torch.bmm(x.flatten(-2).to(torch.bfloat16), layer.bf16.mT)


def grouped_mm(d: pc.Dispatched, layer: Layer) -> torch.Tensor:
    """offs: where each expert's rows end. With align=1 that is where the next one's begin."""
    return torch._grouped_mm(d.x, layer.bf16.mT, offs=d.offsets[1:])


def needs_grouped_mm(layer: Layer) -> None:
    if not hasattr(torch, "_grouped_mm"):
        raise Missing(f"torch {torch.__version__} has none")
    ends = torch.ones(len(layer.bf16), dtype=torch.int32, device=layer.device)
    try:
        torch._grouped_mm(layer.x[:1], layer.bf16.mT, offs=ends)
    except NotImplementedError:
        raise Missing(f"torch {torch.__version__} has none for {layer.device.type}") from None


def needs_scaled_grouped_mm(layer: Layer) -> None:
    raise Missing(
        "on compute capability 9.0 it takes a scale per row, which no wire has; on 10.0 those of mxfp8, in an order of its own"
    )


def needs_gpu(layer: Layer) -> None:
    if layer.device.type != "cuda":
        raise Missing("needs a GPU")


def needs_deep_gemm(layer: Layer) -> None:
    needs_gpu(layer)
    if torch.cuda.get_device_capability()[0] != 9:
        raise Missing('tried on compute capability 9.0 only; on 10.0 it wants wire="fp8_ue8m0"')
    try:
        importlib.import_module("deep_gemm")
    except Exception as problem:  # it also looks for nvcc, and loads CUDA's libraries
        raise Missing(f"not installed: {type(problem).__name__}: {problem}") from None


def deep_gemm_masked(d: pc.Dispatched, layer: Layer) -> torch.Tensor:
    """masked_m is d.counts. expected_m decides the tile, 64 or 128 rows; it need not be right."""
    import deep_gemm

    out = torch.empty(d.x.shape, dtype=torch.bfloat16, device=d.x.device)
    weights = (layer.fp8, layer.fp8_scale)
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked((d.x, d.scale), weights, out, d.counts, layer.rows_expected)
    return out


def deep_gemm_contiguous(d: pc.Dispatched, layer: Layer) -> torch.Tensor:
    """m_indices: the expert of each row; -1 behind the last segment, where tiles are skipped."""
    import deep_gemm

    rows = torch.arange(len(d.x), dtype=torch.int32, device=d.x.device)
    expert = torch.searchsorted(d.offsets[1:], rows, right=True, out_int32=True)
    expert = torch.where(expert < len(d.counts), expert, -1).to(torch.int32)
    out = torch.empty(d.x.shape, dtype=torch.bfloat16, device=d.x.device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((d.x, d.scale), (layer.fp8, layer.fp8_scale), out, expert)
    return out


def deep_gemm_psum(d: pc.Dispatched, layer: Layer) -> torch.Tensor:
    """The same kernel told where each expert's rows end; it rounds up to 128 to find the next one's, as Ragged(128) does."""
    import deep_gemm

    out = torch.empty(d.x.shape, dtype=torch.bfloat16, device=d.x.device)
    ends = d.offsets[:-1] + d.counts
    weights = (layer.fp8, layer.fp8_scale)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((d.x, d.scale), weights, out, ends, use_psum_layout=True)
    return out


TILE = 64
"""Rows of a tile of the kernel below, and so the alignment that it needs: then no tile has rows of two experts."""


def kernel_of_tile(
    x, x_scale, w, w_scale, offsets, out,
    experts, row_stride, scale_stride,
    HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """ROWS x SIDE elements of out. SIDE is the weights' block, so that a tile has one scale of theirs at a time."""
    first = tl.program_id(0) * ROWS
    column = tl.program_id(1) * SIDE
    each = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + 1 + each, mask=each < experts, other=2147483647)
    expert = tl.sum((ends <= first).to(tl.int32), axis=0)
    if expert < experts:  # else the tile is behind the last segment
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        columns_here = column + tl.arange(0, SIDE)
        inner = tl.arange(0, SIDE)
        a = x + rows[:, None] * HIDDEN + inner[None, :]
        b = w + (expert.to(tl.int64) * COLUMNS + columns_here)[None, :] * HIDDEN + inner[:, None]
        b_scale = w_scale + (expert * (COLUMNS // SIDE) + column // SIDE) * (HIDDEN // SIDE)
        total = tl.zeros((ROWS, SIDE), dtype=tl.float32)
        for block in range(HIDDEN // SIDE):
            part = tl.dot(tl.load(a), tl.load(b))
            a_scale = tl.load(x_scale + rows * row_stride + block * scale_stride)
            total += part * (a_scale * tl.load(b_scale + block))[:, None]
            a += SIDE
            b += SIDE
        tl.store(out + rows[:, None] * COLUMNS + columns_here[None, :], total.to(tl.bfloat16))


tile_kernel = triton.jit(kernel_of_tile) if triton else None


def needs_triton(layer: Layer) -> None:
    needs_gpu(layer)
    if triton is None:
        raise Missing("not installed: triton")
    if torch.cuda.get_device_capability() < (8, 9):
        raise Missing("needs compute capability 8.9 for float8_e4m3fn")


def triton_tiles(d: pc.Dispatched, layer: Layer) -> torch.Tensor:
    """Written here. Any strides of the scales do; column by column, the threads of a tile read neighbours."""
    rows, hidden = d.x.shape
    experts, columns, _ = layer.fp8.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=d.x.device)
    tile_kernel[(rows // TILE, columns // BLOCK)](
        d.x, d.scale, layer.fp8, layer.fp8_scale, d.offsets, out,
        experts, d.scale.stride(0), d.scale.stride(1),
        HIDDEN=hidden, COLUMNS=columns, EXPERTS=triton.next_power_of_2(experts), ROWS=TILE, SIDE=BLOCK,
    )  # fmt: skip
    return out


FP8_TMA: dict[str, Any] = {"wire": "fp8", "scale_layout": "tma", "weights": "fp8"}
GEMMS = [
    Gemm("torch loop", pc.Ragged(align=1), loop, in_graph=False),
    Gemm("torch.bmm", pc.Padded(), batched, wire="fp8"),
    Gemm("torch._grouped_mm", pc.Ragged(align=1), grouped_mm, needs_grouped_mm),
    Gemm("torch._scaled_grouped_mm", pc.Ragged(align=128), grouped_mm, needs_scaled_grouped_mm, wire="mxfp8"),
    Gemm("DeepGEMM masked", pc.Padded(align=128), deep_gemm_masked, needs_deep_gemm, **FP8_TMA),
    Gemm("DeepGEMM contiguous", pc.Ragged(align=128), deep_gemm_contiguous, needs_deep_gemm, **FP8_TMA),
    Gemm("DeepGEMM psum", pc.Ragged(align=128), deep_gemm_psum, needs_deep_gemm, **FP8_TMA),
    Gemm("Triton tiles", pc.Ragged(align=TILE), triton_tiles, needs_triton, **FP8_TMA),
]


# ---- the layer -----------------------------------------------------------------------------------------------------------


def uneven(*shape: int, seed: int) -> torch.Tensor:
    """Normal numbers whose blocks of 128 differ up to 64 times."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(-3, 4, (*shape[:-1], shape[-1] // BLOCK, 1), generator=generator).float().exp2()
    return (torch.randn(*shape[:-1], shape[-1] // BLOCK, BLOCK, generator=generator) * blocks).flatten(-2)


def quantised(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and a scale for each 128 x 128."""
    blocks = w.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., block, row, block, column]
    scale = blocks.abs().amax((-3, -1), keepdim=True) / 448
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    return codes.flatten(-4, -3).flatten(-2), scale.squeeze(-1).squeeze(-2)


def dequantised(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.float() * scale.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)


def make_layer(comm: pc.Communicator, device: torch.device, arguments: argparse.Namespace) -> Layer:
    tokens, hidden, experts, top_k = arguments.tokens, arguments.hidden, arguments.experts, arguments.top_k
    generator = torch.Generator().manual_seed(arguments.seed + comm.rank)
    likes = torch.rand(tokens, experts, generator=generator)
    likes[:, 0], likes[:, 1] = 2, -1  # expert 0 has every token, expert 1 none
    scores, ids = likes.topk(top_k)
    topk_weights = scores.softmax(-1).to(device)
    x = uneven(tokens, hidden, seed=arguments.seed + 1000 + comm.rank).to(torch.bfloat16).to(device)

    local = range(comm.rank * arguments.experts_per_rank, min((comm.rank + 1) * arguments.experts_per_rank, experts))
    own: list[tuple[torch.Tensor, ...]] = []
    reference = {name: torch.zeros(tokens, hidden, device=device) for name in ("bf16", "fp8")}
    for expert in range(experts):
        whole = uneven(hidden, hidden, seed=arguments.seed + 2000 + expert).to(device) / hidden**0.5
        bf16, (fp8, fp8_scale) = whole.to(torch.bfloat16), quantised(whole)
        if expert in local:
            own.append((bf16, fp8, fp8_scale))
        share = torch.where(ids.to(device) == expert, topk_weights, 0).sum(1, keepdim=True)
        for name, w in (("bf16", bf16), ("fp8", dequantised(fp8, fp8_scale))):
            reference[name] += share * (x.float() @ w.float().T)
    bf16s, fp8s, scales = (torch.stack(parts) for parts in zip(*own, strict=True))
    rows_expected = max(1, comm.world_size * tokens * top_k // experts)
    return Layer(device, x, ids.to(device), topk_weights, bf16s, fp8s, scales, rows_expected, reference)


# ---- trying them ---------------------------------------------------------------------------------------------------------


def synchronize(layer: Layer) -> None:
    if layer.device.type == "cuda":
        torch.cuda.synchronize()


def microseconds(gemm: Gemm, d: pc.Dispatched, layer: Layer) -> float:
    """Time of one call, from several back to back. The weights may come from the L2 cache."""
    if layer.device.type != "cuda":
        begin = time.perf_counter()
        gemm.run(d, layer)
        return 1e6 * (time.perf_counter() - begin)

    def calls() -> None:
        for _ in range(CALLS):
            gemm.run(d, layer)

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    again: Callable[[], None] = calls
    if gemm.in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            calls()
        again = graph.replay
    again()
    begin.record()
    again()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / CALLS


def said(problem: BaseException) -> str:
    return " ".join(f"{type(problem).__name__}: {problem}".split())[:300]


def attempt(comm: pc.Communicator, gemm: Gemm, layer: Layer, arguments: argparse.Namespace) -> tuple[bool, str]:
    """Returns success, and the text to print. Collective: where one rank fails, the others must not wait for it."""
    why = ""
    try:
        gemm.needs(layer)
    except Missing as missing:
        why = str(missing)
    if not comm.agree(not why):
        return True, why or "another rank lacks it"

    with pc.AllToAll(
        comm, num_experts=arguments.experts, top_k=arguments.top_k, hidden=arguments.hidden,
        max_tokens_per_rank=arguments.tokens, layout=gemm.layout, wire=gemm.wire, scale_layout=gemm.scale_layout,
        device=layer.device,
    ) as a2a:  # fmt: skip
        d = a2a.dispatch(layer.x, layer.ids, layer.topk_weights)
        with comm.busy(f"compiling {gemm.name}"):
            try:
                out = gemm.run(d, layer)
                synchronize(layer)
            except Exception as problem:  # peers need this rank's combine all the same
                why = said(problem)
                out = torch.zeros(d.x.shape, dtype=torch.bfloat16, device=layer.device)
        y = a2a.combine(out, d)
        wanted = layer.reference[gemm.weights]
        error = float((y.float() - wanted).norm() / wanted.norm())
        right = not why and error < gemm.limit
        if not comm.agree(right):
            return False, why or (f"WRONG: error {error:.4f}" if not right else "wrong or failed on another rank")
        with comm.busy(f"timing {gemm.name}"):
            try:
                took = f"{microseconds(gemm, d, layer):.1f}"
            except Exception as problem:  # the result was right
                took = f"not timed: {said(problem)}"
        comm.barrier()
        return True, f"{error:.4f} | {took}"


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=128, help="per rank (128)")
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 128 (2048)")
    parser.add_argument("--experts", type=int, default=16, help="of all ranks together (16)")
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--only", nargs="+", metavar="GEMM", help="those whose names contain one of these")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one GEMM, compiling included (180)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.hidden % BLOCK or not 1 <= arguments.top_k < arguments.experts:
        parser.error("--hidden must be a multiple of 128, and --top-k below --experts")

    comm = pc.Communicator.from_env()
    arguments.experts_per_rank = -(-arguments.experts // comm.world_size)
    if (comm.world_size - 1) * arguments.experts_per_rank >= arguments.experts:
        parser.error("every rank must have an expert")
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(comm.host_rank % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    layer = make_layer(comm, device, arguments)
    comm.barrier()

    def say(line: str) -> None:
        if comm.rank == 0:
            print(line, flush=True)

    what = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    say(f"{comm.world_size} x {what}, torch {torch.__version__}, seed {arguments.seed}: {arguments.tokens} tokens per rank,")
    say(f"hidden {arguments.hidden}, {arguments.experts} experts, top-{arguments.top_k}\n")
    say("| GEMM | layout | wire | scale layout | relative error | us |\n|---|---|---|---|---|---|")
    fine = True
    for gemm in GEMMS:
        if arguments.only and not any(name in gemm.name for name in arguments.only):
            continue
        faulthandler.dump_traceback_later(arguments.limit, exit=True)  # a kernel that hangs cannot be interrupted otherwise
        good, result = attempt(comm, gemm, layer, arguments)
        faulthandler.cancel_dump_traceback_later()
        fine = fine and good
        align = f"align={gemm.layout.align}"
        scales = gemm.scale_layout if gemm.wire != "native" else "none"
        say(f"| {gemm.name} | {type(gemm.layout).__name__}({align}) | {gemm.wire} | {scales} | {result} |")
        if not good:
            print(f"rank {comm.rank}: {gemm.name}: {result}", file=sys.stderr, flush=True)
    comm.close()
    return fine


if __name__ == "__main__":
    raise SystemExit(not main())
