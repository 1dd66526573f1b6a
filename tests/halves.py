"""Runs pytest in two halves side by side: tests that mostly wait, and those that mostly compute. Each takes about as long as the other.

    python tests/halves.py [OPTIONS OF PYTEST]

The half that waits is printed as it goes, the other one after it. The last line is both together.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO

TESTS = Path(__file__).resolve().parent
COMPUTING = {"test_bench.py", "test_graph.py", "test_libfabric.py", "test_moe.py", "test_moe_kernels.py", "test_moe_overlap.py"}
"""Of the ranks' tests; the others wait, and nothing in the other folders does."""
NOTHING = 5
"""What pytest returns when the options leave none of its tests."""


def files(number: int) -> list[str]:
    waiting = {path for path in (TESTS / "ranks").glob("test_*.py") if path.name not in COMPUTING}
    return [str(path) for path in sorted(TESTS.rglob("test_*.py")) if (path not in waiting) == bool(number)]


def counts(said: str) -> Counter[str]:
    """Of pytest's last line: "3 failed, 812 passed, 26 deselected in 100.00s (0:01:40)"."""
    last = next((line for line in reversed(said.splitlines()) if re.search(r" in \d+\.\d+s", line)), "")
    return Counter({what: int(number) for number, what in re.findall(r"(\d+) ([a-z]+)", last.partition(" in ")[0])})


def start(number: int, options: list[str], said: int | IO[bytes]) -> subprocess.Popen[bytes]:
    """What failed in the last run, each half remembers for itself."""
    command = [sys.executable, "-m", "pytest", *files(number), "-o", f"cache_dir=.pytest_cache/{number}", *options]
    return subprocess.Popen(command, cwd=TESTS.parent, stdout=said, stderr=subprocess.STDOUT)


def main(options: list[str]) -> int:
    begun = time.monotonic()
    with tempfile.TemporaryFile() as aside:
        computing = start(1, options, aside)
        waiting = start(0, options, subprocess.PIPE)
        seen = b""
        try:
            assert waiting.stdout is not None
            while piece := waiting.stdout.read1(1 << 16):
                seen += piece
                sys.stdout.buffer.write(piece)
                sys.stdout.flush()
            codes = [waiting.wait(), computing.wait()]
        finally:
            for half in (waiting, computing):
                half.terminate()
        aside.seek(0)
        text = aside.read()
    sys.stdout.buffer.write(text)
    sys.stdout.flush()
    total = counts(seen.decode(errors="replace")) + counts(text.decode(errors="replace"))
    print(f"both halves: {', '.join(f'{number} {what}' for what, number in total.items())} in {time.monotonic() - begun:.0f} s")
    bad = [code for code in codes if code not in (0, NOTHING)]
    if bad or codes == [NOTHING, NOTHING]:
        print(f"FAILED: pytest ended with {codes[0]} for the half that waits and {codes[1]} for the other one")
        return bad[0] if bad else NOTHING
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
