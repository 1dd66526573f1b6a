"""One of two ranks that run SGLang's MoE dispatchers over this library on CPU tensors. Run by the Python that has SGLang.

`python sglang_ranks.py CASES [BACKEND]` with RANK and WORLD_SIZE; prints the largest error of each case beside the largest output. With
another backend than ours, SGLang's own dispatchers run over the packages that are in the places of DeepEP and pplx_kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import sglang_stubs
from engine import in_metrics

sglang_stubs.install()

import torch  # noqa: E402

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BACKEND = sys.argv[2] if len(sys.argv) > 2 else "pplx_comm"
BLOCK, INNER = 128, 64


def start() -> None:
    """As a scheduler does: plug-ins, arguments, publishing, groups."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.runtime_context import SpawnRanks
    from sglang.srt.server_args import ServerArgs, publish

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    asked = ["--model-path", "dummy", "--tp-size", str(WORLD), "--ep-size", str(WORLD), "--moe-a2a-backend", BACKEND]
    server_args = ServerArgs.from_cli_args(parser.parse_args([*asked, "--chunked-prefill-size", "64"]))
    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=RANK))

    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.moe import initialize_moe_config

    initialize_moe_config()
    init_distributed_environment(WORLD, RANK, "env://", RANK, "gloo")
    initialize_model_parallel("gloo")
    if BACKEND != "pplx_comm":
        without_gpu()


def without_gpu() -> None:
    """SGLang's dispatchers ask for a GPU's size and number, quantise by a kernel, and have a group of NCCL beside gloo's."""
    import types

    from sglang.srt.layers.moe.token_dispatcher import deepep, pplx

    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=132)  # type: ignore[misc,assignment]
    torch.cuda.current_device = lambda: 0
    deepep.sglang_per_token_group_quant_fp8 = quantised
    new_group, resolved = torch.distributed.new_group, pplx.get_parallel()
    torch.distributed.new_group = lambda ranks, backend: new_group(ranks, backend="gloo")
    # As with --enable-dp-attention: ranks have tokens of their own.
    pplx.get_parallel = lambda: types.SimpleNamespace(attn_tp_size=1, attn_dp_size=WORLD, nnodes=resolved.nnodes)


def dispatcher_of(case: dict[str, Any]) -> Any:
    """As a layer makes it, and tells it when its weights are loaded.

    told: how the dispatcher hears that tokens travel as case["dtype"]: "by weights", "by argument", or not at all, where it is FP8.
    """
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.utils import DeepEPMode, MoeRunnerBackend
    from sglang.srt.runtime_context import get_exec, get_flags

    # As on the GPUs that have DeepGEMM: Hopper, and where scales are powers of two, Blackwell.
    deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = with_deep_gemm(case)
    deep_gemm_wrapper.DEEPGEMM_BLACKWELL = case["dtype"] == "fp8_ue8m0"
    deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 = case["dtype"] == "fp8_ue8m0"
    get_flags().moe.deepep_mode = DeepEPMode(case.get("deepep_mode", "auto"))
    get_flags().moe.tbo_enabled = bool(case.get("two_batches"))
    config = MoeRunnerConfig(
        num_experts=case["experts"], num_local_experts=case["experts"] // WORLD, hidden_size=case["hidden"],
        top_k=case["top_k"], params_dtype=torch.bfloat16, runner_backend=MoeRunnerBackend.DEEP_GEMM,
    )  # fmt: skip
    told, dtype = case.get("told", "by weights"), "bf16" if case["dtype"] == "bf16" else "fp8"
    with get_exec().moe.override(deepep_dispatcher_output_dtype=dtype) if told == "by argument" else contextlib.nullcontext():
        if case.get("dispatcher") == "pplx":
            made = pplx_dispatcher(config)
        else:
            made = layer.create_moe_dispatcher(config, quant_method=None)
    if told == "by weights":
        made.set_quant_config({"dispatcher_output_dtype": dtype})
    return made


