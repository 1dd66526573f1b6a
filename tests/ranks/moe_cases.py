"""Cases of a MoE layer."""

from __future__ import annotations

import copy
import gc
import os
import signal
import weakref
from typing import Any

import pytest
import torch
from moe_reference import MoECase, World, error, expected, make_world
from outcomes import raised
from torch.utils.checkpoint import checkpoint

import pplx_comm as pc
from pplx_comm.moe import MoE, RouterOptions, routed
from pplx_comm.moe.arithmetic import Precise
from pplx_comm.moe.routed import Pass
from pplx_comm.moe.schedule import one_forward_one_backward
from pplx_comm.moe.sharding import local as part_of


def device_of(me: Any, case: MoECase) -> torch.device:
    """Ranks take the GPUs in turn."""
    if case.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", me.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def taken(layer: MoE, t: torch.Tensor) -> torch.Tensor:
    """As the layer takes it."""
    return t.to(layer.a2a.device, layer.a2a.dtype)


def make_layer(me: Any, case: MoECase, world: World, **arguments: Any) -> MoE:
    """With the world's weights."""
    score, (balance, z) = case.score, case.losses
    layer = MoE(
        case.hidden, case.intermediate, case.num_experts, case.top_k, me.comm, case.precision, compute=case.compute,
        max_tokens_per_rank=64, dtype=getattr(torch, case.dtype), shared_intermediate=case.shared,
        router=RouterOptions(
            score, correction_bias=True, groups=case.groups[0], top_groups=case.groups[1], normalise=case.normalise, scale=case.scale,
            load_balance=balance, z=z,
        ),
        expert_tp=case.expert_tp, recompute=case.recompute, gemm=case.gemm, scaled_gemm=case.scaled_gemm,
        all_to_all={"in_flight": case.in_flight, "timeout": 20.0, "device": device_of(me, case), **case.all_to_all}, **arguments,
    )  # fmt: skip
    fill(layer, world)
    return layer


@torch.no_grad()
def fill(layer: MoE, world: World) -> None:
    p, e = world.parameters, layer.experts
    layer.router.weight.copy_(p.router)
    layer.router.correction_bias.copy_(p.bias)
    gate_up, down = part_of(e.gate_up), part_of(e.down)
    slices, number = layer.placement.slices, layer.comm.rank % layer.placement.slices
    for place, expert in enumerate(e.experts):
        gate_up[place].copy_(torch.cat([whole[expert].chunk(slices)[number] for whole in (p.gate, p.up)]))
        down[place].copy_(p.down[expert].chunk(slices, 1)[number])
    if layer.shared is not None:
        layer.shared.gate_up.copy_(torch.cat(p.shared[:2]))
        layer.shared.down.copy_(p.shared[2])


