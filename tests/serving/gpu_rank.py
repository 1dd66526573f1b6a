"""One of two ranks with a GPU each that run vLLM's modular MoE kernel. Started by gpu_conformance.py, with the cases as JSON.

Prints a line for each case as soon as it is over, and ends when one raises: what follows on broken ranks says nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from gpu_conformance import VLLM_TOLERANCE, Case

import pplx_comm.serving.vllm

pplx_comm.serving.vllm.register()

import layers  # noqa: E402
import vllm.model_executor.layers.fused_moe.modular_kernel as mk  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import get_ep_group, init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager  # noqa: E402
from vllm.forward_context import DPMetadata, create_forward_context, override_forward_context  # noqa: E402
from vllm.model_executor.layers.fused_moe import all2all_utils  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, fp8_w8a8_moe_quant_config  # noqa: E402
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input  # noqa: E402
from vllm.v1.worker.ubatching import make_ubatch_contexts  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
BLOCK = 128
FP8 = torch.float8_e4m3fn
SEED = 20
STEPS = 30
"""That are timed."""


@dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    inner: int
    max_tokens: int


COMPARED = Shape(32, 4, 2048, 1024, 128)
"""As in vLLM's tests."""
TIMED = Shape(64, 8, 7168, 2048, 512)
"""As in DeepSeek-V3, with fewer experts."""


# ---- one process -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    first: torch.Tensor
    second: torch.Tensor
    first_scale: torch.Tensor | None = None
    second_scale: torch.Tensor | None = None

    def of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As float32."""
        return whole(self.first[expert], self.first_scale, expert), whole(self.second[expert], self.second_scale, expert)


def whole(w: torch.Tensor, scale: torch.Tensor | None, expert: int) -> torch.Tensor:
    if scale is None:
        return w.float()
    return w.float() * scale[expert].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def in_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As FP8, with a scale for each block of 128 x 128."""
    rows, columns = w.shape
    tiles = w.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = tiles.abs().amax((1, 3)) / torch.finfo(FP8).max
    return (tiles / scale[:, None, :, None]).to(FP8).view(rows, columns), scale


@cache
def weights_of(shape: Shape, wire: str, everything: bool) -> Weights:
    """Every expert has a seed of its own, so that both ranks have the same ones."""
    mine = range(shape.experts) if everything else experts_of(shape, RANK)
    made: list[list[torch.Tensor]] = []
    for expert in mine:
        generator = torch.Generator(DEVICE).manual_seed(SEED * 1000 + expert)
        one = []
        for size in ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)):
            w = torch.randn(size, generator=generator, device=DEVICE) / 15
            one += list(in_blocks(w)) if wire == "fp8" else [w.bfloat16()]
        made.append(one)
    first, *more = (torch.stack(parts) for parts in zip(*made, strict=True))
    return Weights(first, more[1], more[0], more[2]) if wire == "fp8" else Weights(first, more[0])


def experts_of(shape: Shape, rank: int) -> range:
    count = shape.experts // WORLD
    return range(rank * count, (rank + 1) * count)


def again(x: torch.Tensor, wire: str) -> torch.Tensor:
    """Returns its value after FP8, by vLLM's own quantisation, which depends on the GPU and on DeepGEMM."""
    if wire != "fp8" or x.numel() == 0:
        return x.float()
    q, scale = moe_kernel_quantize_input(x.bfloat16().contiguous(), None, FP8, False, [BLOCK, BLOCK])
    assert scale is not None
    return q.float() * scale.float().repeat_interleave(BLOCK, 1)


def one_process(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shape: Shape, wire: str) -> torch.Tensor:
    """The layer in float32, rounded where the kernels round."""
    everything = weights_of(shape, wire, True)
    x, out = again(x, wire), torch.zeros(x.shape, device=DEVICE)
    for expert in range(shape.experts):
        row, choice = (ids == expert).nonzero(as_tuple=True)
        if row.numel():
            first, second = everything.of(expert)
            gate, up = (x[row] @ first.T).chunk(2, -1)
            inner = again((torch.nn.functional.silu(gate) * up).bfloat16(), wire)
            out.index_add_(0, row, weights[row, choice, None] * (inner @ second.T))
    return out


# ---- vLLM's layer ----------------------------------------------------------------------------------------------------------


