"""One rank of a benchmark, however it was started: it fails with the others, and ends."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from bench.harness.reference import Wrong
from bench.harness.world import Limits, World, started_by_mpi
from pplx_comm.errors import Error

Chosen = TypeVar("Chosen", bound=Limits)


def measure(options: Chosen, arguments: Sequence[str], what: Callable[[Chosen, World, Sequence[str]], None]) -> int:
    """The exit status. A rank that fails takes the others along: none is left waiting."""
    # A launcher asks its ranks to end before it kills them; a rank that closes leaves none of its provider's files in /dev/shm.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    mpi = started_by_mpi()
    world: World | None = None
    alone = True
    """True until the other ranks have heard of it."""
    try:
        world = World(options, mpi)
        what(options, world, arguments)
        world.barrier()
        world.close()
        return 0
    except KeyboardInterrupt:
        status = 130
    except Wrong as wrong:  # on every rank
        status, alone = 1, False
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
        if alone:
            world.comm.control.abort("its benchmark failed")
        world.close()
    if mpi is not None:
        # Its own exit would wait in MPI_Finalize for ranks that will not come.
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(status)
    return status


def leave(status: int) -> None:
    """Ends the process. After a failure nothing may run that waits for other ranks, such as gloo's destructors."""
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
    sys.exit(0)
