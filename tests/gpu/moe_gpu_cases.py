"""What ranks do with a MoE layer on GPUs, beyond the cases of moe_cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import moe_overlap_cases
import torch
from gpu_cases import gpu_of
from moe_cases import fill, make_layer, taken
from moe_overlap_cases import OverlapCase
from moe_reference import MoECase, error, expected, make_world

from pplx_comm.moe.grouped import choose, triton_mm, triton_scaled
from pplx_comm.moe.grouped.loop import Loop, ScaledLoop
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


def same_bits(me: Any, case: OverlapCase) -> list[bool]:
    gpu_of(me)
    return moe_overlap_cases.same_bits(me, case)


def microbatches(me: Any, case: OverlapCase) -> bool:
    gpu_of(me)
    return moe_overlap_cases.microbatches(me, case)


def nobody_comes(me: Any, case: OverlapCase) -> dict[str, Any]:
    gpu_of(me)
    return moe_overlap_cases.nobody_comes(me, case)


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
        loop = Loop()
        for tma in (False, True):
            kernel, name = triton_mm.TritonGroupedMm(tma), f"{spread} {tma}"
            found[f"forward {name}"] = error(kernel.forward(x, w, where)[:used], loop.forward(x, w, where)[:used].cpu().double())
            found[f"dgrad {name}"] = error(kernel.dgrad(dy, w, where)[:used], loop.dgrad(dy, w, where)[:used].cpu().double())
            seen, wanted = (torch.ones(4, n, k, device="cuda") for _ in range(2))
            kernel.wgrad(dy, x, where, seen, True)
            loop.wgrad(dy, x, where, wanted, True)
            found[f"wgrad {name}"] = error(seen, wanted.cpu().double())
            codes, weights = quantise(x), quantise_weights(w)
            seen, wanted = (
                each.product(codes, weights, where, False, torch.float32)
                for each in (triton_scaled.TritonScaledMm(tma), ScaledLoop())
            )
            found[f"codes {name}"] = error(seen[:used], wanted[:used].cpu().double())
    return found


def compiled_once(me: Any, case: MoECase) -> dict[str, Any]:
    """Kernels that a step, forward and backward, compiles: with one routing, and then with others of as many tokens."""
    from pplx_comm.moe.kernels import activation, beside, formats, grouped, mx, scaled

    def compiled() -> dict[str, int]:
        found = {}
        for module in (activation, beside, formats, grouped, mx, scaled):
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
