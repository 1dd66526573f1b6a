"""Writes Perfetto's format: packets of protocol buffers, whose files may be joined end to end."""

from __future__ import annotations

from collections.abc import Iterable

_VARINT, _FIXED, _BYTES = 0, 1, 2
BEGIN, END, INSTANT = 1, 2, 3
"""Types of an event."""


def _varint(value: int) -> bytes:
    said = bytearray()
    while value > 0x7F:
        said.append(value & 0x7F | 0x80)
        value >>= 7
    said.append(value)
    return bytes(said)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _fixed(field: int, value: int) -> bytes:
    return _varint(field << 3 | _FIXED) + value.to_bytes(8, "little")


def _bytes(field: int, value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def _packet(writer: int, *parts: bytes) -> bytes:
    return _bytes(1, b"".join([*parts, _number(10, writer)]))


def process(writer: int, track: int, pid: int, name: str) -> bytes:
    """A packet with the track of a process. All packets of a track have one `writer`, a number but 0."""
    return _packet(writer, _bytes(60, _number(1, track) + _bytes(3, _number(1, pid) + _bytes(6, name))))


def track(writer: int, track: int, parent: int, name: str) -> bytes:
    """A packet with a track below another one."""
    return _packet(writer, _bytes(60, _number(1, track) + _bytes(2, name) + _number(5, parent)))


def event(
    writer: int, track: int, ns: int, kind: int, name: str = "", flow: int = 0, said: Iterable[tuple[str, int | str]] = ()
) -> bytes:  # fmt: skip
    """A packet with the begin or the end of a slice, or an instant. Slices of a track nest. Arrows join the events of a flow.
    said: what a click on it shows."""
    parts = [_number(9, kind), _number(11, track)]
    if name:
        parts.append(_bytes(23, name))
    if flow:
        parts.append(_fixed(47, flow))
    for what, value in said:
        parts.append(_bytes(4, _bytes(10, what) + (_bytes(6, value) if isinstance(value, str) else _number(4, value))))
    return _packet(writer, _number(8, ns), _bytes(11, b"".join(parts)))
