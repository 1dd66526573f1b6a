"""What the NICs have done. Each process counts in a page of its own, which outlives it and describes itself."""

from __future__ import annotations

import struct
from pathlib import Path

MARK = b"EFASOFTC"
HEAD = struct.Struct("<8s7I")
NAME, ROW = 32, 64

Counts = dict[str, dict[str, int]]
"""By NIC, by what is counted."""


def read(folder: Path) -> Counts:
    """The sum over all processes of this fabric, dead ones too."""
    total: Counts = {}
    for page in sorted(folder.glob("counters-*")):
        for nic, counts in _page(page.read_bytes()).items():
            mine = total.setdefault(nic, {})
            for name, value in counts.items():
                mine[name] = mine.get(name, 0) + value
    return total


def _page(data: bytes) -> Counts:
    if len(data) < HEAD.size:
        return {}
    mark, version, _, rows, columns, names_at, rows_at, values_at = HEAD.unpack_from(data)
    if mark != MARK or version != 1:
        return {}
    names = [_text(data, names_at + NAME * i, NAME) for i in range(columns)]
    values = struct.unpack_from(f"<{rows * columns}Q", data, values_at)
    return {
        _text(data, rows_at + ROW * row, ROW): dict(zip(names, values[row * columns : (row + 1) * columns], strict=True))
        for row in range(rows)
    }


def _text(data: bytes, at: int, size: int) -> str:
    return data[at : at + size].split(b"\0")[0].decode()


def table(counts: Counts) -> str:
    """A line for each NIC that did something, a column for what was counted at all."""
    names = list(dict.fromkeys(name for each in counts.values() for name, value in each.items() if value))
    busy = {nic: each for nic, each in counts.items() if any(each.values())}
    if not busy:
        return "no NIC did anything"
    lines = [["NIC", *names], *([nic, *(str(each.get(name, 0)) for name in names)] for nic, each in busy.items())]
    if len(busy) > 1:
        lines.append(["all", *(str(sum(each.get(name, 0) for each in busy.values())) for name in names)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(names) + 1)]
    return "\n".join("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]) for first, *rest in lines)
