"""A training step of a layer whose experts are on all ranks, beside the same in one process in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import Case
from outcomes import must
from rank_cases import open_all_to_all
from reference import same_bits

import pplx_comm as pc

INNER = 24


@dataclass(frozen=True)
class Gradients:
    """Gradients of a rank's tokens and their weights, and of both matrices of its experts."""

    dx: torch.Tensor
    dw: torch.Tensor
    up: list[torch.Tensor]
    down: list[torch.Tensor]


def _layer(case: Case) -> tuple[list[torch.Tensor], ...]:
    """Indexed by rank: tokens, ids, weights, gradient of the output, of replicas the same. Indexed by expert: both matrices. The
    same everywhere."""
    g = torch.Generator().manual_seed(case.seed)
    counts = [case.max_tokens, 0, 2 * case.max_tokens // 3, *range(3, 3 + case.world_size)][: case.world_size // case.replicas]
    x = [torch.randn(n, case.hidden, generator=g) for n in counts]
    ids = [torch.randint(-1, case.num_experts, (n, case.top_k), generator=g) for n in counts]  # repeats and -1 among them
    weights = [torch.rand(n, case.top_k, generator=g) for n in counts]
    dy = [torch.randn(n, case.hidden, generator=g) for n in counts]
    up = [torch.randn(case.hidden, INNER, generator=g) / case.hidden**0.5 for _ in range(case.num_experts)]
    down = [torch.randn(INNER, case.hidden, generator=g) / INNER**0.5 for _ in range(case.num_experts)]
    x, ids, weights, dy = ([t for t in part for _ in range(case.replicas)] for part in (x, ids, weights, dy))
    return x, ids, weights, dy, up, down


def _expert(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ up) @ down


def _slope(case: Case, dx: torch.Tensor, dw: torch.Tensor, rank: int) -> torch.Tensor:
    """Inner product of a rank's first derivatives, in directions that are not those of the output: second derivatives are taken of
    it."""
    g = torch.Generator().manual_seed(case.seed + 1 + rank // case.replicas)
    along = [torch.randn(t.shape, generator=g).to(t.dtype) for t in (dx, dw)]
    return (dx * along[0]).sum() + (dw * along[1]).sum()


def _by_autograd(case: Case, twice: bool = False) -> tuple[list[torch.Tensor], ...]:
    x, ids, weights, dy, up, down = ([t.double() if t.is_floating_point() else t for t in part] for part in _layer(case))
    x, ids, weights, dy = (part[:: case.replicas] for part in (x, ids, weights, dy))  # values that replicas hold count once
    for part in (x, weights, up, down):
        for t in part:
            t.requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for mine, to, w, d in zip(x, ids, weights, dy, strict=True):
        for e in range(case.num_experts):
            loss = loss + (((to == e) * w).sum(1) * (_expert(mine, up[e], down[e]) * d).sum(1)).sum()
    leaves, n, e = [*x, *weights, *up, *down], len(x), case.num_experts
    if twice:
        first = torch.autograd.grad(loss, leaves[: 2 * n], create_graph=True)
        loss = torch.stack([_slope(case, first[i], first[n + i], i * case.replicas) for i in range(n)]).sum()
    gradients = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    filled = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, leaves, strict=True)]
    return filled[:n], filled[n : 2 * n], filled[2 * n : 2 * n + e], filled[2 * n + e :]


def _rows(case: Case, d: pc.Dispatched) -> torch.Tensor:
    """The received tokens in float32, shaped like d.x; what is no token is 0."""
    rows = d.x.float()
    if d.scale is not None:
        numbers = d.scale.view(torch.float8_e8m0fnu).float() if case.wire == "mxfp8" else d.scale
        rows = rows * numbers.repeat_interleave(pc.Wire.of(case.wire).scale_block, -1)[..., : case.hidden]
    return rows.nan_to_num()


def _choices(case: Case, d: pc.Dispatched) -> list[tuple[int, Any, Any]]:
    """Yields for each local expert its number, where its rows are in d.x, and where their numbers are in tail and weights."""
    if case.layout == "compact":
        found = []
        for e in range(len(d.counts)):
            row, k = (d.topk_ids[: int(d.num_rows)] == e).nonzero(as_tuple=True)
            found.append((e, row, (row, k)))
        return found
    counts = d.counts.tolist()
    if case.layout == "padded":
        return [(e, (e, slice(0, n)), (e, slice(0, n))) for e, n in enumerate(counts)]
    starts = d.offsets.tolist()
    return [(e, slice(starts[e], starts[e] + n), slice(starts[e], starts[e] + n)) for e, n in enumerate(counts)]


