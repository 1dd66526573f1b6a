"""Builds mutants of what kernels promise the proxy, and a carrier that they drive; runs the emulation's tests on each, and says which
were caught. The mutants are in emulation_mutants.py and emulation_piece_mutants.py.

    python tests/mutants/run_emulation.py              all
    python tests/mutants/run_emulation.py signal       those whose names have one of these words
    python tests/mutants/run_emulation.py --core       what `make mutants` plants: a few that every carrier must not have
    python tests/mutants/run_emulation.py --core --drawn

A mutant is of one of the emulation's modules in build/dev, in which the files that depend on the mutant's own are compiled again. Exit code
1 if one survives, or no longer applies.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import emulation_mutants
import emulation_piece_mutants
import run
from emulation_mutants import Mutant

TARGETS = {"_nvshmem": "pplx_emulated_carrier", "_cuda": "pplx_emulation"}
WORK = run.ROOT / "build" / "mutants-emulation"
COPIED = ("proxy", "src", "tests/emulation")
TESTS = "tests/emulation"
LIMIT = 300.0
MUTANTS = [*emulation_mutants.MUTANTS, *emulation_piece_mutants.MUTANTS]


def commands(module: str) -> tuple[list[tuple[Path, list[str]]], list[str]]:
    """How each object of the module is compiled, by source; and how they are linked."""
    compiled = []
    for entry in json.loads((run.BUILD / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        if "-o" in words and f"{TARGETS[module]}.dir/" in words[words.index("-o") + 1]:
            compiled.append((Path(entry["file"]), words))
    first = compiled[0][1]
    compiler = first[: next(i for i, word in enumerate(first) if word.startswith("-"))]
    return compiled, [*(word for word in compiler if not word.endswith("ccache")), "-shared"]


def build(mutant: Mutant, folder: Path) -> None:
    """The three modules of tests/emulation, of which one has the mutant."""
    for name in COPIED:
        shutil.copytree(run.ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / mutant.file
    file.write_text(file.read_text().replace(mutant.old, mutant.new))
    compiled, link = commands(mutant.module)
    dependents = run.dependents(mutant.file, folder)  # not by the carrier's header, which a macro names
    todo: list[list[str]] = []
    changed: list[Path] = []
    same: list[Path] = []
    for number, (source, words) in enumerate(compiled):
        own = folder / source.relative_to(run.ROOT)
        at = words.index("-o") + 1
        if own.resolve() not in dependents or (mutant.kernels and source.name not in mutant.kernels):
            same.append(run.BUILD / words[at])
            continue
        changed.append(folder / f"{number}.o")
        # Warnings are the tree's own; what it was configured with stays where it is.
        todo.append([word if "/build/" in word or ".venv" in word else word.replace(str(run.ROOT), str(folder)) for word in words])
        todo[-1][at] = str(changed[-1])
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        list(compilers.map(run.checked, todo))
    # Several sources may have the function: the first one is taken.
    objects = [*changed, *same]
    for module in (run.BUILD / "tests" / "emulation").glob("*.so"):
        if not module.name.startswith(f"{mutant.module}."):
            (folder / module.name).symlink_to(module)
            continue
        run.checked([*link, *map(str, objects), "-latomic", "-ldl", "-o", str(folder / module.name)])


def main(words: list[str]) -> int:
    problems = run.check_list(MUTANTS, run.ROOT)
    if problems:
        print("\n".join(problems))
        return 1
    run.checked(["cmake", "--build", str(run.BUILD), "--target", "pplx_emulation"])
    mutants = run.named([m for m in MUTANTS if m.is_core or words[:1] != ["--core"]], [word for word in words if word != "--core"])
    survivors, begun = 0, time.monotonic()
    for number, mutant in enumerate(mutants, 1):
        shutil.rmtree(WORK, ignore_errors=True)
        started = time.monotonic()
        build(mutant, WORK)
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-m", "not long", TESTS]
        environment = [f"PPLX_TEST_EMULATION={WORK}", "PPLX_TEST_EMULATED_TIMEOUT=5", "PPLX_TEST_VOLUME=1"]
        code, output = run.call(["env", *environment, *pytest, "-k", mutant.tests], LIMIT, run.ROOT)
        caught = code in (None, 1)
        lines = [line.removeprefix("E").strip() for line in output.splitlines()]
        said = [line for line in lines if re.match(r"a put |outcomes.Failed|\S*Error: ", line)] or ["it hangs"]
        survivors += not caught
        verdict = said[-1][:110] if caught else f"passes (exit {code}), though {mutant.why}"
        at = run.how_far(number, len(mutants), begun)
        print(
            f"{at} {'caught' if caught else 'SURVIVES':9} {mutant.name} ({time.monotonic() - started:.0f} s): {verdict}", flush=True
        )
    shutil.rmtree(WORK, ignore_errors=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants caught in {time.monotonic() - begun:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except run.Broken as problem:
        print(problem)
        sys.exit(2)
