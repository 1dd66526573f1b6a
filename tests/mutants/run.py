"""Builds every mutant of mutants.py, runs what must catch it, and says which were caught and by what.

    python tests/mutants/run.py                    all
    python tests/mutants/run.py EAGAIN wrap        those whose names have one of these words
    python tests/mutants/run.py --drawn            one in eight of them, others at each commit

The tree as it is needs no build of its own: its objects are those of `make build`. A mutant compiles the files that depend on its own
and that its catcher is linked of, in a folder of its own, and links them with the objects of the others; a few at a time.
Exit code 1 if one survives, or no longer applies, or if the tests fail on the tree as it is.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import drawn
from mutants import CATCHERS, MUTANTS, Catcher, Mutant, Planted

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / "build" / "mutants"
SOURCES = WORK / "sources"
OBJECTS = WORK / "objects"
BUILD = ROOT / "build" / "dev"
COPIED = ("CMakeLists.txt", "bench/native", "cmake", "proxy", "src", "tests/cpp", "tools")
LIBRARY = "libpplx_core.a"
PARTS = ("pplx_core", "pplx_vector_")  # the targets whose objects are in it
RUN_LIMIT = 120.0  # seconds; the whole tree takes less for each catcher, so a mutant that takes longer hangs
FASTER = "-O1"  # than what `make build` compiles with: most mutants are caught at once, and compiling them is what takes time
DRAWN = 8  # one mutant in that many is drawn
AT_ONCE = (os.cpu_count() or 1) + 2  # more than cores: some mutants are caught by waiting

T = TypeVar("T")
P = TypeVar("P", bound=Planted)


class Broken(Exception):
    """The tools failed, not a mutant."""


def copy_sources(to: Path = SOURCES) -> None:
    """Files that did not change keep their times, so that nothing is built for them."""
    wanted: set[Path] = set()
    for name in COPIED:
        root = ROOT / name
        for source in [root] if root.is_file() else sorted(root.rglob("*")):
            if not source.is_file() or "__pycache__" in source.parts:
                continue
            target = to / source.relative_to(ROOT)
            wanted.add(target)
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    for old in [path for path in to.rglob("*") if path.is_file() and path not in wanted]:
        old.unlink()


def named(mutants: Sequence[P], words: list[str]) -> list[P]:
    """Those whose names have one of the words; without words all."""
    if words == ["--drawn"]:
        print(f"a part, drawn by commit {drawn.commit() or 'nothing: there is no git here'}", flush=True)
        return [m for m in mutants if drawn.is_drawn(m.name, DRAWN)] or [min(mutants, key=lambda m: drawn.number(m.name))]
    return [m for m in mutants if not words or any(word.lower() in m.name.lower() for word in words)]


def check_list(mutants: Sequence[Planted], sources: Path = SOURCES) -> list[str]:
    problems = [f"{m.name}: there is no catcher {m.catch!r}" for m in mutants if isinstance(m, Mutant) and m.catch not in CATCHERS]
    for m in mutants:
        found = (sources / m.file).read_text().count(m.old) if (sources / m.file).is_file() else 0
        if found != 1:
            problems.append(f"{m.name}: its old text stands in {m.file} {found} times, must be once")
    names = [m.name for m in mutants]
    return problems + [f"{name}: two mutants have this name" for name in sorted(set(names)) if names.count(name) > 1]


def call(command: list[str], limit: float, cwd: Path | None = None) -> tuple[int | None, str]:
    """Exit code, None for too slow, and what was printed."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, cwd=cwd) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # its jobs too
            process.communicate()
            return None, ""
    return process.returncode, output.decode(errors="replace")


@dataclass(frozen=True)
class Compiled:
    source: Path  # in SOURCES
    object: Path  # in OBJECTS
    command: tuple[str, ...]


