"""The Triton kernels of pplx_comm.moe in Triton's interpreter, beside torch. A rank is a process whose environment asks for that.

Products are tried in float16: of bfloat16 the interpreter multiplies the bits.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import reference
import torch

from pplx_comm.moe import quantise, swiglu
from pplx_comm.moe.grouped import tiles, triton_mm
from pplx_comm.moe.grouped.loop import Loop, ScaledLoop
from pplx_comm.moe.grouped.scaled import scaled_experts
from pplx_comm.moe.grouped.triton_mx import TritonMx
from pplx_comm.moe.grouped.triton_scaled import TritonScaledMm
from pplx_comm.moe.kernels import launch
from pplx_comm.moe.ran import Ran
from pplx_comm.moe.segments import Segments

USED, ROWS = 272, 300


def segments(*sizes: int) -> Segments:
    return Segments(torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32))


SPREADS = {"zipf": segments(192, 64, 16, 0, 0), "hot": segments(0, 0, 0, USED, 0), "even": segments(48, 64, 48, 64, 48)}


def normal(seed: int, *shape: int) -> torch.Tensor:
    t = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    if shape[0] == ROWS:
        t[USED:] = torch.nan  # rows behind the last segment are not read
    return t


def error(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    seen, wanted = seen.double(), wanted.double()
    found = float((seen - wanted).norm() / wanted.norm())
    return math.inf if math.isnan(found) else found  # max() passes over NaN


@contextlib.contextmanager
def patched(module: Any, changes: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in changes}
    for name, value in changes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def products(me: Any, spread: str, tma: bool, small: bool, seed: int) -> dict[str, float]:
    """Forward and both gradients, on tiles of the usual size or on small ones, of which there are many."""
    tile, of_weights = tiles.Shape(32, 64, 32, 2, 4, 2, flat=True, programs=2), tiles.Shape(64, 32, 32, 2, 4, 2)
    with patched(tiles, {"shape_of_rows": lambda *_: tile, "SHAPE_OF_WEIGHTS": of_weights} if small else {}):
        return _products(spread, tma, seed)


def _products(spread: str, tma: bool, seed: int) -> dict[str, float]:
    where, kernel, loop = SPREADS[spread], triton_mm.TritonGroupedMm(tma), Loop()
    height, width = 160, 72
    x, dy, w = normal(seed, ROWS, width).half(), normal(seed, ROWS, height).half(), normal(seed, 5, height, width).half()
    found = {
        "forward": error(kernel.forward(x, w, where)[:USED], loop.forward(x, w, where)[:USED]),
        "dgrad": error(kernel.dgrad(dy, w, where)[:USED], loop.dgrad(dy, w, where)[:USED]),
    }
    for accumulate in (False, True):
        seen, wanted = (torch.full(w.shape, 2.0) for _ in range(2))
        kernel.wgrad(dy, x, where, seen, accumulate)
        loop.wgrad(dy, x, where, wanted, accumulate)
        found[f"wgrad {accumulate}"] = error(seen, wanted)
    return found


def products_of_codes(me: Any, spread: str, tma: bool, small: bool, seed: int) -> dict[str, float]:
    """On tiles of the usual size or on small ones, of which two share a block of the weights."""
    tile = tiles.Shape(32, 64, 128, 2, 4, 2, flat=True, programs=2)
    with patched(tiles, {"shape_of_codes": lambda *_: tile} if small else {}):
        return _products_of_codes(spread, tma, seed)


def _products_of_codes(spread: str, tma: bool, seed: int) -> dict[str, float]:
    where, kernel, loop = SPREADS[spread], TritonScaledMm(tma), ScaledLoop()
    height, width = 192, 320
    w = quantise.quantise_weights(normal(seed, 5, height, width))
    found = {}
    for transposed, inner in ((False, width), (True, height)):
        codes, scale = quantise.quantise(normal(seed, ROWS, inner))
        for layout in ("row", "tma"):
            if layout == "tma":
                scale = scale.mT.contiguous().mT
            seen, wanted = (each.product((codes, scale), w, where, transposed, torch.float32) for each in (kernel, loop))
            found[f"{transposed} {layout}"] = error(seen[:USED], wanted[:USED])
    return found


def same_codes(seen: torch.Tensor, wanted: torch.Tensor) -> bool:
    """But where the interpreter rounds in its own way: ties, what carries into the exponent, and subnormal numbers."""
    a, b = seen[:USED].float(), wanted[:USED].float()
    sure = (torch.frexp(b)[0].abs() != 0.5) & (b.abs() >= 2.0**-6)
    off = (a - b).abs()[sure]
    return float((off > 0).float().mean()) < 0.01 and bool((off <= b.abs()[sure] / 8).all()) and float(sure.float().mean()) > 0.2


def same(seen: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(seen[:USED].nan_to_num(-1), wanted[:USED].nan_to_num(-1))


def formats(me: Any, seed: int) -> dict[str, bool]:
    where, found = SPREADS["zipf"], {}
    for width in (128, 320):
        x = normal(seed, ROWS, width) * normal(seed, ROWS, 1).abs().log2().round().mul(8).exp2()
        x[3], x[4, :128], x[5, 9] = 0, 0, torch.inf
        (codes, scale), (wanted, wanted_scale) = launch.quantise(x, where), quantise.quantise(x)
        found[f"quantise {width}"] = same(scale, wanted_scale) and same_codes(codes, wanted)
        clean = wanted.clone()
        clean.view(torch.uint8)[5] = 0  # the interpreter knows no NaN in e4m3
        seen = launch.dequantise(clean, wanted_scale, torch.float32, where)
        found[f"dequantise {width}"] = same_numbers(seen, quantise.dequantise(clean, wanted_scale))
        x = normal(seed, ROWS, width) * torch.tensor([1.0, 2.0**-9, 2.0**5, 2.0**-30]).repeat(width)[:width]
        x[USED:], x[3, :96], x[4] = 1, 0, 0
        mx = reference.quantise(x, "mxfp8")
        (codes, scale, became), (wanted, wanted_scale, as_wanted) = (
            launch.rescale_mx(*mx, where),
            quantise.rescale_mx(*(t[:USED] for t in mx)),
        )
        found[f"rescale {width}"] = same(scale, wanted_scale) and same_codes(codes, wanted) and int(became) == int(as_wanted) > 0
        seen = launch.dequantise(*mx, torch.float32, where)
        found[f"e8m0 {width}"] = same_numbers(seen, quantise.dequantise(*mx))
    return found


def padded(me: Any, seed: int) -> dict[str, bool]:
    """Rows with a room for each expert, of which one has none and one more than there is room for: all that takes them."""
    room, width, height = 24, 320, 160
    where = Segments(torch.tensor([3, 0, room + 5, 17, 16], dtype=torch.int32), room, 8)
    there = torch.arange(5 * room) % room < where.where.repeat_interleave(room)

    def rows(n: int) -> torch.Tensor:
        t = torch.randn(5 * room, n, generator=torch.Generator().manual_seed(seed + n))
        return t.masked_fill(~there[:, None], torch.nan).half()

    def right(seen: torch.Tensor, wanted: torch.Tensor) -> bool:
        return error(seen.flatten(0, -2)[there], wanted.flatten(0, -2)[there]) < 1e-3

    def codes_right(seen: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> bool:
        whole = [t[there].repeat(USED, 1)[:USED] for t in (seen[0].float(), wanted[0].float())]
        return right(seen[1], wanted[1]) and same_codes(*whole)

    x, w = rows(width), normal(seed, 5, height, width).half()
    found = {
        f"product {tma}": right(triton_mm.TritonGroupedMm(tma).forward(x, w, where), Loop().forward(x, w, where))
        for tma in (False, True)
    }
    h, clean = rows(2 * width), x.masked_fill(~there[:, None], 1)
    found["swiglu"] = right(launch.swiglu(h, where), swiglu.swiglu(h))
    codes, scale = launch.quantise(x, where)
    assert scale.shape == (5, room, 3) and scale.stride(-2) == 1
    found["quantise"] = codes_right((codes, scale), quantise.quantise(x))
    found["activated"] = codes_right(launch.swiglu_quantise(h, where), quantise.quantise(swiglu.swiglu(h)))
    numbers = quantise.dequantise(codes, scale)
    found["dequantise"] = right(
        launch.dequantise(codes, scale, torch.float32, where), torch.where(codes.float().abs() < 2.0**-6, 0, numbers)
    )
    mx = reference.quantise(clean.float(), "mxfp8")
    by_expert = mx[1].unflatten(0, (5, room))
    found["rescale"] = codes_right(launch.rescale_mx(mx[0], by_expert, where)[:2], quantise.rescale_mx(*mx)[:2])
    of_weights = quantise.quantise_weights(w.float())
    for tma in (False, True):
        pair = (
            each.product((codes, scale), of_weights, where, False, torch.float32) for each in (TritonScaledMm(tma), ScaledLoop())
        )
        found[f"product of codes {tma}"] = right(*pair)
    return found


PAIRS = {
    "as it is": {},
    "small tiles": {"rows": 16, "side": 64, "masked": True},
    "one program": {"rows": 32, "programs": 1, "masked": False},
}
"""Differences from the usual shape. With tiles of 16 rows an expert has several. The first two go by pointers, the last by
descriptors."""


def padded_pair(*counts: int) -> Segments:
    return Segments(torch.tensor(counts, dtype=torch.int32), 48, 16)


PAIR_SEGMENTS = {
    "ragged": (replace(segments(16, 0, 48, 80, 0), expected=16), replace(segments(0, 0, 0, 0, 0), expected=1)),
    "padded": (padded_pair(3, 0, 53, 17, 16), padded_pair(0, 0, 0, 0, 1), padded_pair(0, 0, 0, 0, 0)),
}
"""Small tiles, which are many, run only the first case."""


def operands_of_pair(where: Segments, seed: int, width: int = 256) -> tuple[Any, Any, Any, torch.Tensor]:
    """Codes of rows, NaN where none are, and of both weights; and which rows there are."""
    rows, hidden = where.experts * where.room or 160, 192
    there = torch.zeros(rows, dtype=torch.bool)
    for _, some in where.slices():
        there[some] = True
    g = torch.Generator().manual_seed(seed)
    codes, scale = quantise.quantise(torch.randn(rows, hidden, generator=g))
    codes.view(torch.uint8)[~there], scale[~there] = 0x7F, torch.nan
    scale = scale.unflatten(0, (-1, where.room)) if where.room else scale
    gate_up, down = (torch.randn(where.experts, *shape, generator=g) * 0.1 for shape in ((2 * width, hidden), (hidden, width)))
    return (codes, scale), quantise.quantise_weights(gate_up), quantise.quantise_weights(down), there


def pair(me: Any, layout: str, tma: bool, seed: int) -> dict[str, bool]:
    """The bits of three launches, whatever the tiles are, and words of zeros behind it."""
    from pplx_comm.moe.grouped import pair as of_pair
    from pplx_comm.moe.grouped.products import Apart

    found = {}
    for name, changes in list(PAIRS.items())[tma : 2 + tma]:
        shape = replace(tiles.SHAPE_OF_PAIR, **changes)
        # The tiles have the same number of rows: the interpreter multiplies by numpy, which adds up tiles of other sizes in other
        # orders.
        apart = {"shape_of_codes": lambda *_, s=shape: replace(s, programs=1)}
        with patched(tiles, {"SHAPE_OF_PAIR": shape, **apart}):
            for number, where in enumerate(PAIR_SEGMENTS[layout] if name != "small tiles" else PAIR_SEGMENTS[layout][:1]):
                x, gate_up, down, there = operands_of_pair(where, seed + number)
                both = of_pair.TritonPair(tma)
                assert both.takes_both(x, gate_up, down, where)
                seen = both.through(x, gate_up, down, where, torch.float16)
                wanted = Apart("triton").through(x, gate_up, down, where, torch.float16)
                found[f"{name} {number}"] = torch.equal(seen[there], wanted[there]) and bool(wanted[there].isfinite().all())
        (words,) = of_pair._words._left.values()
        found[f"{name} words"] = len(words) > of_pair.kernels("pair").WRITTEN.value and not bool(words.any())
        of_pair._words._left.clear()
    by_name = (("pair", 256, "pair"), ("auto", 256, "loop"), ("pair", 192, "triton")) if tma and layout == "padded" else ()
    for number, (backend, width, ran_as) in enumerate(by_name):
        x, gate_up, down, there = operands_of_pair(PAIR_SEGMENTS[layout][0], seed, width)
        ran = Ran(layout)
        with ran.noted():
            y = scaled_experts(x, gate_up, down, PAIR_SEGMENTS[layout][0], dtype=torch.float16, backend=backend)
        names = [f"forward 192x{2 * width}", f"forward {width}x192"]
        found[f"named {number}"] = ran.products == dict.fromkeys(names, ran_as) and bool(y[there].isfinite().all())
    return found


TURNS = 0.02, 0.2
"""Seconds that a block of a product takes each process, and its quantisation, so that the first one waits for the second."""


def pair_of_processes(me: Any, path: str, seed: int) -> dict[str, bool]:
    """Two processes with one program each share a launch, and its memory, which is empty until one of them writes it."""
    from triton.runtime.interpreter import interpreter_builder

    from pplx_comm.moe.grouped import pair as of_pair
    from pplx_comm.moe.grouped.products import Apart
    from pplx_comm.moe.kernels import pair as kernels

    where, shape = padded_pair(3, 0, 20), replace(tiles.SHAPE_OF_PAIR, rows=32)
    x, gate_up, down, there = operands_of_pair(where, seed)
    (rows, hidden), width = x[0].shape, down[0].shape[2]
    sizes = {"h": 2 * width * rows * 2, "codes": width * rows, "scales": width // 128 * rows * 4, "out": rows * hidden * 2}
    with open(path, "a+b") as shared:
        shared.truncate((1 << 12) + sum(sizes.values()))
    words, *rest = torch.from_file(path, True, (1 << 12) + sum(sizes.values()), dtype=torch.uint8).split([1 << 12, *sizes.values()])
    words, come = words.view(torch.int32)[:1000], words.view(torch.int32)[1000:]
    h, codes, scale, out = (t.view(d) for t, d in zip(rest, (torch.half, torch.uint8, torch.float32, torch.half), strict=True))
    scale = scale.view(where.experts, width // 128, where.room).mT
    memory = of_pair.Memory(h.view(rows, -1), (codes.view(rows, -1), scale), out.view(rows, -1), words)
    with patched(tiles, {"SHAPE_OF_PAIR": shape, "shape_of_codes": lambda *_: shape}):
        wanted = Apart("triton").through(x, gate_up, down, where, torch.float16)
        found = {}

        def slowly(call: Any) -> Any:
            def later(*operands: Any) -> Any:
                time.sleep(TURNS[me.rank])
                return call(*operands)

            return later

        multiply, quantise_values = slowly(interpreter_builder.create_dot), slowly(kernels.codes_and_scales)

        def together(point: int) -> None:
            come[me.rank] = point
            while int(come[1 - me.rank]) < point:
                time.sleep(1e-3)

        for number in range(2):
            if me.rank == 0:
                codes.fill_(0x7F)
                for t in (h, memory.activated[1], out):
                    t.fill_(torch.nan)
            together(3 * number + 1)
            with (
                patched(interpreter_builder, {"create_dot": multiply}),
                patched(kernels, {"codes_and_scales": quantise_values}),
            ):
                of_pair.launch(x, gate_up, down, where, memory, 1, others=1)
            together(3 * number + 2)
            found[f"same {number}"] = torch.equal(memory.out[there], wanted[there])
            found[f"others {number}"] = bool(memory.out[~there].isnan().all())
            found[f"words {number}"] = not bool(words.any())
            together(3 * number + 3)
    return found


def dot_scaled(a: Any, a_scale: Any, a_format: str, b: Any, b_scale: Any, b_format: str, sums: Any) -> Any:
    """Computes tl.dot_scaled, which the interpreter does not know."""
    import triton.language as tl

    def numbers(codes: Any, scale: Any) -> Any:
        by_block = tl.reshape(codes.to(tl.float32), (codes.shape[0], codes.shape[1] // 32, 32))
        return tl.reshape(by_block * tl.exp2(scale.to(tl.float32) - 127)[:, :, None], codes.shape)

    assert a_format == b_format == "e4m3"
    return sums + tl.dot(numbers(a, a_scale), tl.trans(numbers(tl.trans(b), b_scale)))


def mx(me: Any, seed: int) -> dict[str, bool]:
    """MXFP8 rows as they travel, beside what they mean; and a layer's arithmetic, which leaves the rest to other backends."""
    import triton.language as tl

    from pplx_comm.moe.grouped import products

    tl.dot_scaled = dot_scaled
    found, width, height = {}, 192, 320
    w = quantise.quantise_weights(normal(seed, 5, height, width) * torch.tensor([1.0, 2.0**9, 2.0**-9, 1, 1])[:, None, None])
    room = 64
    padded = Segments(torch.tensor([3, 0, room, 17, 16], dtype=torch.int32), room, 16)
    for name, where, rows in (("ragged", SPREADS["zipf"], ROWS), ("padded", padded, 5 * room)):
        there = torch.cat([torch.arange(rows)[one] for _, one in where.slices()])
        for transposed, inner in ((False, width), (True, height)):
            x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)) * torch.tensor([1.0, 2.0**-6]).repeat(
                inner // 2
            )
            codes, scale = reference.quantise(x, "mxfp8")
            rescaled, one, _ = quantise.rescale_mx(codes, scale)
            for tma in (False, True):
                seen = TritonMx(tma).product((codes, scale), w, where, transposed, torch.float32)
                wanted = ScaledLoop().product((codes, scale), w, where, transposed, torch.float32)
                found[f"{name} {transposed} {tma}"] = error(seen[there], wanted[there]) < 1e-3
            by_name = products.scaled((rescaled, one), w, where, transposed=transposed, dtype=torch.float32, backend="mx")
            found[f"{name} {transposed} others"] = error(by_name[there], wanted[there]) < 1e-3
    found["asked for"] = products.takes_mx(w, padded, "mx") and not products.takes_mx(w, padded, "auto")
    return found


