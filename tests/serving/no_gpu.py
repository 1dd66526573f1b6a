"""Lets torchtitan's and Megatron-Core's training loops run on a machine without a GPU.

Both are written for GPUs only, and nothing in them chooses a CPU. Of the models, losses, schedules, wrappers, optimizers and loops
nothing is replaced, only what they ask of the device, and what they import for text and plots, which no test calls.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

ABSENT = {
    "datasets": ["Dataset", "load_dataset"],
    "datasets.distributed": ["split_dataset_by_node"],
    "tokenizers": ["AddedToken", "Tokenizer"],
    "torch.utils.tensorboard": ["SummaryWriter"],
    "torchdata": [],
    "torchdata.stateful_dataloader": ["StatefulDataLoader"],
}
"""Modules that torchtitan.trainer imports, for real text and its plots."""


class _Cpu(types.ModuleType):
    """torch.cpu, with what torchtitan asks torch.cuda for."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.current_device = lambda: 0
        self.get_device_name = lambda _=None: "cpu"
        self.get_device_properties = lambda _=None: types.SimpleNamespace(total_memory=1 << 34)
        self.memory_stats = lambda _=None: {}
        self.empty_cache = self.reset_peak_memory_stats = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def for_torchtitan() -> None:
    """Before torchtitan is imported. Its tools/utils.py takes "cuda" where torch finds no accelerator."""
    for name, wanted in ABSENT.items():
        module = sys.modules[name] = types.ModuleType(name)
        for each in wanted:
            setattr(module, each, type(each, (), {}))
    import torch._utils as utils

    cpu = _Cpu()
    utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    utils._get_device_module = lambda _: cpu  # type: ignore[assignment,return-value]
    if not hasattr(dist, "set_timeout"):  # 0.3.0 calls it after the first step; torch 2.13 has none
        dist.set_timeout = _no_timeout  # type: ignore[attr-defined]


def _no_timeout(timeout: timedelta, group: Any = None) -> None:
    pass


class _Stream:
    """Everything is done when it returns."""

    def __init__(self, **_: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


class _Event:
    def record(self, _: Any) -> None:
        pass

    def wait(self, _: Any) -> None:
        pass


class _OnTheHost(TorchFunctionMode):
    """Tensors that are asked for on a GPU are the host's, and say that they are a GPU's where clipping gradients wants to hear that."""

    def __torch_function__(self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def for_megatron() -> None:
    """Replaces them for the rest of the process."""
    stream: Any = _Stream()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.stream = lambda _: nullcontext()
    cuda.synchronize = cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign,assignment]
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    _OnTheHost().__enter__()
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 asks for it, and has it with Transformer Engine only

    def on_the_host(t: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """As Megatron-Core's, which leaves alone what is no GPU's, although all-to-all takes no tensor for a list."""
        return t.numpy() if as_numpy and torch.is_tensor(t) else t

    token_dispatcher.maybe_move_tensor_to_cpu = on_the_host
