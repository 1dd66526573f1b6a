"""Checks the machine code of the CUDA kernels: what overlaps in the source must overlap there, too.

Compiles the kernels of src/cuda for sm_90a by the compiler of tools/cuda_compiler.txt, with the options of cmake/cuda.cmake, has
the host's compiler read the C++ files beside them, and disassembles the kernels. No GPU is needed, nor a CUDA toolkit. The rules
are tables in this file:

  loads   In plain kernels of few tokens no load from global memory, and no atomic operation that returns something, is waited for
          before the thread block's first barrier, except those that MAY_WAIT names; and those for one round trip of memory.
  looks   In plain kernels of few tokens, but for those of pieces, a wait for what others store (await_vec16s) has all loads of a
          look on their way before it uses one. For want of predicates the compiler would check some before it loads the others.
  sizes   Code, registers, stack and spills are at most what BOUNDS says.
  traps   There are none: the compiler puts one where all that follows is undefined, say behind a reference to a host constant.

What is waited for is told by the scoreboards: hardware waits for a load at the next instruction whose mask has the scoreboard that
the load was given. That instruction reads the loaded register, or overwrites it, or wants something else that has the same
scoreboard. Reads of registers are followed as well, and must agree. All branches are followed; what cannot be followed is an error.
The two sides of a branch are followed one by one: that a warp which goes both ways waits for one of them on the other is not seen.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import drawn
import sass

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "src" / "cuda"
BUILD = ROOT / "build" / "machine_code"
NEEDS = ROOT / "tools" / "cuda_compiler.txt"
RULED = (
    "decode/dispatch", "decode/combine", "remote/dispatch", "remote/combine", "large/dispatch", "large/combine",
    "rounds/dispatch",
)  # fmt: skip
"""Files whose kernels the rules are for. Others must compile."""
SHARE = 4
"""One file in that many is drawn."""

# ---- the rules ----


@dataclass(frozen=True)
class Sizes:
    """Sizes of a kernel, in bytes but for registers."""

    code: int
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


# Upper bounds of each kernel. A first word of `true`: a plain one. Code may grow by some 3 % before the check fails; the launch
# bounds leave a thread 96 registers in dispatch and in sums, 168 in other kernels of combine. `--show` prints the sizes, `--bounds`
# a new table.
BOUNDS: dict[str, Sizes] = {
    "decode::dispatch<Quantised<2>, true, false>": Sizes(117760, 96, 96, 16, 20),
    "decode::dispatch<Quantised<4>, true, false>": Sizes(118784, 96, 96, 16, 20),
    "decode::dispatch<AsIs, true, false>": Sizes(114688, 96, 96, 16, 20),
    "decode::combine<Float32, true, 4, false>": Sizes(84992, 168, 80, 0, 0),
    "decode::combine<Float32, true, 2, false>": Sizes(58368, 113, 80, 0, 0),
    "decode::combine<Float16, true, 4, false>": Sizes(98304, 168, 80, 0, 0),
    "decode::combine<Float16, true, 2, false>": Sizes(63488, 127, 80, 0, 0),
    "decode::combine<BFloat16, true, 4, false>": Sizes(98304, 168, 80, 0, 0),
    "decode::combine<BFloat16, true, 2, false>": Sizes(63488, 127, 80, 0, 0),
    "decode::dispatch<Quantised<2>, false, true>": Sizes(375808, 96, 368, 60, 184),
    "decode::dispatch<Quantised<4>, false, true>": Sizes(378880, 96, 400, 392, 228),
    "decode::dispatch<AsIs, false, true>": Sizes(371712, 96, 368, 60, 180),
    "decode::dispatch<Quantised<2>, true, true>": Sizes(230400, 96, 240, 28, 32),
    "decode::dispatch<Quantised<4>, true, true>": Sizes(230400, 96, 240, 28, 32),
    "decode::dispatch<AsIs, true, true>": Sizes(227328, 96, 224, 28, 32),
    "decode::combine<Float32, false, 4, true>": Sizes(333824, 168, 160, 0, 0),
    "decode::combine<Float16, false, 4, true>": Sizes(372736, 168, 176, 0, 0),
    "decode::combine<BFloat16, false, 4, true>": Sizes(371712, 168, 176, 0, 0),
    "decode::combine<Float32, true, 4, true>": Sizes(168960, 168, 144, 0, 0),
    "decode::combine<Float16, true, 4, true>": Sizes(187392, 168, 160, 0, 0),
    "decode::combine<BFloat16, true, 4, true>": Sizes(187392, 168, 160, 0, 0),
    "large::dispatch<Quantised<2>, false, false>": Sizes(476160, 128, 176, 144, 92),
    "large::dispatch<Quantised<2>, true, false>": Sizes(558080, 128, 160, 100, 68),
    "large::dispatch<Quantised<4>, false, false>": Sizes(416768, 128, 176, 164, 96),
    "large::dispatch<Quantised<4>, true, false>": Sizes(499712, 128, 176, 112, 64),
    "large::dispatch<AsIs, false, false>": Sizes(391168, 128, 192, 172, 104),
    "large::dispatch<AsIs, true, false>": Sizes(474112, 128, 192, 124, 68),
    "large::dispatch<Quantised<2>, true, true>": Sizes(518144, 128, 224, 128, 80),
    "large::dispatch<Quantised<4>, true, true>": Sizes(444416, 128, 176, 48, 32),
    "large::dispatch<AsIs, true, true>": Sizes(419840, 128, 176, 48, 32),
    "large::combine<Float32, SumsOfRows>": Sizes(94208, 88, 80, 0, 0),
    "large::combine<Float32, Copies>": Sizes(90112, 168, 80, 0, 0),
    "large::combine<Float32, SumsWithExtras>": Sizes(324608, 127, 176, 0, 0),
    "large::combine<Float16, SumsOfRows>": Sizes(101376, 96, 80, 0, 0),
    "large::combine<Float16, Copies>": Sizes(101376, 168, 80, 0, 0),
    "large::combine<Float16, SumsWithExtras>": Sizes(343040, 168, 176, 0, 0),
    "large::combine<BFloat16, SumsOfRows>": Sizes(101376, 96, 80, 0, 0),
    "large::combine<BFloat16, Copies>": Sizes(101376, 168, 80, 0, 0),
    "large::combine<BFloat16, SumsWithExtras>": Sizes(343040, 168, 176, 0, 0),
}


@dataclass(frozen=True, eq=False)
class MayWait:
    """Loads that may be waited for before the first barrier: of a line of `file` with `text` in it, or of what is inlined there."""

    file: str
    text: str
    reason: str
    apart: bool = False  # the warps that do this do nothing else before the barrier
    along: bool = False  # nothing touches what they load; only where something else is waited for that has the same scoreboard


MAY_WAIT = {
    "decode::dispatch": (
        MayWait("dispatch_kernel.cuh", "read_step(a, s.send)", "the block meets to hear the step", apart=True),
        MayWait("dispatch_kernel.cuh", "find_open_step(a, step)", "a receive half votes on whether its step is open", apart=True),
    ),
    "decode::combine": (
        MayWait("combine_kernel.cuh", "begin_combine(a, step", "the block votes on whether its step is open, and on failures"),
        MayWait("combine_kernel.cuh", "first.load_places(a)", "issued before what the vote waits for", along=True),
        MayWait("combine_kernel.cuh", "load_token_row(a, ", "the same", along=True),
    ),
}
"""Exceptions by kernel: all of its plain variants or one of them. An exception that is not needed any more is an error."""


# ---- compiling ----


def compiler() -> Path:
    """Where the wheels are, in a folder that is named after what is in them."""
    folder = BUILD / ("cuda-" + hashlib.sha256(NEEDS.read_bytes()).hexdigest()[:12])
    if not (folder / ".complete").exists():
        print(f"installing what {NEEDS.relative_to(ROOT)} names in {folder.relative_to(ROOT)}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
        run([*pip, "--only-binary", ":all:", "--upgrade", "--target", str(folder), "-r", str(NEEDS)])
        (folder / ".complete").touch()
    (found,) = folder.glob("nvidia/cu*/bin")
    return found


def run(command: list[str], folder: Path | str = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\nended with {done.returncode}")
    return done.stdout


def options() -> list[str]:
    """Those of cmake/cuda.cmake, and what CMake adds to a Release build."""
    text = (ROOT / "cmake" / "cuda.cmake").read_text()
    found = re.findall(r"\$<\$<COMPILE_LANGUAGE:CUDA>:([^>]+)>", text)
    standard = re.search(r"CMAKE_CUDA_STANDARD (\d+)", text)
    if not found or standard is None:
        sys.exit("cmake/cuda.cmake no longer says what kernels are compiled with in a way that tools/machine_code.py can read")
    architecture = "--generate-code=arch=compute_90a,code=[sm_90a]"
    return ["-O3", "-DNDEBUG", f"-std=c++{standard[1]}", architecture, *found, "-Isrc", "-lineinfo", "-Xptxas=-v"]


def compiled(source: str, tools: Path) -> tuple[Path, str]:
    """A file's machine code, and what ptxas says of it: of an earlier call, if nothing has changed since."""
    files = sorted(path for path in (ROOT / "src").rglob("*") if path.suffix in (".h", ".cuh") or path.match(f"{source}.cu"))
    host = run(["gcc", "--version"]).partition("\n")[0]
    key = hashlib.sha256(repr((str(ROOT), str(tools), host, options())).encode())
    for path in files:
        key.update(f"{path}\0".encode() + path.read_bytes())
    name = source.replace("/", "-")
    cubin = BUILD / f"{name}-{key.hexdigest()[:12]}.cubin"
    said = cubin.with_suffix(".txt")
    if not said.exists():
        for old in BUILD.glob(f"{name}-*"):
            old.unlink()
        compile_it = [str(tools / "nvcc"), *options(), "-cubin", "-o", str(cubin), f"src/cuda/{source}.cu"]
        said.write_text(run(compile_it))
    return cubin, said.read_text()


