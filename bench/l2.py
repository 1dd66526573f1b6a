"""Prints ncu's output from bench/l2.sh as a table: python bench/l2.py FOLDER/HEIGHT ..., whose files are FOLDER/HEIGHT.csv"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    import checkout  # noqa: F401

from bench.proxy import markdown
from pplx_comm.errors import Error

HITS, TIME = "lts__t_sector_hit_rate.pct", "gpu__time_duration.sum"
MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}


def figures(text: str) -> dict[str, list[float]]:
    """Returns percent and microseconds of each launch. Lines around the CSV are ncu's own."""
    lines = text.splitlines()
    begin = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, list[float]] = {HITS: [], TIME: []}
    for row in csv.DictReader(line for line in lines[begin:] if line.startswith('"')):
        name, value = row["Metric Name"], float(row["Metric Value"].replace(",", ""))
        if name == TIME:
            found[name].append(value * MICROSECONDS[row["Metric Unit"]])
        elif name == HITS:
            found[name].append(value)
    return found


def table(logs: dict[str, str]) -> str:
    """One row a height: medians of the launches."""
    cells = [["supergroup, tiles of rows", "launches", "L2 hit rate, %", "us", "beside the first"]]
    first = 0.0
    for height, text in logs.items():
        found = figures(text)
        if not found[TIME] or len(found[TIME]) != len(found[HITS]):
            raise Error(f"bench/l2.py: ncu measured no launch with supergroups of {height}: {text.strip().splitlines()[-1:]}")
        us = median(found[TIME])
        first = first or us
        cells.append([height, str(len(found[TIME])), f"{median(found[HITS]):.1f}", f"{us:.1f}", f"{us / first:.2f}"])
    return "\n".join(markdown(cells))


if __name__ == "__main__":
    print(table({Path(path).name: Path(path + ".csv").read_text() for path in sys.argv[1:]}))
