"""Where a CUDA step's time goes: when the warps of a launch come to each of its stages, by the GPU's clock.

make build CMAKE_ARGS=-DPPLX_CUDA_STAGES=ON    # on a machine without a GPU CMAKE_ARGS="-DPPLX_CUDA=ON -DPPLX_CUDA_STAGES=ON"
mpirun -n 4 --bind-to none python bench/stages.py --tokens 1,128 --wire fp8

The stages are noted by a module made for it, in which a launch takes a little longer.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

if __name__ == "__main__":
    import checkout  # noqa: F401

import numpy as np
import torch

from bench.gpu import measure as gpu
from bench.gpu.device import local_rank
from bench.harness.options import Options, from_arguments, parser_of
from bench.harness.rank import leave, measure
from bench.harness.reference import Wrong
from bench.harness.world import World
from bench.proxy import markdown
from pplx_comm.all_to_all import AllToAll
from pplx_comm.errors import Error
from pplx_comm.gpus import cuda_module
from pplx_comm.trace import load_stages

MOST_WARPS = 16 * 1024
FIRST, MEDIAN, LAST = 0.0, 0.5, 1.0
BEGINS = " begins"
"""The stages with which a launch begins have names that end so."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed = parser_of("stages.py", __doc__).parse_args(["--device", "cuda", "--peers", "none", *given])
    return measure(from_arguments(parsed), given, show)


def show(options: Options, world: World, _: Sequence[str]) -> None:
    if not load_stages():
        raise Error("there is no pplx_comm._cuda_stages: make build CMAKE_ARGS=-DPPLX_CUDA_STAGES=ON")
    module = cuda_module()
    device = gpu.opened(local_rank())
    # Only a graph's last pair is looked at; the pairs before it bring the ranks into step.
    options = replace(options, pairs=min(options.pairs, 8))
    for tokens in options.tokens:
        size = gpu.Size(options, world, device, tokens, [])
        for transport, num_sms in itertools.product(options.transports, options.num_sms):
            with size.open(world.comm, transport, num_sms) as a2a:
                times, spent = _stages(module, options, world, device, size, a2a)
                times = _slowest(world, times)
            if world.rank == 0:
                sms = f", {num_sms} SMs" if num_sms else ""
                print(f"{transport.name}, {tokens} tokens{sms}: us after the launch of the slowest rank\n")
                print(_table(times), flush=True)
                print()
                if spent:
                    print("thousands of cycles of each warp of a thread block in one launch\n")
                    print(_spans_table(spent), flush=True)
                    print()


Numbers = dict[str, list[float]]


def _stages(module: Any, options: Options, world: World, device: Any, size: gpu.Size, a2a: AllToAll) -> tuple[Numbers, Numbers]:
    """Returns when the first, the middle and the last warp came to each stage, in the median of all replays.

    And by what the warps of this rank spent their time with: those of a thread block, in the median of all thread blocks.
    """
    names: list[str] = module.stages
    noted = torch.zeros(len(names) + len(module.spans), MOST_WARPS, dtype=torch.int64, device=device.device)
    a2a._steps.device.core.note_stages(noted.data_ptr(), MOST_WARPS)
    replay = device.capture(lambda: size.pairs(a2a))
    each: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(options.replays + gpu.WARMING):
        noted.zero_()
        device.synchronize()
        world.barrier()
        replay()
        device.synchronize()
        if turn < gpu.WARMING:
            continue
        begin = 0
        for name, row in zip(names, noted.cpu().numpy(), strict=False):
            if name.endswith(BEGINS):
                begin = row[row > 0].max()  # the last launch's; its thread blocks begin within a microsecond
            came = row[row >= begin] - begin  # a warp that had nothing to do has noted an earlier launch
            if len(came):
                each[name].append([float(np.quantile(came, share)) / 1000 for share in (FIRST, MEDIAN, LAST)])
    a2a._steps.device.core.note_stages(0, 0)
    a2a.check()
    spent = {}
    for name, row in zip(module.spans, noted.cpu().numpy()[len(names) :], strict=True):
        warps = row[: len(row) // module.warps_of_block * module.warps_of_block].reshape(-1, module.warps_of_block)
        if warps.any():
            spent[name] = (np.median(warps[warps.any(axis=1)], axis=0) / options.pairs / 1000).tolist()
    return {name: np.median(np.array(times), axis=0).tolist() for name, times in each.items() if times}, spent


def _slowest(world: World, mine: dict[str, list[float]]) -> dict[str, list[float]]:
    slowest: dict[str, list[float]] = {}
    for of_rank in world.gather(mine, "stages"):
        for name, times in of_rank.items():
            slowest[name] = [max(pair) for pair in zip(times, slowest.get(name, times), strict=True)]
    if not slowest:
        raise Wrong("no stage was noted")
    return slowest


def _table(times: dict[str, list[float]]) -> str:
    cells = [["stage", "first warp", "middle", "last"]]
    cells += [[name, *(f"{one:.1f}" for one in of_stage)] for name, of_stage in times.items()]
    return "\n".join(markdown(cells))


def _spans_table(spent: dict[str, list[float]]) -> str:
    cells = [["it", *(str(warp) for warp in range(max(map(len, spent.values()))))]]
    cells += [[name, *(f"{cycles:.1f}" if cycles else "" for cycles in each)] for name, each in spent.items()]
    return "\n".join(markdown(cells))


if __name__ == "__main__":
    leave(main())
