"""Tokens per second of a language model as in examples/train.py, beside the same model on all-to-all and torch._grouped_mm.

torchrun --nproc-per-node 2 bench/train.py --device cuda --json train.json
python bench/train.py -n 2 --steps 3 --rounds 3

`nccl` is the same model in bfloat16, whose layers go by NCCL's all-to-all (gloo's on CPUs) between two sorts. Variants take turns,
a few steps each, so that all of them see the machine as it is. Times are whole steps, with their optimiser, of the slowest rank.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    import checkout  # noqa: F401

import numpy as np
import torch
import torch.distributed as dist

from bench.gpu import measure as gpu
from bench.gpu.device import local_rank
from bench.gpu.peers import group_of
from bench.harness.rank import leave, start
from bench.harness.reference import Wrong
from bench.harness.world import World
from bench.moe.theirs import by_all_to_all
from bench.proxy import markdown
from pplx_comm.layer_arguments import positive
from pplx_comm.machine import machine, versions
from pplx_comm.moe import MoE, expert_parameters

VARIANTS = ("bf16", "fp8", "mxfp8", "nccl")
SIZES = {"hidden": 1024, "intermediate": 512, "layers": 6, "experts": 64, "batch": 64, "length": 512}
"""Sizes on GPUs, where the example's model is as small as its text wants it. Nothing is learnt here."""
LIMIT = 0.01
"""How far losses of one step may be apart."""


@dataclass(frozen=True)
class Options:
    device: str
    variants: tuple[str, ...]
    steps: int
    rounds: int
    seed: int
    timeout: float
    threads: int | None
    json: str | None