def weights(me: Any, seed: int) -> dict[str, bool]:
    w = normal(seed, 3, 200, 320) * torch.tensor([1.0, 2.0**20, 2.0**-20])[:, None, None]
    w[0, 130, 5] = torch.nan
    codes, scale = launch.quantise_weights(w, False)
    across, same_scale = launch.quantise_weights(w, True)
    interpret = os.environ.pop("TRITON_INTERPRET")
    wanted, wanted_scale = quantise.quantise_weights(w)
    plainly_across = quantise.quantise_weights(w, across=True)[0]
    os.environ["TRITON_INTERPRET"] = interpret
    right = codes.view(torch.uint8)[0, 128:, :128] == 0x7F
    same_scales = torch.equal(scale.nan_to_num(-1), wanted_scale.nan_to_num(-1))
    return {
        "scales": same_scales,
        "nan": bool(right.all()),
        "codes": same_codes(codes[1:].flatten(0, 1), wanted[1:].flatten(0, 1)),
        "across": torch.equal(across.view(torch.uint8), codes.view(torch.uint8))
        and torch.equal(same_scale.view(torch.int32), scale.view(torch.int32)),
        "plainly across": torch.equal(plainly_across.view(torch.uint8), wanted.view(torch.uint8)),
        "as they are read": across.mT.is_contiguous() and plainly_across.mT.is_contiguous(),
    }


