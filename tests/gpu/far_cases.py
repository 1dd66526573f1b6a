"""Cases of test_large.py where rows lie beyond 2^31 elements: size_cases.py, of whose large tensors only rows leave the GPU."""

from __future__ import annotations

from typing import Any

import gpu_cases
import rank_cases
import torch
from carried import Carried, CarriedDispatched
from cases import Case
from size_cases import FarRunner, found


class Rows:
    """A tensor of the GPU, of which parts are taken to the CPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def __getitem__(self, where: Any) -> torch.Tensor:
        return self._tensor[where].cpu()


class FarDispatched(CarriedDispatched):
    def __getattr__(self, name: str) -> Any:
        return Rows(self.inner.x) if name == "x" else super().__getattr__(name)


class FarCarried(Carried):
    """Takes an expert_out of the GPU."""

    def _dispatch(self, *args: Any, **options: Any) -> CarriedDispatched:
        return FarDispatched(self, super()._dispatch(*args, **options).inner)

    def _combine(self, call: Any, expert_out: Any, d: CarriedDispatched, **options: Any) -> Any:
        def combine(_: None, inner: Any, **moved: Any) -> Any:
            return call(expert_out, inner, **moved)

        return super()._combine(combine, None, d, **options)


def far_rows(me: Any, case: Case) -> dict[str, int]:
    """As size_cases.far_rows(), of Ragged or Padded."""
    with rank_cases.open_all_to_all(me, case, device=str(gpu_cases.gpu_of(me))) as a2a:
        runner = FarRunner(me, case, FarCarried(a2a))  # type: ignore[arg-type]
        runner.run()
        gpu_cases.settle()
        a2a.check()
        return found(runner)