def sources() -> list[Path]:
    """Those for nvcc; protocol_check.cu includes what CMake generates."""
    return [path for path in sorted(CUDA.glob("*/*.cu")) if path.stem != "protocol_check"]


@functools.cache
def python_headers() -> list[str]:
    return run([sys.executable, "-m", "pybind11", "--includes"]).split()


def read(source: Path, tools: Path) -> None:
    """The host's compiler reads a C++ file, with CUDA's own headers: the emulation has others."""
    run(["g++", "-std=c++17", "-fsyntax-only", "-Isrc", "-isystem", str(tools.parent / "include"), *python_headers(), str(source)])


def disassembled(cubin: Path, tools: Path) -> list[sass.Function]:
    return list(sass.read(run([str(tools / "nvdisasm"), "-c", "-gi", "-hex", str(cubin)]).splitlines()))


# ---- kernels ----


@dataclass(frozen=True)
class Kernel:
    name: str
    function: sass.Function
    sizes: Sizes

    @property
    def template(self) -> str:
        return self.name.partition("<")[0]

    @property
    def is_mapped_only(self) -> bool:
        mapped_only = re.match(r"[^,]*, true\b", self.name) is not None
        return mapped_only and "large" not in self.template and "rounds" not in self.template

    @property
    def takes_pieces(self) -> bool:
        return self.name.endswith(", true>")


