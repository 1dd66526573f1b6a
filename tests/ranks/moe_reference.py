"""A Mixture-of-Experts layer in one process, in float64: a loop over tokens' choices and experts, and autograd. It uses nothing of pplx_comm."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class MoECase:
    seed: int
    world_size: int
    spread: str = "even"
    """Distribution of tokens over experts: "even", "zipf", "hot" (one expert has all), "few" (most experts have none)."""
    precision: str = "bf16"
    compute: str | None = None
    dtype: str = "float32"
    hidden: int = 64
    intermediate: int = 48
    num_experts: int = 6
    top_k: int = 2
    tokens: tuple[int, ...] = (9, 0, 24, 5)
    """Indexed by rank."""
    score: str = "softmax"
    groups: tuple[int, int] = (1, 1)
    """Groups of experts, and how many of them a token's choices may be in."""
    normalise: bool = True
    scale: float = 1.0
    shared: int = 32
    expert_tp: int = 1
    recompute: str = "nothing"
    in_flight: int = 1
    gemm: str = "auto"
    scaled_gemm: str = "auto"
    device: str = "cpu"
    all_to_all: dict[str, object] = field(default_factory=dict)
    """Further arguments of the AllToAll."""
    losses: tuple[float, float] = (0.1, 0.01)
    """Coefficients of the load-balance and the z loss."""


@dataclass
class Parameters:
    router: torch.Tensor
    bias: torch.Tensor
    gate: list[torch.Tensor] = field(default_factory=list)
    up: list[torch.Tensor] = field(default_factory=list)
    down: list[torch.Tensor] = field(default_factory=list)
    shared: list[torch.Tensor] = field(default_factory=list)
    """gate, up, down."""


@dataclass
class World:
    """Parameters that are the same on all ranks."""

    parameters: Parameters
    x: list[torch.Tensor]
    dy: list[torch.Tensor]


def make_world(case: MoECase) -> World:
    g = torch.Generator().manual_seed(case.seed)
    hidden, inner, experts = case.hidden, case.intermediate, case.num_experts
    rounded = getattr(torch, case.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) / shape[-1] ** 0.5).to(rounded).double()

    p = Parameters(normal(experts, hidden), _bias(case))
    for _ in range(experts):
        p.gate.append(normal(inner, hidden)), p.up.append(normal(inner, hidden)), p.down.append(normal(hidden, inner))
    if case.shared:
        p.shared = [normal(case.shared, hidden), normal(case.shared, hidden), normal(hidden, case.shared)]
    tokens = case.tokens[: case.world_size]
    x, dy = ([torch.randn(n, hidden, generator=g).to(rounded).double() for n in tokens] for _ in range(2))
    return World(p, x, dy)


def _bias(case: MoECase) -> torch.Tensor:
    """On the choice alone: what makes experts hot or idle."""
    e = torch.arange(case.num_experts)
    if case.spread == "zipf":
        return 1.0 / (e + 1.0)
    if case.spread == "hot":
        return torch.where(e == 1, 100.0, 0.0)
    if case.spread == "few":
        return torch.where(e >= case.num_experts - case.top_k, 100.0, 0.0)
    return torch.zeros(case.num_experts)


def _swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    g = x @ gate.T
    return (g / (1 + torch.exp(-g)) * (x @ up.T)) @ down.T


