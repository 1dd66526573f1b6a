"""One of two processes that write to each other: ``libfabric_peer.py PACKAGE SEED OPTIONS``, in lines of JSON.

It says its address, hears the other's, writes blocks to it that land in reverse, says what arrived, and goes on
polling until it is told to leave. ``libfabric_peer.py PACKAGE`` says what there is.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import sys
import types
from pathlib import Path
from typing import Any

# The package without its __init__, which imports torch: that is seconds, in dozens of processes.
package = types.ModuleType("pplx_comm")
package.__path__ = [str(Path(sys.argv[1]))]
sys.modules["pplx_comm"] = package
sys.path.insert(0, str(Path(sys.argv[1]).parent))

from bench import _instruments  # noqa: E402
from pplx_comm.wiring import libfabric  # noqa: E402

BLOCKS, BYTES = 24, 7168
ROUNDS = 20


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def hear() -> dict[str, Any]:
    # Not sys.stdin: select does not see what its buffer already holds.
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("the test ended")
        line += byte
    return json.loads(line)


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def payload(seed: int) -> bytes:
    return random.Random(seed).randbytes(BLOCKS * BYTES)


def main() -> None:
    seed, options = int(sys.argv[2]), json.loads(sys.argv[3])
    before = resident()
    fabric = libfabric.open_fabric(**options)
    opening = resident() - before
    source = ctypes.create_string_buffer(payload(seed), BLOCKS * BYTES)
    target = ctypes.create_string_buffer(b"\xa5" * BLOCKS * BYTES, BLOCKS * BYTES)
    source_region = fabric.register_memory(ctypes.addressof(source), BLOCKS * BYTES, shared_bytes=0)
    target_region = fabric.register_memory(ctypes.addressof(target), BLOCKS * BYTES, shared_bytes=BLOCKS * BYTES)
    say(
        name=fabric.name,
        endpoint=fabric.endpoint_name(0),
        shm=fabric.shm_names,
        opening=opening,
        address=fabric.address().hex(),
        description=target_region.description.hex(),
    )
    other = hear()
    fabric.insert_peer(5, bytes.fromhex(other["address"]))
    there = fabric.import_region(5, bytes.fromhex(other["description"]))
    say(met=True)
    hear()
    writes = [(5, there, BYTES, i * BYTES, (BLOCKS - 1 - i) * BYTES) for i in range(BLOCKS)]
    seconds, early = _instruments.bare_writes(fabric, source_region, writes, BLOCKS, rounds=ROUNDS, timeout=20.0)
    sent = payload(other["seed"])
    expected = b"".join(sent[(BLOCKS - 1 - i) * BYTES : (BLOCKS - i) * BYTES] for i in range(BLOCKS))
    say(rounds=len(seconds), positive=min(seconds) > 0, early=early, right=target.raw == expected)
    late: list[Any] = []
    while not select.select([0], [], [], 0)[0]:  # the peer's last writes may need this side
        late += fabric.poll()
        os.sched_yield()
    fabric.close()
    say(late=late)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        say(**libfabric.status())
    else:
        main()