def same_numbers(seen: torch.Tensor, wanted: torch.Tensor) -> bool:
    """The interpreter reads subnormal codes as zero."""
    return error(seen[:USED].nan_to_num(0), wanted[:USED].nan_to_num(0)) < 1e-3


def activations(me: Any, seed: int) -> dict[str, float | bool]:
    where, found = SPREADS["even"], {}
    for width in (128, 200):
        h, da, weights = normal(seed, ROWS, 2 * width).half(), normal(seed, ROWS, width).half(), normal(seed, ROWS)
        found[f"forward {width}"] = error(launch.swiglu(h, where)[:USED], swiglu.swiglu(h)[:USED]) < 1e-4
        pairs = zip(launch.swiglu_backward(h, da, weights, where), swiglu.swiglu_backward(h, da, weights), strict=True)
        found[f"backward {width}"] = max(error(a[:USED], b[:USED]) for a, b in pairs) < 1e-4
        (codes, scale), (wanted, wanted_scale) = launch.swiglu_quantise(h, where), quantise.quantise(swiglu.swiglu(h))
        found[f"codes {width}"] = same(scale, wanted_scale) and same_codes(codes, wanted)
    return found


def check_words(name: str, ptx: str, tma: bool) -> None:
    """Checks the instructions that order rows and words."""
    if name == "rows_through_experts":
        for word in ("acq_rel", ".release"):
            just_before = ptx[: ptx.index(word)].splitlines()[-12:]
            stored = [line for line in just_before if "bar.sync" in line or "st.global" in line]
            assert stored and "bar.sync" in stored[-1], f"{word}: all threads have stored"
        acquire = ptx.rindex(".acquire")
        rows = ptx.index("wgmma.mma_async", acquire)
        assert "prefetch.global.L2" in ptx[:acquire] and (not tma or "fence.proxy.async;" in ptx[acquire:rows])


