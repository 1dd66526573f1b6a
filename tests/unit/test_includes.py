"""Folders of C++ include each other one way, and only as this table says. `make lint` checks Python's imports."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL, HOST, CPU, CUDA = "src/protocol", "src/host", "src/cpu", "src/cuda"
MAY_INCLUDE = {
    PROTOCOL: (),
    HOST: (PROTOCOL,),
    "src/cpu/vector": (PROTOCOL,),
    CPU: (PROTOCOL, HOST, "src/cpu/vector"),
    CUDA: (PROTOCOL, HOST),
    "proxy": (PROTOCOL, HOST),
    "proxy/libfabric": (HOST, "proxy"),
    "proxy/sim": (PROTOCOL, CPU, "proxy"),
    "src/bindings": (PROTOCOL, HOST, CPU, "src/cpu/vector", "proxy", "proxy/libfabric"),
    "src/bindings/cuda": (CUDA, "src/bindings"),
    "src/nvshmem": (CUDA,),
}
"""A folder that has no line of its own belongs to the one above it. Nothing here includes bench/ or tests/."""
GENERATED = {("src/cuda/common/ptx.cuh", "emulation/device.h"), ("src/cuda/host/protocol_check.cu", "protocol_headers.h")}
SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}

Edges = dict[tuple[str, str], list[str]]
"""(folder, included folder): where."""


def folder_of(path: str) -> str:
    return max((folder for folder in MAY_INCLUDE if path.startswith(f"{folder}/")), key=len, default="elsewhere")


def edges(sources: dict[str, str]) -> Edges:
    """`sources`: by path, all files that may be included too."""
    found: Edges = defaultdict(list)
    for path, source in sources.items():
        for number, line in enumerate(source.splitlines(), 1):
            match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if match is None or (path, match[1]) in GENERATED:
                continue
            tried = [os.path.normpath(Path(path).parent / match[1]), f"src/{match[1]}", match[1]]
            target = next((name for name in tried if name in sources), match[1])
            if folder_of(path) != folder_of(target):
                found[folder_of(path), folder_of(target)].append(f"{path}:{number}: {match[1]}")
    return found


def offences(sources: dict[str, str]) -> list[str]:
    return [where for (by, of), places in edges(sources).items() if of not in MAY_INCLUDE[by] for where in places]


def read_sources() -> dict[str, str]:
    paths = [path for top in ("src", "proxy") for path in sorted((ROOT / top).rglob("*")) if path.suffix in SUFFIXES]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def test_planted_ones_are_found() -> None:
    sources = {
        "src/host/failure.h": '#include "../protocol/abort.h"\n#include "../cpu/exchange.h"\n',
        "src/protocol/abort.h": "#pragma once\n",
        "src/cpu/exchange.h": '#include "../host/failure.h"\n#include "vector/kernels.h"\n#include "host/failure.h"\n',
        "src/cpu/vector/kernels.h": '#include "bench/writer.h"\n',
        "src/cuda/host/memory/shared_memory.cpp": '#include "../runtime.h"\n  #include "proxy/fabric.h"\n',
        "src/cuda/host/runtime.h": "",
        "proxy/fabric.h": "",
    }
    assert offences(sources) == [
        "src/host/failure.h:2: ../cpu/exchange.h",
        "src/cpu/vector/kernels.h:1: bench/writer.h",
        "src/cuda/host/memory/shared_memory.cpp:2: proxy/fabric.h",
    ]


def test_includes_keep_to_the_table() -> None:
    found = offences(read_sources())
    assert found == [], "\n".join(found)


def test_the_table_has_no_circle_and_no_idle_line() -> None:
    TopologicalSorter(MAY_INCLUDE).prepare()  # raises for a circle
    allowed = {(by, of) for by, row in MAY_INCLUDE.items() for of in row}
    assert allowed == set(edges(read_sources()))