def build_tree(targets: list[str]) -> None:
    """Builds the objects that no mutant changes, and copies them: a build of the checkout meanwhile must not take them away."""
    if not (BUILD / "CMakeCache.txt").is_file():
        raise Broken("there is no build/dev: run `make build` first")
    checked(["cmake", "--build", str(BUILD), "-j", str(AT_ONCE), "--target", *targets])
    shutil.rmtree(OBJECTS, ignore_errors=True)
    OBJECTS.mkdir(parents=True)
    shutil.copy2(BUILD / LIBRARY, OBJECTS)
    for target in targets:
        shutil.copytree(BUILD / "CMakeFiles" / f"{target}.dir", OBJECTS / "CMakeFiles" / f"{target}.dir")


def checked(command: list[str]) -> str:
    code, output = call(command, 900, BUILD if BUILD.is_dir() else None)
    if code != 0:
        raise Broken(f"{' '.join(command)}: exit {code}\n{output[-4000:]}")
    return output


def compilations() -> list[Compiled]:
    found = []
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        command = shlex.split(entry["command"])
        if not entry["file"].startswith(str(ROOT)) or "-o" not in command:
            continue
        source = SOURCES / Path(entry["file"]).relative_to(ROOT)
        found.append(Compiled(source, OBJECTS / command[command.index("-o") + 1], tuple(command)))
    return found


def dependents(file: str, root: Path = SOURCES) -> set[Path]:
    """The sources of a tree that include one of its files, directly or not, and the file itself."""
    sources = [path for path in root.rglob("*") if path.suffix in (".h", ".cpp", ".cuh", ".cu")]
    includes: dict[Path, set[Path]] = {}
    for path in sources:
        names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M)
        folders = (path.parent, root, root / "src", root / "tests", root / "tests" / "cpp")
        tried = [next((at for at in (folder / name for folder in folders) if at.is_file()), None) for name in names]
        includes[path] = {at.resolve() for at in tried if at is not None}
    reached = {(root / file).resolve()}
    while more := {path for path, named in includes.items() if named & reached} - reached:
        reached |= more
    return reached


class Program:
    """A catcher's, and what it is linked of."""

    def __init__(self, catcher: Catcher) -> None:
        self.catcher = catcher
        if catcher.tsan:
            return
        everything = compilations()
        self.own = [c for c in everything if f"CMakeFiles/{catcher.target}.dir/" in str(c.object)]
        members = self._members()
        parts = tuple(str(OBJECTS / "CMakeFiles" / part) for part in PARTS)
        self.core = [c for c in everything if c.object.name in members and str(c.object).startswith(parts)]

    def _members(self) -> set[str]:
        """Names the objects that the linker takes from the library."""
        program = WORK / self.catcher.target
        said = program.with_suffix(".map")
        self.link([c.object for c in self.own], program, f"-Wl,-Map={said}")
        return set(re.findall(re.escape(LIBRARY) + r"\(([\w.]+\.o)", said.read_text(errors="replace")))

    def link(self, objects: list[Path], program: Path, *more: str) -> None:
        command = self.own[0].command
        compiler = command[: next(i for i, word in enumerate(command) if word.startswith("-"))]
        # The linker takes an object before the library in place of its member.
        libraries = [str(OBJECTS / LIBRARY), "-pthread", "-ldl"]
        checked([*compiler, *more, *map(str, objects), *libraries, "-o", str(program)])

    def build(self, sources: Path, changed: set[Path], folder: Path) -> Path:
        """The program of `sources`, in which those files are not what they are in SOURCES."""
        program = folder / self.catcher.target
        if self.catcher.tsan:
            source = sources / "tests" / "cpp" / f"{self.catcher.target}.cpp"
            checked(["c++", "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", str(source), "-o", str(program)])
            return program
        objects: list[Path] = []
        if changed and not any(c.source.resolve() in changed for c in (*self.own, *self.core)):
            raise Broken(f"nothing that {self.catcher.target} is linked of depends on what was changed")
        for number, compiled in enumerate([*self.own, *self.core]):
            if compiled.source.resolve() not in changed:
                objects += [compiled.object] if compiled in self.own else []
                continue
            objects.append(folder / f"{number}.o")
            command = [word.replace(str(ROOT), str(sources)) for word in compiled.command]
            command[command.index("-o") + 1] = str(objects[-1])
            checked([*command, FASTER])
        self.link(objects, program)
        return program

    def run(self, program: Path) -> tuple[bool, str]:
        """Returns True if it passes, else in which words it does not."""
        code, output = self._call(program, self.catcher.arguments)
        if code is None:
            return False, f"hangs for {RUN_LIMIT:.0f} s"
        lines = [line.strip() for line in output.splitlines()]
        telling = ("CHECK", "WARNING: ThreadSanitizer", ": ")
        words = next(
            (line for mark in telling for line in lines if mark in line and not line.startswith("seed 1 (")), f"exit code {code}"
        )
        return code == 0, words

    def would_run_beside(self, program: Path) -> str:
        """In words, whether the other run passes."""
        if not self.catcher.beside:
            return ""
        code, _ = self._call(program, self.catcher.beside)
        return f"; {self.catcher.beside[0]} {'passes' if code == 0 else 'fails, too'}"

    def _call(self, program: Path, arguments: tuple[str, ...]) -> tuple[int | None, str]:
        under = [sys.executable, *self.catcher.under] if self.catcher.under else []
        return call([*under, str(program), *arguments], RUN_LIMIT, ROOT)