def compiled(me: Any, cache: str) -> dict[str, int]:
    """Tensor core instructions by kernel, of each compiled for compute capability 9.0, and 10.0 for MXFP8, which takes no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pplx_comm.moe.kernels import activation, formats, grouped, mx, scaled
    from pplx_comm.moe.kernels import pair as both

    triton.knobs.cache.dir = cache
    rows: dict[str, Any] = {"ROWS": 16, "BLOCK": 128}
    strides = [f"{of}{name}" for of in ("", "out_", "a_") for name in ("row_stride", "scale_stride", "skew")]
    counts = dict.fromkeys(("experts", "room", "rows", "inner", "width", "height", *strides), "i32")
    counts |= dict.fromkeys(("programs", "hidden"), "i32")
    counts |= dict.fromkeys(("where", "offsets", "words"), "*i32")
    f32, bf16, e4m3, u8 = "*fp32", "*bf16", "*fp8e4nv", "*u8"
    grouped_tiles = {"EXPERTS": 32, "ROWS": 128, "SIDE": 256, "INNER": 64, "GROUP": 8}
    variants: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
        (activation.swiglu_forward, {"h": bf16, "out": u8, "scales": f32}, {**rows, "QUANTISED": True}),
        (
            activation.swiglu_gradients,
            {"h": bf16, "da": bf16, "weights": f32, "dh": bf16, "weighted": bf16, "d_weights": f32},
            rows,
        ),
        (formats.quantise_squares, {"w": f32, "codes": u8, "scales": f32}, {"BLOCK": 128}),
        (formats.quantise_rows, {"x": bf16, "codes": u8, "scales": f32}, rows),
        (formats.numbers_of_rows, {"codes": e4m3, "scales": u8, "out": bf16}, {**rows, "BLOCK": 32, "E8M0": True}),
        (
            formats.rescale_rows,
            {"codes": "*i32", "scales": u8, "out": "*i32", "out_scales": f32, "became_subnormal": "*i64"},
            {"ROWS": 16, "MX": 32, "GROUPS": 4, "ASSEMBLY": True},
        ),
    ]
    for tma in (False, True):

        def of(kind: str, *block: int, tma: bool = tma) -> str:
            return f"tensordesc<{kind}{list(block)}>".replace(" ", "") if tma else f"*{kind}"

        for transposed in (False, True):
            block = (64, 256) if transposed else (256, 64)
            types = {"x": of("bf16", 128, 64), "w": of("bf16", *block), "out": bf16}
            variants.append((grouped.rows_by_weights, types, {**grouped_tiles, "TRANSPOSED": transposed, "TMA": tma, "FLAT": True}))
        of_gradient = {"HIGH": 128, "SIDE": 256, "INNER": 64, "GROUP": 8, "ACCUMULATE": True, "TMA": tma}
        variants.append((grouped.weights_gradient, {"dy": of("bf16", 64, 128), "x": of("bf16", 64, 256), "out": f32}, of_gradient))
        types = {"x": of("fp8e4nv", 128, 128), "w": of("fp8e4nv", 128, 128), "x_scale": f32, "w_scale": f32, "out": bf16}
        of_codes = {"EXPERTS": 32, "TMA": tma, "ROWS": 128, "GROUP": 8, "BLOCK": 128}
        variants.append((mx.mx_rows_by_weights, {**types, "x_scale": u8}, {**of_codes, "MX": 32}))
        for shape in (tiles.SHAPE_OF_FEW_CODES, tiles.SHAPE_OF_MANY_CODES) if tma else (tiles.SHAPE_OF_MANY_CODES,):
            types = {"x": of("fp8e4nv", shape.rows, shape.inner), "w": of("fp8e4nv", shape.side, shape.inner), "out": bf16}
            types |= dict.fromkeys(("x_scale", "w_scale"), f32)
            tile = {"TMA": tma, "ROWS": shape.rows, "SIDE": shape.side, "GROUP": shape.group, "BLOCK": 128, "SHAPE": shape}
            variants.append((scaled.scaled_rows_by_weights, types, {**tile, "FLAT": shape.flat}))
        for masked in (True, False) if tma else ():
            shape, scales = (
                replace(tiles.SHAPE_OF_PAIR, masked=masked),
                dict.fromkeys(("x_scale", "up_scale", "down_scale", "a_scale"), f32),
            )
            a = of("fp8e4nv", shape.rows, 128, tma=not masked)
            w = of("fp8e4nv", shape.side, 128)
            types = {"x": a, "a": a, "up": w, "down": w, **scales, "weights": u8, "codes": u8, "h": bf16, "out": bf16}
            tile = {"ROWS_TMA": not masked, "TMA": True, "ASSEMBLY": True, "ROWS": shape.rows, "SIDE": shape.side, "BLOCK": 128}
            variants.append((both.rows_through_experts, types, {**tile, "SOME": 16, "LINES": shape.ahead, "SHAPE": shape}))
    found: dict[str, int] = {}
    both = [
        (*variant, padded) for variant in variants for padded in (False, True) if not padded or "PADDED" in variant[0].arg_names
    ]
    for number, (kernel, types, constants, padded) in enumerate(both):
        if "PADDED" in kernel.arg_names:
            constants = {"EXPERTS": 32, "PADDED": padded, **constants}
        shape = constants.get("SHAPE", tiles.SHAPES_OF_LESS_MEMORY[0])
        options = {"num_warps": shape.warps, "num_stages": shape.stages, **tiles.most_registers(shape)}
        signature = {name: types.get(name) or counts.get(name) or "constexpr" for name in kernel.arg_names}
        constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items() if name in kernel.arg_names}
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*") or name in ("inner", "width", "height", "hidden")
        }
        made = triton.compile(
            ASTSource(kernel, signature=signature, constexprs=constexprs, attrs=aligned),
            target=GPUTarget("cuda", 100 if kernel is mx.mx_rows_by_weights else 90, 32), options=options,
        )  # fmt: skip
        ptx = made.asm["ptx"]
        # A multiprocessor has room for all programs of a shape: 1 KB of each is CUDA's.
        assert shape.programs * (made.metadata.shared + 1024) <= 228 << 10, (kernel.__name__, constants, made.metadata.shared)
        check_words(kernel.__name__, ptx, constants.get("ROWS_TMA", constants.get("TMA", False)))
        found[f"{number} {kernel.__name__}"] = ptx.count("wgmma.mma_async") + ptx.count("kind::mxf8f6f4.block_scale")
    return found
