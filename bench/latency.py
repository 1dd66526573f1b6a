"""Latency of dispatch and combine beside the floor and the peers.

mpirun -n 4 python bench/latency.py --tokens 1,8,32,128 --wire fp8 --transport mapped,proxy:shm,proxy:tcp
python bench/latency.py -n 4 --json result.json --plot result.png
torchrun --nproc-per-node 2 bench/latency.py --device cuda --wire fp8 --tokens 1024,4096,8192 --slot-bytes 33554432     # in pieces
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

if __name__ == "__main__":
    import checkout  # noqa: F401

from bench.cpu import measure as cpu
from bench.gpu import measure as gpu
from bench.gpu.device import local_rank
from bench.harness import report
from bench.harness.options import Options, from_arguments, parser_of
from bench.harness.rank import leave, start
from bench.harness.world import World
from pplx_comm import trace
from pplx_comm.layer_arguments import positive


def latency(options: Options, world: World, arguments: Sequence[str]) -> None:
    if options.trace:
        trace.start()
    results = cpu.run(options, world) if options.device == "cpu" else gpu.run(options, world, gpu.opened(local_rank()))
    if options.trace:
        trace.write(world.comm, options.trace)
        world.barrier()  # rank 0's clock
    if world.rank != 0:
        return
    print(report.table(options, results, world), flush=True)
    if options.json:
        report.write_json(options.json, report.record(options, results, world, list(arguments)))
    if options.plot:
        from bench.harness.plot import plot

        plot(report.record(options, results, world, list(arguments)), options.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = parser_of("latency.py", __doc__)
    parser.add_argument("-n", "--ranks", type=positive, metavar="N", help="start N ranks on this host, without a launcher (1)")
    parsed = parser.parse_args(given)
    return start(parser, __file__, given, parsed.ranks, from_arguments(parsed), latency)


if __name__ == "__main__":
    leave(main())
