"""examples/gemm.py on CPUs: the GEMMs that run there are right, and what is wrong is reported."""

from __future__ import annotations

import re
from pathlib import Path

from harness import Crew
from harness.environment import seed

GEMM = Path(__file__).resolve().parents[2] / "examples" / "gemm.py"
ON_CPUS = ("torch loop", "torch.bmm")
"""Where torch has it, torch._grouped_mm too."""


def run(program: Path) -> tuple[list[int | None], str]:
    """Two ranks, with 3 and 2 experts: their exit statuses, and what they said."""
    small = ["--tokens", "8", "--hidden", "256", "--experts", "5", "--top-k", "2", "--seed", str(seed())]
    with Crew(2, rank_env={rank: {"LOCAL_RANK": str(rank)} for rank in range(2)}) as crew:
        crew.start("program_cases:run", str(program), small, last=True)
        statuses = [crew.wait(rank, 60) for rank in range(2)]
        for rank, status in enumerate(statuses):
            assert status is not None, crew.output()
            crew.ended(rank, status)
        return statuses, crew.output()


def result(said: str, gemm: str) -> str:
    row = re.search(rf"^.*\| {re.escape(gemm)} \| \w+\(align=\d+\) \| \w+ \| \w+ \| (.*) \|$", said, re.M)
    assert row is not None, said
    return row[1]


def test_gemms() -> None:
    statuses, said = run(GEMM)
    assert statuses == [0, 0], said
    for gemm in ON_CPUS:
        assert re.fullmatch(r"0\.0\d+ \| [\d.]+", result(said, gemm)), said
    assert result(said, "Triton tiles") == "needs a GPU"


PLANTED = {
    "begins = d.offsets.tolist()": "begins = [begin + 1 for begin in d.offsets.tolist()]",
    "* d.scale[..., None]": "* d.scale.roll(1, -1)[..., None]",
    "    return torch._grouped_mm(d.x": '    raise RuntimeError("no such tile")\n    return torch._grouped_mm(d.x',
}


def test_wrong_ones(tmp_path: Path) -> None:
    """Rows of the wrong place, scales of the wrong block, an exception: all are reported, and every rank ends with 1."""
    source = GEMM.read_text()
    for right, wrong in PLANTED.items():
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    program = tmp_path / "gemm.py"
    program.write_text(source)
    statuses, said = run(program)
    assert statuses == [1, 1], said
    for gemm in ON_CPUS:
        assert result(said, gemm).startswith("WRONG: error "), said
    if "has none" not in result(said, "torch._grouped_mm"):
        assert result(said, "torch._grouped_mm") == "RuntimeError: no such tile", said
    assert result(said, "Triton tiles") == "needs a GPU"