def _by_recipe(me: Any, case: Case) -> Gradients:
    """One step, forward and backward, call by call."""
    all_x, all_ids, all_weights, all_dy, up, down = _layer(case)
    mine, compact = case.shape.experts_of(me.rank), case.layout == "compact"
    with open_all_to_all(me, case) as a2a:
        w = all_weights[me.rank].clone()
        d = a2a.dispatch(all_x[me.rank], all_ids[me.rank], w)
        w.fill_(torch.nan)  # a plan is the caller's to keep, whatever becomes of the tensors that it was made from
        # Each expert's rows, with a graph.
        x, ups, downs, outs = [], [], [], []
        received, choices = _rows(case, d), _choices(case, d)
        answer = torch.zeros(d.x.shape)
        weights = d.topk_weights if compact else d.weights
        for e, rows, numbers in choices:
            x.append(received[rows].requires_grad_())
            ups.append(up[mine[e]].clone().requires_grad_())
            downs.append(down[mine[e]].clone().requires_grad_())
            outs.append(_expert(x[e], ups[e], downs[e]))
            if compact:
                answer.index_add_(0, rows, outs[e].detach() * weights[numbers][:, None])
            else:
                answer[rows] = outs[e].detach()
        y = a2a.combine(answer, d)

        g = a2a.dispatch(all_dy[me.rank], plan=d.plan)
        came = _rows(case, g)
        weights = g.topk_weights if compact else g.weights
        tail, back = torch.zeros(weights.shape), torch.zeros(g.x.shape)
        d_up, d_down = [], []
        for e, rows, numbers in choices:
            tail[numbers] = (came[rows] * outs[e].detach()).sum(-1)
            dx, du, dd = torch.autograd.grad(outs[e], (x[e], ups[e], downs[e]), came[rows] * weights[numbers][:, None])
            d_up.append(du)
            d_down.append(dd)
            if compact:
                back.index_add_(0, rows, dx)
            else:
                back[rows] = dx
        dx, dw = a2a.combine(back, g, weighted=False, tail=tail)

    assert y.shape == all_x[me.rank].shape
    return Gradients(dx, dw, d_up, d_down)


def _through_the_library(me: Any, case: Case, through: str) -> Gradients:
    """The same step with autograd through the library. Gradients of what needs none are zeros."""
    all_x, all_ids, all_weights, all_dy, up, down = _layer(case)
    mine, compact = case.shape.experts_of(me.rank), case.layout == "compact"
    with open_all_to_all(me, case) as a2a:
        x, w = all_x[me.rank].clone(), all_weights[me.rank].clone()
        if through != "experts":
            x.requires_grad_(), w.requires_grad_()
        d = a2a.dispatch(x, all_ids[me.rank], w)
        ups, downs = ([part[e].clone().requires_grad_() for e in mine] for part in (up, down))
        answer = torch.zeros(d.x.shape, requires_grad=True)  # a rank without experts has a backward pass, too
        weights = d.topk_weights if compact else d.weights
        if through == "all twice":
            answer = answer + 0 * d.x * weights.sum()  # and a second one
        for e, rows, numbers in _choices(case, d):
            out = _expert(d.x[rows], ups[e], downs[e])
            if compact:
                answer = answer.index_add(0, rows, out * weights[numbers][:, None])
            else:
                answer = answer.index_put((torch.arange(answer.shape[0])[rows],) if case.layout == "ragged" else (
                    torch.full((len(out),), e), torch.arange(len(out))), out)  # fmt: skip
        y = a2a.combine(answer, d)
        if through == "all twice":
            _slope(case, *torch.autograd.grad(y, (x, w), all_dy[me.rank], create_graph=True), me.rank).backward()
        else:
            y.backward(all_dy[me.rank])
        assert a2a.stats()["open_steps"] == 0
        assert (x.grad is None and w.grad is None) == (through == "experts")
        of = [[t.grad if t.grad is not None else torch.zeros_like(t) for t in part] for part in ([x, w], ups, downs)]
        return Gradients(*of[0], *of[1:])


def gradients(me: Any, case: Case) -> dict[str, float]:
    """How far the library's gradients of a step are from autograd's in one process, relative to their length."""
    return _errors(me, case, _by_recipe(me, case))


def gradients_of_autograd(me: Any, case: Case, through: str) -> dict[str, float]:
    """The same with autograd through the library. through: "all"; "all twice", second derivatives; or "experts": tokens and weights need
    no gradient."""
    errors = _errors(me, case, _through_the_library(me, case, through), through == "all twice")
    return {name: error for name, error in errors.items() if through != "experts" or name not in ("dx", "dw")}


def gradients_in_pieces(me: Any, case: Case, through: str) -> dict[str, float]:
    """The same of a case in pieces, whose gradients have the bits of those of whole blocks. through: "recipe" or "autograd"."""

    def step(case: Case) -> Gradients:
        return _by_recipe(me, case) if through == "recipe" else _through_the_library(me, case, "all")

    found, whole = step(case), step(replace(case, slot_bytes=1 << 40))
    for name, mine in vars(found).items():
        theirs = getattr(whole, name)
        pairs = zip(mine, theirs, strict=True) if isinstance(mine, list) else [(mine, theirs)]
        must(all(same_bits(a, b) for a, b in pairs), f"{case}: {name} in pieces and of whole blocks")
    return _errors(me, case, found)


def _errors(me: Any, case: Case, of: Gradients, twice: bool = False) -> dict[str, float]:
    """How far this rank's gradients are from those of one process, relative to their length."""
    mine = case.shape.experts_of(me.rank)
    wanted_dx, wanted_dw, wanted_up, wanted_down = _by_autograd(case, twice)

    def error(seen: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
        a, b = (torch.cat([t.double().reshape(-1) for t in part]) if part else torch.zeros(0) for part in (seen, wanted))
        return float((a - b).norm() / max(float(b.norm()), 1e-30)) if len(b) and b.any() else float(a.norm()) if len(a) else 0.0

    return {
        "dx": error([of.dx], [wanted_dx[me.rank // case.replicas]]),
        "dw": error([of.dw], [wanted_dw[me.rank // case.replicas]]),
        "up": error(of.up, wanted_up[mine.start : mine.stop]),
        "down": error(of.down, wanted_down[mine.start : mine.stop]),
    }
