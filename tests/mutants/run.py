"""Builds every mutant of mutants.py, runs what must catch it, and says who was caught and by what.

    python tests/mutants/run.py                    all
    python tests/mutants/run.py EAGAIN wrap        those whose names have one of these words

Works on a copy of the sources in build/mutants, which keeps its objects: a second run builds only what changed. What a mutant made
is thrown away with it, so the next one builds only what depends on its own file.
Exit code 1 if one survives, or no longer applies, or if the tests fail on the tree as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from mutants import CATCHERS, MUTANTS, Catcher, Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / "build" / "mutants"
SOURCES = WORK / "sources"
BUILD = WORK / "build"
CLEAN = WORK / "clean"  # BUILD as it is without mutants
COPIED = ("CMakeLists.txt", "cmake", "proxy", "src", "tests/cpp", "tools")
RUN_LIMIT = 120.0  # seconds; the whole tree takes less for each catcher, so a mutant that takes longer hangs
FLAGS = ("-std=c++17", "-O1")


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


def check_list(mutants: list[Mutant], sources: Path = SOURCES, catchers: dict[str, Catcher] | None = CATCHERS) -> list[str]:
    problems = [f"{m.name}: there is no catcher {m.catch!r}" for m in mutants if catchers is not None and m.catch not in catchers]
    for m in mutants:
        found = (sources / m.file).read_text().count(m.old) if (sources / m.file).is_file() else 0
        if found != 1:
            problems.append(f"{m.name}: its old text stands in {m.file} {found} times, must be once")
    names = [m.name for m in mutants]
    return problems + [f"{name}: two mutants have this name" for name in sorted(set(names)) if names.count(name) > 1]


def call(command: list[str], limit: float) -> tuple[int | None, str]:
    """Exit code, None for too slow, and what was printed."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # its jobs too
            process.communicate()
            return None, ""
    return process.returncode, output.decode(errors="replace")


def build(catcher: Catcher) -> None:
    if catcher.tsan:
        source = SOURCES / "tests" / "cpp" / f"{catcher.target}.cpp"
        command = ["c++", *FLAGS, "-g", "-fsanitize=thread", "-pthread", str(source), "-o", catcher.command[0].format(build=BUILD)]
    else:
        command = ["cmake", "--build", str(BUILD), "--target", catcher.target, "-j", "2"]
    code, output = call(command, 600)
    if code != 0:
        raise Broken(f"{' '.join(command)}: exit {code}\n{output[-4000:]}")


def run(catcher: Catcher) -> tuple[bool, str]:
    """Whether it passes, and in which words it does not."""
    code, output = call([part.format(build=BUILD) for part in catcher.command], RUN_LIMIT)
    if code is None:
        return False, f"hangs for {RUN_LIMIT:.0f} s"
    lines = [line.strip() for line in output.splitlines()]
    telling = ("CHECK", "WARNING: ThreadSanitizer", ": ")
    words = next(
        (line for mark in telling for line in lines if mark in line and not line.startswith("seed 1 (")), f"exit code {code}"
    )
    return code == 0, words


def configure() -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = ["-DPPLX_PYTHON=OFF", "-DPPLX_TESTS=ON", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"]
    code, output = call(["cmake", "-S", str(SOURCES), "-B", str(BUILD), *generator, *options], 120)
    if code != 0:
        raise Broken(output)


def mirror(source: Path, target: Path) -> None:
    """Make `target` what `source` is, times included: a build tool cannot tell them apart."""
    target.mkdir(parents=True, exist_ok=True)
    wanted = {entry.name: entry for entry in os.scandir(source)}
    for entry in os.scandir(target):
        if entry.name not in wanted:
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
    for name, entry in wanted.items():
        there = target / name
        if entry.is_dir(follow_symlinks=False):
            mirror(Path(entry.path), there)
            continue
        here, old = entry.stat(follow_symlinks=False), there.lstat() if there.exists() else None
        if old is None or (here.st_mtime_ns, here.st_size) != (old.st_mtime_ns, old.st_size):
            shutil.copy2(entry.path, there, follow_symlinks=False)


def try_mutant(mutant: Mutant) -> tuple[bool, str]:
    """Whether it was caught, and by what."""
    file, catcher = SOURCES / mutant.file, CATCHERS[mutant.catch]
    before, times = file.read_text(), file.stat()
    file.write_text(before.replace(mutant.old, mutant.new))
    try:
        build(catcher)
        passes, words = run(catcher)
    finally:
        file.write_text(before)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        mirror(CLEAN, BUILD)
    return not passes, words


def main(words: list[str]) -> int:
    begun = time.monotonic()
    mutants = [m for m in MUTANTS if not words or any(word.lower() in m.name.lower() for word in words)]
    copy_sources()
    problems = check_list(MUTANTS)
    if problems:
        print("\n".join(problems))
        return 1
    configure()
    for name in dict.fromkeys(m.catch for m in mutants):
        build(CATCHERS[name])
        passes, said = run(CATCHERS[name])
        print(f"{'passes' if passes else 'FAILS':9} {name} on the tree as it is{'' if passes else ': ' + said}", flush=True)
        if not passes:
            return 1
    mirror(BUILD, CLEAN)
    survivors = []
    for mutant in mutants:
        at = time.monotonic()
        caught, said = try_mutant(mutant)
        if not caught:
            survivors.append(mutant)
        verdict = f"by {mutant.catch}: {said[:100]}" if caught else f"{mutant.catch} passes, though {mutant.why}"
        print(f"{'caught' if caught else 'SURVIVES':9} {mutant.name} ({time.monotonic() - at:.0f} s), {verdict}", flush=True)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants caught in {time.monotonic() - begun:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Broken as problem:
        print(problem)
        sys.exit(2)
