"""Cases of the rank processes of tests/gpu: the cases of rank_cases.py with device="cuda", and cases that need a GPU.

The runner and the reference stay as they are: tensors travel to the GPU where they enter the library, and back where they leave it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import chaos_cases
import failure_cases
import numpy as np
import outcomes
import rank_cases
import torch
import training_cases
from carried import Carried
from cases import DTYPES, Case, bits
from rank_cases import Runner
from reference import quantise, same_bits

import pplx_comm as pc
from pplx_comm import trace
from pplx_comm.device import cuda as device_of_cuda
from pplx_comm.gpus import cuda_module
from pplx_comm.wiring import nvshmem
from pplx_comm.wiring.gpu_memory import Opened


def load_module(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


def use_module(path: str) -> None:
    """That file as pplx_comm._cuda, in place of the checkout's: a fuzz build, or a mutant."""
    pc._cuda = load_module("pplx_comm._cuda", path)  # type: ignore[attr-defined]


def use_nvshmem_module(path: str) -> None:
    """That file as pplx_comm._nvshmem."""
    ctypes.CDLL(str(nvshmem.library_path()), mode=ctypes.RTLD_GLOBAL)
    pc._nvshmem = load_module("pplx_comm._nvshmem", path)  # type: ignore[attr-defined]


@functools.cache
def use_environment() -> None:
    """Takes what this rank's environment names. Not at import: ranks are forked from a process that has imported this."""
    if "PPLX_TEST_CUDA" in os.environ:
        use_module(os.environ["PPLX_TEST_CUDA"])
    if "PPLX_TEST_NVSHMEM" in os.environ:
        use_nvshmem_module(os.environ["PPLX_TEST_NVSHMEM"])
    if "PPLX_TEST_NVSHMEM_TRIED" in os.environ:  # other ranks tried it alone, which takes each of them seconds
        tried = [(gpu, by_nic) for gpu in range(torch.cuda.device_count()) for by_nic in (False, True)]
        nvshmem.library.probed = dict.fromkeys(tried, nvshmem.Alone(None))


def module_in_use(me: Any) -> str:
    use_environment()
    return str(pc._cuda.__file__)  # type: ignore[attr-defined]


HELD = 10.0
"""Seconds on the GPU's clock that a test holds multiprocessors for at most: less than the library's patience with a peer."""