def how_far(done: int, of: int, started: float) -> str:
    left = (time.monotonic() - started) * (of - done) / done
    return f"[{done}/{of}, {left:.0f} s left]"


def try_mutant(mutant: Mutant, program: Program, changed: set[Path], folder: Path) -> tuple[Mutant, bool, str, float]:
    """Returns True if it was caught, by what, and how long that took."""
    begun = time.monotonic()
    file = folder / "sources" / mutant.file
    before = file.read_text()
    file.write_text(before.replace(mutant.old, mutant.new))
    try:
        built = program.build(folder / "sources", changed, folder)
        passes, words = program.run(built)
        words = words[:100] + program.would_run_beside(built)
    finally:
        file.write_text(before)
    return mutant, not passes, words, time.monotonic() - begun


def main(words: list[str]) -> int:
    begun = time.monotonic()
    mutants = named(MUTANTS, words)
    copy_sources()
    problems = check_list(MUTANTS)
    if problems:
        print("\n".join(problems))
        return 1
    names = list(dict.fromkeys(m.catch for m in mutants))
    targets = list(dict.fromkeys(CATCHERS[name].target for name in names if not CATCHERS[name].tsan))
    if targets:
        build_tree(targets)
    programs = {name: Program(CATCHERS[name]) for name in names}
    folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for number in range(AT_ONCE):
        copy_sources(WORK / str(number) / "sources")
        folders.put(WORK / str(number))

    def in_a_folder(work: Callable[[Path], T]) -> T:
        folder = folders.get()
        try:
            return work(folder)
        finally:
            folders.put(folder)

    with ThreadPoolExecutor(AT_ONCE) as workers:
        for name, (passes, said) in zip(
            names,
            workers.map(lambda p: in_a_folder(lambda f: p.run(p.build(f / "sources", set(), f))), programs.values()),
            strict=True,
        ):
            print(f"{'passes' if passes else 'FAILS':9} {name} on the tree as it is{'' if passes else ': ' + said}", flush=True)
            if not passes:
                return 1
        changed = {file: dependents(file) for file in {m.file for m in mutants}}
        tried = [workers.submit(in_a_folder, partial(try_mutant, m, programs[m.catch], changed[m.file])) for m in mutants]
        survivors, started = 0, time.monotonic()
        for number, done in enumerate(as_completed(tried), 1):
            mutant, caught, said, seconds = done.result()
            survivors += not caught
            verdict = f"by {mutant.catch}: {said}" if caught else f"{mutant.catch} passes, though {mutant.why}"
            at = how_far(number, len(mutants), started)
            print(f"{at} {'caught' if caught else 'SURVIVES':9} {mutant.name} ({seconds:.0f} s), {verdict}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants caught in {time.monotonic() - begun:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Broken as problem:
        print(problem)
        sys.exit(2)