class Layer:
    """vLLM's kernel, with its experts and with a prepare and finalize of ours, or its own."""

    def __init__(self, shape: Shape, form: str, experts: str, wire: str) -> None:
        communicator = get_ep_group().device_communicator
        self._shape, self._communicator = shape, communicator
        self._manager = theirs() if form == "allgather" else ours()
        os.environ["PPLX_COMM_VLLM_FORMAT"] = "batched" if form == "batched" else "standard"
        backend = "allgather_reducescatter" if form == "allgather" else "pplx_comm"
        moe = layers.layer_of(
            WORLD, RANK, backend, experts=shape.experts, local=shape.experts // WORLD, top_k=shape.top_k, hidden=shape.hidden,
            inner=shape.inner, max_tokens=shape.max_tokens, device=DEVICE,
        )  # fmt: skip
        self._weights = weights_of(shape, wire, False)
        quant = FUSED_MOE_UNQUANTIZED_CONFIG
        if wire == "fp8":
            assert self._weights.first_scale is not None and self._weights.second_scale is not None
            quant = fp8_w8a8_moe_quant_config(
                w1_scale=self._weights.first_scale, w2_scale=self._weights.second_scale, block_shape=[BLOCK, BLOCK]
            )
        with self._chosen():
            prepare_finalize: Any = all2all_utils.maybe_make_prepare_finalize(moe, quant, None, allow_new_interface=True)
            room = {}
            if form == "batched":
                room = {
                    "max_num_tokens": prepare_finalize.max_num_tokens_per_rank(),
                    "num_dispatchers": prepare_finalize.num_dispatchers(),
                }
            self._kernel = mk.FusedMoEKernel(prepare_finalize, experts_class(form, experts)(moe, quant, **room))
        self._map = torch.full((shape.experts,), -1, dtype=torch.int32, device=DEVICE)
        for local, expert in enumerate(experts_of(shape, RANK)):
            self._map[expert] = local

    @contextmanager
    def _chosen(self) -> Iterator[None]:
        """vLLM's own asks the group for its manager at each step."""
        before, self._communicator.all2all_manager = self._communicator.all2all_manager, self._manager
        try:
            yield
        finally:
            self._communicator.all2all_manager = before

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with self._chosen():
            return self._kernel.apply(
                hidden_states=x, w1=self._weights.first, w2=self._weights.second, topk_weights=weights, topk_ids=ids,
                activation=MoEActivation.SILU, global_num_experts=self._shape.experts, expert_map=self._map,
                apply_router_weight_on_input=False,
            )  # fmt: skip


def experts_class(form: str, experts: str) -> Any:
    if experts == "deepgemm":
        if form == "batched":
            from vllm.model_executor.layers.fused_moe.experts.batched_deep_gemm_moe import BatchedDeepGemmExperts

            return BatchedDeepGemmExperts
        from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts

        return DeepGemmExperts
    if form == "batched":
        from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import BatchedTritonExperts

        return BatchedTritonExperts
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    return TritonExperts


@cache
def layer_of(shape: Shape, form: str, experts: str, wire: str) -> Layer:
    return Layer(shape, form, experts, wire)


@cache
def ours() -> Any:
    return get_ep_group().device_communicator.all2all_manager


@cache
def theirs() -> Any:
    return AgRsAll2AllManager(get_ep_group().cpu_group)


# ---- a step ----------------------------------------------------------------------------------------------------------------


