"""Codes, scales and activations beside the formats' definitions; grouped products beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from harness import seed

import pplx_comm as pc
from pplx_comm.moe import functional as F
from pplx_comm.moe.grouped import products
from pplx_comm.moe.grouped.torch_mm import TorchGroupedMm
from pplx_comm.moe.quantise import power_of_two_scale
from pplx_comm.moe.swiglu import swiglu_backward

OFFSETS = torch.tensor([0, 16, 16, 48, 64], dtype=torch.int32)
"""Four experts, one without rows; 64 of 80 rows are used."""


def normal(*shape: int, spread: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed() + sum(shape))
    return torch.randn(*shape, generator=g) * torch.randint(-spread, spread + 1, shape, generator=g).float().exp2()


@pytest.mark.parametrize("columns", [128, 320])
def test_quantising_is_the_wires(columns: int) -> None:
    x = normal(40, columns, spread=12)
    x[3], x[4, :128] = 0, 0
    x[5, 7], x[6, 9] = torch.nan, torch.inf
    x[7, :128] = torch.linspace(-448, 448, 128)
    codes, scale = F.quantise(x)
    wanted, wanted_scale = reference.quantise(x, "fp8_ue8m0")
    assert torch.equal(codes.view(torch.uint8) & 0x7F, wanted.view(torch.uint8) & 0x7F)  # the sign of a NaN may differ
    assert torch.equal(scale.nan_to_num(-1), wanted_scale.nan_to_num(-1))


def test_scales_around_every_power() -> None:
    """448 * 2^k itself, and its neighbours in float32."""
    at = 448 * torch.arange(-100, 100).double().exp2()
    for amax in (at, at.float().nextafter(torch.tensor(0.0)).double(), at.float().nextafter(torch.tensor(torch.inf)).double()):
        scale = power_of_two_scale(amax.float()).double()
        assert (scale * 448 >= amax).all() and (scale / 2 * 448 < amax).all()


def test_weights_survive_transposition() -> None:
    w = normal(2, 256, 384, spread=6)
    codes, scale = F.quantise_weights(w)
    across, scale_across = F.quantise_weights(w.mT)
    assert torch.equal(codes.mT.contiguous().view(torch.uint8), across.view(torch.uint8)) and torch.equal(scale.mT, scale_across)
    back = F.dequantise_weights(codes, scale)
    assert ((back - w).abs().amax((1, 2)) <= w.abs().amax((1, 2)) / 16).all()


@pytest.mark.parametrize("columns", [128, 416])
def test_mx_becomes_one_scale_per_128(columns: int) -> None:
    """The same numbers, but for codes that became subnormal, which are counted."""
    x = normal(64, columns, spread=3)
    x[1, 32:64], x[2] = 0, 0
    x[3, :128], x[3, :32] = x[3, :128] * 2.0**-30, 0  # a block of zeros has scale 1, and says nothing
    codes, scale = reference.quantise(x, "mxfp8")
    moved, common, became = F.rescale_mx(codes, scale)
    before, after = F.dequantise(codes, scale), F.dequantise(moved, common)
    different = before != after
    assert common.shape == (64, -(-columns // 128)) and (common.log2().frac() == 0).all()
    in_units = before.abs() / common.repeat_interleave(128, 1)[:, :columns]
    small = (in_units < 2.0**-6) & (codes.float().abs() >= 2.0**-6)
    assert became == small.sum() > 0 and not (different & ~small & (codes.float().abs() >= 2.0**-6)).any()
    assert (before - after)[3, :128].norm() < 1e-3 * before[3, :128].norm()
    assert ((before - after).norm() / before.norm()) < 1e-3


def test_mx_with_a_nan() -> None:
    x = normal(2, 128)
    x[0, 40] = torch.nan
    moved, scale, _ = F.rescale_mx(*reference.quantise(x, "mxfp8"))
    back = F.dequantise(moved, scale)
    assert back[0, 32:64].isnan().all() and not back[0, :32].isnan().any() and not back[1].isnan().any()


def test_swiglu_and_its_gradients() -> None:
    h = normal(20, 96).double().requires_grad_()
    weights, da = normal(20).double().requires_grad_(), normal(20, 48).double()
    gate, up = h[:, :48], h[:, 48:]
    a = gate / (1 + torch.exp(-gate)) * up
    assert torch.allclose(F.swiglu(h.detach().float()).double(), a, atol=1e-5)
    (weights[:, None] * a * da).sum().backward()
    dh, weighted, dw = swiglu_backward(h.detach().float(), da.float(), weights.detach().float())
    assert torch.allclose(dh.double(), h.grad, atol=1e-4) and torch.allclose(dw.double(), weights.grad, atol=1e-4)
    assert torch.allclose(weighted.double(), (weights[:, None] * a).detach(), atol=1e-5)


def test_swiglu_and_quantise_are_one() -> None:
    h = normal(20, 512).bfloat16()
    codes, scale = F.swiglu_quantise(h)
    wanted, wanted_scale = F.quantise(F.swiglu(h))
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8)) and torch.equal(scale, wanted_scale)


def by_expert(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y, dx, dw = torch.zeros_like(dy).double(), torch.zeros_like(x).double(), torch.zeros_like(w).double()
    for e in range(len(w)):
        rows = slice(int(OFFSETS[e]), int(OFFSETS[e + 1]))
        y[rows] = x[rows].double() @ w[e].double().T
        dx[rows] = dy[rows].double() @ w[e].double()
        dw[e] = dy[rows].double().T @ x[rows].double()
    return y[:64], dx[:64], dw


@pytest.mark.parametrize("backend", ["loop", "torch"])
def test_grouped_products(backend: str) -> None:
    dtype = torch.bfloat16
    if backend == "torch" and not TorchGroupedMm().takes(torch.device("cpu"), dtype):
        pytest.skip("this torch has no _grouped_mm")
    x, w, dy = normal(80, 64).to(dtype).requires_grad_(), normal(4, 48, 64).to(dtype).requires_grad_(), normal(80, 48).to(dtype)
    with torch.no_grad():
        x[64:] = torch.nan  # rows behind the last segment are not read
    y, dx, dw = by_expert(x.detach(), w.detach(), dy)
    seen = F.grouped_mm(x, w, OFFSETS, backend)
    seen.backward(dy)
    for a, b in ((seen[:64], y), (x.grad[:64], dx), (w.grad, dw)):
        assert (a.double() - b).norm() / b.norm() < 0.004
    assert not w.grad[1].any()
    total = torch.ones(4, 48, 64)
    products.wgrad(dy, x.detach(), F.Segments(OFFSETS), total, True, backend)
    assert (total.double() - 1 - dw).norm() / dw.norm() < 0.004


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_codes(transposed: bool) -> None:
    w = normal(4, 192, 320)
    x = normal(80, 192 if transposed else 320, spread=4)
    a, b = F.quantise(x), F.quantise_weights(w)
    y = F.scaled_grouped_mm(a, b, OFFSETS, transposed=transposed, dtype=torch.float32)
    xs, ws = F.dequantise(*a).double(), F.dequantise_weights(*b).double()
    for e in range(4):
        rows = slice(int(OFFSETS[e]), int(OFFSETS[e + 1]))
        wanted = xs[rows] @ (ws[e] if transposed else ws[e].T)
        assert torch.allclose(y[rows].double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max() if len(wanted) else 1))


def test_a_backend_that_is_not_there() -> None:
    with pytest.raises(Exception, match=r"'abacus'.*'loop'"):
        F.grouped_mm(normal(80, 8), normal(4, 8, 8), OFFSETS, "abacus")


def test_a_layer_of_pieces(comm: pc.Communicator) -> None:
    """dispatch, grouped_mm and combine with the library's own autograd are what send and receive are."""
    a2a = pc.AllToAll(
        comm,
        num_experts=4,
        top_k=2,
        hidden=64,
        max_tokens_per_rank=32,
        dtype=torch.float32,
        layout=pc.Ragged(align=16, zero_pad=True),
        device="cpu",
    )
    x, logits = normal(20, 64).requires_grad_(), normal(20, 4).requires_grad_()
    gate_up, down = normal(4, 96, 64).requires_grad_(), normal(4, 64, 48).requires_grad_()

    def pieces(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = a2a.dispatch(x, ids, weights)
        gate, up = F.grouped_mm(d.x, gate_up, d.offsets).chunk(2, -1)
        return a2a.combine(F.grouped_mm(torch.nn.functional.silu(gate) * up, down, d.offsets), d)

    def whole(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return F.receive(F.send(a2a, x, ids, weights), gate_up, down)

    with a2a:
        outputs = [call(*F.choose(F.softmax_scores(logits), 2)) for call in (pieces, whole)]
        one, other = (torch.autograd.grad(y.square().sum(), (x, logits, gate_up, down)) for y in outputs)
    assert torch.equal(*outputs)
    for a, b in zip(one, other, strict=True):
        assert (a - b).norm() < 1e-5 * a.norm()


def test_rows_that_lie_otherwise(comm: pc.Communicator) -> None:
    ids = torch.zeros(1, 1, dtype=torch.int64)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    shape: Any = {"num_experts": 4, "top_k": 1, "hidden": 64, "max_tokens_per_rank": 8, "device": "cpu"}
    for layout, match in ((pc.Padded(), "no_grad"), (pc.Compact(), "Compact")):
        with pc.AllToAll(comm, layout=layout, **shape) as a2a, pytest.raises(pc.Error, match=match):
            F.send(a2a, x, ids, torch.ones(1, 1))
    with pc.AllToAll(comm, layout=pc.Compact(), **shape) as a2a, pytest.raises(pc.Error, match="Compact"):
        F.segments(a2a.dispatch(x, ids))


def test_products_of_padded_rows(comm: pc.Communicator) -> None:
    """Behind a dispatch, with products that take rows so; and without gradients."""
    a2a = pc.AllToAll(comm, num_experts=4, top_k=2, hidden=64, max_tokens_per_rank=8, layout=pc.Padded(align=16), device="cpu")
    x, w, ids = normal(8, 64).bfloat16(), normal(4, 48, 64).bfloat16(), torch.tensor([[0, 2]] * 5 + [[2, 3]] * 3)
    with a2a:
        d = a2a.dispatch(x, ids)
        rows, where = d.x.flatten(0, 1), F.segments(d)
        assert (where.experts, where.room) == (4, d.x.shape[1]) and [e for e, _ in where.slices()] == [0, 2, 3]
        for backend in ("loop", "torch"):
            y = F.grouped_mm(rows, w, where, backend).unflatten(0, (4, -1))
            for e, n in enumerate(d.counts.tolist()):
                wanted = d.x[e, :n].double() @ w[e].double().mT
                assert n == 0 or (y[e, :n].double() - wanted).norm() < 0.004 * wanted.norm()
        with pytest.raises(pc.Error, match="no gradients"):
            F.grouped_mm(rows, w.requires_grad_(), where).sum().backward()
