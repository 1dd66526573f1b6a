"""Runs targets of make one after the other, and prints how long each took and which tests were the slowest.

    python tools/check.py TARGET...

Ends with the first target that fails. Targets that run pytest write build/tests/TARGET.xml.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "tests"
SLOWEST = 15


def tests_of(results: Path) -> tuple[Counter[str], list[tuple[float, str]]]:
    """How many tests ended how, and the seconds of each."""
    counts, seconds = Counter[str](passed=0, failed=0, skipped=0), []
    for file in sorted(results.glob("*.xml")):
        for case in xml.parse(file).iter("testcase"):
            ended = {child.tag for child in case}
            counts["failed" if ended & {"failure", "error"} else "skipped" if "skipped" in ended else "passed"] += 1
            seconds.append((float(case.get("time", 0)), f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"))
    return counts, sorted(seconds, reverse=True)


def main(targets: list[str]) -> int:
    for file in RESULTS.glob("*.xml"):
        file.unlink()
    took: list[tuple[str, float]] = []
    code = 0
    for target in targets:
        print(f"==== make {target}", flush=True)
        begun = time.monotonic()
        code = subprocess.run([os.environ.get("MAKE", "make"), "--no-print-directory", target], cwd=ROOT).returncode
        took.append((target if code == 0 else f"{target} FAILED", time.monotonic() - begun))
        if code != 0:
            break
    counts, tests = tests_of(RESULTS)
    print("\nseconds")
    for what, spent in [*took, ("all", sum(spent for _, spent in took)), ("the slowest tests", 0.0)]:
        print(f"{spent:7.0f}  {what}" if spent else what)
    for spent, name in tests[:SLOWEST]:
        print(f"{spent:7.1f}  {name}")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
