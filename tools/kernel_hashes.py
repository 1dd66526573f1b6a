"""Hashes the machine code of every kernel in a build, so that a change of names or folders proves that it changes nothing else.

    tools/kernel_hashes.py BUILD --hashes FILE     writes name, hash and size of each kernel
    tools/kernel_hashes.py BUILD --compare FILE    tells which kernels are not those of FILE; fails if any differ

BUILD is a CMake folder whose target _cuda was built for one architecture. A hash covers operations, operands and scheduling bits.
It does not cover addresses, lines, file names, labels or symbols. Kernels are matched by name without namespaces, then by hash.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TypedDict

import machine_code
import sass

NAME = re.compile(r"(?<![\w.$])(?:\.L[\w.$]*|\$[\w.$]+|_Z[\w.$]+)")
HALF = re.compile(r"::(dispatch|combine)\b")
ARGUMENT = re.compile(r"c\[0x0\]\[([^\]]*?)0x[0-9a-f]+\]")


class About(TypedDict):
    hash: str
    without_arguments: str  # the hash without offsets of arguments in the constant bank
    without_numbers: str  # the hash without any number
    instructions: int
    opcodes: dict[str, int]


def lines_of(function: sass.Function) -> list[str]:
    """Instructions without addresses: labels count from their instruction, symbols are numbered in order of appearance."""
    symbols: dict[str, str] = {}
    lines = []
    for at, instruction in enumerate(function.instructions):
        text = ", ".join(instruction.operands)
        for name in NAME.findall(text):
            target = function.labels.get(name)
            new = symbols.setdefault(name, f"symbol{len(symbols)}") if target is None else f"{target - at:+d}"
            text = text.replace(name, new, 1)
        lines.append(f"{instruction.guard}{instruction.opcode} {text} {instruction.control:x}")
    return lines


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def about(function: sass.Function) -> About:
    lines = lines_of(function)
    return {
        "hash": digest(lines),
        "without_arguments": digest([ARGUMENT.sub(r"c[0x0][\1argument]", line) for line in lines]),
        "without_numbers": digest([re.sub(r"0x[0-9a-f]+", "number", line) for line in lines]),
        "instructions": len(lines),
        "opcodes": collections.Counter(instruction.opcode for instruction in function.instructions),
    }


def hashes_of(built: Path, tools: Path) -> dict[str, About]:
    found: dict[str, About] = {}
    with tempfile.TemporaryDirectory() as folder:
        machine_code.run([str(tools / "cuobjdump"), "--extract-elf", "all", str(built)], folder)
        for cubin in Path(folder).glob("*.cubin"):
            text = machine_code.run([str(tools / "nvdisasm"), "-c", "-hex", str(cubin)])
            for function in sass.read(text.splitlines()):
                demangled = subprocess.run(["c++filt", function.name], capture_output=True, text=True, check=True).stdout.strip()
                found[machine_code.readable(demangled)] = about(function)
    return found


def difference(old: About, new: About) -> str:
    if old["without_arguments"] == new["without_arguments"]:
        return "only in the constant bank's offsets of arguments"
    if old["without_numbers"] == new["without_numbers"]:
        return "only in numbers, such as offsets of arguments whose address is taken"
    was, now = (collections.Counter(of["opcodes"]) for of in (old, new))
    moved = sum(((was - now) + (now - was)).values())
    return f"{old['instructions']} instructions before, {new['instructions']} now; operations that differ in number: {moved}"


def compare(old: dict[str, About], new: dict[str, About]) -> list[str]:
    """A line for each kernel that changed, came or went. A kernel with another name and an equal hash was renamed."""
    said, equal = [], 0
    left = {name: of for name, of in old.items() if name not in new}
    for name, of in sorted(new.items()):
        if name in old:
            if old[name]["hash"] == of["hash"]:
                equal += 1
            else:
                said.append(f"changed  {name}: {difference(old[name], of)}")
            continue
        same = next((was for was, had in left.items() if had["hash"] == of["hash"]), None)
        if same is not None:
            equal += 1
            print(f"renamed  {same} -> {name}")
            del left[same]
            continue
        alike = next((was for was, had in left.items() if had["without_arguments"] == of["without_arguments"]), None)
        if alike is not None:
            said.append(f"changed  {alike} -> {name}: {difference(left.pop(alike), of)}")
        else:
            said.append(f"new      {name}")
    said += [f"gone     {name}" for name in sorted(left)]
    print(f"{equal} of {len(new)} kernels are equal")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--hashes", type=Path, metavar="FILE", help="write what the kernels are")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="say which kernels are not those of FILE")
    arguments = parser.parse_args()
    tools = machine_code.compiler()
    objects = sorted((arguments.build.resolve() / "CMakeFiles" / "_cuda.dir").rglob("*.cu.o"))
    if not objects:
        sys.exit(f"{arguments.build} has no kernels: build its target _cuda")
    with concurrent.futures.ThreadPoolExecutor(2) as at_once:
        new = {name: of for found in at_once.map(lambda built: hashes_of(built, tools), objects) for name, of in found.items()}
    if arguments.hashes:
        arguments.hashes.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
    print(f"{len(new)} kernels, {sum(bool(HALF.search(name)) for name in new)} of dispatch and combine")
    if arguments.compare and (said := compare(json.loads(arguments.compare.read_text()), new)):
        sys.exit("\n".join(said))


if __name__ == "__main__":
    main()
