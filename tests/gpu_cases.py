"""What the rank processes of tests/gpu run: the cases of rank_cases.py with device="cuda", and what only a GPU has.

The runner and the reference stay as they are: tensors travel to the GPU where they enter the library, and back where they leave it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import rank_cases
import torch
from rank_cases import Case, Runner
from reference import same_bits

import pplx_comm as pc

_TENSORS = ("x", "scale", "counts", "offsets", "weights", "src_rank", "src_token", "topk_ids", "topk_weights", "num_rows")


def gpu_of(me: Any) -> torch.device:
    """Ranks take the GPUs in turn, so that more ranks than GPUs share them."""
    device = torch.device("cuda", me.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def moved(tensor: torch.Tensor | None, device: torch.device | str) -> torch.Tensor | None:
    """With the same strides: what lies between rows must not travel."""
    if tensor is None:
        return None
    there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return there.copy_(tensor)


class CarriedDispatched:
    def __init__(self, inner: pc.Dispatched) -> None:
        self.inner = inner
        self.plan = inner.plan

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        return moved(value, "cpu") if name in _TENSORS else value

    def wait(self) -> CarriedDispatched:
        self.inner.wait()
        return self


class CarriedCombining:
    def __init__(self, inner: pc.Combining, out: torch.Tensor | None) -> None:
        self.inner, self.out = inner, out

    def wait(self) -> torch.Tensor:
        y = moved(self.inner.wait(), "cpu")
        assert y is not None
        if self.out is not None:
            self.out.copy_(y)
            return self.out
        return y


class Carried:
    """An AllToAll on a GPU that takes and returns CPU tensors."""

    def __init__(self, inner: pc.AllToAll) -> None:
        self.inner = inner
        self.device = inner.device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _dispatch(
        self, call: Any, x: Any, ids: Any = None, weights: Any = None, x_scale: Any = None, **options: Any
    ) -> CarriedDispatched:
        there = [moved(t, self.device) for t in (x, ids, weights, x_scale)]
        return CarriedDispatched(call(there[0], there[1], there[2], x_scale=there[3], **options))

    def dispatch(self, *args: Any, **options: Any) -> CarriedDispatched:
        return self._dispatch(self.inner.dispatch, *args, **options)

    def dispatch_send(self, *args: Any, **options: Any) -> CarriedDispatched:
        return self._dispatch(self.inner.dispatch_send, *args, **options)

    def dispatch_recv(self, d: CarriedDispatched) -> CarriedDispatched:
        return d.wait()

    def _combine(
        self, call: Any, expert_out: Any, d: CarriedDispatched, weights: Any = None, out: Any = None, **options: Any
    ) -> CarriedCombining:
        there = moved(weights, self.device), moved(out, self.device)
        return CarriedCombining(call(moved(expert_out, self.device), d.inner, weights=there[0], out=there[1], **options), out)

    def combine(self, *args: Any, **options: Any) -> CarriedCombining:
        return self._combine(self.inner.combine, *args, **options)

    def combine_send(self, *args: Any, **options: Any) -> CarriedCombining:
        return self._combine(self.inner.combine_send, *args, **options)

    def combine_recv(self, c: CarriedCombining) -> torch.Tensor:
        return c.wait()


def exchange(me: Any, case: Case) -> str:
    """All steps of a case against the reference, to the last bit; without what device="cuda" does not have yet."""
    if case.wire == "mxfp8":
        case = replace(case, wire="fp8_ue8m0")
    with rank_cases.open_all_to_all(me, case, device=str(gpu_of(me))) as a2a:
        try:
            runner = Runner(me, case, Carried(a2a))  # type: ignore[arg-type]
            for step in runner.steps:
                step.tails = None
            digest: str = runner.run()
            torch.cuda.synchronize()
            a2a.check()
        except BaseException as problem:
            problem.args = (f"{problem}\n{case}",)
            raise
        return digest


def both_devices(me: Any, case: Case, steps: int) -> None:
    """The same steps on the CPU device and on the GPU: the same bits, at shapes that the reference is too slow for."""
    device = gpu_of(me)
    dtype = rank_cases.DTYPES[case.dtype]
    g = torch.Generator().manual_seed(case.seed * 1000 + me.rank)
    with (
        rank_cases.open_all_to_all(me, case, device="cpu", timeout=60.0) as cpu,
        rank_cases.open_all_to_all(me, case, device=str(device), timeout=10.0) as gpu,
    ):
        for step in range(steps):
            tokens = int(torch.randint(0, case.max_tokens + 1, (), generator=g)) if step else case.max_tokens
            x = torch.randn(tokens, case.hidden, generator=g).to(dtype)
            ids = torch.rand(tokens, case.num_experts, generator=g).topk(case.top_k).indices
            weights = torch.rand(tokens, case.top_k, generator=g)
            c = cpu.dispatch(x, ids, weights)
            d = gpu.dispatch(x.to(device), ids.to(device), weights.to(device))
            torch.cuda.synchronize()
            gpu.check()
            assert c.offsets is not None and d.offsets is not None
            assert c.counts.tolist() == d.counts.tolist() and c.offsets.tolist() == d.offsets.tolist()
            used = torch.cat([torch.arange(int(b), int(b) + int(n)) for b, n in zip(c.offsets, c.counts, strict=False)])
            for name in ("x", "scale", "weights", "src_rank", "src_token"):
                want, have = getattr(c, name), getattr(d, name)
                assert (want is None) == (have is None), name
                if want is not None and not same_bits(want[used], have.cpu()[used]):
                    raise AssertionError(f"step {step}: {name} differs, {case}")
            out = torch.full((c.x.shape[0], case.hidden), float("nan"), dtype=dtype)
            out[used] = torch.randn(len(used), case.hidden, generator=g).to(dtype)
            want, have = cpu.combine(out, c), gpu.combine(out.to(device), d)
            torch.cuda.synchronize()
            gpu.check()
            if not same_bits(want, have.cpu()):
                raise AssertionError(f"step {step}: combine differs, {case}")


def soak(me: Any, case: Case, steps: int) -> int:
    """Steps without a look at the host: a checker on the device counts what is wrong. Every element of a token says whose it is."""
    device = gpu_of(me)
    g = torch.Generator(device=device).manual_seed(case.seed * 1000 + me.rank)
    dtype = rank_cases.DTYPES[case.dtype]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    with rank_cases.open_all_to_all(me, case, device=str(device), timeout=20.0) as a2a:
        for step in range(steps):
            tokens = (step * 7 + me.rank * 3) % (case.max_tokens + 1)
            ids = torch.randint(-1, case.num_experts, (tokens, case.top_k), generator=g, device=device)
            # Small integers are exact in every dtype, and so are their sums.
            mine = torch.arange(tokens, device=device) % 8 + me.rank + step % 5
            x = mine[:, None].expand(tokens, case.hidden).to(dtype)
            d = a2a.dispatch(x, ids)
            value = (d.src_token % 8 + d.src_rank + step % 5).to(dtype)
            row = torch.arange(d.x.shape[0], device=device)
            # searchsorted may run into an empty segment's start, which is the end of the one before.
            assert d.offsets is not None
            expert = torch.searchsorted(d.offsets[1:].contiguous(), row, right=True).clamp(max=a2a.num_local_experts - 1)
            used = row < d.offsets[expert] + d.counts[expert]
            rows = d.x.to(dtype)
            if d.scale is not None:  # small integers survive e4m3
                rows = (d.x.float().unflatten(1, (-1, 128)) * d.scale[:, :, None]).flatten(1).round().to(dtype)
            wrong += (used[:, None] & (rows != value[:, None])).sum()
            wrong += d.counts.sum() - used.sum()
            y = a2a.combine(rows, d)
            wrong += (y != (mine * (ids >= 0).sum(1))[:, None].to(dtype)).sum()
        torch.cuda.synchronize()
        a2a.check()
    return int(wrong)


def replay(me: Any, case: Case, replays: int) -> int:
    """A captured pair, replayed with changing inputs, against the same steps taken eagerly. Returns how many replays differed."""
    device = gpu_of(me)
    dtype = rank_cases.DTYPES[case.dtype]
    g = torch.Generator(device=device).manual_seed(case.seed * 1000 + me.rank)
    n = case.max_tokens
    x = torch.zeros(n, case.hidden, dtype=dtype, device=device)
    ids = torch.zeros(n, case.top_k, dtype=torch.int64, device=device)
    weights = torch.zeros(n, case.top_k, device=device)
    with (
        rank_cases.open_all_to_all(me, case, device=str(device), timeout=20.0) as captured,
        rank_cases.open_all_to_all(me, case, device=str(device), timeout=20.0) as eager,
    ):
        captured.warmup()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            d = captured.dispatch(x, ids, weights)
            y = captured.combine(d.x if case.wire == "native" else d.x.to(dtype), d)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(replays):
            x.copy_(torch.randn(n, case.hidden, generator=g, device=device))
            ids.copy_(torch.randint(-1, case.num_experts, (n, case.top_k), generator=g, device=device))
            weights.copy_(torch.rand(n, case.top_k, generator=g, device=device))
            graph.replay()
            e = eager.dispatch(x, ids, weights)
            want = eager.combine(e.x if case.wire == "native" else e.x.to(dtype), e)
            wrong += (y.view(torch.int16) != want.view(torch.int16)).any()
        torch.cuda.synchronize()
        captured.check()
        eager.check()
        return int(wrong)


def lost_peer(me: Any, case: Case, timeout: float) -> Any:
    """The last rank never dispatches: the others' kernels end by themselves, the next call says why, and the context lives on."""
    device = gpu_of(me)
    with rank_cases.open_all_to_all(me, case, device=str(device), timeout=timeout) as a2a:
        if me.rank == me.world_size - 1:
            until = time.monotonic() + 20 * timeout
            while me.comm.failure is None and time.monotonic() < until:
                time.sleep(0.01)
            return "silent"
        x = torch.zeros(case.max_tokens, case.hidden, dtype=rank_cases.DTYPES[case.dtype], device=device)
        a2a.dispatch(x, torch.zeros(case.max_tokens, case.top_k, dtype=torch.int64, device=device))
        torch.cuda.synchronize()
        assert int(torch.ones(3, device=device).sum()) == 3
        try:
            a2a.check()
        except pc.StepTimeout as error:
            return error.peer
        return "nothing"
