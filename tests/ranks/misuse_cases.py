"""Mistakes of ranks, and the errors that they get; see harness and rank_cases.py."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import torch
from cases import DTYPES, Case
from outcomes import mistake, must, raised
from rank_cases import Good, check_dispatched, environment, exchange, open_all_to_all
from reference import same_bits

import pplx_comm as pc
from pplx_comm.wiring import config, wire_up


def gradients_of_codes(me: Any, case: Case) -> str:
    with open_all_to_all(me, case) as a2a:
        x = torch.ones(2, case.hidden, dtype=DTYPES[case.dtype], requires_grad=True)
        return str(raised(lambda: a2a.dispatch(x, torch.zeros(2, case.top_k, dtype=torch.int64)))["message"])


def bad_dispatches(me: Any, case: Case, clumsy: int) -> None:
    """One rank makes every mistake that dispatch can see; the others know nothing of it."""
    with open_all_to_all(me, case) as a2a, open_all_to_all(me, case) as other:
        good = Good(me, case, a2a)
        good.step()
        hidden, k, experts, most = case.hidden, case.top_k, case.num_experts, case.max_tokens
        dtype = DTYPES[case.dtype]
        x, ids, w = torch.zeros(2, hidden, dtype=dtype), torch.zeros(2, k, dtype=torch.int64), torch.ones(2, k)
        fp8 = torch.zeros(2, hidden).to(torch.float8_e4m3fn)
        blocks = -(-hidden // reference.BLOCK.get(case.wire, 128))
        mx = case.wire == "mxfp8"
        scale = torch.full((2, blocks), 127, dtype=torch.uint8) if mx else torch.ones(2, blocks)
        far = ids.clone()
        far[1, k - 1] = experts
        below = ids.clone()
        below[0, 0] = -2
        huge = ids.clone()
        huge[1, 0] = 2**40
        mistakes: list[tuple[Any, str]] = [
            (lambda: a2a.dispatch(None, ids), "x must be a tensor"),
            (lambda: a2a.dispatch([[0.0] * hidden], ids), "x must be a tensor"),
            (lambda: a2a.dispatch(x.double(), ids), "float64"),
            (lambda: a2a.dispatch(x.to(torch.float32 if dtype != torch.float32 else torch.float16), ids), "x is torch.float"),
            (lambda: a2a.dispatch(x[:, :-1], ids), rf"shape \(2, {hidden - 1}\)"),
            (lambda: a2a.dispatch(x[0], ids), "shape"),
            (lambda: a2a.dispatch(x[None], ids), "shape"),
            (lambda: a2a.dispatch(x.t().contiguous().t(), ids), "contiguous"),
            (lambda: a2a.dispatch(x.to("meta"), ids), "meta"),
            (lambda: a2a.dispatch(x, ids.to("meta")), "meta"),
            (lambda: a2a.dispatch(x, ids, w.to("meta")), "meta"),
            (
                lambda: a2a.dispatch(torch.zeros(most + 1, hidden, dtype=dtype), torch.zeros(most + 1, k, dtype=torch.int64)),
                f"{most + 1} tokens.*max_tokens_per_rank={most}",
            ),
            (lambda: a2a.dispatch(x), "topk_ids"),
            (lambda: a2a.dispatch(x, ids.float()), "int32 or int64"),
            (lambda: a2a.dispatch(x, ids.to(torch.int16)), "int32 or int64"),
            (lambda: a2a.dispatch(x.to_sparse(), ids), "x is torch.sparse_coo.*dense"),
            (lambda: a2a.dispatch(x, ids.to_sparse()), "topk_ids is torch.sparse_coo.*dense"),
            (lambda: a2a.dispatch(x, ids, w.to_sparse_csr()), "topk_weights is torch.sparse_csr.*dense"),
            (lambda: a2a.dispatch(x, ids[:1]), "topk_ids"),
            (lambda: a2a.dispatch(x, ids[0]), "topk_ids"),
            (lambda: a2a.dispatch(x, torch.zeros(2, k + 1, dtype=torch.int32)), "topk_ids"),
            (lambda: a2a.dispatch(x, ids.tolist()), "topk_ids"),
            # Names the id, and the allowed range.
            (lambda: a2a.dispatch(x, far), rf"\[1, {k - 1}\] is {experts}.*{experts - 1}"),
            (lambda: a2a.dispatch(x, far.int()), rf"\[1, {k - 1}\] is {experts}"),
            (lambda: a2a.dispatch(x, below), r"\[0, 0\] is -2"),
            (lambda: a2a.dispatch(x, huge), r"\[1, 0\] is 1099511627776"),
            (lambda: a2a.dispatch(x, ids, w.double()), "topk_weights.*float32"),
            (lambda: a2a.dispatch(x, ids, w[:1]), "topk_weights"),
            (lambda: a2a.dispatch(x, ids, w.tolist()), "topk_weights"),
            (lambda: a2a.dispatch(fp8, ids), "float8"),
            (lambda: a2a.dispatch(x, ids, plan=7), "plan="),
            (lambda: a2a.dispatch(x, None, plan=ids), "plan="),
        ]
        if case.wire != "native":
            good_dtype, other_dtype = ("uint8", scale.float()) if mx else ("float32", scale.to(torch.uint8))
            wide = torch.ones(2, scale.shape[1] + 1).to(scale.dtype)
            mistakes += [
                (lambda: a2a.dispatch(x, ids, x_scale=scale), "x is"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=other_dtype), rf"x_scale is.*{good_dtype} \[2, {blocks}\].*{case.wire}"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=scale.double()), f"x_scale.*{good_dtype}"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=scale[:1]), rf"x_scale.*\(1, {blocks}\).*\[2, {blocks}\]"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=wide), rf"x_scale.*\(2, {blocks + 1}\).*\[2, {blocks}\]"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=wide.t()), "x_scale.*shape"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=scale[0]), "x_scale.*shape"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=scale.to("meta")), "meta"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=1.0), "x_scale"),
                (lambda: a2a.dispatch(fp8, ids, x_scale=scale.to_sparse()), "x_scale is torch.sparse_coo.*dense"),
            ]
            if not mx:
                mistakes.append((lambda: a2a.dispatch(fp8, ids, x_scale=scale.to(torch.float16)), "x_scale.*float32"))
            if case.wire == "fp8_ue8m0":
                for value in (3.0, -1.0, math.inf, 2.0**-128, 1 + 2.0**-23, 1 - 2.0**-24):
                    odd = scale.clone()
                    odd[1, blocks - 1] = value
                    mistakes.append(
                        (lambda odd=odd: a2a.dispatch(fp8, ids, x_scale=odd), rf"x_scale\[1, {blocks - 1}\].*powers of two")
                    )
        else:
            mistakes.append((lambda: a2a.dispatch(fp8, ids, x_scale=scale), "x_scale= needs wire="))
        if me.rank == clumsy:
            for call, pattern in mistakes:
                mistake(call, pattern)
        good.step()

        d = good.dispatch()
        plan = d.plan
        if me.rank == clumsy:
            # The step is open, and in_flight allows no second.
            mine = good.mine
            mistake(lambda: a2a.dispatch(mine.x, mine.ids, mine.weights, x_scale=mine.x_scale), "in_flight=1.*combine it")
            mistake(lambda: other.dispatch(torch.zeros(plan.tokens, hidden, dtype=dtype), plan=plan), "another AllToAll")
            mistake(lambda: a2a.dispatch(torch.zeros(plan.tokens + 1, hidden, dtype=dtype), plan=plan), "tokens")
            mistake(
                lambda: a2a.dispatch(
                    torch.zeros(plan.tokens, hidden, dtype=dtype), torch.zeros(plan.tokens, k, dtype=torch.int64), plan=plan
                ),
                "plan=",
            )
        good.combine(d)
        good.step()
        Good(me, case, other).step()


def bad_combines(me: Any, case: Case, clumsy: int) -> None:
    """The same for combine and what belongs to it: handles used twice, too early, or elsewhere."""
    with open_all_to_all(me, case) as a2a, open_all_to_all(me, case) as other:
        good = Good(me, case, a2a)
        dtype = DTYPES[case.dtype]
        tokens = good.mine
        sent = a2a.dispatch_send(tokens.x, tokens.ids, tokens.weights, x_scale=tokens.x_scale)
        if me.rank == clumsy:
            mistake(lambda: a2a.combine(torch.zeros(1, case.hidden, dtype=dtype), sent), "wait")
            mistake(lambda: other.dispatch_recv(sent), "another AllToAll")
            mistake(lambda: a2a.dispatch_recv(tokens.x), "dispatch")
            mistake(lambda: a2a.combine_recv(sent), "combine_send")
        d = a2a.dispatch_recv(sent)
        good.last_step = d.step
        must(a2a.dispatch_recv(sent) is d and d.wait() is d, "received again is the same")
        check_dispatched(case, good.runner.steps[0], me.rank, d)
        n = d.plan.tokens
        rows = d.x.shape
        out = torch.zeros(rows, dtype=dtype)
        needed = int(d.num_rows) if case.layout == "compact" else int(d.offsets[-1]) if case.layout == "ragged" else 0
        tail_shape = (rows[0], case.top_k) if case.layout == "compact" else rows[:-1]
        mistakes: list[tuple[Any, str]] = [
            (lambda: a2a.combine(None, d), "expert_out"),
            (lambda: a2a.combine(out, None), "dispatch"),
            (lambda: a2a.combine(out, d.plan), "dispatch"),
            (lambda: a2a.combine(out.double(), d), "float64"),
            (lambda: a2a.combine(out.to("meta"), d), "meta"),
            (lambda: a2a.combine(out.to_sparse(), d), "expert_out is torch.sparse_coo.*dense"),
            (lambda: a2a.combine(out, d, tail=torch.zeros(tail_shape).to_sparse()), "tail is torch.sparse_coo.*dense"),
            (lambda: a2a.combine(out[..., :-1], d), "shape"),
            (lambda: a2a.combine(out[None], d), "shape"),
            (lambda: a2a.combine(torch.zeros(*rows[:-1], 2 * case.hidden, dtype=dtype)[..., ::2], d), "contiguous"),
            (lambda: a2a.combine(out, d, out=torch.zeros(n + 1, case.hidden, dtype=dtype)), "out"),
            (lambda: a2a.combine(out, d, out=torch.zeros(n, case.hidden, dtype=torch.float64)), "out"),
            (lambda: a2a.combine(out, d, out=torch.zeros(n, case.hidden, dtype=dtype, device="meta")), "meta"),
            (lambda: a2a.combine(out, d, out=[1]), "out"),
            (lambda: a2a.combine(out, d, accumulate=True), "out="),
            (lambda: a2a.combine(out, d, weights=torch.ones(n, case.top_k), weighted=False), "weights"),
            (lambda: a2a.combine(out, d, weights=torch.ones(n + 1, case.top_k)), "weights"),
            (lambda: a2a.combine(out, d, weights=torch.ones(n, case.top_k, dtype=torch.float64)), "weights"),
            (lambda: a2a.combine(out, d, tail=1.0), "tail must be"),
            (lambda: a2a.combine(out, d, tail=torch.zeros(tail_shape, dtype=torch.float64)), "tail must be a float32.*float64"),
            (lambda: a2a.combine(out, d, tail=torch.zeros(tail_shape, device="meta")), "tail.*meta"),
            (lambda: a2a.combine(out, d, tail=torch.zeros(*tail_shape, 1)), "tail.*shape"),
            (lambda: a2a.combine(out, d, tail=torch.zeros(())), "tail.*shape"),
            (lambda: other.combine(out, d), "another AllToAll"),
        ]
        if n > 1:
            mistakes.append((lambda: a2a.combine(out, d, out=torch.zeros(case.hidden, n, dtype=dtype).t()), "contiguous"))
            # Rows that are one row cannot hold what is written to each.
            mistakes.append((lambda: a2a.combine(out, d, out=torch.zeros(1, case.hidden, dtype=dtype).expand(n, -1)), "out"))
        if case.layout == "compact":
            mistakes.append((lambda: a2a.combine(out, d, tail=torch.zeros(rows[0], case.top_k + 1)), "tail.*shape"))
        if case.layout != "padded" and needed:
            mistakes.append((lambda: a2a.combine(out[: needed - 1], d), f"{needed - 1} rows.*{needed}"))
            mistakes.append(
                (lambda: a2a.combine(out, d, tail=torch.zeros(needed - 1, *tail_shape[1:])), f"tail.*{needed - 1} rows.*{needed}")
            )
        if case.layout == "padded" and len(case.shape.experts_of(me.rank)):
            mistakes.append((lambda: a2a.combine(out[:, :-1], d), "shape"))
            mistakes.append((lambda: a2a.combine(out, d, tail=torch.zeros(rows[0], rows[1] - 1)), "tail.*shape"))
        if me.rank == clumsy:
            for call, pattern in mistakes:
                mistake(call, pattern)
        c = good.runner.combine_send(0, d)
        if me.rank == clumsy:
            mistake(lambda: a2a.combine(out, d), "already|once")
            mistake(d.release, "already")
            mistake(lambda: other.combine_recv(c), "another AllToAll")
        good.runner.combine_recv(0, c)
        first = c.wait()
        must(a2a.combine_recv(c) is first and c.wait() is first, "waited again is the same")
        if me.rank == clumsy:
            mistake(lambda: a2a.combine(out, d), "already|once")
            mistake(d.release, "already")
        good.n = 1
        good.step()
        d = good.dispatch()
        d.release()
        if me.rank == clumsy:
            mistake(d.release, "already")
            mistake(lambda: a2a.combine(out, d), "already|once")
        good.n += 1
        good.step()


def after_close(me: Any, case: Case) -> None:
    """Every call on what is closed says so; what it returned stays good."""
    a2a = open_all_to_all(me, case)
    good = Good(me, case, a2a)
    d = good.dispatch()
    tokens = good.mine
    good.combine(d)
    before = d.x.clone()
    y = torch.zeros(d.x.shape, dtype=DTYPES[case.dtype])
    me.comm.barrier()
    a2a.close()
    a2a.close()
    for call in (
        lambda: a2a.dispatch(tokens.x, tokens.ids), lambda: a2a.combine(y, d), a2a.check, a2a.warmup, a2a.reset, d.release,
        lambda: a2a.dispatch_send(tokens.x, tokens.ids), lambda: a2a.combine_send(y, d),
    ):  # fmt: skip
        mistake(call, "closed|already")
    with open_all_to_all(me, case) as again:
        Good(me, case, again).step()
    must(same_bits(before, d.x), "what dispatch returned belongs to the caller")


def numbers_of_tokens(me: Any) -> None:
    """Shapes that are easy to get wrong: one token, one choice, views with odd strides, tensors that need no storage."""
    case = Case(1, me.world_size, top_k=1, hidden=8, max_tokens=4)
    with open_all_to_all(me, case) as a2a:
        x = torch.arange(8, dtype=torch.bfloat16)[None]
        ids = torch.tensor([[1, 2, 3, 4]])[:, ::4]
        weights = torch.tensor([[0.5, 1.0, 1.0]])[:, ::3]
        d = a2a.dispatch(x, ids, weights)
        y = a2a.combine(d.x.clone(), d)
        must(same_bits(y, x * 0.5), "one token through strided views", y)
        d = a2a.dispatch(x.expand(4, 8), ids.expand(4, 1), weights.expand(4, 1))
        y = a2a.combine(d.x.clone(), d)
        must(same_bits(y, (x * 0.5).expand(4, 8)), "rows that are one row", y)
        d = a2a.dispatch(torch.empty(0, 8, dtype=torch.bfloat16), torch.empty(0, 1, dtype=torch.int32))
        y = a2a.combine(d.x.clone(), d)
        must(tuple(y.shape) == (0, 8), "no tokens", y.shape)
        t = torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
        for recorded in (True, False):
            with torch.set_grad_enabled(recorded):
                d = a2a.dispatch(t, ids.expand(4, 1))
                y = a2a.combine(d.x.clone(), d)
            must(y.requires_grad == recorded, "autograd records where it is on", recorded)


def construct(
    me: Any, arguments: dict[str, Any], per_rank: dict[int, dict[str, Any]], env: dict[int, dict[str, str]]
) -> dict[str, Any]:
    """Makes an AllToAll, on some ranks otherwise than on the rest; says what was raised, then makes a good one."""
    usual: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens_per_rank": 8, "device": "cpu"}
    with environment(**env.get(me.rank, {})):
        result = raised(lambda: pc.AllToAll(me.comm, **{**usual, **arguments, **per_rank.get(me.rank, {})}).close())
    case = Case(1, me.world_size)
    with open_all_to_all(me, case) as a2a:
        Good(me, case, a2a).step()
    return result


def sees_a_gpu(me: Any, who: list[int]) -> dict[str, Any]:
    """Ranks `who` have a GPU, as far as torch and the CUDA module say; device= is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: me.rank in who)
        patch.setattr(config, "device_index", lambda _: 0)
        patch.setattr(wire_up, "cuda_module", lambda: SimpleNamespace(pci_address=lambda _: "0000:53:00.0"))
        return construct(me, {"device": None}, {}, {})


