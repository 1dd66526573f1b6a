"""vLLM's modular MoE kernel over pplx_comm on two GPUs, with vLLM's own Triton and DeepGEMM experts.

`python gpu_conformance.py` runs every case in two processes and prints what came of each, then layer times as a Markdown table. It ends
by itself: a job whose rank fails or falls silent is ended, and another one takes the cases behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines import ROOT, free_port

HERE = Path(__file__).resolve().parent
RANKS = 2
SILENCE = 90.0
"""Seconds without a word of a job after which it is ended: compiling kernels takes most of them."""

VLLM_TOLERANCE = 3e-2
"""Absolute and relative, of vLLM's tests of combinations of modular kernels, for inputs and weights of the size that theirs have."""
OF_A_TOKEN = {"bf16": 0.02, "fp8": 0.08}
"""The largest difference of a token's row, by its norm. vLLM's tolerance is about as large as the outputs: this is what would fail."""


@dataclass(frozen=True)
class Case:
    """A run: vLLM's `experts` fed by pplx_comm in `form`, as `mode` says; `tokens` of a rank to time, 0 to compare."""

    form: str
    experts: str
    wire: str
    mode: str
    tokens: int = 0

    @property
    def name(self) -> str:
        of = f" {self.tokens} tokens" if self.tokens else ""
        return f"{'time' if self.tokens else 'same'}: {self.form} {self.experts} {self.wire} {self.mode}{of}"


KERNELS = [
    ("standard", "triton", "fp8"),
    ("batched", "triton", "fp8"),
    ("standard", "triton", "bf16"),
    ("batched", "triton", "bf16"),
    ("standard", "deepgemm", "fp8"),
    ("batched", "deepgemm", "fp8"),
]
MODES = ["eager", "graph", "two-batch overlap", "two-batch overlap graph"]
TIMED = [
    ("standard", "triton", "fp8"),
    ("batched", "triton", "fp8"),
    ("allgather", "triton", "fp8"),
    ("batched", "deepgemm", "fp8"),
    ("standard", "deepgemm", "fp8"),
    ("allgather", "deepgemm", "fp8"),
    ("standard", "triton", "bf16"),
    ("batched", "triton", "bf16"),
    ("allgather", "triton", "bf16"),
]
TOKENS = [8, 128, 512]


def all_cases() -> list[Case]:
    compared = [Case(*kernel, mode) for kernel in KERNELS for mode in MODES]
    return compared + [Case(*kernel, "graph", tokens) for kernel in TIMED for tokens in TOKENS]


# ---- the jobs --------------------------------------------------------------------------------------------------------------


