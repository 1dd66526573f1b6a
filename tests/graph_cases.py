"""An MoE layer as a model has it, on every rank: compiled, and with autograd."""

from __future__ import annotations

from typing import Any

import torch
from rank_cases import Case, open_all_to_all

import pplx_comm as pc

INNER = 24


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
        self.down = torch.nn.Parameter(down[mine.start : mine.stop].to(dtype))

    def experts(self, d: pc.Dispatched, rows: torch.Tensor) -> torch.Tensor:
        if self.case.layout == "padded":
            return torch.tanh(rows @ self.up) @ self.down
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
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def _model(me: Any, a2a: pc.AllToAll, case: Case) -> torch.nn.Module:
    """Two layers that share one AllToAll."""
    return torch.nn.Sequential(Layer(a2a, case, me.rank), Layer(a2a, case, me.rank))


def compiled(me: Any, case: Case, backend: str, steps: int) -> dict[str, Any]:
    """Steps of a compiled model beside the same eagerly; the largest relative difference."""
    torch._dynamo.reset()
    with open_all_to_all(me, case) as a2a, torch.no_grad():
        model = _model(me, a2a, case)
        fast = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
        worst = 0.0
        for step in range(steps):
            x = _inputs(me, case, step)
            worst = max(worst, _close(fast(x), model(x)))
        return {"worst": worst, "steps": a2a.stats()["steps"], "open": a2a.stats()["open_steps"]}


def _gradients(model: torch.nn.Module, run: Any, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    (y.float() ** 2).sum().backward()
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, *(p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters())]


def compiled_training(me: Any, case: Case, backend: str, steps: int) -> dict[str, Any]:
    """The same with gradients."""
    torch._dynamo.reset()
    with open_all_to_all(me, case) as a2a:
        model = _model(me, a2a, case)
        fast = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
        worst = 0.0
        for step in range(steps):
            x = _inputs(me, case, step)
            ours, eager = _gradients(model, fast, x), _gradients(model, model, x)
            worst = max(worst, *(_close(a, b) for a, b in zip(ours, eager, strict=True)))
        return {"worst": worst, "steps": a2a.stats()["steps"], "open": a2a.stats()["open_steps"]}
