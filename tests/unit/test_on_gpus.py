"""tools/on_gpus.py: its runs are commands that this tree has, and it keeps to its time."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path

import on_gpus
import pytest
from gpu_runs import RUNS, Run

ROOT = Path(__file__).resolve().parents[2]

TWO = on_gpus.Machine(gpus=2, ranks=2)


def test_names_are_unique() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS)


def options_of(script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [script, "--help"])
        patch.setattr(sys, "path", [str((ROOT / script).parent), *sys.path])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    shown = capsys.readouterr()
    assert not ended.value.code, shown.err
    # Where an option is explained, not where a line of the docstring has one of mpirun's.
    lines = [line.split("  ")[0] for line in re.findall(r"^  +(-.*)$", shown.out, re.MULTILINE)]
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(lines)))


def test_scripts_have_their_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[str]] = {}
    for run in RUNS:
        words = on_gpus.command_of(run, TWO, tmp_path)
        if "pytest" not in words:
            at = next((n for n, word in enumerate(words) if (ROOT / word).is_file() and not Path(word).is_absolute()), None)
            assert at is not None, f"{run.name}: no script of this tree"
            asked.setdefault(words[at], set()).update(word for word in words[at + 1 :] if word.startswith("-"))
    for script, options in asked.items():
        known = options_of(script, capsys, monkeypatch) if options else set()
        assert options <= known, f"{script} has no {options - known}"


COLLECTS = """
import json, sys, pytest
for name, words in json.loads(sys.argv[1]):
    if code := pytest.main([*words, "--collect-only", "-q", "-p", "no:cacheprovider"]):
        sys.exit(f"{name}: pytest ended with {code}")
"""


@pytest.mark.slow
def test_there_are_tests_to_run(tmp_path: Path) -> None:
    """One interpreter collects for all runs."""
    commands = [(run.name, on_gpus.command_of(run, TWO, tmp_path)) for run in RUNS]
    wanted = [(name, words[words.index("pytest") + 1 :]) for name, words in commands if "pytest" in words]
    every = {**os.environ, "PPLX_TEST_DRAWN": "1"}
    found = subprocess.run(
        [sys.executable, "-c", COLLECTS, json.dumps(wanted)], cwd=ROOT, env=every, capture_output=True, text=True
    )
    assert wanted and found.returncode == 0, found.stderr + found.stdout[-2000:]


def plan(tmp_path: Path, runs: list[Run], seconds: float = 600) -> tuple[bool, str]:
    good = on_gpus.run_all(runs, TWO, tmp_path, on_gpus.time.monotonic() + seconds)
    return good, (tmp_path / "summary.txt").read_text()


def test_what_succeeded_is_not_run_again(tmp_path: Path) -> None:
    """And one that fails does not end the others."""
    program = tmp_path / "one.py"
    program.write_text("print('seen')\nopen(__file__ + '.count', 'a').write('x')\n")
    runs = [Run("bad", "", 1, "{python} -S -c 'raise SystemExit(3)'"), Run("one", "", 1, f"{{python}} -S {program}")]
    good, summary = plan(tmp_path, runs)
    assert (
        not good
        and re.search(r"^bad +failed \(3\)", summary, re.MULTILINE)
        and re.search(r"^one +ok .* seen$", summary, re.MULTILINE)
    )
    none = Run("none", "", 1, "{python} -S -c 'print(\"== 2 skipped in 1.00s ==\")'")
    for _ in range(2):
        good, summary = plan(tmp_path, [none])
        assert good and re.search(r"^none +skipped .* 2 skipped in 1.00s$", summary.splitlines()[-1])
    good, summary = plan(tmp_path, runs[1:])
    assert good and summary.endswith("ok before\n")
    assert (tmp_path / "one.py.count").read_text() == "x" and not (tmp_path / "bad.ok").exists()


def test_a_hang_is_ended_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = f"import os, time; child = os.fork(); child and open({str(child)!r}, 'w').write(str(child)); time.sleep(600)"
    good, summary = plan(tmp_path, [Run("hang", "", 0.05, f'{{python}} -c "{program}"')])
    assert not good and re.search(r"^hang +cut off", summary, re.MULTILINE)
    state = Path(f"/proc/{child.read_text()}/stat")

    def gone() -> bool:
        """Killed, it ends when it next gets a core, and is gone once init has collected it."""
        try:
            return state.read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    deadline = time.monotonic() + 20
    while not gone():
        assert time.monotonic() < deadline, "the child lives"
        time.sleep(0.01)


def test_proofs_run_beside_each_other_and_figures_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met = {False: threading.Barrier(2), True: threading.Barrier(2)}
    alone: list[bool] = []

    def attempt(run: Run, *_: object) -> tuple[str, str]:
        """Two proofs meet, a figure waits for another in vain."""
        try:
            met[run.figure or run.alone].wait(0.1 if run.figure or run.alone else 60)
        except threading.BrokenBarrierError:
            met[run.figure or run.alone].reset()
            alone.append(run.figure or run.alone)
        return "ok", run.name

    monkeypatch.setattr(on_gpus, "attempt", attempt)
    runs = [Run(name, "", 0, "", figure=name.startswith("f")) for name in ("p1", "p2", "f1", "f2")]
    runs[3] = Run("a1", "", 0, "", alone=True)
    assert on_gpus.run_all(runs, TWO, tmp_path, on_gpus.time.monotonic() + 600, beside=2)
    assert (tmp_path / "summary.txt").read_text().split() == [run.name for run in runs] and alone == [True, True]


def test_none_is_begun_without_its_time_or_its_gpus(tmp_path: Path) -> None:
    runs = [Run("long", "", 5, "{python} -c 0"), Run("wide", "", 1, "{python} -c 0", gpus=4), Run("short", "", 1, "{python} -c 0")]
    good, summary = plan(tmp_path, runs, 120)
    assert good and "long                 not run: takes 5 minutes, and 2.0 are left" in summary
    assert re.search(r"^wide +not run: needs 4 GPUs, or 4 ranks under MPS$", summary, re.MULTILINE)
    assert re.search(r"^short +ok", summary, re.MULTILINE)


def test_ranks_under_mps_prove_and_do_not_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = on_gpus.Machine(gpus=1, ranks=2)
    assert shared.lacks(Run("proof", "", 1, "", gpus=2)) == ""
    assert shared.lacks(Run("figure", "", 1, "", gpus=2, figure=True)) == "needs 2 GPUs"
    listed = tmp_path / "nvidia-smi"
    listed.write_text("#!/bin/sh\necho 'GPU 0: one'\necho 'GPU 1: two'\n")
    listed.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PPLX_TEST_RANKS_PER_GPU", "3")
    assert on_gpus.this_machine() == on_gpus.Machine(gpus=2, ranks=6)


def test_order_and_unknown_names() -> None:
    assert [run.name for run in on_gpus.chosen("decode,proof-large,decode*")] == ["decode", "proof-large", "decode-sms"]
    with pytest.raises(SystemExit, match="no run is called proof-nothing"):
        on_gpus.chosen("proof-nothing")
