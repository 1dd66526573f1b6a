"""Cases of test_nvshmem.py: kernels that post by NVSHMEM, beside mapped memory."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import gpu_cases
import rank_cases
import torch
from cases import DTYPES, Case
from gpu_cases import group_of
from reference import same_bits

import pplx_comm as pc

_TENSORS = ("x", "scale", "weights", "src_rank", "src_token", "topk_ids", "topk_weights")


def _filled(d: pc.Dispatched, name: str) -> torch.Tensor | None:
    """The rows that mean something, on the host."""
    value = getattr(d, name)
    if value is None:
        return None
    if d.num_rows is not None:
        return value[: int(d.num_rows)].cpu()
    counts = d.counts.tolist()
    if d.offsets is not None:
        parts = [value[:0], *(value[begin : begin + n] for begin, n in zip(d.offsets.tolist(), counts, strict=False))]
    else:
        parts = [value.flatten(0, 1)[:0], *(value[expert, :n] for expert, n in enumerate(counts))]
    return torch.cat([part.cpu() for part in parts])


def _tokens(case: Case, group: int, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(case.seed * 1_000_003 + step * 1009 + group)
    tokens = int(torch.randint(0, case.max_tokens + 1, (), generator=g)) if step else case.max_tokens
    x = torch.randn(tokens, case.hidden, generator=g).to(DTYPES[case.dtype])
    ids = torch.randint(-1, case.num_experts, (tokens, case.top_k), generator=g)
    return x.to(device), ids.to(device), torch.rand(tokens, case.top_k, generator=g).to(device)


def _same(name: str, a: torch.Tensor | None, b: torch.Tensor | None, case: Case, step: int) -> None:
    if (a is None) != (b is None) or (a is not None and b is not None and not same_bits(a, b)):
        raise AssertionError(f"step {step}: {name} differs, {case}")


def against_mapped(me: Any, case: Case, steps: int) -> None:
    """Steps over mapped memory, between nodes by the proxy, and by NVSHMEM have the same bits, whole and in halves, with weights= and
    tails."""
    device = gpu_cases.gpu_of(me)
    with (
        rank_cases.open_all_to_all(me, case.without_nvshmem, device=str(device), timeout=20.0) as mapped,
        rank_cases.open_all_to_all(me, case, device=str(device), timeout=20.0) as posted,
    ):
        for step in range(steps):
            x, ids, weights = _tokens(case, group_of(me, case), step, device)
            a = mapped.dispatch(x, ids, weights)
            b = posted.dispatch(x, ids, weights) if step % 2 else posted.dispatch_recv(posted.dispatch_send(x, ids, weights))
            gpu_cases.settle(device)
            posted.check()
            for name in ("counts", *_TENSORS):
                have = [d.counts.cpu() if name == "counts" else _filled(d, name) for d in (a, b)]
                _same(name, *have, case, step)
            out = torch.randn(a.x.shape, device=device, dtype=torch.float32).to(x.dtype)
            late = weights * 2 if step % 3 == 1 and case.layout != "compact" else None
            tail = None
            if step % 3 == 2:
                like = a.weights if a.weights is not None else a.topk_weights
                assert like is not None
                tail = torch.randn(like.shape, device=device)
            want, have_y = (a2a.combine(out, d, weights=late, tail=tail) for a2a, d in ((mapped, a), (posted, b)))
            gpu_cases.settle(device)
            posted.check()
            for number, pair in enumerate(zip(*(y if isinstance(y, tuple) else (y,) for y in (want, have_y)), strict=True)):
                _same(f"combine's result {number}", *(y.cpu() for y in pair), case, step)


def remote(me: Any, case: Case) -> list[int]:
    """A case, and the peers that blocks are put to."""
    gpu_cases.exchange(me, case)
    with rank_cases.open_all_to_all(me, case, device=str(gpu_cases.gpu_of(me)), timeout=20.0) as a2a:
        wiring = a2a._steps.session.wiring
        name = wiring.kernels.__name__.rpartition(".")[2]
        rank_cases.must(
            name == ("_nvshmem" if wiring.puts else "_cuda"), "a rank that puts nothing takes the kernels of mapped memory:", name
        )
        return list(wiring.peers.remote)


def _a_quarter(device: torch.device) -> dict[str, int]:
    """Makes kernels of two AllToAlls, and PyTorch's, find room beside each other, under MPS too."""
    return {"num_sms": max(1, torch.cuda.get_device_properties(device).multi_processor_count // 4)}


def two(me: Any, case: Case, steps: int) -> None:
    """Two AllToAlls on streams that nothing orders; one is closed and made again, in the memory that it had."""
    device = gpu_cases.gpu_of(me)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    few = _a_quarter(device)
    opened = [rank_cases.open_all_to_all(me, case, device=str(device), timeout=20.0, **few) for _ in range(2)]
    addresses = [a2a._steps.session.wiring.symmetric.segment.address for a2a in opened]
    assert addresses[0] != addresses[1]
    for step in range(steps):
        for number, a2a in enumerate(opened):
            with torch.cuda.stream(streams[number]):
                x, ids, weights = _tokens(case, group_of(me, case), step * 2 + number, device)
                d = a2a.dispatch(x, ids, weights)
                a2a.combine(torch.zeros(d.x.shape, dtype=x.dtype, device=device), d)
        if step == steps // 2:
            gpu_cases.settle(device)
            me.comm.barrier()  # all have heard what this one has sent
            opened[0].close()
            me.comm.barrier()
            opened[0] = rank_cases.open_all_to_all(me, case, device=str(device), timeout=20.0, **few)
            assert opened[0]._steps.session.wiring.symmetric.segment.address == addresses[0]
    gpu_cases.settle(device)
    for a2a in opened:
        a2a.check()
        a2a.close()


def remade(me: Any, case: Case, times: int, steps: int) -> None:
    """Two AllToAlls; one is closed and made again, so often, each time in the memory that it had, while kernels of the other are
    under way. Each step has rows of its own, so one of an AllToAll that was closed before would be seen."""
    device = gpu_cases.gpu_of(me)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    few = {**_a_quarter(device), "timeout": 5.0}
    opened = [rank_cases.open_all_to_all(me, case, device=str(device), **few) for _ in range(2)]
    address = opened[0]._steps.session.wiring.symmetric.segment.address
    sums: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(number: int, seed: int) -> None:
        """Experts give back what they get, in float32: small integers, whose sums are exact."""
        x, ids, _ = _tokens(case, group_of(me, case), seed, device)
        x = (x * 64).round()
        d = opened[number].dispatch(x, ids)
        y = opened[number].combine(d.x, d)
        assert isinstance(y, torch.Tensor)
        sums.append((y, x * (ids >= 0).sum(1, keepdim=True)))

    for time in range(times + 1):
        for n in range(steps):
            for number in range(2):
                with torch.cuda.stream(streams[number]):
                    step(number, 2 * (time * steps + n) + number)
        if time < times:
            # The peer's steps of this time are still in flight. Memory that close() frees may wait for them.
            settled = torch.cuda.Event()
            settled.record(streams[0])
            while not settled.query():
                opened[0].check()
            opened[0].close()
            opened[0] = rank_cases.open_all_to_all(me, case, device=str(device), **few)
            assert opened[0]._steps.session.wiring.symmetric.segment.address == address
    gpu_cases.settle(device)
    for stream in streams:
        stream.synchronize()
    for a2a in opened:
        a2a.check()
    wrong = [n for n, (y, wanted) in enumerate(sums) if not torch.equal(y, wanted)]
    rank_cases.must(not wrong, "sums of these steps, of", len(sums), ":", wrong)
    for a2a in opened:
        a2a.close()


def landed_at_close(me: Any, case: Case, how: str) -> bool:
    """True if another AllToAll may have this one's memory once this rank closes it: after a whole step, with a step that is "open"
    or whose combine was only "sent", or after one whose kernels "gave up" while the last rank stayed away and no call looked."""
    device = gpu_cases.gpu_of(me)
    a2a = rank_cases.open_all_to_all(me, case, device=str(device), timeout=0.5 if how == "gave up" else 20.0)
    segment, said = a2a._steps.session.wiring.symmetric.segment, list[bool]()
    give_back = segment.close

    def noted(landed: bool) -> None:
        said.append(landed)
        give_back(landed)

    segment.close = noted
    x, ids, _ = _tokens(case, group_of(me, case), 0, device)
    if how != "gave up" or me.rank != me.world_size - 1:
        d = a2a.dispatch_send(x, ids) if how == "open" else a2a.dispatch(x, ids)
        out = torch.zeros(d.x.shape, dtype=x.dtype, device=device)
        if how == "whole":
            a2a.combine(out, d)
        elif how == "sent":
            a2a.combine_send(out, d)
        gpu_cases.settle(device)
    with contextlib.suppress(pc.Error):  # a rank that gave up raises it
        me.comm.barrier()
    a2a.close()
    [landed] = said
    return landed


def begun_by_nvshmem4py(me: Any, case: Case, given: bool) -> bool:
    """An NVSHMEM that is there already, and memory of its own. Returns whether nvshmem4py is here."""
    try:
        import nvshmem.core
        from cuda.core import Device
    except ImportError:
        return False
    device = gpu_cases.gpu_of(me)
    own = Device(device.index)
    own.set_current()
    identity = nvshmem.core.get_unique_id(empty=me.rank != 0)
    told = me.comm.control.all_gather({"id": pickle.dumps(identity).hex()}, "nvshmem4py", 60.0)
    identity = pickle.loads(bytes.fromhex(told[0]["id"]))
    nvshmem.core.init(device=own, uid=identity, rank=me.rank, nranks=me.world_size, initializer_method="uid")
    memory = nvshmem.core.tensor((64 << 20,), dtype=torch.uint8) if given else None
    with rank_cases.open_all_to_all(me, case, device=str(device), timeout=20.0, symmetric_memory=memory) as a2a:
        assert memory is None or a2a._steps.session.wiring.symmetric.segment.address == memory.data_ptr()
        for step in range(20):
            x, ids, weights = _tokens(case, group_of(me, case), step, device)
            d = a2a.dispatch(x, ids, weights)
            a2a.combine(torch.zeros(d.x.shape, dtype=x.dtype, device=device), d)
        gpu_cases.settle(device)
        a2a.check()
    return True


def too_small(me: Any) -> str:
    """Returns the error of a heap without room."""
    case = Case(1, me.world_size, num_experts=16, top_k=2, hidden=7168, max_tokens=4096, transport="nvshmem")
    try:
        rank_cases.open_all_to_all(me, case, device=str(gpu_cases.gpu_of(me)), timeout=20.0).close()
    except pc.Error as error:
        return str(error)
    return "there was room"