def example() -> ModuleType:
    """examples/train.py."""
    spec = importlib.util.spec_from_file_location("train_example", Path(__file__).resolve().parents[1] / "examples" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def theirs(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """Replaces MoE.forward in `nccl`: the same router, parameters and shared expert."""
    tokens = x.reshape(-1, x.shape[-1]).to(moe.a2a.dtype)
    to = moe.router(tokens)
    moe.aux_loss = to.loss
    gate_up, down = (w.to(tokens.dtype) for w in (moe.experts.gate_up, moe.experts.down))
    y, _ = by_all_to_all(tokens, to.ids, to.weights, gate_up, down, lambda _: None)
    return (y if moe.shared is None else y + moe.shared(tokens)).reshape(x.shape).to(x.dtype)


class Trained:
    """One variant's model, on its way."""

    def __init__(self, variant: str, world: World, options: Options, device: torch.device) -> None:
        self._example, self._comm, self._device = example(), world.fresh(), device
        self.sizes: dict[str, int] = SIZES if options.device == "cuda" else self._example.SIZES["cpu"]
        precision = "bf16" if variant == "nccl" else variant
        self._model = self._example.Model(self._comm, self.sizes, str(device), precision, options.seed).to(device)
        if variant == "nccl":
            for block in self._model.blocks:
                block.moe.forward = functools.partial(theirs, block.moe)
        own = {id(weight) for _, weight in expert_parameters(self._model)}
        self._same = [weight for weight in self._model.parameters() if id(weight) not in own]
        self._optimiser = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        (self._text, _), self._step = self._example.corpus(), 0
        self.first_loss = 0.0

    def step(self) -> None:
        """As examples/train.py has it."""
        tokens = self._example.batch(self._text, self.sizes, self._step, self._comm).to(self._device)
        loss = self._example.loss_of(self._model, tokens)
        extra = sum(block.moe.aux_loss for block in self._model.blocks)
        ((loss + extra) / self._comm.world_size).backward()
        for weight in self._same:
            dist.all_reduce(weight.grad)
        self._optimiser.step()
        self._optimiser.zero_grad()
        if self._step == 0:
            self.first_loss = self._example.mean_of(loss, self._comm)
        self._step += 1

    def close(self) -> None:
        self._comm.close()


def seconds_of(call: Callable[[], None], options: Options, world: World, device: Any) -> float:
    """Seconds of some steps, until the slowest rank is done."""
    device.synchronize()
    world.barrier()
    begin = time.perf_counter()
    for _ in range(options.steps):
        call()
    device.synchronize()
    return float(max(world.gather(time.perf_counter() - begin, "seconds")))


def train(options: Options, world: World, arguments: Sequence[str]) -> None:
    if options.device == "cuda":
        device: Any = gpu.opened(local_rank())
    else:
        torch.set_num_threads(world.threads)
        device = argparse.Namespace(device=torch.device("cpu"), name="CPU", synchronize=lambda: None)
    group_of(world, options, device.device)
    trained = {variant: Trained(variant, world, options, device.device) for variant in options.variants}
    say = functools.partial(print, file=sys.stderr, flush=True) if world.rank == 0 else lambda _: None
    for variant, one in trained.items():
        say(f"first step of {variant}")  # compiles, and chooses products
        one.step()
    losses = {variant: one.first_loss for variant, one in trained.items()}
    for variant, loss in losses.items():
        first = next(iter(losses.values()))
        if not abs(loss - first) < LIMIT * first:
            raise Wrong(f"{variant} begins with a loss of {loss:.4f}, and {next(iter(losses))} with {first:.4f}")
    seconds: dict[str, list[float]] = {variant: [] for variant in trained}
    for number in range(options.rounds):
        say(f"measuring round {number + 1} of {options.rounds}")
        for variant, one in trained.items():
            seconds[variant].append(seconds_of(one.step, options, world, device))
    for one in trained.values():
        one.close()
    dist.destroy_process_group()
    sizes = next(iter(trained.values())).sizes
    tokens = options.steps * sizes["batch"] * sizes["length"]
    rates = {variant: tokens / float(np.median(of_rounds)) for variant, of_rounds in seconds.items()}
    if world.rank == 0:
        _report(options, world, device.name, sizes, rates, losses, seconds, list(arguments))


def _report(
    options: Options, world: World, where: str, sizes: dict[str, int], rates: dict[str, float], losses: dict[str, float],
    seconds: dict[str, list[float]], arguments: list[str],
) -> None:  # fmt: skip
    cells = [["layers", "tokens per second", "beside nccl"]]
    for variant, per_second in rates.items():
        beside = f"{per_second / rates['nccl']:.2f}x" if "nccl" in rates else ""
        cells.append([variant, f"{per_second:.0f}", beside])
    print(f"{world.size} ranks, {where}, {', '.join(f'{name} {n}' for name, n in sizes.items())}\n")
    print("\n".join(markdown(cells)), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            record = {
                "ranks": world.size, "machine": machine() | {"device": where}, "versions": versions(), "sizes": sizes,
                "arguments": arguments, "steps": options.steps,
            }  # fmt: skip
            json.dump(record | {"tokens_per_second": rates, "first_loss": losses, "seconds": seconds}, file, indent=1)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-n", "--ranks", type=positive, metavar="N", help="start N ranks on this host, without a launcher (1)")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--variants", default=",".join(VARIANTS), help="some of bf16, fp8, mxfp8, nccl (all)")
    p.add_argument("--steps", type=positive, default=10, help="of a variant, before it is the next one's turn (10)")
    p.add_argument("--rounds", type=positive, default=7, help="turns of each, of which the median is taken (7)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--timeout", type=float, default=120.0, help="seconds after which a silent rank fails the run (120)")
    p.add_argument("--threads", type=positive, help="per rank (PPLX_COMM_THREADS, else this rank's share of the cores)")
    p.add_argument("--json", metavar="FILE")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    p = parser()
    parsed = p.parse_args(given)
    variants = tuple(dict.fromkeys(parsed.variants.split(",")))
    if unknown := sorted(set(variants) - set(VARIANTS)):
        p.error(f"{', '.join(unknown)}: there are {', '.join(VARIANTS)}")
    options = Options(
        parsed.device, variants, parsed.steps, parsed.rounds, parsed.seed, parsed.timeout, parsed.threads, parsed.json
    )
    return start(p, __file__, given, parsed.ranks, options, train)


if __name__ == "__main__":
    leave(main())