def readable(demangled: str) -> str:
    """decode::dispatch<AsIs, true, false>, for example."""
    name = re.sub(r"\([^()]*\)$", "", demangled).replace("(anonymous namespace)::", "").replace("pplx::cuda::", "")
    return re.sub(r"(\d)u\b", r"\1", name.removeprefix("void "))


def kernels_of(functions: Iterable[sass.Function], said: str) -> list[Kernel]:
    """`said`: by ptxas, with -v."""
    found = []
    for function in functions:
        demangled = run(["c++filt", function.name]).strip()
        about = re.search(
            rf"Function properties for {re.escape(function.name)}\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, "
            r"(\d+) bytes spill loads\n.*Used (\d+) registers",
            said,
        )
        if about is None:
            sys.exit(f"ptxas says nothing of {demangled}")
        stack, stores, loads, registers = (int(number) for number in about.groups())
        found.append(Kernel(readable(demangled), function, Sizes(function.bytes, registers, stack, stores, loads)))
    return found


# ---- checking ----


@functools.cache
def lines_of(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def is_of(load: sass.Instruction, what: MayWait) -> bool:
    return any(Path(path).name == what.file and what.text in lines_of(path)[line - 1] for path, line in load.lines)


def place(instruction: sass.Instruction) -> str:
    """Its line, what that is inlined at, and so on; and the text of the first one that is not a helper's of ptx.cuh."""
    ours = [(Path(path), line) for path, line in instruction.lines if Path(path).is_relative_to(ROOT / "src")]
    if not ours:
        return "of no line of the source"
    path, number = next((line for line in ours if line[0].name != "ptx.cuh"), ours[0])
    return f"{' < '.join(f'{path.name}:{line}' for path, line in ours)}  {lines_of(str(path))[number - 1].strip()}"


def check_loads(kernel: Kernel, rules: dict[str, tuple[MayWait, ...]], used: set[tuple[str, MayWait]]) -> list[str]:
    """Returns what is wrong. `used` gets the exceptions that there was a reason for."""
    may_wait = {what: name for name in (kernel.name, kernel.template) for what in rules.get(name, ())}

    def exception(load: sass.Instruction) -> MayWait | None:
        return next((what for what in may_wait if is_of(load, what)), None)

    def role(load: sass.Instruction) -> str:
        what = exception(load)
        return what.text if what is not None and what.apart else ""

    def may(wait: sass.Wait, what: MayWait) -> bool:
        if not what.along:
            return True
        others = [exception(other.load) for other in followed.waits if other.at is wait.at]
        return not wait.by_register and any(other is not None and not other.along for other in others)

    followed = sass.follow(kernel.function, role)
    wrong = [f"cannot be followed: {what}" for what in followed.lost]
    if not followed.barriers or not followed.loads:
        wrong.append("has no barrier, or no load before it: is this still the kernel that the rule was made for?")
    bad: dict[int, list[sass.Wait]] = {}  # keyed by the address that waits
    for wait in followed.waits:
        what = exception(wait.load)
        if what is not None and may(wait, what):
            used.add((may_wait[what], what))
        else:
            bad.setdefault(wait.at.address, []).append(wait)
    for address, waits in bad.items():
        because = {f"{wait.why} of {wait.load}" for wait in followed.waits if wait.at.address == address and wait.by_register}
        wrong.append(
            f"{waits[0].at}\n"
            f"    {place(waits[0].at)}\n"
            f"    waits for early loads before the first barrier, as it {' and '.join(sorted(because)) or waits[0].why}. The loads:"
            + "".join(f"\n      {wait.load}\n        {place(wait.load)}" for wait in waits)
        )
    for name, trips in followed.trips.items():
        if trips > 1:
            wrong.append(f"`{name or 'all warps'}`: {trips} round trips of memory one after the other, 1 at most")
    return wrong


def look_of(load: sass.Instruction) -> tuple[sass.Line, ...]:
    """The call of await_vec16s() that it is part of, and what that is inlined at."""
    for i, (path, line) in enumerate(load.lines):
        if Path(path).name == "arrival.cuh" and "look(" in lines_of(path)[line - 1]:
            return load.lines[i:]
    return ()


def check_looks(function: sass.Function) -> list[str]:
    wrong = []
    loaded: dict[str, sass.Instruction] = {}  # the last load of a look into each register, on the way that falls through
    used: dict[tuple[sass.Line, ...], sass.Instruction] = {}  # in this stretch of straight code
    labels = set(function.labels.values())
    for i, at in enumerate(function.instructions):
        before = function.instructions[i - 1]
        if i in labels or before.name == "BRA":
            used.clear()
        if before.name in {"BRA", "EXIT", "RET"} and not before.guard and len(before.operands) < 2:
            loaded.clear()
        written, read = sass.split(at)
        look = look_of(at) if sass.is_load(at) else ()
        if look in used:
            wrong.append(f"{at}\n    {place(at)}\n    comes after `{used[look]}`, which waits for another load of the same look")
        used |= {look_of(loaded[register]): at for register in read & loaded.keys()}
        for register in written:
            loaded.pop(register, None)
            if look:
                loaded[register] = at
    return wrong


def check_traps(function: sass.Function) -> list[str]:
    """Where the compiler sees that what comes next means nothing, it puts a trap in its place, and says nothing."""
    return [f"{at}\n    {place(at)}\n    a trap" for at in function.instructions if at.name == "BPT"]


def check_sizes(sizes: Sizes, bounds: Sizes) -> list[str]:
    return [
        f"{field.name.replace('_', ' ')}: {getattr(sizes, field.name)}, at most {getattr(bounds, field.name)}"
        for field in fields(Sizes)
        if getattr(sizes, field.name) > getattr(bounds, field.name)
    ]


def check(
    kernels: list[Kernel], bounds: dict[str, Sizes], may_wait: dict[str, tuple[MayWait, ...]], whole: bool = True
) -> list[str]:
    """`whole`: the kernels are all that there are."""
    wrong = []
    used: set[tuple[str, MayWait]] = set()
    for kernel in kernels:
        if kernel.name not in bounds:
            wrong.append(f"{kernel.name}: BOUNDS does not have it")
            continue
        found = check_sizes(kernel.sizes, bounds[kernel.name]) + check_traps(kernel.function)
        if kernel.is_mapped_only:
            found += check_loads(kernel, may_wait, used)
        if kernel.is_mapped_only and not kernel.takes_pieces:
            found += check_looks(kernel.function)
        wrong += [f"{kernel.name}: {what}" for what in found]
    if not whole:
        return wrong
    wrong += [f"{name}: BOUNDS has it, but there is no such kernel" for name in bounds.keys() - {kernel.name for kernel in kernels}]
    for name, exceptions in may_wait.items():
        wrong += [
            f"{name}: nothing waits any more for `{what.text}`: take it out of MAY_WAIT"
            for what in exceptions
            if (name, what) not in used
        ]
    return wrong


def table(kernels: list[Kernel], bounds: dict[str, Sizes]) -> str:
    names = [field.name for field in fields(Sizes)]
    rows = [["kernel", *(name.replace("_", " ") for name in names)]]
    for kernel in kernels:
        most = bounds.get(kernel.name)
        rows.append([kernel.name, *(f"{getattr(kernel.sizes, n)} / {getattr(most, n) if most else '-'}" for n in names)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def new_bounds(kernels: list[Kernel]) -> str:
    rows = []
    for kernel in kernels:
        s, had = kernel.sizes, BOUNDS.get(kernel.name, kernel.sizes)
        code = -(-kernel.sizes.code * 103 // 100 // 1024) * 1024
        rows.append(
            f'    "{kernel.name}": Sizes({code}, {max(s.registers, had.registers)}, {s.stack}, {s.spill_stores}, {s.spill_loads}),'
        )
    return "\n".join(["BOUNDS = {", *rows, "}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", action="store_true", help="only of one file in four, others at each commit")
    parser.add_argument("--show", action="store_true", help="print what each kernel has, beside its bound")
    parser.add_argument("--bounds", action="store_true", help="print a new BOUNDS, with 3 %% more code than there is")
    parser.add_argument("--loads", action="store_true", help="print each load before the first barrier, and where it is waited for")
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    tools = compiler()
    share = SHARE if arguments.drawn else 1
    names = [str(path.relative_to(CUDA).with_suffix("")) for path in sources()]
    wanted = [name for name in names if drawn.is_drawn(name, share)]
    print(f"compiling {', '.join(wanted)}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as at_once:
        results = {name: at_once.submit(compiled, name, tools) for name in wanted}
        list(at_once.map(lambda path: read(path, tools), [*CUDA.glob("host/**/*.cpp"), *ROOT.glob("src/bindings/cuda/*.cpp")]))
    kernels = [
        kernel
        for name in wanted
        for cubin, said in [results[name].result()]
        if name in RULED
        for kernel in kernels_of(disassembled(cubin, tools), said)
    ]
    if arguments.show:
        print(table(kernels, BOUNDS))
    if arguments.loads:
        show_loads(kernels)
    if arguments.bounds:
        print(new_bounds(kernels))
        return
    wrong = check(kernels, BOUNDS, MAY_WAIT, whole=not arguments.drawn)
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(kernels)} kernels: their machine code is as tools/machine_code.py wants it")


def show_loads(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        followed = sass.follow(kernel.function)
        print(f"\n{kernel.name}: {followed.trips.get('', 0)} round trips, if all warps did all")
        for load in followed.loads:
            print(f"  {load}\n    {place(load)}")
            for wait in followed.waits:
                if wait.load is load:
                    print(f"    waited for at {wait.at}, which {wait.why}\n      {place(wait.at)}")


if __name__ == "__main__":
    main()
