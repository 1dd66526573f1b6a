"""One rank of the benchmark, however it was started."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from ..errors import Error
from . import gpu, report
from .device import local_rank
from .options import Options, parse
from .reference import Wrong
from .run import run
from .world import World, started_by_mpi


def main(arguments: Sequence[str] | None = None, program: str | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    return measure(parse(given, program or "latency.py"), given)


def latency(options: Options, world: World, arguments: Sequence[str]) -> None:
    results = run(options, world) if options.device == "cpu" else gpu.run(options, world, gpu.opened(local_rank()))
    if world.rank != 0:
        return
    print(report.table(options, results, world), flush=True)
    if options.json:
        report.write_json(options.json, report.record(options, results, world, list(arguments)))
    if options.plot:
        from .plot import plot

        plot(report.record(options, results, world, list(arguments)), options.plot)


def measure(options: Options, arguments: Sequence[str], what: Callable[[Options, World, Sequence[str]], None] = latency) -> int:
    """The exit status. A rank that fails takes the others along: none is left waiting."""
    # A launcher that ends its ranks asks first; closing then leaves nothing of a provider in /dev/shm.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    mpi = started_by_mpi()
    world: World | None = None
    try:
        world = World(options, mpi)
        what(options, world, arguments)
        world.barrier()
        world.close()
        return 0
    except KeyboardInterrupt:
        status = 130
    except Wrong as wrong:
        status = 1
        if world is None or world.rank == 0:
            print(f"bench: {wrong}", file=sys.stderr, flush=True)
    except Error as problem:
        status = 1
        rank = f"rank {world.rank}: " if world is not None else ""
        print(f"bench: {rank}{problem}", file=sys.stderr, flush=True)
    except Exception:
        status = 1
        traceback.print_exc()
    if world is not None:
        world.close()
    if mpi is not None:
        # Its own exit would wait in MPI_Finalize for ranks that will not come.
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(status)
    return status


def leave(status: int) -> None:
    """Ends the process. After a failure nothing that waits for other ranks may run, gloo's destructors for one."""
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
    sys.exit(0)
