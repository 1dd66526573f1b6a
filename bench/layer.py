"""A whole MoE layer behind its router, forward and with backward, beside the layers that users of other libraries write.

torchrun --nproc-per-node 2 bench/layer.py --device cuda --json layer.json --plot layer.png
python bench/layer.py -n 2 --tokens 8,64 --hidden 256 --intermediate 128 --experts 8 --top-k 2
torchrun --nproc-per-node 2 bench/layer.py --device cuda --routings even,zipf,hot --layers ours,capacity --capacity-plot c.png

ours        dispatch, grouped products, combine; few tokens forward take Padded and masked products.
nccl        NCCL's all-to-all (gloo's on CPUs) between two sorts, torch._grouped_mm
ag_rs       all-gather, torch._grouped_mm, reduce-scatter
capacity    a room for each expert, as GShard has it: padding is computed, tokens beyond it are dropped
deep_ep     DeepEP and DeepGEMM, where both are installed: the low-latency mode and masked kernels up to 512 tokens, beyond that the
            normal mode, tuned, and contiguous kernels between a copy of rows to their experts and a sum
mega        DeepGEMM's layer of one call for compute capability 9.0: pip install sgl-deep-gemm==0.1.4.post1 apache-tvm-ffi==0.1.11

All in one run, on the same tokens, experts and weights, and held against the same loop in float64. The table says which backend
multiplied; "beside mega" and "beside nccl" are their times over the layer's; "exposed" is
(forward pass - its products alone) / (dispatch + combine alone): docs/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace

if __name__ == "__main__":
    import checkout  # noqa: F401

import torch

from bench.gpu import measure as gpu
from bench.gpu.device import local_rank
from bench.harness.rank import leave, start
from bench.harness.world import World
from bench.moe import report
from bench.moe.measure import run
from bench.moe.options import LayerOptions, from_arguments, parser_of


def layer(options: LayerOptions, world: World, arguments: Sequence[str]) -> None:
    if options.device == "cuda":
        device = gpu.opened(local_rank())
    else:
        torch.set_num_threads(world.threads)
        device = SimpleNamespace(device=torch.device("cpu"), name="CPU", synchronize=lambda: None)
    points = run(options, world, device)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if world.rank != 0:
        return
    of = report.record(options, points, world.size, device.name, list(arguments))
    print(report.tables(points), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(of, file, indent=1)
    if options.plot:
        report.plot(of, options.plot)
    if options.capacity_plot:
        report.plot_capacity(of, options.capacity_plot)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = parser_of(__doc__)
    parsed = parser.parse_args(given)
    return start(parser, __file__, given, parsed.ranks, from_arguments(parsed), layer)


if __name__ == "__main__":
    leave(main())