class Job:
    """Two ranks that take the cases in order. They say what came of each as soon as it is known."""

    def __init__(self, cases: list[Case], folder: Path) -> None:
        self.cases = cases
        self._outputs = [folder / f"rank{rank}" for rank in range(RANKS)]
        env = os.environ | {
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "PPLX_COMM_VLLM_TIMEOUT": os.environ.get("PPLX_COMM_VLLM_TIMEOUT", "20"),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(folder.parent / "cache")),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
            "HF_HUB_OFFLINE": "1",
        }
        arguments = [sys.executable, str(HERE / "gpu_rank.py"), json.dumps([asdict(case) for case in cases])]
        self._ranks = []
        for rank, output in enumerate(self._outputs):
            with output.open("wb") as file:
                self._ranks.append(
                    subprocess.Popen(
                        arguments, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=file, stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )  # fmt: skip

    def run(self, seconds: float) -> str:
        """Why it ended: "" if it came to its end."""
        end, heard, size = time.monotonic() + seconds, time.monotonic(), 0
        try:
            while any(rank.poll() is None for rank in self._ranks):
                now = time.monotonic()
                total = sum(output.stat().st_size for output in self._outputs)
                if total != size:
                    heard, size = now, total
                if any(rank.poll() for rank in self._ranks):
                    # The others say what they saw of it, if they can.
                    for rank in self._ranks:
                        with suppress(subprocess.TimeoutExpired):
                            rank.wait(min(25.0, max(0.0, end - now)))
                    return "a rank ended with an error"
                if now > end:
                    return "out of time"
                if now - heard > SILENCE:
                    return f"silent for {SILENCE:.0f} s"
                time.sleep(0.1)
            return "" if not any(rank.returncode for rank in self._ranks) else "a rank ended with an error"
        finally:
            for rank in self._ranks:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()

    def results(self) -> dict[str, list[dict[str, Any]]]:
        """The ranks' results of each case."""
        said: dict[str, list[dict[str, Any]]] = {}
        for output in self._outputs:
            for line in output.read_text(errors="replace").splitlines():
                if line.startswith("CASE "):
                    result = json.loads(line[5:])
                    said.setdefault(result.pop("name"), []).append(result)
        return said

    def facts(self) -> str:
        return next(
            (line[6:] for line in self._outputs[0].read_text(errors="replace").splitlines() if line.startswith("FACTS ")), ""
        )

    def tail(self) -> str:
        return "\n".join(f"-- {output.name}\n{output.read_text(errors='replace')[-3000:]}" for output in self._outputs)


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The worse result of both ranks."""
    if error := next((result["error"] for result in results if "error" in result), None):
        return {"error": error}
    if len(results) < RANKS:
        return {"error": "only one rank ended it"}
    if "times" in results[0]:
        slowest = sorted(max(pair) for pair in zip(*(result["times"] for result in results), strict=True))
        return {"p50": slowest[len(slowest) // 2]}
    if "skip" in results[0]:
        return results[0]
    return {
        name: all(result[name] for result in results) if name == "close" else max(result[name] for result in results)
        for name in results[0]
    }


def run_all(cases: list[Case], seconds: float, folder: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """Returns the result of each case, by its name."""
    end = time.monotonic() + seconds
    done: dict[str, dict[str, Any]] = {}
    facts = ""
    number = 0
    while (left := [case for case in cases if case.name not in done]) and end - time.monotonic() > 20:
        number += 1
        job = Job(left, Path(tempfile.mkdtemp(prefix=f"job{number}-", dir=folder)))
        why = job.run(end - time.monotonic())
        facts = facts or job.facts()
        said = job.results()
        done |= {name: merged(results) for name, results in said.items() if len(results) == RANKS or why}
        if not why:
            break
        print(f"job {number}: {why}\n{job.tail()}", flush=True)
        if why != "out of time":
            # The first case that no rank ended is to blame.
            for case in left:
                if case.name not in done:
                    if not any("error" in merged(results) for results in said.values()):
                        done[case.name] = {"error": why}
                    break
    for case in cases:
        done.setdefault(case.name, {"error": "not run"})
    return done, facts


def verdict(case: Case, result: dict[str, Any]) -> str:
    """Returns what is wrong with it, or nothing."""
    if "error" in result:
        return str(result["error"])
    if case.tokens or "skip" in result:
        return ""
    bound = OF_A_TOKEN[case.wire]
    if not result["close"]:
        return f"not within vLLM's {VLLM_TOLERANCE} of one process: {result['worst']:.4f} of {result['largest']:.4f}"
    if result["token"] > bound:
        return f"a token is {result['token']:.4f} of its norm from one process, more than {bound}"
    if result["backend"] > bound:
        return f"a token is {result['backend']:.4f} of its norm from vLLM's own backend, more than {bound}"
    return ""


def in_words(result: dict[str, Any]) -> str:
    if "skip" in result:
        return f"skipped, {result['skip']}"
    if "p50" in result:
        return f"{result['p50']:.0f} us"
    return (
        f"worst {result['worst']:.5f} of {result['largest']:.4f}; a token's row {result['token']:.4f} from one process, "
        f"{result['backend']:.4f} from vLLM's backend"
    )


def table(done: dict[str, dict[str, Any]]) -> str:
    lines = ["| layer, p50 of the slower rank, us | " + " | ".join(f"{tokens} tokens a rank" for tokens in TOKENS) + " |"]
    lines.append("|---" * (len(TOKENS) + 1) + "|")
    for form, experts, wire in TIMED:
        cells = []
        for tokens in TOKENS:
            result = done.get(Case(form, experts, wire, "graph", tokens).name, {})
            cells.append(f"{result['p50']:.0f}" if "p50" in result else "-")
        who = "vLLM allgather_reducescatter" if form == "allgather" else f"pplx_comm {form}"
        lines.append(f"| {who}, {experts}, {wire} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=190.0, help="for everything")
    parser.add_argument("--only", default="", help="words that the names of the cases to run have")
    parser.add_argument("--output", type=Path, help="where the ranks' output goes")
    given = parser.parse_args()
    cases = [case for case in all_cases() if all(word in case.name.split() for word in given.only.split())]
    folder = given.output or Path(tempfile.mkdtemp(prefix="gpu_conformance-"))
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    done, facts = run_all(cases, given.seconds, folder)
    print(facts)
    wrong = 0
    for case in cases:
        problem = verdict(case, done[case.name])
        wrong += bool(problem)
        print(f"{'FAILED' if problem else 'ok':6} {case.name}: {problem or in_words(done[case.name])}")
    print(table(done))
    print(f"{len(cases) - wrong} of {len(cases)} in {time.monotonic() - start:.0f} s; output of the ranks in {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
