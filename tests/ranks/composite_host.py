"""The bare kernels of the composite floor on the host, unit after unit: slow, and plain to read."""

from __future__ import annotations

import ctypes

import torch

from bench.gpu.composite import Geometry, Row, Work

CHUNK = 512
DTYPES = {"BFLOAT16": torch.bfloat16, "FLOAT16": torch.float16, "FLOAT32": torch.float32}


def folded(source: torch.Tensor, row: Row, fold: int) -> torch.Tensor:
    """A row's bytes. Of each chunk of a part, sixteen bytes of a lane are `fold` times sixteen that were read, a chunk apart; what
    would lie beyond the part's share is read at its end."""
    pieces, parts = source.view(-1, 16), []
    for begin in range(0, row.bytes, row.part_bytes):
        end = min(row.bytes, begin + row.part_bytes)
        last = min(row.source_bytes, end * fold) - 16
        within = torch.arange(0, end - begin, 16)
        first = (begin + within // CHUNK * CHUNK) * fold + within % CHUNK
        made = torch.zeros(len(within), 16, dtype=torch.uint8)
        for f in range(fold):
            made ^= pieces[(first + f * CHUNK).clamp(max=last) // 16]
        parts.append(made.ravel())
    return torch.cat(parts)


def _bytes(address: int, n: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(ctypes.string_at(address, n)), dtype=torch.uint8)


def run(phase: str, work: Work, geometry: Geometry) -> None:
    dtype = DTYPES[geometry.dtype.name]
    for unit, others in zip(work.units, work.others, strict=True):
        kind, one = int(unit["kind"]), int(unit["one"])
        row = work.rows[kind]
        begin = int(unit["part"]) * row.part_bytes
        n = min(row.part_bytes, row.bytes - begin)
        addresses = [int(other) for other in others[: unit["n"]]]
        assert n > 0 and all(addresses) and len(set(addresses)) == len(addresses)
        if phase == "dispatch":
            whole = folded(_bytes(one, row.source_bytes), row, geometry.fold if kind == 0 else 1)
            data = whole[begin : begin + n].numpy().tobytes()
            for to in addresses:
                ctypes.memmove(to + begin, data, n)
        else:
            total = sum(_bytes(other + begin, n).view(dtype).float() for other in addresses)
            assert isinstance(total, torch.Tensor)
            data = total.to(dtype).view(torch.uint8).numpy().tobytes()
            ctypes.memmove(one + begin, data, n)
