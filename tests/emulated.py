"""What the ranks of tests/test_emulation.py run: device="cuda" on a CPU.

pplx_comm._cuda is the one that tests/emulation builds, and the tensors are the CPU's, which is its GPU. Each call waits for what it
launched, and raises what went wrong with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from typing import Any

import chaos_cases
import failure_cases
import gpu_cases
import one_process
import placement_cases
import rank_cases
import torch
from rank_cases import Case

from pplx_comm import _config, _gpu

_opened = rank_cases.open_all_to_all
_LAUNCHING = ("dispatch", "dispatch_recv", "combine", "combine_recv", "release")
_synchronize: Any = None


def _waiting(launch: Any) -> Any:
    """Its kernel has ended when it returns: PyTorch gives memory of the CPU to the next who asks, not behind a stream's work."""

    def waited(core: Any, *args: Any) -> Any:
        result = launch(core, *args)
        _synchronize()
        return result

    return waited


def _checking(call: Any) -> Any:
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        result = call(self, *args, **options)
        self._owner.check()
        return result

    return checked


def use(module: str) -> None:
    """From now on device="cuda" is that."""
    global _synchronize
    if _synchronize is not None:
        return
    gpu_cases.use_module(module)
    _synchronize = ctypes.CDLL(module).pplx_emulation_synchronize

    make = _gpu.Gpu.__init__

    def on_cpu(self: Any, owner: Any, core: Any, device: torch.device) -> None:
        make(self, owner, core, device)
        owner.device = owner._checks._device = self._device = torch.device("cpu")

    setattr(_gpu.Gpu, "__init__", on_cpu)  # noqa: B010
    exchange = _gpu.cuda_module().Exchange
    for name in ("dispatch", "combine", "release"):
        setattr(exchange, name, _waiting(getattr(exchange, name)))
    exchange.stats = lambda core: {"steps": core.steps}  # which an AllToAll of the CPU asks for
    for name in _LAUNCHING:
        setattr(_gpu.Gpu, name, _checking(getattr(_gpu.Gpu, name)))
    setattr(_gpu, "_raw_stream", lambda device: 0)  # noqa: B010
    setattr(_config, "device_index", lambda device: 0)  # noqa: B010
    setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())  # noqa: B010
    setattr(torch.cuda, "set_device", lambda device: None)  # noqa: B010
    setattr(torch.cuda, "current_device", lambda: 0)  # noqa: B010
    setattr(torch.cuda, "device_count", lambda: 1)  # noqa: B010
    setattr(one_process, "_reserve", lambda: None)  # noqa: B010
    setattr(gpu_cases, "settle", lambda *_: _synchronize())  # noqa: B010
    setattr(gpu_cases, "exchange", rank_cases.exchange)  # noqa: B010
    for user in (rank_cases, failure_cases, chaos_cases, gpu_cases, placement_cases):
        user.open_all_to_all = _open


def _open(me: Any, case: Case, **options: Any) -> Any:
    return _opened(me, case, **{**options, "device": "cuda"})


def call(me: Any, module: str, name: str, *args: Any, **options: Any) -> Any:
    """A case of the other modules ("rank_cases:exchange")."""
    use(module)
    where, _, function = name.partition(":")
    return getattr(importlib.import_module(where), function)(me, *args, **options)


def gdrcopy_is_used(me: Any, module: str, case: Case) -> bool:
    """A case, and whether its arrival words were where the library of that name could write."""
    use(module)
    ctypes.CDLL(os.environ["PPLX_TEST_GDRCOPY"])  # dlopen() finds what is loaded by its name
    rank_cases.exchange(me, case)
    with _open(me, case) as a2a:
        return bool(a2a._core.arrivals_on_gpu)
