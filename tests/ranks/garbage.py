"""Bytes that strangers send to a rank's door, from random ones to almost right messages."""

from __future__ import annotations

import os
import random
from typing import Any

from pplx_comm.control.frames import HEADER, MAGIC, VERSION, Kind, frame, json_frame

SEED = int(os.environ.get("PPLX_SEED", "1"))


def garbage(rng: random.Random) -> bytes:
    kind = rng.randrange(7)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 4000))
    if kind == 1:
        return HEADER.pack(MAGIC, VERSION, rng.randrange(256), rng.randrange(2), rng.randrange(1 << 32)) + rng.randbytes(50)
    if kind == 2:
        return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    if kind == 3:
        return frame(rng.choice([Kind.HELLO, Kind.PROOF]), rng.randbytes(rng.randrange(100)))
    value: Any = {
        "rank": rng.choice([1, 0, -1, 10**30, True, None, "1", 1.5]),
        "wants": rng.choice([1, 0, -1, 10**30, True, None, "1", 1.5]),
        "world": rng.choice([2, 3, "2", None]),
        "job": rng.choice(["", "x", "\ud800", "\0" * 9, 5]),
        "nonce": rng.choice(["0" * 32, "\ud800" * 32, "\n" * 32, 7]),
        "proof": rng.choice(["0" * 64, "\ud800", 1, None]),
    }
    if kind == 4:
        return json_frame(rng.choice([Kind.HELLO, Kind.PROOF]), value)
    if kind == 5:
        return frame(Kind.HELLO, b"[" * 900)
    return json_frame(Kind.HELLO, value)[: rng.randrange(1, 40)]
