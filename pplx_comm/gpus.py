"""The CUDA module of this build, and the GPUs that this process sees."""

from __future__ import annotations

import sys
from typing import Any

import torch

from pplx_comm.errors import Error


def built() -> Any:
    """pplx_comm._cuda, or _cuda_stages where that is loaded, or an Error that says why there is none."""
    if "pplx_comm._cuda_stages" in sys.modules:
        return sys.modules["pplx_comm._cuda_stages"]
    try:
        import pplx_comm._core  # first: _cuda's types are made of its  # noqa: F401
        import pplx_comm._cuda as _cuda
    except ImportError as problem:
        raise Error(
            f"device='cuda', the default where torch sees a GPU: this build has no CUDA module ({problem}). Rebuild with CUDA 12.3 "
            "or newer and nvcc in PATH (`python -m pplx_comm doctor` says what is there), or pass device='cpu'"
        ) from None
    return _cuda


def cuda_module() -> Any:
    """pplx_comm._cuda, or an Error where there is no GPU to use it on."""
    if built().device_count() == 0:
        raise Error("device='cuda': this process sees no GPU")
    return built()


def device_index(device: torch.device) -> int:
    """The GPU that `device` names; "cuda" alone is torch's current one."""
    count = cuda_module().device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise Error(f"device='cuda:{index}': this process sees {count} GPUs")
    return int(index)