def ninth(me: Any) -> dict[str, Any]:
    case = Case(1, me.world_size)
    all_eight = [open_all_to_all(me, case) for _ in range(8)]
    result = raised(lambda: open_all_to_all(me, case))
    for a2a in all_eight:
        Good(me, case, a2a).step()
    me.comm.barrier()
    all_eight.pop(3).close()
    me.comm.barrier()
    all_eight.append(open_all_to_all(me, case))
    Good(me, case, all_eight[-1]).step()
    for a2a in all_eight:
        a2a.close()
    return result


def other_version(me: Any, who: int) -> dict[str, Any]:
    """One rank runs another version."""
    before = wire_up.__version__
    if me.rank == who:
        wire_up.__version__ = "0.0.1+other"
    try:
        return raised(lambda: open_all_to_all(me, Case(1, me.world_size)))
    finally:
        wire_up.__version__ = before


def other_nodes(me: Any) -> dict[str, Any]:
    """Rank 1 of three has another table of nodes."""
    control = me.comm.control
    before, control.node_of = control.node_of, [0, 1, 1] if me.rank == 1 else control.node_of
    try:
        return raised(lambda: open_all_to_all(me, Case(1, 3, transport="auto:tcp")))
    finally:
        control.node_of = before


def other_first_step(me: Any, who: int) -> dict[str, Any]:
    return raised(lambda: open_all_to_all(me, Case(1, me.world_size, first_step=5 if me.rank == who else 1)))