def whole_step(me: Any, case: MoECase, how: str = "plain") -> dict[str, float]:
    """Forward and backward; how far this rank is from the reference in each result."""
    world = make_world(case)
    layer = make_layer(me, case, world, main_grad=how == "main_grad")
    if how == "main_grad":  # passes add to what is there
        layer.experts.gate_up.main_grad += 1
        layer.experts.down.main_grad += 1
    x = taken(layer, world.x[me.rank]).requires_grad_()
    call = torch.compile(layer, backend=how) if how in ("aot_eager", "inductor") else layer
    y = checkpoint(call, x, use_reentrant=False) if how == "checkpoint" else call(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    ((y * taken(layer, world.dy[me.rank])).sum() + layer.aux_loss).backward()
    assert layer.a2a.stats()["open_steps"] == 0
    return errors(layer, expected(case, world, me.rank), x, y)


def repeated(me: Any, case: MoECase) -> list[bool]:
    """Two layers with the same weights and tokens, forward and backward, with deterministic algorithms: by result, the same bits."""
    world = make_world(case)
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            layer = make_layer(me, case, world)
            x = taken(layer, world.x[me.rank]).requires_grad_()
            y = layer(x)
            ((y * taken(layer, world.dy[me.rank])).sum() + layer.aux_loss).backward()
            gradients = [w.grad for w in layer.parameters()]
            found.append([y.detach(), layer.aux_loss.detach(), x.grad, *gradients])
    finally:
        torch.use_deterministic_algorithms(False)
    return [torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(*found, strict=True)]


def passes_left(me: Any, case: MoECase, steps: int = 3) -> int:
    """How many passes are still there after their backward passes, without a look for cycles: each holds gigabytes."""
    world = make_world(case)
    layer = make_layer(me, case, world)
    seen: list[weakref.ref[Pass]] = []
    begin = Pass.__init__

    def noted(self: Pass, *arguments: Any) -> None:
        seen.append(weakref.ref(self))
        begin(self, *arguments)

    gc.collect()
    gc.disable()
    Pass.__init__ = noted  # type: ignore[method-assign]
    try:
        for _ in range(steps):
            layer(taken(layer, world.x[me.rank]).requires_grad_()).backward(taken(layer, world.dy[me.rank]))
    finally:
        Pass.__init__ = begin  # type: ignore[method-assign]
        gc.enable()
    assert len(seen) == steps
    return sum(ref() is not None for ref in seen)


def errors(layer: MoE, wanted: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    e = layer.experts
    gate_up, down = (w.main_grad - 1 if w.grad is None else part_of(w.grad) for w in (e.gate_up, e.down))
    found = {
        "y": error(y, wanted.y),
        "loss": error(layer.aux_loss, wanted.loss),
        "x": error(x.grad, wanted.x),
        "router": error(layer.router.weight.grad, wanted.router),
        "gate_up": error(gate_up, wanted.gate_up),
        "down": error(down, wanted.down),
    }
    if layer.shared is not None:
        found["shared_gate_up"] = error(layer.shared.gate_up.grad, wanted.shared_gate_up)
        found["shared_down"] = error(layer.shared.down.grad, wanted.shared_down)
    return found


def layers_in_flight(me: Any, case: MoECase) -> dict[str, Any]:
    """Two layers that share an AllToAll; two microbatches go forward before either goes back. The same bits as one after the other."""
    world = make_world(case)
    layers = [make_layer(me, case, world) for _ in range(2)]
    assert layers[0].a2a is layers[1].a2a
    inputs = [taken(layers[0], world.x[me.rank]) * factor for factor in (1, -0.5)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return layers[1](layers[0](x) + x)

    def gradients() -> list[torch.Tensor]:
        found = [p.grad.clone() for layer in layers for p in layer.parameters()]
        for layer in layers:
            layer.zero_grad()
        return found

    dy = taken(layers[0], world.dy[me.rank])
    for x in inputs:
        forward(x).backward(dy)
    apart = gradients()
    outputs = [forward(x) for x in inputs]
    for y in outputs:
        y.backward(dy)
    together = gradients()
    torch.autograd.backward(interleaved(layers, inputs), [dy, dy])
    halves = gradients()
    same = [all(torch.equal(a, b) for a, b in zip(apart, found, strict=True)) for found in (together, halves)]
    return {"same": same, "open": layers[0].a2a.stats()["open_steps"]}


def interleaved(layers: list[MoE], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Both microbatches, half a layer of one after half a layer of the other."""
    for place, layer in enumerate(layers):
        begun = [layer.begin(x) for x in inputs]
        outputs = [layer.finish(each) for each in begun]
        inputs = [y + x for y, x in zip(outputs, inputs, strict=True)] if place == 0 else outputs
    return inputs


def scheduled(me: Any, case: MoECase) -> dict[str, Any]:
    """Three microbatches through two layers, one after the other and interleaved."""
    world = make_world(case)
    layers = [make_layer(me, case, world) for _ in range(2)]
    inputs = [taken(layers[0], world.x[me.rank]) * factor for factor in (1, -0.5, 0.25)]
    dy, opened = taken(layers[0], world.dy[me.rank]), []

    def begin(number: int, x: torch.Tensor, losses: torch.Tensor) -> dict[str, Any]:
        begun = layers[number].begin(x)
        return {"x": x, "begun": begun, "losses": losses + layers[number].aux_loss}

    def compute(number: int, so_far: dict[str, Any]) -> dict[str, Any]:
        opened.append(layers[0].a2a.stats()["open_steps"])
        return {**so_far, "begun": layers[number].compute(so_far["begun"])}

    def finish(number: int, so_far: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return layers[number].finish(so_far["begun"]) + so_far["x"], so_far["losses"]

    parts = [
        lambda x: begin(0, x, torch.zeros((), device=x.device)),
        lambda so_far: compute(0, so_far),
        lambda so_far: begin(1, *finish(0, so_far)),
        lambda so_far: compute(1, so_far),
        lambda so_far: finish(1, so_far),
        lambda both: (both[0] * dy).sum().float() + both[1],
    ]
    apart = []
    for x in inputs:
        value: Any = x
        for part in parts:
            value = part(value)
        value.backward()
        apart.append(value.detach())
    wanted = [p.grad.clone() for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    opened.clear()
    losses = one_forward_one_backward(parts, inputs)
    found = [p.grad for layer in layers for p in layer.parameters()]
    same = all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    return {
        "same": same, "losses": torch.equal(torch.stack(losses), torch.stack(apart)),
        "most_open": max(opened), "open": layers[0].a2a.stats()["open_steps"],
    }  # fmt: skip


def experts_alone(me: Any, case: MoECase) -> dict[str, Any]:
    """Gradients of the experts' weights and nothing else, and a whole step after that."""
    world = make_world(case)
    layer = make_layer(me, case, world)
    x = taken(layer, world.x[me.rank]).requires_grad_()
    y = layer(x)
    weights = (layer.experts.gate_up, layer.experts.down)
    alone = torch.autograd.grad((y * taken(layer, world.dy[me.rank])).sum(), weights)
    closed = layer.a2a.stats()["open_steps"]
    (layer(x) * taken(layer, world.dy[me.rank])).sum().backward()
    same = all(torch.equal(a, w.grad) for a, w in zip(alone, weights, strict=True))
    return {"same": same, "open": closed + layer.a2a.stats()["open_steps"]}


def decoding(me: Any, case: MoECase, decode_tokens: int) -> dict[str, Any]:
    """Calls of few tokens and of many, in turn, of a layer for inference; and how many steps went which way."""
    world = make_world(case)
    layer = make_layer(me, case, world, inference=True, decode_tokens=decode_tokens)
    x, most, wanted = taken(layer, world.x[me.rank]), max(case.tokens), expected(case, world, me.rank).y
    found = {}
    with torch.no_grad():
        for name, known in (("few", most), ("many", 64), ("unknown", None), ("few again", most)):
            found[name] = error(layer(x, known), wanted)
    assert layer.decode_a2a is not None
    steps = [a2a.stats()["steps"] for a2a in (layer.decode_a2a, layer.a2a)]
    return {"errors": found, "steps": steps}


def recovery(me: Any, case: MoECase, decode_tokens: int, victim: int) -> list[int]:
    """A rank dies. comm.reset() follows each call that fails, on either path of the layer. Returns how many were left, each time."""
    world = make_world(case)
    layer = make_layer(me, case, world, inference=True, decode_tokens=decode_tokens)
    x, left, good = taken(layer, world.x[me.rank]), [], 0
    with torch.no_grad():
        while not left or good < 4:
            if me.rank == victim and good == 2:  # it may take writes of the second step with it
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                y = layer(x, most_tokens=(64, max(case.tokens))[good % 2])
                good += 1
            except pc.PeerError:
                left.append(len(me.comm.reset()))
                assert len(left) < 5, "the layer never recovers"
                good = 0
    assert y.isfinite().all()
    me.comm.barrier()
    return left


def too_few_rows(me: Any, case: MoECase) -> str:
    layer = make_layer(me, case, world := make_world(case), max_rows=16)
    x = taken(layer, world.x[me.rank])
    with torch.no_grad():
        assert layer(x).isfinite().all()
        try:
            layer(x)
        except pc.Error as problem:
            return str(problem)
    return "nothing"


def load_and_bias(me: Any, case: MoECase) -> dict[str, Any]:
    """The load that a layer counts, and the bias after an update."""
    world = make_world(case)
    layer = make_layer(me, case, world)
    x = taken(layer, world.x[me.rank])
    with torch.no_grad():
        layer(x)
        layer.eval()(x)
    load = layer.load.tolist()
    layer.update_bias(0.25)
    return {"load": load, "bias": (layer.router.correction_bias - world.parameters.bias).tolist(), "after": layer.load.tolist()}


def subnormal_codes(me: Any, case: MoECase) -> int:
    layer = make_layer(me, case, world := make_world(case))
    x = taken(layer, world.x[me.rank]).clone()
    x[:, :32] *= 2.0**-12  # beside blocks of normal size
    with torch.no_grad():
        layer(x)
    return int(layer.experts.subnormal_codes)


def fails_inside(me: Any, case: MoECase, where: str, clumsy: int) -> dict[str, Any]:
    """One rank fails, or drops a call, while a step is open: what each rank's call raised; and after a reset, the error of a whole step."""
    world = make_world(case)
    layer = make_layer(me, case, world)
    x = taken(layer, world.x[me.rank]).requires_grad_()
    layer(x).sum().backward()  # a first step may come late
    me.comm.barrier()  # a rank still in that step would hear of the failure there

    def call() -> None:
        if me.rank == clumsy and where == "begun":
            layer.begin(x)
            return
        layer(x).sum().backward()

    def fail(*_: Any, **__: Any) -> None:
        raise {"begin": KeyboardInterrupt, "compute": torch.OutOfMemoryError, "backward": pc.Error}[where]("planted")

    with pytest.MonkeyPatch.context() as patch:
        if me.rank == clumsy and where != "begun":
            owner, name = {
                "begin": (layer.shared, "forward"), "compute": (Precise, "down"), "backward": (routed, "swiglu_backward"),
            }[where]  # fmt: skip
            patch.setattr(owner, name, fail)
        found = raised(call)
    survivors = layer.a2a.reset()
    layer.zero_grad()
    x.grad = None
    y = layer(x)
    ((y * taken(layer, world.dy[me.rank])).sum() + layer.aux_loss).backward()
    return {**found, "survivors": survivors, "error": max(errors(layer, expected(case, world, me.rank), x, y).values())}


def differing(me: Any, wrong: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what MoE() raises where the last rank passes something else, for each of `wrong`; then a layer, which all make
    alike."""
    alike = {
        "hidden": 64, "intermediate": 32, "num_experts": 4, "top_k": 2, "max_tokens_per_rank": 16, "comm": me.comm,
        "all_to_all": {"device": "cpu"},
    }  # fmt: skip
    last = me.rank == me.world_size - 1
    found = [raised(lambda each=each: MoE(**{**alike, **(each if last else {})})) for each in wrong]
    MoE(**alike)(torch.ones(3, 64)).sum().backward()
    return found


def copied(me: Any, case: MoECase) -> dict[str, Any]:
    """A deep copy of a layer that has run: it has weights of its own, the same results, and the same AllToAll."""
    world = make_world(case)
    layer = make_layer(me, case, world, main_grad=True)
    layer(taken(layer, world.x[me.rank])).sum().backward()
    other = copy.deepcopy(layer)
    with torch.no_grad():
        layer.experts.down.zero_()
    x = taken(other, world.x[me.rank]).t().contiguous().t().requires_grad_()  # not contiguous
    other.experts.gate_up.main_grad.fill_(1)
    other.experts.down.main_grad.fill_(1)
    other.zero_grad()
    y = other(x)
    ((y * taken(layer, world.dy[me.rank])).sum() + other.aux_loss).backward()
    return {"shared": other.a2a is layer.a2a, "error": max(errors(other, expected(case, world, me.rank), x, y).values())}
