"""Everything that is changed in vLLM, which has no place where a backend from outside could be registered.

`names` runs in every process of vLLM's, and changes nothing for other backends. `kernels` runs in a worker that was asked for ours.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from typing import Any

from pplx_comm.errors import Error
from pplx_comm.settings import Serving, read

NAME = "pplx_comm"

_done: set[str] = set()


def once(what: str) -> bool:
    """True at the first call for `what`. vLLM calls its plug-ins again in some processes."""
    first = what not in _done
    _done.add(what)
    return first


def ours(backend: str | None, settings: Serving | None = None) -> bool:
    """True if that all2all backend is this library."""
    return backend is not None and backend in (NAME, (read(Serving) if settings is None else settings).alias)


def names(settings: Serving, refusal: str | None) -> None:
    """Adds the name where the command line, the configuration and the platform look. refusal: the error for a user that asks for
    the backend."""
    if once("names"):
        _accept_the_name(settings, refusal)
        if refusal is None:
            _answer_for_the_name()
            _make_our_communicator()


def _accept_the_name(settings: Serving, refusal: str | None) -> None:
    """ParallelConfig is a dataclass checked by pydantic, and the choices of the command line come from its annotation."""
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import parallel

    known = typing.get_args(parallel.All2AllBackend)
    parallel.All2AllBackend = typing.Literal.__getitem__((*known, NAME))
    config = parallel.ParallelConfig
    config.__annotations__["all2all_backend"] = parallel.All2AllBackend
    field = config.__dataclass_fields__["all2all_backend"]
    field.type = parallel.All2AllBackend
    if refusal is not None:
        checked = config.__post_init__

        def refuse(self: Any, *arguments: Any) -> None:
            if ours(self.all2all_backend, settings):
                raise Error(refusal)
            checked(self, *arguments)

        config.__post_init__ = refuse
    rebuild_dataclass(config, force=True)


def _answer_for_the_name() -> None:
    """ParallelConfig knows by name which backends want a part of the tokens of a tensor parallel group on each of its ranks, and
    which want few tokens because they make a batch for each expert."""
    from vllm.config.parallel import ParallelConfig

    def sequence_parallel(config: Any, settings: Serving) -> bool:
        return (
            settings.tensor_parallel == "sequence"
            and config.enable_expert_parallel
            and config.tensor_parallel_size > 1
            and config.data_parallel_size > 1
        )

    def batched(config: Any, settings: Serving) -> bool:
        return settings.format == "batched" and config.enable_expert_parallel and config.data_parallel_size > 1

    _answer(ParallelConfig, "use_sequence_parallel_moe", sequence_parallel)
    _answer(ParallelConfig, "use_batched_dp_moe", batched)


def _make_our_communicator() -> None:
    """A platform names the class of the communicator of its process groups, which picks the manager of the all2all by name."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    theirs = platform.get_device_communicator_cls

    def get_device_communicator_cls(cls: Any) -> str:
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        if config is None or not ours(config.parallel_config.all2all_backend):
            return str(theirs())
        return "pplx_comm.serving.vllm.communicator.Communicator"

    get_device_communicator_cls.theirs = theirs  # type: ignore[attr-defined]
    platform.get_device_communicator_cls = classmethod(get_device_communicator_cls)


def their_communicator() -> str:
    """Returns the platform's own choice."""
    from vllm.platforms import current_platform

    function = type(current_platform).get_device_communicator_cls.__func__
    return str(function.theirs() if hasattr(function, "theirs") else type(current_platform).get_device_communicator_cls())


def kernels() -> None:
    """In a worker, when the communicator of its expert parallel group is made: before there are layers."""
    if once("kernels"):
        _answer_for_the_layers()
        _make_our_prepare_and_finalize()
        _keep_the_hidden_size()
        _hide_the_layer_from_dynamo()
        _allow_fault_tolerance()


def _answer_for_the_layers() -> None:
    """The configuration of a layer knows by name whether experts are given batches, and whether placement may be round-robin."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    def batched(config: Any, settings: Serving) -> bool:
        return bool(config.use_all2all_kernels) and settings.format == "batched"

    def tables(config: Any, settings: Serving) -> bool:
        return bool(config.use_all2all_kernels)

    _answer(FusedMoEParallelConfig, "use_batched_activation_format", batched)
    _answer(FusedMoEParallelConfig, "needs_round_robin_routing_tables", tables)


def _make_our_prepare_and_finalize() -> None:
    """The factory is a chain of ifs, and every quantisation method has imported it by name."""
    from vllm.model_executor.layers.fused_moe import all2all_utils

    theirs = all2all_utils.maybe_make_prepare_finalize

    def maybe_make_prepare_finalize(moe: Any, quant_config: Any, routing_tables: Any = None, *arguments: Any, **more: Any) -> Any:
        parallel = moe.moe_parallel_config
        if not (parallel.use_all2all_kernels and ours(parallel.all2all_backend)):
            return theirs(moe, quant_config, routing_tables, *arguments, **more)
        from pplx_comm.serving.vllm.prepare_finalize import make

        manager = more.get("all2all_manager") or all2all_utils.get_ep_all2all_manager()
        return make(moe, round_robin=routing_tables is not None, manager=manager, monolithic=bool(more.get("use_monolithic")))

    _everywhere(theirs, maybe_make_prepare_finalize)


def _keep_the_hidden_size() -> None:
    """Keeps the hidden size. For vLLM's DeepEP names it rounds sizes up to those that DeepEP was compiled for, with a class that
    needs DeepEP."""
    from vllm.model_executor.layers.fused_moe import all2all_utils

    theirs = all2all_utils.maybe_roundup_layer_hidden_size

    def maybe_roundup_layer_hidden_size(hidden_size: int, act_dtype: Any, moe_parallel_config: Any) -> int:
        if ours(moe_parallel_config.all2all_backend):
            return hidden_size
        return int(theirs(hidden_size, act_dtype, moe_parallel_config))

    _everywhere(theirs, maybe_roundup_layer_hidden_size)


def _hide_the_layer_from_dynamo() -> None:
    """On CPUs alone vLLM lets torch.compile trace through the layer. A dispatch is no graph: take the operator, as on GPUs."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    def _select_forward(self: Any) -> Any:
        shared = self._shared_experts is not None
        return torch.ops.vllm.moe_forward_shared if shared else torch.ops.vllm.moe_forward

    MoERunner._select_forward = _select_forward


def _allow_fault_tolerance() -> None:
    """Joins the set of backends that can name dead ranks."""
    try:
        from vllm.v1.worker.sentinel import gpu_worker_sentinel
    except ImportError:  # vLLM before it had fault tolerance, or a platform without it
        return
    if hasattr(gpu_worker_sentinel, "FT_BACKEND_SET"):
        gpu_worker_sentinel.FT_BACKEND_SET |= {NAME}


def _answer(owner: Any, name: str, answer: Callable[[Any, Serving], bool]) -> None:
    """A property that gives our answer for our backend and its own for others."""
    theirs = owner.__dict__[name].fget

    def get(config: Any) -> bool:
        settings = read(Serving)
        if config.all2all_backend == NAME:
            return answer(config, settings)
        return bool(theirs(config))

    setattr(owner, name, property(get, doc=theirs.__doc__))


def _everywhere(old: Any, new: Any) -> None:
    """Also where it was imported by name. vars(), because getattr() would make lazy modules import what they name."""
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", {})
        for name in [name for name, value in list(space.items()) if value is old]:
            setattr(module, name, new)
