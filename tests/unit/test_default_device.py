"""device=None takes a GPU where torch sees one."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import pplx_comm as pc
from pplx_comm.wiring.config import device_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize("sees", [False, True])
def test_a_gpu_where_torch_sees_one(sees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pplx_comm.gpus.built", lambda: SimpleNamespace(device_count=lambda: 2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [device_of(given) for given in (None, "cpu", "cuda")] == [GPU if sees else CPU, CPU, GPU]


def test_a_gpu_without_kernels(comm: pc.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller hears of it, and what to do; nothing goes to the CPU in silence."""
    monkeypatch.setitem(sys.modules, "pplx_comm._cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(pc.Error, match=r"default where torch sees a GPU.* no CUDA module.* or pass device='cpu'"):
        pc.AllToAll(comm, num_experts=2, top_k=1, hidden=64, max_tokens_per_rank=2)
