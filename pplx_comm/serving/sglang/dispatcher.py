"""Dispatch and combine as SGLang's MoE layers call them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.batch_overlap.two_batch_overlap import MaybeTboDeepEPDispatcher
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import get_is_extend_in_batch
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPPDispatchHooks
from sglang.srt.layers.moe.utils import get_deepep_mode, is_tbo_enabled
from sglang.srt.runtime_context import get_parallel

from pplx_comm.errors import Error
from pplx_comm.handles import Combining
from pplx_comm.serving.sglang.manager import Manager
from pplx_comm.serving.sglang.modes import Layer, LowLatency, Mode, Normal, Step


def make(config: Any) -> Dispatchers:
    """Makes the dispatchers of the layer that has this MoeRunnerConfig."""
    group = get_parallel().tp_group
    manager = Manager.of(group, torch.device(group.device))
    if config.num_experts != config.num_local_experts * manager.world_size:
        raise Error(
            f"pplx_comm needs the same number of experts on every rank, but this rank has {config.num_local_experts} of "
            f"{config.num_experts} over {manager.world_size} ranks: choose another --tp-size, or add experts with "
            "--ep-num-redundant-experts"
        )
    if config.apply_router_weight_on_input:
        raise Error("pplx_comm applies the router's weights to the experts' output, but this layer needs them on its input")
    overlap = is_tbo_enabled()
    layer = Layer(
        num_experts=int(config.num_experts),
        top_k=int(config.top_k),
        hidden=int(config.hidden_size),
        dtype=config.params_dtype,
        in_flight=2 if overlap else 1,
        num_sms=manager.settings.num_sms if overlap else None,
    )
    return Dispatchers([Dispatcher(layer, manager, config.runner_backend) for _ in range(layer.in_flight)])


class Dispatchers(MaybeTboDeepEPDispatcher):
    """Those of a layer, one for each batch that is computed at the same time. Models ask for SGLang's own class."""

    def __init__(self, inners: list[Dispatcher]) -> None:
        BaseDispatcher.__init__(self)
        self._inners = inners


class Dispatcher(BaseDispatcher):
    """A step is dispatch_a, dispatch_b, the experts, combine_a and combine_b, or dispatch, the experts and combine. It stays in the
    mode in which it began."""

    expert_mask_gpu = None

    def __init__(self, layer: Layer, manager: Manager, runner_backend: Any) -> None:
        super().__init__()
        self.runner_backend = runner_backend
        self.deepep_mode = get_deepep_mode()
        self._modes: dict[Any, Mode] = {}
        if self.deepep_mode.enable_low_latency():
            self._modes[LowLatency.dispatch_mode] = LowLatency(layer, manager, runner_backend)
        if self.deepep_mode.enable_normal():
            self._modes[Normal.dispatch_mode] = Normal(layer, manager, runner_backend)
        self._deepep_dispatch_hooks = DeepEPPDispatchHooks()
        self._mode: Mode | None = None
        self._step: Step | None = None
        self._combining: Combining | None = None
        self._next = "dispatch_a"

    def _expect(self, call: str) -> None:
        if self._next != call:
            raise Error(f"{call} was called when {self._next} was to come: a step is dispatch_a, dispatch_b, combine_a, combine_b")

    # ---- dispatch --------------------------------------------------------------------------------------------------------

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        hooks = self._deepep_dispatch_hooks
        self._dispatch("dispatch_send" if hooks.hook_dict else "dispatch", hidden_states, topk_output)
        hooks(self)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: Any) -> None:
        self._dispatch("dispatch_send", hidden_states, topk_output)

    def _dispatch(self, call: str, hidden_states: torch.Tensor, topk_output: Any) -> None:
        self._expect("dispatch_a")
        _wait_for_compilers()
        self._mode = self._modes[self.deepep_mode.resolve(get_is_extend_in_batch())]
        self._step = self._mode.dispatch(call, hidden_states, topk_output.topk_ids, topk_output.topk_weights)
        self._next = "dispatch_b"

    def dispatch_b(self) -> Any:
        self._expect("dispatch_b")
        assert self._mode is not None
        assert self._step is not None
        output = self._mode.dispatch_recv(self._step)
        self._next = "combine_a"
        return output

    # ---- combine ---------------------------------------------------------------------------------------------------------

    def combine(self, combine_input: Any) -> torch.Tensor:
        y = self._combine("combine", combine_input)
        self._next = "dispatch_a"
        assert isinstance(y, torch.Tensor)
        return y

    def combine_a(self, combine_input: Any) -> None:
        self._combining = self._combine("combine_send", combine_input)
        self._next = "combine_b"

    def _combine(self, call: str, combine_input: Any) -> Any:
        self._expect("combine_a")
        _wait_for_compilers()
        assert self._mode is not None
        assert self._step is not None
        rows, _, topk_weights = combine_input
        result = self._mode.combine(call, rows, self._step, topk_weights)
        self._step = None
        return result

    def combine_b(self) -> torch.Tensor:
        self._expect("combine_b")
        assert self._mode is not None
        assert self._combining is not None
        y = self._mode.combine_recv(self._combining)
        self._combining, self._next = None, "dispatch_a"
        return y

    # ---- what SGLang tells -----------------------------------------------------------------------------------------------

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        super().set_quant_config(quant_config)
        for mode in self._modes.values():
            mode.set_quant_config(quant_config)

    def set_overlap_args(self, combine_overlap_args: Any, meta_overlap_args: Any) -> None:
        if combine_overlap_args is not None:
            raise Error(
                "pplx_comm does not combine while the experts still compute: start SGLang without --enable-single-batch-overlap"
            )

    def register_deepep_dispatch_hook(self, hook: Any) -> Any:
        """Called between the halves of dispatch()."""
        return self._deepep_dispatch_hooks.register_hook(hook)


def _wait_for_compilers() -> None:
    """While SGLang has DeepGEMM compile its kernels, ranks come later than a step waits for."""
    if envs.SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE.get():
        get_parallel().tp_group.barrier()
