"""How a router chooses, beside plain Python; its losses; and the bias that balances the load."""

from __future__ import annotations

import math

import pytest
import torch
from harness import seed

import pplx_comm as pc
from pplx_comm.moe import MoE, RouterOptions
from pplx_comm.moe import functional as F
from pplx_comm.moe.experts import SharedExpert
from pplx_comm.moe.router import Router


def scores(tokens: int, experts: int, more: int = 0) -> torch.Tensor:
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed() + more))


def plain(row: list[float], bias: list[float] | None, top_k: int, groups: int, top_groups: int) -> list[int]:
    ranked = [s + (bias[e] if bias else 0) for e, s in enumerate(row)]
    size = len(row) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    worth = [sum(sorted((ranked[e] for e in group), reverse=True)[: 2 if bias else 1]) for group in members]
    best = sorted(range(groups), key=lambda g: -worth[g])[:top_groups]
    allowed = [e for g in best for e in members[g]]
    return sorted(allowed, key=lambda e: -ranked[e])[:top_k]


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_choices(groups: int, top_groups: int, biased: bool) -> None:
    s = scores(50, 32)
    bias = scores(1, 32, 1)[0] - 0.5 if biased else None
    ids, weights = F.choose(s, 5, bias=bias, groups=groups, top_groups=top_groups, scale=2.5)
    for t in range(len(s)):
        wanted = plain(s[t].tolist(), None if bias is None else bias.tolist(), 5, groups, top_groups)
        assert ids[t].tolist() == wanted
        total = sum(s[t, e].item() for e in wanted)
        assert weights[t].tolist() == pytest.approx([2.5 * s[t, e].item() / total for e in wanted], rel=1e-5)


def test_negative_scores_with_a_bias_stay_out_of_other_groups() -> None:
    """Experts outside of a token's groups are not chosen, however low the bias makes the others."""
    s = torch.full((1, 8), 0.5)
    bias = torch.tensor([-3.0, -3, -3, -3, -9, -9, -9, -9])
    ids, _ = F.choose(s, 4, bias=bias, groups=2, top_groups=1)
    assert sorted(ids[0].tolist()) == [0, 1, 2, 3]


def test_weights_as_they_are() -> None:
    s = scores(4, 8).requires_grad_()
    ids, weights = F.choose(s, 3, normalise=False)
    assert torch.equal(weights, s.gather(1, ids))
    weights.sum().backward()
    assert torch.equal(s.grad, torch.zeros_like(s).scatter(1, ids, 1.0))


def test_losses() -> None:
    even = torch.full((8, 4), 0.25)
    assert F.load_balance_loss(even, torch.arange(8)[:, None] % 4).item() == pytest.approx(1)
    one = torch.tensor([[1.0, 0, 0, 0]]).expand(8, 4)
    assert F.load_balance_loss(one, torch.zeros(8, 1, dtype=torch.int64)).item() == pytest.approx(4)
    assert F.z_loss(torch.zeros(3, 4)).item() == pytest.approx(math.log(4) ** 2)
    nobody = torch.zeros(0, 4)
    assert F.load_balance_loss(nobody, torch.zeros(0, 1, dtype=torch.int64)).item() == F.z_loss(nobody).item() == 0


def test_the_bias_evens_out_the_load() -> None:
    """Tokens that all like the same experts: after some updates nearly all are used alike."""
    g = torch.Generator().manual_seed(seed())
    logits = torch.randn(512, 16, generator=g) + torch.linspace(3, -3, 16)
    s, bias = F.sigmoid_scores(logits), torch.zeros(16)
    first = F.expert_load(F.choose(s, 2)[0], 16)
    for _ in range(400):
        load = F.expert_load(F.choose(s, 2, bias=bias)[0], 16)
        F.update_bias(bias, load, 0.005)
    assert first.max() / first.mean() > 3 and load.max() / load.mean() < 1.6
    assert load.sum() == 512 * 2


def test_refused_arguments(comm: pc.Communicator) -> None:
    sizes = (64, 32, 8, 2, comm)
    for arguments, said in (
        ({"precision": "fp4"}, "fp4"),
        ({"compute": "int8"}, "int8"),
        ({"recompute": "all"}, "recompute='all'"),
        ({"router": RouterOptions(score="relu")}, "relu"),
        ({"router": RouterOptions(groups=3)}, "groups=3"),
        ({"router": RouterOptions(groups=8)}, "top_k=2"),
        ({"gemm": "abacus"}, "abacus"),
    ):
        with pytest.raises(pc.Error, match=said):
            MoE(*sizes, **arguments, all_to_all={"device": "cpu"})
    layer = MoE(*sizes, max_tokens_per_rank=8, inference=True, all_to_all={"device": "cpu"})
    with pytest.raises(pc.Error, match="no_grad"):
        layer(torch.zeros(1, 64))
    with pytest.raises(pc.Error, match="correction_bias"):
        layer.update_bias()
    with torch.no_grad():
        assert layer(torch.zeros(2, 3, 64)).shape == (2, 3, 64)


def test_inference(comm: pc.Communicator) -> None:
    """The same bits as in training. The weights' codes are kept until the weights are written to."""
    plain, constant = (
        MoE(128, 128, 4, 2, comm, "fp8", max_tokens_per_rank=16, inference=kept, all_to_all={"device": "cpu"})
        for kept in (False, True)
    )
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(seed())).bfloat16()
    with torch.no_grad():
        before = constant(x)
        assert torch.equal(before, plain(x)) and torch.equal(before, constant(x))
        for layer in (plain, constant):
            layer.experts.down *= 2
        after = constant(x)
        assert torch.equal(after, plain(x)) and not torch.equal(after, before)


@pytest.mark.slow
def test_compute_is_compiled_whole() -> None:
    """A layer's compute between its steps has no break: the router, and the shared expert with its activation."""
    options = RouterOptions("sigmoid", correction_bias=True, groups=4, top_groups=2, load_balance=0.1, z=0.1)
    router, shared = Router(32, 16, 3, options), SharedExpert(32, 16, True, torch.device("cpu"), torch.float32)
    shared.reset_parameters(seed())
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(seed())).requires_grad_()

    def compute(x: torch.Tensor) -> torch.Tensor:
        to = router(x)
        return shared(x).sum(-1) * to.weights.square().sum(-1) + to.loss

    gradients = []
    for call in (compute, torch.compile(compute, backend="aot_eager", fullgraph=True)):
        leaves = [x, *router.parameters(), *shared.parameters()]
        gradients.append(torch.autograd.grad(call(x).sum(), leaves))
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
