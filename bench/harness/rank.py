"""One rank of a benchmark, however it was started: it fails with the others, and ends."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from bench.harness.launch import launch
from bench.harness.reference import Wrong
from bench.harness.world import Limits, World, started_by_mpi
from pplx_comm.control.launch import detect
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


def start(
    parser: argparse.ArgumentParser, script: str, given: Sequence[str], ranks: int | None, options: Chosen,
    what: Callable[[Chosen, World, Sequence[str]], None],
) -> int:  # fmt: skip
    """measure(), on the ranks that a launcher has started, or on `ranks` ranks of this host. Returns the exit status."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("-n", "--ranks")
    of_rank = own.parse_known_args(list(given))[1]
    launched = detect(os.environ)
    if launched.source != "no launcher" and ranks not in (None, launched.world_size):
        parser.error(f"-n {ranks}, but the launcher started {launched.world_size} ranks: leave -n out")
    if launched.source == "no launcher" and ranks is not None and ranks > 1:
        return launch(ranks, [script, *of_rank])
    return measure(options, of_rank, what)


def leave(status: int) -> None:
    """Ends the process. After a failure nothing may run that waits for other ranks, such as gloo's destructors."""
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
    sys.exit(0)
