"""Everything that is changed in SGLang, most of it at places that SGLang has for plug-ins.

SGLang knows its backends by name in some 350 places: models, quantisation methods, CUDA graphs, memory. What is right for DeepEP
there is right for this library, whose dispatchers give the same formats. So the operator's argument stays "pplx_comm", and what
SGLang resolves it to is "deepep"; the resolution and the argument both travel to SGLang's other processes.

`names` runs in every process, and changes nothing for other backends. `layers` runs in a scheduler that was asked for ours.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pplx_comm.errors import Error
from pplx_comm.serving.sglang import versions
from pplx_comm.settings import Sglang, read

NAME = "pplx_comm"
STANDS_FOR = "deepep"
ARGUMENTS = "moe_a2a_backend", "speculative_moe_a2a_backend"

_DEEPEP = "sglang.srt.layers.moe.token_dispatcher.deepep"
_done: set[str] = set()


def once(what: str) -> bool:
    """True at the first call for `what`."""
    first = what not in _done
    _done.add(what)
    return first


def asked(server_args: Any) -> bool:
    """True if these arguments name this library."""
    return any(getattr(server_args, argument, None) == NAME for argument in ARGUMENTS)


# ---- in every process ------------------------------------------------------------------------------------------------------


def names() -> None:
    if once("names"):
        _accept_the_name()
        _resolve_the_name()
        _change_layers_when_asked()


def _accept_the_name() -> None:
    """The choices of the command line are a list beside each field. SGLang's own plug-in functions extend such lists in place."""
    from typing import get_type_hints

    from sglang.srt.arg_groups.arg_utils import Arg
    from sglang.srt.server_args import ServerArgs

    hints = get_type_hints(ServerArgs, include_extras=True)
    for argument in ARGUMENTS:
        (arg,) = (more for more in hints[argument].__metadata__ if isinstance(more, Arg))
        if NAME not in arg.choices:
            arg.choices.append(NAME)


def _resolve_the_name() -> None:
    """Before the first step of the resolution, which others read from then on."""
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    @register_resolution_hook("handle_deprecated_dp_attention")
    def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
        if asked(server_args):
            _refuse(server_args)
            ours = {argument: STANDS_FOR for argument in ARGUMENTS if getattr(server_args, argument) == NAME}
            declare_resolution(server_args, NAME, **ours)
        previous(server_args)


def _refuse(server_args: Any) -> None:
    """Raises for arguments that would fail later, or silently."""
    import sglang

    settings = read(Sglang)
    problem = None if settings.untested else versions.problem(sglang.__version__)
    if problem is not None:
        raise Error(problem)
    if server_args.use_ray:
        raise Error("--moe-a2a-backend pplx_comm: SGLang loads no plug-ins in Ray's actors; start it without --use-ray")
    if server_args.enable_single_batch_overlap:
        raise Error(
            "--moe-a2a-backend pplx_comm does not run SGLang's single batch overlap, whose combine starts while the experts "
            "compute: start it without --enable-single-batch-overlap; --enable-two-batch-overlap works"
        )
    if server_args.elastic_ep_backend is not None:
        raise Error("--moe-a2a-backend pplx_comm does not serve elastic expert parallelism: start without --elastic-ep-backend")
    if server_args.deepep_config is not None:
        raise Error(
            "--deepep-config has kernel settings of DeepEP, and --moe-a2a-backend pplx_comm has none of its kernels: start without "
            "it; PPLX_COMM_SGLANG_NUM_SMS sets how many SMs two-batch overlap leaves to dispatch and combine"
        )


def _change_layers_when_asked() -> None:
    """Publishing its arguments is the first thing that a scheduler does with them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def published(context: Any, server_args: Any, *, role: str, **_: Any) -> None:
        if asked(server_args) and role not in ("tokenizer", "detokenizer", "dp_controller", "encoder"):
            layers()

    HookRegistry.register("sglang.srt.runtime_context.publish", published, HookType.AFTER)


# ---- in a scheduler that was asked for this library --------------------------------------------------------------------------


def layers() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    if not once("layers"):
        return
    source = HookSource(plugin_name=NAME, dist_name=NAME)
    hooks = {
        "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher": _create_moe_dispatcher,
        f"{_DEEPEP}.DeepEPConfig.get_instance": _get_instance,
        f"{_DEEPEP}.DeepEPBuffer.clean_buffer": _clean_buffer,
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND, source=source)
    HookRegistry.apply_hooks()
    # SGLang logs what fails here, and would then take DeepEP.
    missing = [target for target in hooks if not hasattr(pkgutil.resolve_name(target), "__wrapped__")]
    if missing:
        raise Error(f"pplx_comm could not take the place of {', '.join(missing)} in SGLang; SGLang's log above says why")


def ours() -> bool:
    """True if the layer under construction is for this library. A draft model may have a backend of its own."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend
    from sglang.srt.runtime_context import get_flags, get_server_args

    server_args = get_server_args()
    name = server_args.moe_a2a_backend
    if get_flags().moe.speculative_context and server_args.speculative_moe_a2a_backend is not None:
        name = server_args.speculative_moe_a2a_backend
    return bool(name == NAME and get_moe_a2a_backend().is_deepep())


def _create_moe_dispatcher(theirs: Callable[..., Any], moe_runner_config: Any, quant_method: Any = None, **more: Any) -> Any:
    """A chain of ifs over the names of backends."""
    if not ours():
        return theirs(moe_runner_config, quant_method=quant_method, **more)
    from pplx_comm.serving.sglang.dispatcher import make

    return make(moe_runner_config)


def _get_instance(theirs: Callable[..., Any], *arguments: Any) -> Any:
    """Two-batch overlap asks DeepEP, which need not be installed, how many SMs it takes from DeepGEMM."""
    return SimpleNamespace(num_sms=read(Sglang).num_sms) if ours() else theirs(*arguments)


def _clean_buffer(theirs: Callable[..., Any], cls: Any) -> None:
    """CUDA graph runners tell DeepEP's buffer when the mode changes; here there is none."""
    if cls._state().buffer is not None:
        theirs(cls)
