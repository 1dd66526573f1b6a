"""gpu_conformance.py as a test: vLLM's own experts over pplx_comm on two GPUs. It runs in this Python, which must have vLLM."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import HERE

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(400),
]


def test_every_case(tmp_path: Path) -> None:
    program = [sys.executable, str(HERE / "gpu_conformance.py"), "--seconds", "360", "--output", str(tmp_path)]
    ended = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=390, check=False)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout[-6000:]