def run(case: MoECase, p: Parameters, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Output and losses of one rank's tokens, and each token's experts."""
    logits = x @ p.router.T
    scores = torch.softmax(logits, -1) if case.score == "softmax" else torch.sigmoid(logits)
    n, experts = scores.shape
    chosen = [
        choices_of_token(case, [float(s) + float(b) for s, b in zip(scores[t].detach(), p.bias, strict=True)]) for t in range(n)
    ]
    y = torch.zeros_like(x)
    for e in range(experts):
        rows = [t for t in range(n) if e in chosen[t]]
        if rows:
            weight = torch.stack([scores[t, e] / (sum(scores[t, f] for f in chosen[t]) if case.normalise else 1) for t in rows])
            routed = _swiglu(x[rows], p.gate[e], p.up[e], p.down[e])
            y = y.index_add(0, torch.tensor(rows), case.scale * weight[:, None] * routed)
    if p.shared:
        y = y + _swiglu(x, *p.shared)
    return y, _losses(case, logits, scores, chosen), chosen


def choices_of_token(case: MoECase, worth: list[float]) -> list[int]:
    """The best experts of the best groups; a group is worth its best two experts together, as in DeepSeek-V3."""
    groups, top_groups = case.groups
    size = len(worth) // groups
    members = [range(first, first + size) for first in range(0, len(worth), size)]
    if groups > 1:
        members.sort(key=lambda those: -sum(sorted((worth[e] for e in those), reverse=True)[:2]))
    allowed = [e for those in members[:top_groups] for e in those]
    return sorted(allowed, key=lambda e: -worth[e])[: case.top_k]


def _losses(case: MoECase, logits: torch.Tensor, scores: torch.Tensor, chosen: list[list[int]]) -> torch.Tensor:
    n, experts = scores.shape
    if n == 0:
        return logits.sum()
    balance = torch.zeros((), dtype=logits.dtype)
    for e in range(experts):
        share = sum(e in those for those in chosen) / (n * case.top_k)
        balance = balance + share * (scores[:, e] / scores.sum(1)).mean()
    return case.losses[0] * experts * balance + case.losses[1] * (torch.exp(logits).sum(1).log() ** 2).mean()


@dataclass
class Expected:
    """One rank's output and gradients; those of its experts come from the tokens of all ranks."""

    y: torch.Tensor
    loss: torch.Tensor
    x: torch.Tensor
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared_gate_up: torch.Tensor | None
    shared_down: torch.Tensor | None


def expected(case: MoECase, world: World, rank: int) -> Expected:
    p = world.parameters
    for leaf in (*p.gate, *p.up, *p.down):
        leaf.requires_grad_()
    total, own = torch.zeros((), dtype=torch.float64), None
    for r, (x, dy) in enumerate(zip(world.x, world.dy, strict=True)):
        x = x.clone().requires_grad_()
        mine = Parameters(
            p.router.clone().requires_grad_(), p.bias, p.gate, p.up, p.down, [w.clone().requires_grad_() for w in p.shared]
        )
        y, loss, _ = run(case, mine, x)
        total = total + (y * dy).sum() + loss
        if r == rank:
            own = (x, mine, y, loss)
    assert own is not None
    x, mine, y, loss = own
    tp = case.expert_tp
    share = -(-case.num_experts // (case.world_size // tp))
    local = range(min(rank // tp * share, case.num_experts), min((rank // tp + 1) * share, case.num_experts))
    leaves = [x, mine.router, *mine.shared, *(w for part in (p.gate, p.up, p.down) for w in (part[e] for e in local))]
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    grads = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
    dx, router, shared, experts = grads[0], grads[1], grads[2 : 2 + len(mine.shared)], grads[2 + len(mine.shared) :]
    n = len(local)
    gates, ups, downs = (
        [g.chunk(tp, dim)[rank % tp] for g in part]
        for part, dim in ((experts[:n], 0), (experts[n : 2 * n], 0), (experts[2 * n :], 1))
    )
    none = torch.zeros(0, dtype=torch.float64)
    return Expected(
        y.detach(), loss.detach(), dx, router,
        torch.stack([torch.cat(both) for both in zip(gates, ups, strict=True)]) if n else none,
        torch.stack(downs) if n else none,
        torch.cat(shared[:2]) if shared else None, shared[2] if shared else None,
    )  # fmt: skip


def error(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    """The length of the difference, relative to what was wanted."""
    seen, wanted = seen.detach().cpu().double().reshape(-1), wanted.reshape(-1)
    length = float(wanted.norm())
    if not bool(seen.isfinite().all()):
        return math.inf  # max() passes over NaN
    return float((seen - wanted).norm()) / length if length else float(seen.norm()) if seen.numel() else 0.0
