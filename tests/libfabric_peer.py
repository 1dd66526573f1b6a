"""One of two processes that write to each other: `libfabric_peer.py SEED OPTIONS`. Talks to the test over stdin and stdout, in lines of JSON.

It says its address, hears the other's, writes blocks to it in reverse order, checks what arrived, says so, and leaves when told to.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from pplx_comm import _libfabric

BLOCKS, BYTES = 24, 7168


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def hear() -> dict[str, Any]:
    return json.loads(sys.stdin.readline())


def payload(seed: int) -> bytes:
    return random.Random(seed).randbytes(BLOCKS * BYTES)


def main() -> None:
    import ctypes

    seed, options = int(sys.argv[1]), json.loads(sys.argv[2])
    fabric = _libfabric.open_fabric(**options)
    source = ctypes.create_string_buffer(payload(seed), BLOCKS * BYTES)
    target = ctypes.create_string_buffer(b"\xa5" * BLOCKS * BYTES, BLOCKS * BYTES)
    source_region = fabric.register_memory(ctypes.addressof(source), BLOCKS * BYTES)
    target_region = fabric.register_memory(ctypes.addressof(target), BLOCKS * BYTES)
    say(
        name=fabric.name,
        endpoint=fabric.endpoint_name(0),
        shm=fabric.shm_names,
        address=fabric.address().hex(),
        description=target_region.description.hex(),
    )
    other = hear()
    fabric.insert_peer(5, bytes.fromhex(other["address"]))
    there = fabric.import_region(5, bytes.fromhex(other["description"]))
    say(met=True)
    hear()
    writes = [(5, there, BYTES, i * BYTES, (BLOCKS - 1 - i) * BYTES) for i in range(BLOCKS)]
    seconds, early = fabric.bare_writes(source_region, writes, BLOCKS, rounds=20, timeout=20.0)
    sent = payload(other["seed"])
    expected = b"".join(sent[(BLOCKS - 1 - i) * BYTES : (BLOCKS - i) * BYTES] for i in range(BLOCKS))
    say(seconds=sorted(seconds)[len(seconds) // 2], early=early, right=target.raw == expected)
    # Polls until the other is done too: its last writes may need this side.
    while not hear().get("leave"):
        pass
    fabric.close()


if __name__ == "__main__":
    main()
