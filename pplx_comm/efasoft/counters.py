"""Counters of the NICs. Each process counts in a page of its own, which outlives it."""

from __future__ import annotations

import struct
from pathlib import Path

MARK = 0x43414645
HEAD = struct.Struct("=8I")
NAME, VALUES_AT = 32, 48
"""proxy/efasoft/README.md has the layout."""

Counts = dict[str, dict[str, int]]
"""NIC -> counter -> count."""


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
    mark, _, _, columns, rows, names_at, rows_at, row_size = HEAD.unpack_from(data)
    if mark != MARK:  # its process was killed as it began
        return {}
    names = [_text(data, names_at + NAME * column) for column in range(columns)]
    counts = {}
    for at in range(rows_at, rows_at + rows * row_size, row_size):
        values = struct.unpack_from(f"={columns}Q", data, at + VALUES_AT)
        counts[_text(data, at)] = dict(zip(names, values, strict=True))
    return counts


def _text(data: bytes, at: int) -> str:
    return data[at : at + NAME].split(b"\0")[0].decode()


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
