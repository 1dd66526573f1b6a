"""The control protocol's frames: a fixed header, then a payload whose length is checked before a byte of it is kept."""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator
from typing import Any

from pplx_comm.errors import Error

MAGIC = b"PPLX"
VERSION = 3
HEADER = struct.Struct("!4sBBHI")  # magic, version, kind, 0, payload bytes


class Kind(enum.IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REJECT = 5
    GATHER = 8
    GATHERED = 9
    FAIL = 10
    GOODBYE = 16
    ABORT = 17
    ALL_GATHER = 18
    FDS = 19
    PROPOSE = 20
    DECIDE = 21
    BUSY = 22
    ASK = 23
    TOLD = 24


KiB, MiB = 1 << 10, 1 << 20
LIMIT = {
    Kind.HELLO: KiB,
    Kind.CHALLENGE: KiB,
    Kind.PROOF: KiB,
    Kind.WELCOME: KiB,
    Kind.REJECT: KiB,
    Kind.GATHER: MiB,
    Kind.GATHERED: 256 * MiB,
    Kind.FAIL: MiB,
    Kind.GOODBYE: 64 * KiB,
    Kind.ABORT: 64 * KiB,
    Kind.ALL_GATHER: 64 * MiB,
    Kind.FDS: 4 * KiB,
    Kind.PROPOSE: 64 * KiB,
    Kind.DECIDE: 64 * KiB,
    Kind.BUSY: 4 * KiB,
    Kind.ASK: KiB,
    Kind.TOLD: MiB,
}


class FrameError(Exception):
    """Something else than this protocol came. The connection is dropped; nothing else happens."""


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    if len(payload) > LIMIT[kind]:
        raise Error(f"a {kind.name} message of {len(payload)} bytes is larger than its limit of {LIMIT[kind]} bytes")
    return HEADER.pack(MAGIC, VERSION, kind, 0, len(payload)) + payload


def json_frame(kind: Kind, value: Any) -> bytes:
    return frame(kind, encode(value))


def encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def decode(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as problem:
        raise FrameError(f"a payload that is not JSON: {problem}") from None


def decode_object(payload: bytes) -> dict[str, Any]:
    value = decode(payload)
    if not isinstance(value, dict):
        raise FrameError("a payload that is not a JSON object")
    return value


def field(value: dict[str, Any], name: str, kind: type) -> Any:
    found = value.get(name)
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise FrameError(f"field {name!r} is not {kind.__name__}")
    if isinstance(found, str) and not found.isprintable():  # lone surrogates and control characters would fail later, elsewhere
        raise FrameError(f"field {name!r} has unprintable characters")
    return found


def rank_field(value: dict[str, Any], name: str, world_size: int) -> int:
    rank: int = field(value, name, int)
    if not 0 <= rank < world_size:
        raise FrameError(f"field {name!r} is no rank of {world_size}")
    return rank


class FrameReader:
    """Cuts a byte stream into frames. Only `allowed` kinds may come; change it when the conversation moves on."""

    def __init__(self, allowed: frozenset[Kind]) -> None:
        self.allowed = allowed
        self._data = bytearray()

    @property
    def missing(self) -> int:
        """Bytes to the end of this header or frame. A reader that stops there leaves the rest to the next reader."""
        if len(self._data) < HEADER.size:
            return HEADER.size - len(self._data)
        return HEADER.size + int(HEADER.unpack_from(self._data)[4]) - len(self._data)

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """The frames that `data` completes. Checked one by one, so that `allowed` may change between two of them."""
        self._data += data
        while len(self._data) >= HEADER.size:
            magic, version, number, zero, length = HEADER.unpack_from(self._data)
            if magic != MAGIC or zero:
                raise FrameError("not a pplx_comm connection")
            if version != VERSION:
                raise FrameError(f"speaks control protocol {version}, this rank speaks {VERSION}: install one version of pplx_comm")
            if number not in self.allowed:
                raise FrameError(f"message kind {number} does not belong here")
            kind = Kind(number)
            if length > LIMIT[kind]:
                raise FrameError(f"a {kind.name} message of {length} bytes is over its limit of {LIMIT[kind]}")
            end = HEADER.size + length
            if len(self._data) < end:
                return
            payload = bytes(self._data[HEADER.size : end])
            del self._data[:end]
            yield kind, payload
