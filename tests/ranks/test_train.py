"""examples/train.py on CPUs, for a few steps: it learns, and neither the number of ranks nor the precision changes much."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Crew
from harness.environment import clean_environment

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train.py"


def losses(ranks: int, *options: str) -> dict[str, list[float]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
    with Crew(ranks, world, rank_env={rank: {"LOCAL_RANK": str(rank)} for rank in range(ranks)}) as crew:
        crew.start("program_cases:run", str(TRAIN), ["--steps", "8", *options], last=True)
        for rank in range(ranks):
            status = crew.wait(rank, 120)
            assert status == 0, crew.output()
            crew.ended(rank, status)
        printed = re.search(r"^\{.*\}$", crew.output(0), re.M)
        assert printed is not None, crew.output()
        found: dict[str, list[float]] = json.loads(printed[0])
        return found


def test_a_few_steps() -> None:
    alone, both = losses(1, "--precision", "bf16"), losses(2)
    assert list(both) == ["bf16", "fp8", "mxfp8"]
    for precision, of_steps in both.items():
        assert of_steps[0] == pytest.approx(math.log(256), rel=0.1) and of_steps[-1] < 0.98 * of_steps[0], precision
        assert of_steps == pytest.approx(both["bf16"], rel=0.01), precision
        assert precision == "bf16" or of_steps != both["bf16"]
    assert both["bf16"] == pytest.approx(alone["bf16"], rel=1e-3)


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path) -> None:
    """It starts its ranks, prints the table and draws the losses; as nothing may differ here, it ends with 1."""
    pytest.importorskip("matplotlib")
    environment, picture = {**clean_environment(), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}, tmp_path / "losses.png"
    options = ["--ranks", "2", "--steps", "2", "--precision", "bf16,fp8", "--within", "0", "--plot", str(picture)]
    done = subprocess.run([sys.executable, str(TRAIN), *options], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"^\| (\d) \| (\w+) \|", done.stdout, re.M) == [("2", "bf16"), ("2", "fp8")]
    assert picture.stat().st_size > 1000
