"""Checks what pplx_comm._nvshmem asks of NVSHMEM, whose own waits nothing ends: its kernels call two functions that post, no other.

Compiles the kernels with the carrier of src/nvshmem to PTX, and follows calls from each kernel; and src/nvshmem/host.cpp, whose
symbols must all be in the libraries. The compiler is that of tools/machine_code.py, NVSHMEM the version that pyproject.toml names,
both from PyPI: no GPU is needed, nor a CUDA toolkit. What NVSHMEM's two functions do is not looked at: docs/carriers.md has that.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import machine_code
from machine_code import BUILD, ROOT, run

MAY_CALL = {
    "nvshmemi_transfer_put_signal<(threadgroup_t)0>": "a put with its signal, by a thread",
    "nvshmemi_transfer_amo_nonfetch<unsigned long>": "a signal alone",
}
"""All that kernels may call of NVSHMEM but what is inlined, which is stores to memory that a GPU maps."""

FUNCTION = re.compile(r"^(?:\.\w+\s+)*\.(func|entry)\s+(?:\([^)]*\)\s*)?([\w$]+)")
CALL = re.compile(r"\bcall(?:\.uni)?\s+(?:\([^)]*\)\s*,\s*)?([\w$%]+)")


def calls_of(ptx: str) -> tuple[set[str], dict[str, set[str]]]:
    """Kernels, and by function what it calls. One that only others define calls nothing."""
    kernels, calls, here = set(), {}, ""
    code = re.sub(r"//[^\n]*", "", ptx)
    for piece in re.split(r"\n(?=(?:\.\w+\s+)*\.(?:func|entry)\b)", "\n" + code):
        found = FUNCTION.match(piece)
        if found is None:
            continue
        kind, here = found.groups()
        calls.setdefault(here, set()).update(CALL.findall(piece))
        if kind == "entry":
            kernels.add(here)
    return kernels, calls


def reached_from(kernel: str, calls: Mapping[str, set[str]]) -> set[str]:
    seen, ahead = set(), [kernel]
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += calls.get(name, ())
    return seen


def readable(name: str) -> str:
    name = re.sub(r"^__nv_static_\d+__\w+?_(?=_Z)", "", name)  # the prefix of a kernel that only its file knows
    return machine_code.readable(run(["c++filt", name]).strip())


def wrong_calls(ptx: str) -> list[str]:
    """Checks all kernels: returns calls of NVSHMEM's that are not allowed, and calls that cannot be followed."""
    kernels, calls = calls_of(ptx)
    found = []
    for kernel in sorted(kernels):
        for name in sorted(reached_from(kernel, calls)):
            if name.startswith("%"):
                found.append(f"{readable(kernel)} calls a function by its address")
            elif "nvshmem" in name and readable(name) not in MAY_CALL:
                found.append(f"{readable(kernel)} calls {readable(name)}")
    return found


def nvshmem(folder: Path = BUILD) -> Path:
    """Where the wheel is."""
    wanted = re.search(r"nvidia-nvshmem-cu\d+==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    if wanted is None:
        sys.exit("pyproject.toml no longer says which NVSHMEM")
    place = folder / f"nvshmem-{wanted[1]}"
    if not (place / ".complete").exists():
        print(f"installing {wanted[0]} in {place.relative_to(ROOT)}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
        run([*pip, "--only-binary", ":all:", "--upgrade", "--target", str(place), wanted[0]])
        (place / ".complete").touch()
    return place / "nvidia" / "nvshmem"


def name_of(source: Path) -> str:
    return f"{source.parent.name}/{source.stem}"


def ptx_of(source: Path, tools: Path, home: Path) -> str:
    out = BUILD / f"carrier-{name_of(source).replace('/', '-')}.ptx"
    options = [option for option in machine_code.options() if not option.startswith(("--generate-code", "-lineinfo", "-Xptxas"))]
    carrier = ['-DPPLX_CARRIER="nvshmem/carrier.cuh"', "-isystem", str(home / "include")]
    run([str(tools / "nvcc"), *options, *carrier, "-arch=compute_90a", "-rdc=true", "-ptx", "-o", str(out), str(source)])
    return out.read_text()


def missing_on_the_host(tools: Path, home: Path) -> list[str]:
    """Symbols of NVSHMEM's that host.cpp wants, and its libraries do not have."""
    out = BUILD / "carrier-host.o"
    system = [word for folder in (home / "include", tools.parent / "include") for word in ("-isystem", str(folder))]
    system += machine_code.python_headers()
    run(["g++", "-std=c++17", "-O1", "-fPIC", "-Isrc", *system, "-c", "src/nvshmem/host.cpp", "-o", str(out)])
    wanted = {name for name in symbols("-u", out) if "nvshmem" in name and "pplx" not in name}
    there = symbols("--defined-only", home / "lib/libnvshmem_device.a") | symbols("-D", home / "lib/libnvshmem_host.so.3")
    return sorted(wanted - there) if wanted else ["nothing at all: nm has said nothing of NVSHMEM"]


def symbols(option: str, file: Path) -> set[str]:
    return {line.split()[-1].partition("@")[0] for line in run(["nm", option, str(file)]).splitlines() if line.strip()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", help="in src/cuda, such as decode/dispatch; default: all")
    named = parser.parse_args().sources
    tools, home = machine_code.compiler(), nvshmem()
    wrong = [f"src/nvshmem/host.cpp: no library has {name}" for name in missing_on_the_host(tools, home)]
    posts = False
    for source in [path for path in machine_code.sources() if not named or name_of(path) in named]:
        text = ptx_of(source, tools, home)
        found = wrong_calls(text)
        posts = posts or "nvshmemi_transfer_put_signal" in text
        print(f"{source.relative_to(ROOT)}: {len(found) or 'no'} calls of NVSHMEM but those that post", flush=True)
        wrong += [f"{source.relative_to(ROOT)}: {what}" for what in found]
    if not posts:
        wrong.append("no kernel puts anything: this tool does not see what it is there for")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