def inputs_of(shape: Shape, tokens: int, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and weights, as large as vLLM's tests have them."""
    generator = torch.Generator(DEVICE).manual_seed(SEED * 100000 + number * 10 + RANK)
    x = (torch.randn(tokens, shape.hidden, generator=generator, device=DEVICE) / 15).bfloat16()
    logits = torch.rand(tokens, shape.experts, generator=generator, device=DEVICE)
    weights, ids = logits.softmax(-1).topk(shape.top_k)
    return x, ids.to(torch.int32), (weights / weights.sum(-1, keepdim=True)).float()


def context_of(config: VllmConfig, tokens: list[int]) -> Any:
    """Returns vLLM's own description of a step: the tokens of each rank."""
    across = torch.tensor(tokens, dtype=torch.int32)
    return create_forward_context(None, config, dp_metadata=DPMetadata.make(config.parallel_config, tokens[RANK], across))


@contextmanager
def step_of(config: VllmConfig, tokens: list[int]) -> Iterator[None]:
    context = context_of(config, tokens)
    with override_forward_context(context), context.dp_metadata.sp_local_sizes(1):
        yield


def eager(config: VllmConfig, layer: Layer, tokens: list[int], given: Any) -> torch.Tensor:
    with step_of(config, tokens):
        return layer(*given)


Ready = Callable[[], torch.Tensor]
"""Takes a step that is prepared: everything that must be done before a capture is."""


def one_batch(config: VllmConfig, layer: Layer, tokens: list[int], given: Any) -> Ready:
    return partial(eager, config, layer, tokens, given)


class Graph:
    """A captured step, replayed with other inputs."""

    def __init__(self, prepare: Callable[[Any], Ready], given: Any, stream: torch.cuda.Stream) -> None:
        self._given = tuple(tensor.clone() for tensor in given)
        for _ in range(2):
            prepare(self._given)()  # builds and compiles what is missing
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        take = prepare(self._given)
        with torch.cuda.graph(self._graph, stream=stream):
            self._out = take()

    def __call__(self, given: Any) -> torch.Tensor:
        for mine, new in zip(self._given, given, strict=True):
            mine.copy_(new)
        self._graph.replay()
        return self._out.clone()

    def times(self) -> list[float]:
        """Microseconds from one end to the next, of replays without a pause: each waits for the other rank."""
        for _ in range(5):
            self._graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        events[0].record()
        for event in events[1:]:
            self._graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [1000 * start.elapsed_time(end) for start, end in pairwise(events)]


class TwoBatches:
    """Two layers over both halves of the tokens, by vLLM's contexts of micro-batches: as its runner starts them."""

    def __init__(self, config: VllmConfig, layer: Layer, stream: torch.cuda.Stream) -> None:
        self._config, self._layer, self._stream = config, layer, stream
        self._communication = torch.cuda.Stream()

    def __call__(self, tokens: list[int], given: Any) -> Ready:
        """On the stream that it was made with. tokens: of each rank, both halves together, even numbers."""
        barrier = threading.Barrier(3)
        halves = list(zip(*(tensor.chunk(2) for tensor in given), strict=True))
        contexts = make_ubatch_contexts(
            2, compute_stream=self._stream, comm_stream=self._communication, ready_barrier=barrier,
            forward_contexts=[context_of(self._config, [count // 2 for count in tokens]) for _ in halves],
        )  # fmt: skip
        outputs: dict[int, torch.Tensor] = {}
        problems: list[BaseException] = []

        def run(context: Any, half: Any) -> None:
            try:
                torch.cuda.set_device(DEVICE)
                with torch.inference_mode(), context:
                    x, ids, weights = half
                    self._layer(x * 0.5, ids, weights)
                    outputs[context.id] = self._layer(x, ids, weights)
            except BaseException as problem:
                problems.append(problem)

        threads = [
            threading.Thread(target=run, args=(context, half), daemon=True) for context, half in zip(contexts, halves, strict=True)
        ]
        for thread in threads:
            thread.start()
        barrier.wait(20)

        def take() -> torch.Tensor:
            with override_forward_context(None):
                contexts[0].cpu_wait_event.set()
                for thread in threads:
                    thread.join(50)
                    if problems:
                        raise problems[0]
                    if thread.is_alive():
                        raise TimeoutError("a micro-batch did not end within 50 s")
            return torch.cat([outputs[0], outputs[1]])

        return take


# ---- cases -----------------------------------------------------------------------------------------------------------------


def compare(config: VllmConfig, case: Case, stream: torch.cuda.Stream) -> dict[str, Any]:
    """The layer against one process, and against vLLM's own backend with standard experts of the same kind."""
    if missing(case):
        return {"skip": "DeepGEMM is not there"}
    layer = layer_of(COMPARED, case.form, case.experts, case.wire)
    backend = layer_of(COMPARED, "allgather", case.experts, case.wire)
    graph = "graph" in case.mode
    # Without a graph the ranks may have any number of tokens, or none; an overlap takes two equal halves of any.
    steps = [[64, 64]] * 3 if graph else [[64, 22], [2, 128]] if "overlap" in case.mode else [[33, 64], [0, 17], [128, 1]]
    prepare: Callable[[list[int], Any], Ready] = partial(one_batch, config, layer)
    if "overlap" in case.mode:
        prepare = TwoBatches(config, layer, stream)
    captured = Graph(partial(prepare, steps[0]), inputs_of(COMPARED, 64, 9), stream) if graph else None
    found: dict[str, Any] = {"close": True, "worst": 0.0, "largest": 0.0, "token": 0.0, "backend": 0.0}
    for number, tokens in enumerate(steps):
        given = inputs_of(COMPARED, tokens[RANK], number)
        y = prepare(tokens, given)() if captured is None else captured(given)
        torch.cuda.synchronize()
        # vLLM's own cannot gather from a rank that has no tokens.
        other = eager(config, backend, tokens, given) if min(tokens) else None
        wanted = one_process(*given, COMPARED, case.wire)
        if tokens[RANK]:
            found["close"] &= bool(torch.allclose(y.float(), wanted, atol=VLLM_TOLERANCE, rtol=VLLM_TOLERANCE))
            found["worst"] = max(found["worst"], float((y - wanted).abs().max()))
            found["largest"] = max(found["largest"], float(wanted.abs().max()))
            found["token"] = max(found["token"], farthest(y, wanted))
            if other is not None:
                found["backend"] = max(found["backend"], farthest(y, other))
    return found


def missing(case: Case) -> bool:
    from vllm.utils.deep_gemm import is_deep_gemm_supported

    return case.experts == "deepgemm" and not is_deep_gemm_supported()


def farthest(y: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference of a token's row, by its norm; what is no number is infinitely far."""
    off = (y.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1).clamp(min=1e-6)
    return float(off.nan_to_num(nan=1e9, posinf=1e9).max())


def measure(config: VllmConfig, case: Case, stream: torch.cuda.Stream) -> dict[str, Any]:
    if missing(case):
        return {"skip": "DeepGEMM is not there"}
    layer = layer_of(TIMED, case.form, case.experts, case.wire)
    tokens = [case.tokens] * WORLD
    graph = Graph(partial(one_batch, config, layer, tokens), inputs_of(TIMED, case.tokens, 0), stream)
    times = graph.times()
    return {"times": times, "median": statistics.median(times)}


def main() -> int:
    cases = [Case(**case) for case in json.loads(sys.argv[1])]
    torch.cuda.set_device(DEVICE)
    config = layers.rank_of(WORLD, RANK, "pplx_comm", DEVICE.type)
    # vLLM allows micro-batches to DeepEP's names only, when it checks the configuration. The manager makes room for two steps.
    config.parallel_config.enable_dbo = True
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(WORLD, RANK, "env://", DEVICE.index, "nccl")
        initialize_model_parallel(1)
        init_workspace_manager(DEVICE, 2)
        if RANK == 0:
            print("FACTS " + facts(), flush=True)
        # vLLM has a stream of its own too, on which it also captures.
        stream = torch.cuda.Stream()
        torch.cuda.set_stream(stream)
        for case in cases:
            print(f"RUNS {case.name}", flush=True)
            try:
                result = (measure if case.tokens else compare)(config, case, stream)
            except Exception as problem:
                traceback.print_exc()
                said = " ".join(f"{type(problem).__name__}: {problem}".split())
                print("CASE " + json.dumps({"name": case.name, "error": said[:400]}), flush=True)
                os._exit(1)  # a hung thread or stream would keep the process
            print("CASE " + json.dumps({"name": case.name, **result}), flush=True)
            ours().comm.barrier()
        ours().destroy()
    sys.stdout.flush()
    os._exit(0)  # objects that vLLM leaves open must not decide how this ends


def facts() -> str:
    import triton
    import vllm
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used, is_deep_gemm_supported

    deep_gemm = "scales that are powers of two" if is_deep_gemm_e8m0_used() else "" if is_deep_gemm_supported() else "none"
    return (
        f"{torch.cuda.get_device_name()} x {WORLD}, vLLM {vllm.__version__}, torch {torch.__version__}, triton {triton.__version__}, "
        f"DeepGEMM: {deep_gemm or 'there'}; seed {SEED}"
    )


if __name__ == "__main__":
    sys.exit(main())
