"""Collective messages, kept by call until all have come. Pure data: the mesh holds the lock."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from pplx_comm.control.frames import FrameError
from pplx_comm.errors import Error

_KEY = struct.Struct("!IIH")
_FDS = struct.Struct("!II")


@dataclass(frozen=True)
class Call:
    """One collective call: its tag, and its sequence number for this tag and generation."""

    generation: int
    tag: str
    count: int

    def pack(self) -> bytes:
        tag = self.tag.encode()
        if len(tag) > 1000:
            raise Error(f"the tag {self.tag[:40]!r}... is longer than 1000 bytes")
        return _KEY.pack(self.generation, self.count, len(tag)) + tag

    @classmethod
    def unpack(cls, payload: bytes) -> tuple[Call, bytes]:
        try:
            generation, count, length = _KEY.unpack_from(payload)
            end = _KEY.size + length
            if len(payload) < end:
                raise FrameError("a tag that is cut short")
            return cls(generation, payload[_KEY.size : end].decode(), count), payload[end:]
        except (struct.error, UnicodeDecodeError) as problem:
            raise FrameError(f"a bad tag: {problem}") from None


@dataclass
class Descriptors:
    """Collects the descriptors that one rank sends in one call, over one or more messages."""

    total: int
    announced: int = 0
    fds: list[int] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.announced >= self.total

    @property
    def short(self) -> bool:
        return len(self.fds) != self.total

    @staticmethod
    def header(total: int, here: int) -> bytes:
        return _FDS.pack(total, here)


class Inbox:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._payloads: dict[Call, dict[int, bytes]] = {}
        self._descriptors: dict[Call, dict[int, Descriptors]] = {}
        self._last: dict[int, Call] = {}

    def open(self, generation: int, tag: str) -> Call:
        count = self._counts.get(tag, 0)
        self._counts[tag] = count + 1
        call = Call(generation, tag, count)
        self._payloads.setdefault(call, {})
        self._descriptors.setdefault(call, {})
        return call

    def payloads(self, call: Call) -> dict[int, bytes]:
        """Stays empty if a new generation has ended the call."""
        return self._payloads.get(call, {})

    def descriptors(self, call: Call) -> dict[int, Descriptors]:
        return self._descriptors.get(call, {})

    def close(self, call: Call) -> None:
        self._payloads.pop(call, None)
        for left in self._descriptors.pop(call, {}).values():
            close_fds(left.fds)

    def receive(self, generation: int, sender: int, payload: bytes) -> None:
        call, body = Call.unpack(payload)
        self._last[sender] = call
        if self._wanted(generation, call):
            self._payloads.setdefault(call, {})[sender] = body

    def receive_fds(self, generation: int, sender: int, payload: bytes, fds: list[int]) -> None:
        try:
            call, body = Call.unpack(payload)
            if len(body) != _FDS.size:
                raise FrameError("a message of file descriptors of the wrong length")
        except FrameError:
            close_fds(fds)
            raise
        total, here = _FDS.unpack(body)
        self._last[sender] = call
        if not self._wanted(generation, call):
            close_fds(fds)
            return
        entry = self._descriptors.setdefault(call, {}).setdefault(sender, Descriptors(total))
        entry.announced += here
        entry.fds += fds

    def new_generation(self, generation: int) -> None:
        self._counts.clear()
        for call in [call for call in {**self._payloads, **self._descriptors} if call.generation < generation]:
            self.close(call)

    def whereabouts(self, rank: int, call: Call) -> str:
        last = self._last.get(rank)
        if last is None or last.generation != call.generation:
            return f"rank {rank}, which has called nothing yet"
        if last.tag != call.tag and rank in self._payloads.get(last, {}):
            return f"rank {rank}, which waits in {last.tag!r}"
        return f"rank {rank}, last seen in {last.tag!r} (call {last.count + 1})"

    def clear(self) -> None:
        for call in list(self._descriptors):
            self.close(call)
        self._payloads.clear()

    def _wanted(self, generation: int, call: Call) -> bool:
        """False for a generation that is over and for a call that was given up here."""
        if call.generation != generation:
            return call.generation > generation
        return call.count >= self._counts.get(call.tag, 0) or call in self._payloads


def close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