def with_deep_gemm(case: dict[str, Any]) -> bool:
    """SGLang's own dispatcher has no other way for prefills."""
    return case["dtype"] != "bf16" or BACKEND == "deepep"


def pplx_dispatcher(config: Any) -> Any:
    from sglang.srt.layers.moe.token_dispatcher.pplx import PplxDispatcher
    from sglang.srt.layers.moe.utils import DeepEPMode

    return PplxDispatcher(
        torch.distributed.group.WORLD, config.top_k, num_experts=config.num_experts, num_local_experts=config.num_local_experts,
        hidden_size=config.hidden_size, params_dtype=config.params_dtype, deepep_mode=DeepEPMode.LOW_LATENCY,
    )  # fmt: skip


# ---- the experts, and what one process makes of it --------------------------------------------------------------------------


def weights_of(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(case["seed"])
    experts, hidden = case["experts"], case["hidden"]
    return (
        torch.randn(experts, 2 * INNER, hidden, generator=generator) / hidden**0.5,
        torch.randn(experts, hidden, INNER, generator=generator) / INNER**0.5,
    )


def mlp(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ w1.T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.T


def travelled(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """x as it arrives: blocks of 128 with a scale each."""
    return x.float() if dtype == "bf16" else dequantised(*quantised(x, scale_ue8m0=dtype == "fp8_ue8m0"))


def quantised(x: torch.Tensor, *_: Any, scale_ue8m0: bool = False, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what SGLang's kernel does, whose names these are."""
    blocks = x.float().view(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax(-1).clamp(min=1e-10) / 448
    if scale_ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return (blocks / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).view(x.shape), scale


def dequantised(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return x.float()
    if scale.dtype == torch.int32:  # four exponents each, the first in the lowest byte
        exponents = torch.stack([(scale >> shift) & 0xFF for shift in (0, 8, 16, 24)], -1).flatten(-2)
        scale = torch.exp2(exponents.float() - 127)
    return x.float() * scale.repeat_interleave(BLOCK, -1)


def inputs_of(case: dict[str, Any], step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(1000 * case["seed"] + 10 * step + rank)
    tokens, experts, top_k = case["tokens"][step][rank], case["experts"], case["top_k"]
    x = torch.randn(tokens, case["hidden"], generator=own).bfloat16()
    ids = torch.rand(tokens, experts, generator=own).argsort(1)[:, :top_k].to(torch.int32)
    ids[torch.rand(tokens, top_k, generator=own) < 0.2] = -1
    return x, ids, torch.rand(tokens, top_k, generator=own)


def wanted_of(case: dict[str, Any], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    w1, w2 = weights_of(case)
    arrived, wanted = travelled(x, case["dtype"]), torch.zeros(x.shape)
    for t, k in (ids >= 0).nonzero().tolist():
        wanted[t] += weights[t, k] * mlp(arrived[t], w1[ids[t, k]], w2[ids[t, k]])
    return wanted


def experts_of(case: dict[str, Any], output: Any) -> Any:
    """Acts as SGLang's runners on a dispatch, in torch, between SGLang's own conversions where those run without a GPU."""
    from sglang.srt.layers.moe.moe_runner.base import PermuteMethodPool
    from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmRunnerOutput
    from sglang.srt.layers.moe.token_dispatcher import DeepEPNormalCombineInput, DispatchOutputChecker

    assert (output.hidden_states.dtype == torch.bfloat16) == (case["dtype"] == "bf16")
    w1, w2 = weights_of(case)
    mine = range(RANK * case["experts"] // WORLD, (RANK + 1) * case["experts"] // WORLD)
    if DispatchOutputChecker.format_is_deepep_ll(output):
        state: dict[str, Any] = {}
        given = PermuteMethodPool.get_pre_permute(output.format.value, "deep_gemm")(output, None, None, state)
        x, scale = given.hidden_states, given.hidden_states_scale
        assert given.masked_m.dtype == torch.int32 and x.shape[1] % 64 == 0
        if scale is not None:
            assert scale.stride(-2) == 1, "a scale that is not column by column"
            assert (scale.dtype == torch.int32) == (case["dtype"] == "fp8_ue8m0")
        if output.topk_ids.numel():
            assert given.expected_m == (output.topk_ids.numel() * WORLD + case["experts"]) // case["experts"]
        rows = torch.full(x.shape, float("nan")).bfloat16()  # rows beyond the counts may hold anything
        for local, expert in enumerate(mine):
            count = int(given.masked_m[local])
            part = None if scale is None else scale[local, :count]
            rows[local, :count] = mlp(dequantised(x[local, :count], part), w1[expert], w2[expert]).bfloat16()
        x.set_(torch.empty(0, dtype=x.dtype))  # as SGLang's dispose_tensor does
        return PermuteMethodPool.get_post_permute("deep_gemm", output.format.value)(DeepGemmRunnerOutput(rows), None, None, state)

    assert DispatchOutputChecker.format_is_deepep_normal(output)
    x, ids = dequantised(output.hidden_states, output.hidden_states_scale), output.topk_ids
    assert ids.dtype == torch.int64 and (ids >= 0).any(1).all(), "a row that no local expert wants"
    tile = 128 if with_deep_gemm(case) else 1
    meant = [-(-int((ids == local).sum()) // tile) * tile for local in range(len(mine))]
    assert output.num_recv_tokens_per_expert == meant, (output.num_recv_tokens_per_expert, meant)
    rows = torch.zeros(x.shape)
    for local, expert in enumerate(mine):
        row, choice = (ids == local).nonzero(as_tuple=True)
        rows.index_add_(0, row, output.topk_weights[row, choice, None] * mlp(x[row], w1[expert], w2[expert]))
    return DeepEPNormalCombineInput(rows.bfloat16(), ids, output.topk_weights)


# ---- cases -------------------------------------------------------------------------------------------------------------------


class Worst:
    def __init__(self) -> None:
        self.worst, self.largest = 0.0, 0.0

    def compare(self, case: dict[str, Any], y: torch.Tensor, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        wanted = wanted_of(case, *given)
        assert y.shape == wanted.shape and y.dtype == torch.bfloat16
        if wanted.numel():
            self.worst = max(self.worst, float((y - wanted).abs().max()))
            self.largest = max(self.largest, float(wanted.abs().max()))


def topk_of(ids: torch.Tensor, weights: torch.Tensor) -> Any:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    # A rank without tokens may come with another number of choices, but to DeepEP, for which SGLang fuses no shared experts.
    ids, weights = (ids, weights) if len(ids) or BACKEND == "deepep" else (ids[:, :1], weights[:, :1])
    return StandardTopKOutput(weights, ids, torch.empty(len(ids), 0))


def steps(case: dict[str, Any]) -> dict[str, Any]:
    """A step after another, with dispatch() and combine()."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch

    dispatcher, worst, formats = dispatcher_of(case), Worst(), []
    for step in range(len(case["tokens"])):
        set_is_extend_in_batch(case["extend"][step])
        given = inputs_of(case, step, RANK)
        output = dispatcher.dispatch(hidden_states=given[0], topk_output=topk_of(*given[1:]))
        formats.append(output.format.value)
        worst.compare(case, dispatcher.combine(combine_input=experts_of(case, output)), given)
    return {"worst": worst.worst, "largest": worst.largest, "formats": formats}


def two_batches(case: dict[str, Any]) -> dict[str, Any]:
    """In the order of two-batch overlap: each half of one batch comes between the halves of the other."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch

    dispatcher, worst = dispatcher_of(case), Worst()
    set_is_extend_in_batch(case["extend"][0])
    for pair in range(0, len(case["tokens"]), 2):
        given = [inputs_of(case, pair + batch, RANK) for batch in range(2)]
        combined: list[Any] = [None, None]
        for batch, (x, *choices) in enumerate(given):
            dispatcher.dispatch_a(hidden_states=x, topk_output=topk_of(*choices), tbo_subbatch_index=batch)
        for batch in range(2):
            output = dispatcher.dispatch_b(tbo_subbatch_index=batch)
            dispatcher.combine_a(combine_input=experts_of(case, output), tbo_subbatch_index=batch)
        for batch in reversed(range(2)):
            combined[batch] = dispatcher.combine_b(tbo_subbatch_index=batch)
        for y, one in zip(combined, given, strict=True):
            worst.compare(case, y, one)
    return {"worst": worst.worst, "largest": worst.largest}


def hooks(case: dict[str, Any]) -> dict[str, Any]:
    """Those that models register: what they return counts, and a removed one is not called. And the calls that are made then."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch

    import pplx_comm

    dispatcher, worst, heard = dispatcher_of(case), Worst(), []
    set_is_extend_in_batch(case["extend"][0])
    x, ids, weights = inputs_of(case, 0, RANK)
    handles = [
        dispatcher.register_pre_dispatch_hook(lambda _, x, topk: heard.append("pre_dispatch") or (-x, topk)),
        dispatcher.register_post_dispatch_hook(lambda _, output: heard.append("post_dispatch")),
        dispatcher.register_pre_combine_hook(lambda _, given: heard.append("pre_combine")),
        dispatcher.register_post_combine_hook(lambda _, y: heard.append("post_combine") or 2 * y),
        *dispatcher.register_deepep_dispatch_hook(lambda _: heard.append("between")),
    ]
    calls = {name: getattr(pplx_comm.AllToAll, name) for name in ("dispatch", "dispatch_send", "combine", "combine_send")}
    for name, call in calls.items():
        setattr(pplx_comm.AllToAll, name, lambda *given, name=name, call=call, **more: heard.append(name) or call(*given, **more))
    for called in (True, False):
        output = dispatcher.dispatch(hidden_states=x, topk_output=topk_of(ids, weights))
        y = dispatcher.combine(combine_input=experts_of(case, output))
        worst.compare(case, y, (-x, ids, 2 * weights) if called else (x, ids, weights))
        for handle in handles:
            handle.remove()
    for name, call in calls.items():
        setattr(pplx_comm.AllToAll, name, call)
    return {"worst": worst.worst, "largest": worst.largest, "heard": heard}


def other_weights(case: dict[str, Any]) -> dict[str, Any]:
    """Weights that something between dispatch and combine has changed."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch

    dispatcher, worst = dispatcher_of(case), Worst()
    set_is_extend_in_batch(False)
    x, ids, weights = inputs_of(case, 0, RANK)
    output = dispatcher.dispatch(hidden_states=x, topk_output=topk_of(ids, weights))
    combine_input = experts_of(case, output)._replace(topk_weights=3 * output.topk_weights)
    worst.compare(case, dispatcher.combine(combine_input=combine_input), (x, ids, 3 * weights))
    return {"worst": worst.worst, "largest": worst.largest}


def recorded(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the loads that SGLang's recorder gets, beside those by the choices of both ranks."""
    from pplx_comm.serving.sglang import modes

    class Recorder:
        recording = True
        heard: list[dict[str, Any]] = []  # noqa: RUF012

        def on_deepep_dispatch_normal(self, counts: list[int], **told: Any) -> None:
            self.heard.append({"counts": counts} | {name: None if t is None else t.tolist() for name, t in told.items()})

        def on_deepep_dispatch_low_latency(self, counts: torch.Tensor) -> None:
            self.heard.append({"counts": counts.tolist()})

    theirs, modes.get_global_expert_distribution_recorder = modes.get_global_expert_distribution_recorder, Recorder
    try:
        result = steps(case)
    finally:
        modes.get_global_expert_distribution_recorder = theirs
    each, meant = case["experts"] // WORLD, []
    for step, extend in enumerate(case["extend"]):
        ids = [inputs_of(case, step, rank)[1] for rank in range(WORLD)]
        counts = [sum(int((of == RANK * each + local).sum()) for of in ids) for local in range(each)]
        meant.append({"counts": counts})
        if extend:
            own = [[expert for expert in row if expert >= 0] for row in ids[RANK].tolist()]
            meant[-1] |= {
                "num_tokens_per_rank": [sum(any(e // each == rank for e in row) for row in own) for rank in range(WORLD)],
                "num_tokens_per_rdma_rank": None,
                "num_tokens_per_expert": [sum(row.count(expert) for row in own) for expert in range(case["experts"])],
            }
    return result | {"recorded": Recorder.heard, "meant": meant}


def refusals(case: dict[str, Any]) -> dict[str, Any]:
    """Each leaves the dispatcher as it was."""
    from sglang.srt.batch_overlap.two_batch_overlap import MaybeTboDeepEPDispatcher
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch

    def heard(function: Any) -> str:
        try:
            function()
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}"
        return "nothing"

    dispatcher = dispatcher_of(case)
    assert isinstance(dispatcher, MaybeTboDeepEPDispatcher)  # models ask for it
    set_is_extend_in_batch(False)
    many = torch.zeros(500, case["hidden"], dtype=torch.bfloat16)
    none = topk_of(torch.zeros(500, case["top_k"], dtype=torch.int32), torch.zeros(500, case["top_k"]))
    said = {
        "low_latency": heard(lambda: dispatcher.dispatch(hidden_states=many, topk_output=none)),
        "order": heard(dispatcher.combine_b),
        "nvfp4": heard(lambda: dispatcher.set_quant_config({"dispatcher_output_dtype": "nvfp4"})),
        "overlap": heard(lambda: dispatcher.set_overlap_args(object(), {})),
        "uneven": heard(lambda: dispatcher_of(case | {"experts": case["experts"] + 1})),
    }
    set_is_extend_in_batch(True)
    said["normal"] = heard(lambda: dispatcher.dispatch(hidden_states=many, topk_output=none))
    dispatcher.set_quant_config({"dispatcher_output_dtype": "bf16"})
    return said | {"steps": steps(case)}


def cast(case: dict[str, Any]) -> dict[str, Any]:
    """Packed scales are those that SGLang's own function packs."""
    from sglang.srt.layers.moe.moe_runner.deep_gemm import _cast_to_e8m0_with_rounding_up

    from pplx_comm.serving.sglang.modes import packed

    exponents = torch.randint(-120, 20, (3, 64, 8), generator=torch.Generator().manual_seed(case["seed"]))
    scale = torch.exp2(exponents.float())
    theirs, mine = _cast_to_e8m0_with_rounding_up.__wrapped__(scale), packed(scale)
    return {"same": bool((theirs == mine).all()), "strides": theirs.stride() == mine.stride()}


def unweighted(case: dict[str, Any]) -> dict[str, Any]:
    """Must differ: combines without the router's weights."""
    import pplx_comm

    combine = pplx_comm.AllToAll.combine

    def wrong(*given: Any, **more: Any) -> Any:
        return combine(*given, **{**more, "weighted": False})

    pplx_comm.AllToAll.combine = wrong  # type: ignore[method-assign]
    try:
        return steps(case)
    finally:
        pplx_comm.AllToAll.combine = combine  # type: ignore[method-assign]


def counted(case: dict[str, Any]) -> dict[str, Any]:
    """PPLX_COMM_METRICS alone: this process's files have its steps."""
    folder, deadline = Path(os.environ["PPLX_COMM_METRICS"]), time.monotonic() + 60
    while not sum(in_metrics(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)  # between two writes of the files
    return {"steps": sum(in_metrics(folder))}


def main() -> None:
    start()
    kinds = {one.__name__: one for one in (steps, two_batches, hooks, other_weights, unweighted, recorded, refusals, cast, counted)}
    print("RESULTS " + json.dumps([kinds[case["kind"]](case) for case in json.loads(sys.argv[1])]), flush=True)
    from sglang.srt.runtime_context import get_parallel

    get_parallel().tp_group.barrier()  # a rank that has left is gone


if __name__ == "__main__":
    main()