def bad_replicas(me: Any) -> None:
    """Impossible replicas are refused on all ranks, and later calls work. Four ranks."""

    def refused(pattern: str, **changes: Any) -> None:
        r = raised(lambda: open_all_to_all(me, Case(1, 4), **changes))
        must(bool(r.get("is_error")) and re.search(pattern, r["message"]) is not None, f"for {pattern!r}:", r["type"], r["message"])

    refused("replicas=3 must divide the world size, 4", replicas=3)
    refused("replicas=8 must divide", replicas=8)
    refused("replicas=0 must be 1 to", replicas=0)
    refused("replicas must be an integer, not True", replicas=True)
    refused("ranks 0 and 1 hold the same tokens, and node_size=1 puts", replicas=2, node_size=1, transport="proxy", provider="tcp")
    refused("ranks . and . hold the same tokens, and node_size=3 puts", replicas=4, node_size=3, transport="auto", provider="tcp")
    refused("replicas is 1 on ranks 0, 1; 2 on ranks 2, 3|replicas is 1 on .* 2 on", replicas=1 + me.rank // 2)
    exchange(me, Case(2, 4, replicas=2, transport="mixed:tcp", crowd="uneven"))
    with open_all_to_all(me, Case(3, 4, replicas=2)) as a2a:
        a2a.warmup()  # it draws tokens itself, the same on replicas
