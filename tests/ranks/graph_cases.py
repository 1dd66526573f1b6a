"""An MoE layer as a model has it, on every rank: compiled, and with autograd."""

from __future__ import annotations

import contextlib
from typing import Any

import outcomes
import torch
from cases import Case
from rank_cases import open_all_to_all

import pplx_comm as pc
from pplx_comm.device.steps import Steps
from pplx_comm.torch_ops import operators as operators_module

INNER = 24
PATIENCE = 60.0  # seconds: others wait while a rank compiles for as many tokens as only it has


class Layer(torch.nn.Module):
    """A linear router, experts that are a batch of matrices, and a residual. Experts compute on all rows, used or not."""

    def __init__(self, a2a: pc.AllToAll, case: Case, rank: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(case.seed)
        dtype = a2a.dtype
        self.a2a, self.case = a2a, case
        self.router = torch.nn.Parameter(torch.randn(case.hidden, case.num_experts, generator=g))
        mine = case.shape.experts_of(rank)
        up = torch.randn(case.num_experts, case.hidden, INNER, generator=g) / case.hidden**0.5
        down = torch.randn(case.num_experts, INNER, case.hidden, generator=g) / INNER**0.5
        self.up = torch.nn.Parameter(up[mine.start : mine.stop].to(dtype))
        self.bias = torch.nn.Parameter(torch.zeros(len(mine), 1, case.hidden, dtype=dtype))
        self.down = torch.nn.Parameter(down[mine.start : mine.stop].to(dtype))

    def experts(self, d: pc.Dispatched, rows: torch.Tensor) -> torch.Tensor:
        if self.case.layout == "padded":
            return torch.tanh(rows @ self.up) @ self.down + self.bias  # its gradient sees every row, used or not
        if self.case.layout == "compact":
            total = torch.zeros_like(rows, dtype=torch.float32)
            assert d.topk_ids is not None and d.topk_weights is not None and d.num_rows is not None
            used = torch.arange(rows.shape[0], device=rows.device) < d.num_rows
            for e in range(len(d.counts)):
                weight = torch.where(used[:, None] & (d.topk_ids == e), d.topk_weights, 0).sum(1)
                total = total + weight[:, None] * (torch.tanh(rows @ self.up[e]) @ self.down[e]).float()
            return total.to(rows.dtype)
        assert d.offsets is not None
        row = torch.arange(rows.shape[0], device=rows.device)
        total = torch.zeros_like(rows)
        for e in range(len(d.counts)):
            here = (row >= d.offsets[e]) & (row < d.offsets[e] + d.counts[e])
            total = total + here[:, None] * (torch.tanh(rows @ self.up[e]) @ self.down[e])
        return total

    def rows(self, d: pc.Dispatched) -> torch.Tensor:
        """Rows that no token fills are undefined in a dispatch without gradients."""
        rows = d.x
        if d.scale is not None:
            numbers = d.scale.repeat_interleave(pc.Wire.of(self.case.wire).scale_block, -1)[..., : self.case.hidden]
            rows = (d.x.float() * numbers).to(self.a2a.dtype)
        return rows.nan_to_num(posinf=0, neginf=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = (x.float() @ self.router).softmax(-1).topk(self.case.top_k)
        d = self.a2a.dispatch(x, ids, weights)
        y = self.a2a.combine(self.experts(d, self.rows(d)), d)
        assert isinstance(y, torch.Tensor)
        return x + y


def _inputs(me: Any, case: Case, step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed((case.seed * 1000 + step) * 64 + me.rank)
    tokens = (case.max_tokens, 0, 1, case.max_tokens - 1)[(step + me.rank) % 4] if step % 2 else case.max_tokens
    return torch.randn(tokens, case.hidden, generator=g).to(getattr(torch, case.dtype))


def _close(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.isfinite().all() and b.isfinite().all()  # no comparison fails with a NaN
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def _device(me: Any, gpu: bool) -> str:
    if not gpu:
        return "cpu"
    from gpu_cases import gpu_of

    return str(gpu_of(me))


def _model(me: Any, a2a: pc.AllToAll, case: Case, layers: int) -> torch.nn.Module:
    """Layers that share one AllToAll."""
    return torch.nn.Sequential(*(Layer(a2a, case, me.rank) for _ in range(layers))).to(a2a.device)


def compiled(me: Any, case: Case, backend: str, steps: int, gpu: bool = False, layers: int = 2) -> dict[str, Any]:
    """Steps of a compiled model beside the same eagerly; the largest relative difference."""
    torch._dynamo.reset()
    with open_all_to_all(me, case, device=_device(me, gpu), timeout=PATIENCE) as a2a, torch.no_grad():
        model = _model(me, a2a, case, layers)
        fast = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
        worst = 0.0
        for step in range(steps):
            x = _inputs(me, case, step).to(a2a.device)
            worst = max(worst, _close(fast(x), model(x)))
        return {"worst": worst, "steps": a2a.stats()["steps"], "open": a2a.stats()["open_steps"]}


def _gradients(model: torch.nn.Module, run: Any, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    (y.float() ** 2).sum().backward()
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, *(p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters())]


def compiled_training(me: Any, case: Case, backend: str, steps: int, gpu: bool = False, layers: int = 2) -> dict[str, Any]:
    """The same with gradients."""
    torch._dynamo.reset()
    with open_all_to_all(me, case, device=_device(me, gpu), timeout=PATIENCE) as a2a:
        model = _model(me, a2a, case, layers)
        fast = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
        worst = 0.0
        for step in range(steps):
            x = _inputs(me, case, step).to(a2a.device)
            if not gpu:
                outputs = a2a._steps.device._outputs
                poison = [outputs.tensor(outputs.x.shape, a2a.dtype).fill_(torch.nan) for _ in range(8)]
                del poison  # the next dispatches get this memory
            ours, eager = _gradients(model, fast, x), _gradients(model, model, x)
            worst = max(worst, *(_close(a, b) for a, b in zip(ours, eager, strict=True)))
        return {"worst": worst, "steps": a2a.stats()["steps"], "open": a2a.stats()["open_steps"]}


def rules(me: Any, case: Case) -> None:
    """What must hold of single calls. Raises what does not."""
    g = torch.Generator().manual_seed(case.seed * 64 + me.rank)
    n = case.max_tokens
    x = torch.randn(n, case.hidden, generator=g).to(getattr(torch, case.dtype))
    ids = torch.rand(n, case.num_experts, generator=g).topk(case.top_k).indices
    weights = torch.rand(n, case.top_k, generator=g)
    late = torch.rand(n, case.top_k, generator=g)
    with open_all_to_all(me, case) as a2a:

        def pair(x: torch.Tensor, given: torch.Tensor, **options: Any) -> torch.Tensor:
            d = a2a.dispatch(x, ids, given)
            y = a2a.combine(d.x * 2, d, **options)
            assert isinstance(y, torch.Tensor)
            return y

        expected = pair(x, weights)
        leaf, leaf_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()

        # The same bits as without gradients, and a plan that takes tensors of both kinds.
        d = a2a.dispatch(leaf, ids, leaf_weights)
        plain = a2a.dispatch_recv(a2a.dispatch_send(x, ids, weights)) if case.in_flight > 1 else None
        assert torch.equal(a2a.combine(d.x * 2, d), expected)  # type: ignore[arg-type]
        if plain is not None:
            used = torch.cat(
                [
                    torch.arange(0),
                    *(torch.arange(b, b + n) for b, n in zip(plain.offsets.tolist(), plain.counts.tolist(), strict=False)),
                ]
            )
            assert torch.equal(d.counts, plain.counts) and torch.equal(d.offsets, plain.offsets)
            for name in ("x", "weights", "src_rank", "src_token"):
                assert torch.equal(getattr(d, name)[used], getattr(plain, name)[used]), name
            plain.release()
        for tensor in (x, leaf):
            again = a2a.dispatch(tensor, plan=d.plan)
            assert torch.equal(a2a.combine(again.x * 2, again), expected)  # type: ignore[arg-type]
        rows = sum(d.plan.rows(rank) for rank in range(case.world_size))
        assert n <= rows <= n * min(case.top_k, case.world_size), rows

        # Weights that are known late have no gradient, but the tokens have theirs; unweighted sums too; part of d.x is enough.
        y = pair(leaf, leaf_weights, weights=late)
        (dx,) = torch.autograd.grad(y.sum(), leaf)
        assert torch.allclose(dx, (2 * late.sum(1, keepdim=True)).expand_as(dx), rtol=1e-4)
        (dx,) = torch.autograd.grad(pair(leaf, leaf_weights, weighted=False).sum(), leaf)
        assert torch.equal(dx, torch.full_like(dx, 2 * case.top_k))
        d = a2a.dispatch(leaf, ids, leaf_weights)
        assert d.offsets is not None
        y = a2a.combine(d.x[: int(d.offsets[-1])] * 2, d)
        dx, dw = torch.autograd.grad(y.sum(), (leaf, leaf_weights))  # type: ignore[union-attr]
        assert torch.allclose(dx, (2 * weights.sum(1, keepdim=True)).expand_as(dx), rtol=1e-4)
        assert torch.allclose(dw, (2 * x.sum(1, keepdim=True)).expand_as(dw), rtol=1e-3, atol=1e-4)

        # A step that was released: what was dispatched has a gradient all the same.
        d = a2a.dispatch(leaf, ids, leaf_weights)
        d.release()
        (dx,) = torch.autograd.grad(d.x.sum(), leaf)
        ranks = (ids // -(-case.num_experts // case.world_size))[:, :, None] == torch.arange(case.world_size)
        assert torch.equal(dx, ranks.sum((1, 2))[:, None].to(dx.dtype).expand_as(dx))
        assert a2a.stats()["open_steps"] == 0

        # What cannot be says so, and takes no step.
        steps = a2a.stats()["steps"]
        d = a2a.dispatch(leaf, ids, leaf_weights)
        for wrong, says in (
            (lambda: a2a.dispatch(leaf, ids, async_op=True), "halves"),
            (lambda: a2a.dispatch_send(leaf, ids), "halves"),
            (lambda: a2a.combine_send(d.x, d), "halves"),
            (lambda: a2a.combine(d.x, d, weights=leaf_weights), "weights= has no gradient"),
            (lambda: a2a.combine(d.x, d, out=torch.empty_like(x)), "with out= there is no gradient"),
            (lambda: a2a.combine(d.x, d, accumulate=True), "accumulate=True needs out="),
            (lambda: a2a.dispatch(leaf[:, :-16], ids), "has shape"),
            (lambda: a2a.dispatch(leaf, ids, plan=d.plan), "plan= replaces topk_ids"),
            (lambda: a2a.dispatch(leaf[1:], plan=d.plan), "the plan is for"),
        ):
            raised = outcomes.raised(wrong)
            assert says in raised["message"], (says, raised)
        with torch.no_grad():
            out = torch.ones_like(x)
            assert a2a.combine(d.x * 2, d, out=out, accumulate=True) is out
            assert torch.allclose(out, expected + 1, atol=1e-5)
        assert "combined once" in outcomes.raised(lambda: a2a.combine(d.x, d))["message"]
        assert a2a.stats()["steps"] == steps + 1 and a2a.stats()["open_steps"] == 0


def old_tensors(me: Any, case: Case, gpu: bool = False) -> None:
    """Of what was dispatched before a reset() nothing goes on: not its combine, its plan, nor its backward pass. Compiled code does."""
    torch._dynamo.reset()
    with open_all_to_all(me, case, device=_device(me, gpu), timeout=PATIENCE) as a2a:
        x = torch.ones(case.max_tokens, case.hidden, dtype=a2a.dtype, device=a2a.device)
        ids = (torch.arange(case.max_tokens * case.top_k, device=a2a.device) % case.num_experts).view(-1, case.top_k)

        def pair(x: torch.Tensor) -> torch.Tensor:
            d = a2a.dispatch(x, ids)
            y = a2a.combine(d.x, d)
            assert isinstance(y, torch.Tensor)
            return y

        fast = torch.compile(pair, fullgraph=True, backend="aot_eager")
        leaf = x.clone().requires_grad_()
        y = fast(leaf)
        assert torch.equal(y, pair(x))
        eager, d, plain = pair(leaf), a2a.dispatch(leaf, ids), a2a.dispatch(x, ids)
        with contextlib.suppress(pc.PeerError):  # of a rank that is further on
            me.comm.barrier()
        me.comm.control.abort("the test ends this generation")
        a2a.reset()
        for wrong in (
            lambda: y.sum().backward(),
            lambda: eager.sum().backward(),
            lambda: a2a.combine(d.x, d),
            lambda: a2a.combine(d.x, plain),
            lambda: a2a.combine(plain.x, plain),
            lambda: d.release(),
            lambda: a2a.dispatch(x, plan=d.plan),
            lambda: a2a.dispatch(leaf, plan=plain.plan),
        ):
            raised = outcomes.raised(wrong)
            assert "before reset()" in raised["message"], raised
        assert a2a.stats()["open_steps"] == 0
        assert torch.equal(fast(leaf), pair(x))
        a2a.check()


def quantised(me: Any, case: Case) -> list[str]:
    """Codes have no gradient."""
    said = []
    with open_all_to_all(me, case) as a2a:
        x, ids = torch.randn(4, case.hidden).to(a2a.dtype), torch.zeros(4, case.top_k, dtype=torch.int64)
        try:
            a2a.dispatch(x.clone().requires_grad_(), ids)
        except pc.Error as problem:
            said.append(str(problem))
        d = a2a.dispatch(x, ids)
        try:
            a2a.combine(torch.zeros(d.x.shape, dtype=a2a.dtype, requires_grad=True), d)
        except pc.Error as problem:
            said.append(str(problem))
        d.release()
    return said


def in_order(me: Any, case: Case, backend: str) -> list[list[int]]:
    """Steps that nothing orders but the program, and one whose result nobody reads: what the core saw, compiled and eagerly."""
    torch._dynamo.reset()
    with open_all_to_all(me, case, timeout=PATIENCE) as a2a, torch.no_grad():
        seen: list[int] = []
        device = type(a2a._steps.device)
        run = device.dispatch

        def watched(phases: Any, owner: Any, halves: int, sent: Any, *rest: Any) -> Any:
            seen.append(int(sent[0][0, 0]))
            return run(phases, owner, halves, sent, *rest)

        def steps(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            first, second = a2a.dispatch(x * 0 + 1, ids), a2a.dispatch(x * 0 + 2, ids)
            a2a.combine(second.x, second)  # nobody reads it, but the others wait for it
            y = a2a.combine(first.x, first)
            a2a.dispatch(x * 0 + 3, ids).release()
            again = a2a.dispatch(x * 0 + 3, ids), a2a.dispatch(x * 0 + 3, ids)  # alike, and still two steps
            out = torch.empty_like(x)
            for d, accumulate in zip(again, (False, True), strict=True):
                assert a2a.combine(d.x, d, out=out, accumulate=accumulate) is out
            assert isinstance(y, torch.Tensor)
            return y + out

        x, ids = torch.ones(4, case.hidden), torch.zeros(4, case.top_k, dtype=torch.int64)
        orders = []
        device.dispatch = watched  # type: ignore[method-assign,assignment]
        try:
            for call in (steps, torch.compile(steps, fullgraph=True, backend=backend)):
                seen.clear()
                assert torch.equal(call(x, ids), x * case.top_k * (1 + 3 + 3))
                orders.append(list(seen))
        finally:
            device.dispatch = run  # type: ignore[method-assign]
        assert a2a.stats()["open_steps"] == 0
        return orders


def layers_without_tokens(me: Any, case: Case) -> dict[str, Any]:
    """Three layers on two AllToAlls, forward and backward, where no layer reads anything of the one before: whose operators ran, eagerly
    and compiled."""
    torch._dynamo.reset()
    with open_all_to_all(me, case, timeout=PATIENCE) as a2a, open_all_to_all(me, case, timeout=PATIENCE) as other:
        both = (a2a, other)
        model = torch.nn.Sequential(*(Layer(which, case, me.rank) for which in (a2a, other, a2a)))
        ran: list[int] = []
        real = operators_module._steps

        def watched(spec: str) -> Steps:
            steps = real(spec)
            ran.append([which._steps for which in both].index(steps))
            return steps

        orders = []
        operators_module._steps = watched
        try:
            for run in (model, torch.compile(model, fullgraph=True, dynamic=True)):
                ran.clear()
                run(torch.empty(0, case.hidden, dtype=a2a.dtype, requires_grad=True)).square().sum().backward()
                orders.append(list(ran))
        finally:
            operators_module._steps = real
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        each = [which.stats() for which in both]
        return {"orders": orders, "steps": [s["steps"] for s in each], "open": sum(s["open_steps"] for s in each)}


def apart(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether no two share memory, as torch sees it."""
    return len({t.untyped_storage()._cdata for t in tensors}) == len(tensors)


def operators(me: Any, case: Case) -> None:
    """torch's own checks of an operator, as far as calls may be repeated, and as two calls of the same need not bring the same tickets."""
    with open_all_to_all(me, case) as a2a, torch.no_grad():
        x, ids = torch.randn(4, case.hidden).to(a2a.dtype), torch.zeros(4, case.top_k, dtype=torch.int64)
        graph, ops = a2a._graph, torch.ops.pplx_comm
        arguments = (graph.spec, x, ids, None, None, None, False, True)  # a dispatch that closes its step
        assert apart(ops.dispatch(*arguments))
        for utility in ("test_schema", "test_faketensor", "test_autograd_registration"):
            torch.library.opcheck(ops.dispatch.default, arguments, test_utils=utility)
        torch.library.opcheck(ops.combine.default, _combine_arguments(a2a, x, ids), test_utils="test_schema")
        torch.library.opcheck(ops.combine.default, _combine_arguments(a2a, x, ids), test_utils="test_faketensor")


def _combine_arguments(a2a: pc.AllToAll, x: torch.Tensor, ids: torch.Tensor) -> tuple[Any, ...]:
    graph = a2a._graph
    rows, _, weights, ticket, plan = torch.ops.pplx_comm.dispatch(graph.spec, x, ids, None, None, None, False, False)
    return graph.spec, rows, weights, ticket, plan, x.shape[0], None, True, None, None
