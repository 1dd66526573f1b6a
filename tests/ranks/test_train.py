"""examples/train.py on CPUs, for a few steps: it learns, and neither the number of ranks nor the precision changes much."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Crew
from harness.environment import clean_environment

from bench.train import example

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train.py"


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Binds a port without listening: rank 0 can have it later, and a process that asks for any port gets another."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def results(ranks: int, *options: str) -> dict[str, dict[str, Any]]:
    world = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    of_rank = {rank: {"LOCAL_RANK": str(rank)} for rank in range(ranks)}
    with held_port() as port, Crew(ranks, {**world, "MASTER_PORT": str(port)}, rank_env=of_rank) as crew:
        crew.start("program_cases:run", str(TRAIN), ["--steps", "24", *options], last=True)
        for rank in range(ranks):
            status = crew.wait(rank, 120)
            assert status == 0, crew.output()
            crew.ended(rank, status)
        printed = re.search(r"^\{.*\}$", crew.output(0), re.M)
        assert printed is not None, crew.output()
        found: dict[str, dict[str, Any]] = json.loads(printed[0])
        return found


@pytest.mark.slow
def test_a_few_steps() -> None:
    alone, both = results(1, "--precision", "bf16"), results(2)
    assert list(both) == ["bf16", "fp8", "mxfp8"]
    bf16 = both["bf16"]
    for precision, one in both.items():
        of_steps, held_out = one["losses"], one["held_out"]
        assert of_steps[0] == pytest.approx(math.log(256), rel=0.1) and of_steps[-1] < 0.98 * of_steps[0], precision
        assert held_out < 0.98 * of_steps[0] and held_out not in of_steps, precision
        assert [*of_steps, held_out] == pytest.approx([*bf16["losses"], bf16["held_out"]], rel=0.01), precision
        assert precision == "bf16" or of_steps != bf16["losses"]
    assert bf16["losses"] == pytest.approx(alone["bf16"]["losses"], rel=1e-3)
    assert bf16["held_out"] == pytest.approx(alone["bf16"]["held_out"], rel=1e-3)


@pytest.fixture(scope="module")
def train() -> Any:
    return example()


def test_held_out_text(train: Any) -> None:
    """Whole files, text alone, a tenth; and no step sees them."""
    learnt, held_out = (bytes(part.numpy()) for part in train.corpus())
    own = Path(train.__file__).read_bytes()
    assert (own in learnt) != (own in held_out)
    assert b"\0" not in learnt + held_out and 0.02 < len(held_out) / len(learnt) < 0.4
    assert len(learnt) > 2_000_000
    for begin in range(0, len(held_out) - 4000, len(held_out) // 20):
        assert held_out[begin : begin + 4000] not in learnt


def test_more_ranks_than_gpus(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any is started."""
    monkeypatch.setattr(train.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cuda", "--ranks", "1,2,4"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="4 ranks of this host need 4 GPUs, and there are 2"):
        train.main()
    train.need_gpus(2, share=False)
    train.need_gpus(4, share=True)
    monkeypatch.setattr(train.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="there are 0"):
        train.need_gpus(4, share=True)


@pytest.mark.parametrize(
    ("of_steps", "held_out", "status"), [(1.005, 1.005, 0), (1.02, 1.0, 1), (1.0, 0.98, 1), (math.nan, 1.0, 1)]
)
def test_the_comparison(
    train: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], of_steps: float, held_out: float, status: int
) -> None:
    """Both losses, with bf16's."""
    trained = {"bf16": train.Trained([3.0, 2.0], 2.5), "fp8": train.Trained([3.0 * of_steps, 2.0 * of_steps], 2.5 * held_out)}
    monkeypatch.setattr(train, "start", lambda ranks: trained)
    monkeypatch.setattr(sys, "argv", ["train.py", "--ranks", "2"])
    monkeypatch.delenv("RANK", raising=False)
    assert train.main() == status
    assert "| 2 | bf16 | 2.5000 | +0.00% | 2.5000 | +0.00% |" in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path) -> None:
    """It starts its ranks, prints the table and draws the losses; as nothing may differ here, it ends with 1."""
    pytest.importorskip("matplotlib")
    environment, picture = {**clean_environment(), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}, tmp_path / "losses.png"
    options = ["--ranks", "2", "--steps", "1", "--precision", "bf16,fp8", "--within", "0", "--plot", str(picture)]
    done = subprocess.run([sys.executable, str(TRAIN), *options], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"^\| (\d) \| (\w+) \|", done.stdout, re.M) == [("2", "bf16"), ("2", "fp8")]
    assert picture.stat().st_size > 1000
