"""Cases of a MoE layer on GPUs, beyond those of moe_cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from gpu_cases import gpu_of
from moe_cases import fill, make_layer, taken
from moe_reference import MoECase, error, expected, make_world

from pplx_comm.moe.grouped import choose, triton_mm, triton_scaled
from pplx_comm.moe.grouped.loop import Loop, ScaledLoop
from pplx_comm.moe.grouped.products import Apart
from pplx_comm.moe.quantise import quantise, quantise_weights
from pplx_comm.moe.segments import Segments


def host_waits_for_nothing(me: Any, case: MoECase) -> dict[str, Any]:
    """A second step, forward and backward, while torch raises at whatever makes the host wait."""
    world = make_world(case)
    layer = make_layer(me, case, world)
    x, dy = taken(layer, world.x[me.rank]).requires_grad_(), taken(layer, world.dy[me.rank])
    for step in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            y = layer(x)
            y.backward(dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"y": error(y, expected(case, world, me.rank).y), "choices": sorted(set(choose.choices().values()))}


def in_a_graph(me: Any, case: MoECase) -> list[float]:
    """A captured call, replayed with other tokens and another routing."""
    first, second = make_world(case), make_world(MoECase(**{**case.__dict__, "seed": case.seed + 1}))
    second.parameters = first.parameters
    layer = make_layer(me, case, first, inference=True)
    x = taken(layer, first.x[me.rank])
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                layer(x)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        me.comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        seen = []
        for world in (second, first):
            x.copy_(taken(layer, world.x[me.rank]))
            graph.replay()
            seen.append(y.cpu())
    return [error(each, expected(case, world, me.rank).y) for each, world in zip(seen, (second, first), strict=True)]


def products(me: Any, seed: int) -> dict[str, float]:
    """Our kernels on bfloat16 and on codes beside the loop, with shapes of layers, even and uneven."""
    gpu_of(me)
    found = {}
    for spread in ((128, 128, 128, 128), (512, 0, 48, 16), (0, 0, 1024, 0)):
        where = Segments(torch.tensor([0, *spread], device="cuda").cumsum(0, dtype=torch.int32))
        used, rows, n, k = sum(spread), sum(spread) + 256, 1536, 2048
        g = torch.Generator(device="cuda").manual_seed(seed)
        x, dy, w = (torch.randn(*shape, device="cuda", generator=g).bfloat16() for shape in ((rows, k), (rows, n), (4, n, k)))
        x[used:], dy[used:] = torch.nan, torch.nan
        known, loop = Segments(where.where.cpu()), Loop()
        exact = {  # in float32 on the CPU
            "forward": loop.forward(x.cpu().float(), w.cpu().float(), known)[:used],
            "dgrad": loop.dgrad(dy.cpu().float(), w.cpu().float(), known)[:used],
            "wgrad": torch.ones(4, n, k),
        }
        loop.wgrad(dy.cpu(), x.cpu(), known, exact["wgrad"], True)
        for tma in (False, True):
            kernel, name = triton_mm.TritonGroupedMm(tma), f"{spread} {tma}"
            seen = torch.ones(4, n, k, device="cuda")
            kernel.wgrad(dy, x, where, seen, True)
            found[f"wgrad {name}"] = error(seen, exact["wgrad"].double())
            found[f"forward {name}"] = error(kernel.forward(x, w, where)[:used], exact["forward"].double())
            found[f"dgrad {name}"] = error(kernel.dgrad(dy, w, where)[:used], exact["dgrad"].double())
            codes, weights = quantise(x), quantise_weights(w)
            seen, wanted = (
                each.product(codes, weights, where, False, torch.float32)
                for each in (triton_scaled.TritonScaledMm(tma), ScaledLoop())
            )
            found[f"codes {name}"] = error(seen[:used], wanted[:used].cpu().double())
    return found


def both_products(me: Any, seed: int) -> dict[str, bool]:
    """Both products of few rows in one launch: the bits of three, in calls one after the other, and in replays of a graph whose
    rows change."""
    from pplx_comm.moe.grouped import pair

    gpu_of(me)
    found, both, apart = {}, pair.TritonPair(), Apart("triton")
    hidden, width, experts, room, g = 1024, 512, 32, 256, torch.Generator(device="cuda").manual_seed(seed)
    gate_up, down = (
        quantise_weights(torch.randn(experts, *shape, device="cuda", generator=g).mul_(0.05).bfloat16())
        for shape in ((2 * width, hidden), (hidden, width))
    )

    def drawn(number: int, layout: str) -> tuple[Any, Segments, torch.Tensor]:
        """Few rows, none, more than a tile has, and all that there is room for."""
        counts = torch.randint(0, 4, (experts,), device="cuda", generator=g, dtype=torch.int32) * (number != 1)
        counts[number] += (0, 0, 65, room - 3)[number % 4]
        sizes = torch.full_like(counts, room) if layout == "padded" else (counts + 127) // 128 * 128
        ends = sizes.cumsum(0, dtype=torch.int32)
        rows = torch.arange(experts * room, device="cuda", dtype=torch.int32)
        expert = torch.searchsorted(ends, rows, right=True).clamp(max=experts - 1)
        filled = counts if layout == "padded" else sizes
        there = (rows < ends[-1]) & (rows - (ends - sizes)[expert] < filled[expert])
        x = torch.randn(len(rows), hidden, device="cuda", generator=g).bfloat16().masked_fill(~there[:, None], torch.nan)
        padded = layout == "padded"
        where = Segments(counts if padded else torch.cat([ends[:1] * 0, ends]), room if padded else 0, 2)
        return quantise(x, where), where, there

    for layout in ("padded", "ragged"):
        cases = [drawn(number, layout) for number in range(8)]
        wanted = [apart.through(x, gate_up, down, where, torch.bfloat16) for x, where, _ in cases]
        for number, (x, where, there) in enumerate(cases):
            assert both.takes_both(x, gate_up, down, where)
            seen = [both.through(x, gate_up, down, where, torch.bfloat16) for _ in range(3)]
            found[f"{layout} {number}"] = all(torch.equal(each[there], wanted[number][there]) for each in seen)
        (codes, scale), where, _ = cases[0]
        codes, scale = codes.clone(), torch.empty_like(scale).copy_(scale)
        where = replace(where, where=where.where.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = both.through((codes, scale), gate_up, down, where, torch.bfloat16)
        for turn in range(24):
            (new_codes, new_scale), new_where, there = cases[turn % 8]
            codes.view(torch.uint8).copy_(new_codes.view(torch.uint8))
            scale.copy_(new_scale)
            where.where.copy_(new_where.where)
            graph.replay()
            found[f"{layout} replay {turn}"] = torch.equal(y[there], wanted[turn % 8][there])
    return found


def compiled_once(me: Any, case: MoECase) -> dict[str, Any]:
    """Kernels that a step, forward and backward, compiles: with one routing, and then with others of the same number of tokens."""
    from pplx_comm.moe.kernels import activation, formats, grouped, mx, pair, scaled

    def compiled() -> dict[str, int]:
        found = {}
        for module in (activation, formats, grouped, mx, pair, scaled):
            for name, kernel in vars(module).items():
                caches = getattr(kernel, "device_caches", {})
                found[f"{module.__name__}.{name}"] = sum(len(cache[0]) for cache in caches.values())
        return {name: kernels for name, kernels in found.items() if kernels}

    first = make_world(case)
    layer = make_layer(me, case, first)
    x, dy = taken(layer, first.x[me.rank]).requires_grad_(), taken(layer, first.dy[me.rank])
    layer(x).backward(dy)
    torch.cuda.synchronize()
    counts, errors = compiled(), []
    for spread in ("hot", "few", "zipf"):
        other = replace(case, spread=spread, seed=case.seed + len(spread))
        world = make_world(other)
        fill(layer, world)
        y = layer(taken(layer, world.x[me.rank]).requires_grad_())
        y.backward(taken(layer, world.dy[me.rank]))
        errors.append(error(y, expected(other, world, me.rank).y))
    torch.cuda.synchronize()
    return {"before": counts, "after": compiled(), "errors": errors}


def formats(me: Any, seed: int) -> dict[str, bool]:
    """Codes and scales as torch makes them, to the bit: of numbers of any size, of zeros, and of rows that are not finite."""
    gpu_of(me)
    found, rows = {}, 300
    where = Segments(torch.tensor([0, 100, rows], device="cuda", dtype=torch.int32))
    for width in (128, 320, 2048):
        g = torch.Generator(device="cuda").manual_seed(seed)
        x = torch.randn(rows, width, device="cuda", generator=g) * torch.randn(rows, 1, device="cuda", generator=g).mul(8).exp2()
        x[3], x[4, :128], x[5, 9], x[6, 0] = 0, 0, torch.inf, torch.nan
        for dtype in (torch.bfloat16, torch.float32):
            (codes, scale), (wanted, wanted_scale) = quantise(x.to(dtype), where), quantise(x.to(dtype))
            found[f"codes {width} {dtype}"] = torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
            found[f"scales {width} {dtype}"] = torch.equal(scale.nan_to_num(-1), wanted_scale.nan_to_num(-1))
    return found