def gpu_of(me: Any) -> torch.device:
    """Ranks take the GPUs in turn, so that more ranks than GPUs share them."""
    use_environment()
    device = torch.device("cuda", me.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def group_of(me: Any, case: Case) -> int:
    """Returns the group of replicas that pass the same tokens; without replicas the rank."""
    return int(me.rank // case.replicas)


def settle(device: torch.device | str | None = None) -> None:
    """Waits for what was launched on a GPU's current stream, and holds none of CUDA's locks meanwhile."""
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    while not done.query():
        time.sleep(0)  # a poll that leaves others the core


def on_gpu(me: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """A case of the CPU device ("failure_cases:leaves"), with device="cuda" in its place."""
    device = gpu_of(me)
    cpu = rank_cases.open_all_to_all

    def opened(me: Any, case: Case, **changes: Any) -> Carried:
        return Carried(cpu(me, case, **{"device": str(device), **changes}), checked=True)

    module, _, function = name.partition(":")
    users = (rank_cases, failure_cases, training_cases, chaos_cases)
    for user in users:
        user.open_all_to_all = opened  # type: ignore[assignment]
    try:
        return getattr(importlib.import_module(module), function)(me, *args, **kwargs)
    finally:
        for user in users:
            user.open_all_to_all = cpu


def exchange(me: Any, case: Case) -> str:
    """All steps of a case against the reference, to the last bit."""
    with rank_cases.open_all_to_all(me, case, device=str(gpu_of(me))) as a2a:
        try:
            runner = Runner(me, case, Carried(a2a))  # type: ignore[arg-type]
            digest: str = runner.run()
            torch.cuda.synchronize()
            a2a.check()
            rank_cases.check_counters(runner)
        except BaseException as problem:
            # A step that was given up leaves rows that differ.
            problem.args = (f"{problem}\n{outcomes.raised(a2a.check)['message']}\n{case}",)
            raise
        return digest


@contextlib.contextmanager
def unreachable(me: Any, pairs: list[tuple[int, int]]) -> Iterator[None]:
    """The GPU of the first of each pair cannot map the memory of the second's."""
    real = Opened.open

    def opened(self: Any, gpu: int, rank: int, *rest: Any) -> None:
        if (me.rank, rank) in pairs:
            self.refused[rank] = "a test says so"
        else:
            real(self, gpu, rank, *rest)

    setattr(Opened, "open", opened)  # noqa: B010
    try:
        yield
    finally:
        setattr(Opened, "open", real)  # noqa: B010


def exchange_apart(me: Any, case: Case, pairs: list[tuple[int, int]]) -> list[int]:
    """A case among GPUs some of which do not reach each other. Returns this rank's remote peers."""
    with unreachable(me, pairs):
        exchange(me, case)
        with rank_cases.open_all_to_all(me, case, device=str(gpu_of(me))) as a2a:
            return list(a2a._steps.session.wiring.peers.remote)


def refused_apart(me: Any, case: Case, pairs: list[tuple[int, int]]) -> str:
    """Returns the error where ranks must reach each other and do not."""
    with unreachable(me, pairs):
        try:
            rank_cases.open_all_to_all(me, case, device=str(gpu_of(me))).close()
        except pc.Error as problem:
            return str(problem)
    return "it took it"


def hangs_in_a_copy(me: Any, case: Case, late: int) -> None:
    """All ranks but one wait for it in a copy to the host, of rows that its dispatch is to bring."""
    device = gpu_of(me)
    with rank_cases.open_all_to_all(me, case, device=str(device)) as a2a:
        x = torch.ones(case.max_tokens, case.hidden, dtype=DTYPES[case.dtype], device=device)
        ids = (torch.arange(case.max_tokens * case.top_k, device=device) % case.num_experts).view(-1, case.top_k)
        me.say("pid", (os.getpid(), me.comm.control.job))
        if me.rank == late:
            me.hear()
        d = a2a.dispatch(x, ids)
        d.x.cpu()
        a2a.combine(torch.ones_like(d.x), d)
        a2a.check()


def odd_values(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Some blocks of x with what quantising has to look at: NaN, infinities, zeros of either sign, the smallest, the largest."""
    limits = torch.finfo(x.dtype)
    odd = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, limits.smallest_normal, -limits.smallest_normal / 4, limits.max]
    for value in odd if x.shape[0] else []:
        row, column = int(torch.randint(0, x.shape[0], (), generator=g)), int(torch.randint(0, x.shape[1], (), generator=g))
        x[row, column] = value
        begin = column // 32 * 32
        if value == value and abs(value) < 1:  # the whole block, or a neighbour would say how large it is
            x[row, begin : begin + 32] = value
    return x


def small_values(x: torch.Tensor, dtype: torch.dtype, g: torch.Generator, odd: bool) -> torch.Tensor:
    """If odd, a quarter of each row is zeros of either sign, another one is about as small as numbers can be."""
    quarter = x.shape[1] // 4 if odd else 0
    x[:, :quarter] = torch.where(torch.rand(x.shape[0], quarter, generator=g) < 0.7, -0.0, 0.0)
    x[:, quarter : 2 * quarter] *= torch.finfo(dtype).smallest_normal
    return x.to(dtype)


def rows_that_look_blank(me: Any, case: Case, steps: int) -> None:
    """Tokens of any bits, all ones above all, which is how a place looks where nothing has come yet."""
    quantised = case.wire != "native"
    dtype = torch.uint8 if quantised else DTYPES[case.dtype]
    g = torch.Generator().manual_seed(case.seed)
    device = gpu_of(me)
    with rank_cases.open_all_to_all(me, case, device=str(device)) as a2a:
        for _ in range(steps):
            bits, ids = [], []
            for _ in range(case.world_size):
                tokens = int(torch.randint(0, case.max_tokens + 1, (), generator=g))
                x = torch.randint(0, 256, (tokens, case.hidden * dtype.itemsize), generator=g, dtype=torch.uint8)
                x[torch.rand(x.shape[0], generator=g) < 0.5] = 255
                x[:, 12:16][torch.rand(x.shape[0], generator=g) < 0.3] = 255
                bits.append(x)
                ids.append(torch.rand(tokens, case.num_experts, generator=g).topk(case.top_k).indices)
            mine = bits[me.rank].view(torch.float8_e4m3fn if quantised else dtype)
            scale = torch.rand(mine.shape[0], -(-case.hidden // 128)) + 1 if quantised else None
            d = a2a.dispatch(mine.to(device), ids[me.rank].to(device), x_scale=None if scale is None else scale.to(device))
            settle()
            rows = d.x.view(torch.uint8).cpu()
            assert d.offsets is not None
            for begin, n in zip(d.offsets.tolist(), d.counts.tolist(), strict=False):
                for row in range(begin, begin + n):
                    source, token = int(d.src_rank[row]), int(d.src_token[row])
                    assert torch.equal(rows[row], bits[source][token]), (row, source, token)
            d.release()
            a2a.check()


def blocks_of_any_magnitude(me: Any, case: Case, steps: int) -> None:
    """One rank and one expert. A block's largest number has any bits, and nearly any exponent: two divisions make its scale."""
    g = torch.Generator().manual_seed(case.seed)
    device, n = gpu_of(me), case.max_tokens
    ids = torch.zeros(n, 1, dtype=torch.int64, device=device)
    with rank_cases.open_all_to_all(me, case, device=str(device)) as a2a:
        for _ in range(steps):
            powers = torch.randint(-130, 125, (n, case.hidden // 128, 1), generator=g).double().exp2()
            x = (torch.randn(n, case.hidden // 128, 128, generator=g) * powers).float().view(n, case.hidden)
            codes, scale = quantise(x)
            d = a2a.dispatch(x.to(device), ids)
            settle()
            token = d.src_token[:n].long().cpu()
            assert d.scale is not None
            assert same_bits(d.x[:n].cpu(), codes[token])
            assert same_bits(d.scale[:n].cpu(), scale[token])
            d.release()
            a2a.check()


def answers_that_look_blank(me: Any, case: Case, steps: int) -> None:
    """Compact: some vectors of experts' rows look as a place does where nothing has come yet. What is NaN there stays NaN."""
    g = torch.Generator().manual_seed(case.seed)
    dtype, world, device = DTYPES[case.dtype], case.world_size, gpu_of(me)
    vectors, each, last = case.hidden * dtype.itemsize // 16, 16 // dtype.itemsize, 4 // dtype.itemsize
    with rank_cases.open_all_to_all(me, case, device=str(device)) as a2a:
        for _ in range(steps):
            tokens = torch.randint(case.max_tokens // 2, case.max_tokens + 1, (world,), generator=g).tolist()
            ids = [torch.rand(n, case.num_experts, generator=g).topk(case.top_k).indices for n in tokens][me.rank]
            # [rank of the expert, source, token, vector]
            blank = torch.rand(world, world, case.max_tokens, vectors, generator=g) < 0.1
            d = a2a.dispatch(torch.zeros(len(ids), case.hidden, dtype=dtype, device=device), ids.to(device))
            settle()
            assert d.num_rows is not None
            n = int(d.num_rows)
            out = torch.ones(d.x.shape, dtype=dtype)
            of_row = blank[me.rank, d.src_rank[:n].cpu().long(), d.src_token[:n].cpu().long()]
            out[:n].view(torch.int32).view(n, vectors, 4)[..., 3][of_row] = -1
            y = a2a.combine(out.to(device), d)
            settle()
            goes = torch.zeros(len(ids), world, dtype=torch.bool).scatter_(1, ids // (case.num_experts // world), True)
            nan = (goes.unsqueeze(2) & blank[:, me.rank, : len(ids)].transpose(0, 1)).any(1)
            wanted = goes.sum(1).float().view(-1, 1, 1).repeat(1, vectors, each)
            wanted[..., each - last :][nan] = torch.nan
            torch.testing.assert_close(y.cpu().float(), wanted.flatten(1), rtol=0, atol=0, equal_nan=True)
            a2a.check()


def missing_rows(me: Any, case: Case, steps: int) -> None:
    """Rows that expert_out does not have count as zero, whatever lies behind it, and the next check says so."""
    g = torch.Generator().manual_seed(case.seed + me.rank)
    dtype, device = DTYPES[case.dtype], gpu_of(me)
    with rank_cases.open_all_to_all(me, case, device=str(device)) as a2a:
        for _ in range(steps):
            tokens = int(torch.randint(1, case.max_tokens + 1, (), generator=g))
            ids = torch.rand(tokens, case.num_experts, generator=g).topk(case.top_k).indices.to(device)
            x = torch.zeros(tokens, case.hidden, dtype=dtype, device=device)
            d = a2a.dispatch(x, ids)
            settle()
            rows = _rows_of(d, case.layout)
            end = int(rows.max()) + 1 if len(rows) else 0
            cut = end - int(torch.randint(0, end // 2 + 1, (), generator=g))
            out = torch.randn(d.x.shape, generator=g).to(device, dtype)
            y, wanted = torch.full((2, tokens, case.hidden), torch.nan, dtype=dtype, device=device)

            def combine(out: torch.Tensor, d: pc.Dispatched, y: torch.Tensor) -> None:
                a2a.combine(out, d, out=y)
                settle()
                a2a.check()

            if cut < end:
                outcomes.mistake(functools.partial(combine, out[:cut], d, y), "fewer rows")
            else:
                combine(out, d, y)
            out[cut:] = 0
            combine(out, a2a.dispatch(x, ids), wanted)
            outcomes.must(torch.equal(y, wanted), case, "rows", cut, "of", end)


def _rows_of(d: pc.Dispatched, layout: str) -> torch.Tensor:
    """Returns the rows of d.x that something was dispatched to, as one list whatever the layout."""
    if layout == "compact":
        assert d.num_rows is not None
        return torch.arange(int(d.num_rows))
    room = d.x.shape[1] if layout == "padded" else 0
    begins = [e * room for e in range(len(d.counts))] if layout == "padded" else d.offsets.tolist()  # type: ignore[union-attr]
    return torch.cat([torch.arange(begin, begin + int(n)) for begin, n in zip(begins, d.counts, strict=False)])


open_on_cpu = rank_cases.open_all_to_all
"""Also where the emulation has put its own in the other's place."""


def both_devices(
    me: Any, case: Case, steps: int, odd: bool = False, tokens_of: Sequence[int] = (), num_sms: int | None = None, ahead: int = 0
) -> None:
    """The same steps on the CPU device and on the GPU: the same bits, at shapes that the reference is too slow for.

    tokens_of: how many tokens each step has; else max_tokens first, and then any number. ahead: steps by which each rank has the
    numbers of `tokens_of` before the rank below it.
    """
    device = gpu_of(me)
    dtype = DTYPES[case.dtype]
    g = torch.Generator().manual_seed(case.seed * 1000 + group_of(me, case))
    of_experts = torch.Generator().manual_seed(case.seed * 1000 + me.rank)
    with (
        open_on_cpu(me, case.without_nvshmem, device="cpu", timeout=60.0) as cpu,
        rank_cases.open_all_to_all(me, case, device=str(device), num_sms=num_sms) as gpu,
    ):
        for step in range(steps):
            tokens = int(torch.randint(0, case.max_tokens + 1, (), generator=g)) if step else case.max_tokens
            tokens = tokens_of[(step + ahead * me.rank) % len(tokens_of)] if tokens_of else tokens
            x = torch.randn(tokens, case.hidden, generator=g).to(dtype)
            x = odd_values(x, g) if odd else x
            ids = torch.rand(tokens, case.num_experts, generator=g).topk(case.top_k).indices
            weights = torch.rand(tokens, case.top_k, generator=g)
            c = cpu.dispatch(x, ids, weights)
            d = gpu.dispatch(x.to(device), ids.to(device), weights.to(device))
            settle()
            gpu.check()
            assert c.counts.tolist() == d.counts.tolist()
            assert (c.offsets is None) == (d.offsets is None) and (c.offsets is None or c.offsets.tolist() == d.offsets.tolist())
            used = _rows_of(c, case.layout)
            for name in ("x", "scale", "weights", "src_rank", "src_token", "topk_ids", "topk_weights"):
                want, have = getattr(c, name), getattr(d, name)
                assert (want is None) == (have is None), name
                if want is None:
                    continue
                assert want.dtype == have.dtype and want.shape == have.shape and want.stride() == have.stride(), name
                flat = [t.reshape(-1, *t.shape[2 if case.layout == "padded" else 1 :]) for t in (want, have.cpu())]
                if not same_bits(flat[0][used], flat[1][used]):
                    raise AssertionError(f"step {step}: {name} differs, {case}")
            rows = c.x.shape[:-1]
            flat_out = torch.full((rows.numel(), case.hidden), float("nan"), dtype=dtype)
            flat_out[used] = small_values(torch.randn(len(used), case.hidden, generator=of_experts), dtype, of_experts, odd)
            out = flat_out.view(*rows, case.hidden)
            there = out.to(device)
            tail = bits((*rows, case.top_k) if case.layout == "compact" else tuple(rows), of_experts)
            if step % 2 == 0:  # without tails another kernel runs
                same = same_bits(cpu.combine(out, c), gpu.combine(there, d).cpu())
            else:
                want, came = cpu.combine(out, c, tail=tail)
                have, came_too = gpu.combine(there, d, tail=tail.to(device))
                same = same_bits(want, have.cpu()) and same_bits(came, came_too.cpu())
            settle()
            gpu.check()
            if not same:
                raise AssertionError(f"step {step}: combine differs, {case}")


def soak_for(me: Any, case: Case, transports: Sequence[str], seconds: float) -> dict[str, int]:
    """Soaks of cases that are drawn, for so long: steps, bytes that this rank's proxy wrote, and how many elements were wrong."""
    done = {"steps": 0, "bytes": 0, "wrong": 0}
    r = random.Random(case.seed)
    until, more = time.monotonic() + seconds, True
    while more:
        drawn = replace(
            case, transport=r.choice(transports), seed=r.randrange(2**30), num_experts=r.choice([4, 16, 61]), top_k=r.choice([1, 2, 4]),
            hidden=r.choice([128, 512, 2048, 7168]), max_tokens=r.choice([1, 7, 32, 128]), wire=r.choice(["native", "fp8"]),
        )  # fmt: skip
        done["wrong"] += soak(me, drawn, 500, done)
        done["steps"] += 500
        # The first rank's clock decides for all.
        more = bool(me.comm.control.all_gather({"more": time.monotonic() < until}, "soak", 60.0)[0]["more"])
    return done


def soak(me: Any, case: Case, steps: int, done: dict[str, int] | None = None, ahead: int = 0) -> int:
    """Steps without a look at the host: a checker on the device counts what is wrong. Every element of a token says whose it is.
    `ahead`: how many steps are launched at most before the host waits for them."""
    device, group = gpu_of(me), group_of(me, case)
    g = torch.Generator(device=device).manual_seed(case.seed * 1000 + group)
    dtype = DTYPES[case.dtype]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    with rank_cases.open_all_to_all(me, case, device=str(device), timeout=20.0) as a2a:
        before = a2a.stats().get("proxy", {}).get("bytes", 0)
        for step in range(steps):
            tokens = (step * 7 + group * 3) % (case.max_tokens + 1)
            ids = torch.randint(-1, case.num_experts, (tokens, case.top_k), generator=g, device=device)
            # Integers up to 15 are exact in every dtype and, by any scale, in e4m3, and so are sums of four.
            mine = (torch.arange(tokens, device=device) % 8 + 3 * group + step % 5) % 16
            x = mine[:, None].expand(tokens, case.hidden).to(dtype)
            d = a2a.dispatch(x, ids)
            value = ((d.src_token % 8 + 3 * (d.src_rank // case.replicas) + step % 5) % 16).to(dtype)
            row = torch.arange(d.x.shape[0], device=device)
            # searchsorted may run into an empty segment's start, which is the end of the one before.
            assert d.offsets is not None
            expert = torch.searchsorted(d.offsets[1:].contiguous(), row, right=True).clamp(max=a2a.num_local_experts - 1)
            used = row < d.offsets[expert] + d.counts[expert]
            rows = d.x.to(dtype)
            if d.scale is not None:
                scale = d.scale.view(torch.float8_e8m0fnu).float() if case.wire == "mxfp8" else d.scale
                rows = (d.x.float().unflatten(1, (scale.shape[1], -1)) * scale[:, :, None]).flatten(1).round().to(dtype)
            wrong += (used[:, None] & (rows != value[:, None])).sum()
            wrong += d.counts.sum() - used.sum()
            y = a2a.combine(rows, d)
            wrong += (y != (mine * (ids >= 0).sum(1))[:, None].to(dtype)).sum()
            if ahead and step % ahead == ahead - 1:
                settle()
        torch.cuda.synchronize()
        a2a.check()
        if done is not None:
            done["bytes"] += a2a.stats()["proxy"]["bytes"] - before  # the proxy lives as long as its Communicator
    return int(wrong)


def replay(me: Any, case: Case, replays: int) -> int:
    """A captured pair, replayed with changing inputs, against the same steps taken eagerly. Returns how many replays differed."""
    device = gpu_of(me)
    dtype = DTYPES[case.dtype]
    g = torch.Generator(device=device).manual_seed(case.seed * 1000 + group_of(me, case))
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
                time.sleep(0.01)  # a poll: callbacks of a failure come to another thread
            return "silent"
        x = torch.zeros(case.max_tokens, case.hidden, dtype=DTYPES[case.dtype], device=device)
        a2a.dispatch(x, torch.zeros(case.max_tokens, case.top_k, dtype=torch.int64, device=device))
        torch.cuda.synchronize()
        assert int(torch.ones(3, device=device).sum()) == 3
        try:
            a2a.check()
        except pc.StepTimeout as error:
            return error.peer
        return "nothing"


def killed(me: Any, case: Case, victim: int) -> Any:
    """kill -9 between two steps. The others' next step ends by itself, their next host calls name the rank within a second, other
    streams go on, and so do they after reset(). Returns the ranks that they named, and when."""
    device = gpu_of(me)
    x = torch.zeros(case.max_tokens, case.hidden, dtype=DTYPES[case.dtype], device=device)
    ids = (torch.arange(case.max_tokens * case.top_k, device=device) % case.num_experts).view(-1, case.top_k)
    a2a = rank_cases.open_all_to_all(me, case, device=str(device), timeout=30.0)

    def step() -> torch.Tensor:
        d = a2a.dispatch(x, ids)
        y = a2a.combine(torch.ones(d.x.shape, dtype=x.dtype, device=device), d)
        assert isinstance(y, torch.Tensor)
        return y

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    me.comm.barrier()
    if me.rank == victim:
        me.say("dying")
        time.sleep(60)  # it is killed meanwhile
    other = torch.cuda.Stream()
    until, peer, at = time.monotonic() + 20, None, 0.0
    with contextlib.suppress(pc.PeerError):  # may be the first call that hears of it
        step()
    with torch.cuda.stream(other):
        beside = torch.ones(1000, device=device).cumsum(0)
    other.synchronize()
    assert int(beside[-1]) == 1000
    while peer is None and time.monotonic() < until:
        try:
            a2a.check()
            time.sleep(0.001)  # a poll: check() is the subject
        except pc.PeerError as error:
            peer, at = error.peer, time.monotonic()
    torch.cuda.synchronize()
    assert int(torch.ones(3, device=device).sum()) == 3
    left = a2a.reset()
    alive = torch.tensor([rank in left for rank in range(me.world_size)], device=device)
    choices = alive[ids // -(-case.num_experts // me.world_size)].sum(1)
    for _ in range(5):
        y = step()
    torch.cuda.synchronize()
    a2a.check()
    assert torch.equal(y, choices[:, None].to(x.dtype).expand_as(y)), "experts of the dead answer nothing, all others do"
    me.comm.barrier()
    a2a.close()
    return peer, at


def traced_replays(me: Any, case: Case) -> list[tuple[int, ...]]:
    """A timeline begins when the graph is there. Returns step, begin and end of its kernels."""
    device = gpu_of(me)
    x = torch.ones(case.max_tokens, case.hidden, dtype=DTYPES[case.dtype], device=device)
    ids = (torch.arange(case.max_tokens * case.top_k, device=device) % case.num_experts).view(-1, case.top_k)
    with rank_cases.open_all_to_all(me, case, device=str(device)) as a2a:
        a2a.warmup()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(2):
                d = a2a.dispatch(x, ids)
                a2a.combine(d.x, d)
        graph.replay()
        torch.cuda.synchronize()
        trace.start()
        for _ in range(case.steps):
            graph.replay()
        torch.cuda.synchronize()
        a2a.check()
        trace.stop()
        spans = np.frombuffer(cuda_module().read_trace(), trace._SPAN)
    kernels = spans[spans["what"] == trace._KERNEL]
    return sorted(tuple(int(kernel[name]) for name in ("step", "begun", "ended")) for kernel in kernels)


def old_graph(me: Any, case: Case) -> None:
    """A graph from before a reset() does nothing, and disturbs no rank; captured anew it works."""
    device = gpu_of(me)
    x = torch.ones(case.max_tokens, case.hidden, dtype=DTYPES[case.dtype], device=device)
    ids = (torch.arange(case.max_tokens * case.top_k, device=device) % case.num_experts).view(-1, case.top_k)
    with rank_cases.open_all_to_all(me, case, device=str(device), timeout=20.0) as a2a:

        def capture() -> tuple[torch.cuda.CUDAGraph, Any, Any]:
            a2a.warmup()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                d = a2a.dispatch(x, ids)
                y = a2a.combine(d.x, d)
            return graph, d, y

        def replayed(graph: torch.cuda.CUDAGraph) -> None:
            graph.replay()
            torch.cuda.synchronize()
            a2a.check()

        graph, d, y = capture()
        replayed(graph)
        sums = y.clone()
        for _ in range(2):
            with contextlib.suppress(pc.PeerError):  # a rank that is further on raises it
                me.comm.barrier()
            me.comm.control.abort("the test ends this generation")
            assert a2a.reset() == list(range(me.world_size))
            if me.rank == 0:
                replayed(graph)
                assert int(d.counts.sum()) == 0
            fresh, _, again = capture()
            for _ in range(3):
                if me.rank == me.world_size - 1:
                    replayed(graph)
                replayed(fresh)
            assert torch.equal(sums, again)


def streams(me: Any, case: Case, steps: int) -> None:
    """Each half on a stream of its own, and the streams' other work in between: what is received is what was sent."""
    device = gpu_of(me)
    lanes = [torch.cuda.Stream() for _ in range(4)]
    x = torch.ones(case.max_tokens, case.hidden, dtype=DTYPES[case.dtype], device=device)
    ids = (torch.arange(case.max_tokens * case.top_k, device=device) % case.num_experts).view(-1, case.top_k)
    with rank_cases.open_all_to_all(me, case, device=str(device), timeout=20.0) as a2a:
        torch.cuda.synchronize()
        for step in range(steps):
            with torch.cuda.stream(lanes[step % 4]):
                torch.cuda._sleep(1_000_000 if (step + me.rank) % 3 == 0 else 1)
                d = a2a.dispatch_send(x, ids)
            with torch.cuda.stream(lanes[(step + 1) % 4]):
                a2a.dispatch_recv(d)
                torch.cuda._sleep(1_000_000 if (step + me.rank) % 3 == 1 else 1)
                c = a2a.combine_send(torch.ones(d.x.shape, dtype=x.dtype, device=device), d)
            with torch.cuda.stream(lanes[(step + 2) % 4]):
                y = a2a.combine_recv(c)
            torch.cuda.synchronize()
            a2a.check()
            assert isinstance(y, torch.Tensor) and bool((y == case.top_k).all()), f"step {step}"


def counts_of_a_routing(me: Any, case: int) -> None:
    """Counts a routing by the kernel of get_dispatch_layout; choices of a token may be dropped, and may be the same."""
    r, device = random.Random(case), gpu_of(me)
    ranks, tokens, top_k = r.choice([1, 2, 6, 8, 64]), r.choice([0, 1, 255, 257, 1000]), r.randint(1, 16)
    experts, nodes = ranks * r.choice([1, 3, 128]), r.choice([0] + [n for n in (2, 3, 4) if ranks % n == 0])
    g = torch.Generator().manual_seed(case)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=g, dtype=r.choice([torch.int32, torch.int64]))
    own, goes = ids.to(device), torch.ones(tokens, ranks, dtype=torch.bool, device=device)
    counts = torch.full((ranks + nodes + experts,), 77, dtype=torch.int32, device=device)
    cuda_module().count_routing(
        own.data_ptr(), ids.dtype == torch.int64, tokens, top_k, ranks, nodes, experts, goes.data_ptr(), counts.data_ptr(),
        device.index or 0, device_of_cuda.raw_stream(device.index or 0),
    )  # fmt: skip
    settle(device)
    owners = [{id // (experts // ranks) for id in row if id >= 0} for row in ids.tolist()]
    wanted = [[rank in owner for rank in range(ranks)] for owner in owners]
    homes = [{rank * nodes // ranks for rank in owner} for owner in owners]
    by_rank, by_node = Counter(rank for owner in owners for rank in owner), Counter(node for home in homes for node in home)
    by_expert = Counter(ids.flatten().tolist())
    outcomes.must(goes.tolist() == wanted, case, "where tokens go")
    found = [by_rank[n] for n in range(ranks)] + [by_node[n] for n in range(nodes)] + [by_expert[n] for n in range(experts)]
    outcomes.must(counts.tolist() == found, case, counts.tolist(), found)


def held_sms(me: Any, case: Case, left: int, steps: int) -> int:
    """Steps beside a kernel that holds all multiprocessors but `left`. Returns how many elements are wrong.

    The holding kernel outlives every step, so nothing in them may wait for the whole GPU: what is launched is loaded, and what is
    allocated is in torch's pool, after some steps without it.
    """
    from bench.gpu.device import instruments

    device = gpu_of(me)
    held = torch.cuda.get_device_properties(device).multi_processor_count - left
    words = torch.zeros(1 + held, dtype=torch.int64).pin_memory()  # [0]: end; the others: held
    side = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    x = torch.ones(case.max_tokens, case.hidden, dtype=DTYPES[case.dtype], device=device)
    g = torch.Generator(device=device).manual_seed(case.seed * 1000 + group_of(me, case))
    with rank_cases.open_all_to_all(me, case, device=str(device), timeout=20.0) as a2a:

        def step() -> None:
            ids = torch.randint(0, case.num_experts, (case.max_tokens, case.top_k), generator=g, device=device)
            d = a2a.dispatch(x, ids)
            y = a2a.combine(torch.ones(d.x.shape, dtype=x.dtype, device=device), d)
            wrong.add_((y != case.top_k).sum())

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        a2a.check()
        me.comm.barrier()
        reserved = torch.cuda.memory_reserved()
        try:
            instruments().hold(words.data_ptr(), held, HELD, side.cuda_stream)
            until = time.monotonic() + HELD / 2
            while int(words[1:].sum()) < held:
                assert time.monotonic() < until, f"{int(words[1:].sum())} of {held} multiprocessors could be held"
                time.sleep(0.001)
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(steps):
                    step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            done = torch.cuda.Event()
            done.record()
            while not done.query() and not side.query():
                time.sleep(0.001)
            assert done.query() and not side.query(), f"the steps were not done within the {HELD:g} s that the GPU was held for"
            assert torch.cuda.memory_reserved() == reserved, "the steps allocate from the driver, which may wait for the GPU"
            a2a.check()
        finally:
            words[0] = 1
        torch.cuda.synchronize()
    return int(wrong)
