"""Rounding, quantising and adding, through the public surface in this process: a world of one, against torch and numpy.

tests/cpp/test_number.cpp searches every value of each format; here torch's own conversions are the second opinion.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
import torch
from harness import seed
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import same_bits

import pplx_comm as pc

SIXTEEN = [torch.bfloat16, torch.float16]


def alone(comm: pc.Communicator, hidden: int, tokens: int, **options: Any) -> pc.AllToAll:
    """One expert, one choice, everything stays here."""
    return pc.AllToAll(
        comm,
        device="cpu",
        **{"num_experts": 1, "top_k": 1, "hidden": hidden, "max_tokens_per_rank": tokens, "layout": pc.Ragged(align=1), **options},
    )


def through_combine(comm: pc.Communicator, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """round(weight * row), as combine does it."""
    tokens, hidden = rows.shape
    with alone(comm, hidden, tokens, dtype=rows.dtype) as a2a:
        d = a2a.dispatch(torch.zeros_like(rows), torch.zeros(tokens, 1, dtype=torch.int32), weights)
        return a2a.combine(rows, d)


def through_fp8(comm: pc.Communicator, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, hidden = x.shape
    with alone(comm, hidden, tokens, dtype=x.dtype, wire="fp8") as a2a:
        d = a2a.dispatch(x, torch.zeros(tokens, 1, dtype=torch.int32))
        n = int(d.offsets[-1])
        assert n == tokens
        codes, scale = d.x[:n].clone(), d.scale[:n].clone()
        d.release()
        return codes, scale


def twice(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rank's partial sum is rounded, and added to +0 for the token's: only -0 notices."""
    return (0.0 + (0.0 + sums).to(dtype).float()).to(dtype)


def interesting_floats(random: np.random.Generator) -> torch.Tensor:
    """Random bits; values, halfway points and their neighbours in each format; specials."""
    bits = random.integers(0, 2**32, 400_000, dtype=np.uint32)
    every = np.arange(0, 2**16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    edges = (every[:, None] | low[None, :]).reshape(-1)
    fp16 = np.arange(0, 2**16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    around = (
        (fp16[:, None] + np.array([-4097, -4096, -4095, -1, 0, 1, 4095, 4096, 4097], dtype=np.int64)[None, :])
        .astype(np.uint32)
        .reshape(-1)
    )
    tiny = random.integers(0, 2**24, 100_000, dtype=np.uint32)  # subnormals of fp32 and below fp16's
    small = random.integers(0x33000000, 0x39000000, 200_000, dtype=np.uint32)  # where fp16 is subnormal
    values = np.concatenate([bits, edges, around, tiny, small])
    values = np.concatenate([values, np.zeros(-len(values) % 64, dtype=np.uint32)])
    return torch.from_numpy(values.view(np.float32)).view(-1, 64)


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_fp32_to_16_bits(comm: pc.Communicator, dtype: torch.dtype) -> None:
    """A weight is any fp32 number and the row is one, so that combine rounds just that weight."""
    values = interesting_floats(np.random.default_rng(seed())).reshape(-1)
    y = torch.cat(
        [through_combine(comm, torch.ones(len(part), 8, dtype=dtype), part[:, None].contiguous()) for part in values.split(2**18)]
    )
    wanted = twice(values, dtype)[:, None].expand(-1, 8)
    nan = values.isnan()
    assert same_bits(y[~nan], wanted[~nan])
    assert y[nan].isnan().all()


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_16_bits_to_fp32(comm: pc.Communicator, dtype: torch.dtype) -> None:
    """Every one of the 65,536 inputs, as it is and multiplied."""
    rows = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 64)
    nan = rows.isnan()
    for weight in (None, 1.0, -1.0, 1 / 3, 2.0**-20, 2.0**20, 1e-30):
        w = None if weight is None else torch.full((len(rows), 1), weight)
        y = through_combine(comm, rows.clone(), w)
        wanted = twice(rows.float() * (1.0 if weight is None else torch.tensor(weight)), dtype)
        bad = nan | wanted.isnan()
        assert same_bits(y[~bad], wanted[~bad]), weight
        assert y[bad].isnan().all()


def test_fp32_is_not_touched(comm: pc.Communicator) -> None:
    """No flush to zero, no rounding: what combine does to one fp32 row is one multiplication, and adding it to +0."""
    rows = interesting_floats(np.random.default_rng(seed() + 1))
    y = through_combine(comm, rows.clone(), torch.ones(len(rows), 1))
    nan = rows.isnan()
    assert same_bits(y[~nan], (rows + 0.0)[~nan])
    assert y[nan].isnan().all()


def test_a_caller_that_flushes_to_zero(comm: pc.Communicator) -> None:
    """Results do not depend on the floating-point mode of the calling thread, and leave it as it was."""
    rows = torch.tensor([[1e-40, -1e-41, 1e-38, 2e-38]]).repeat(8, 4)
    usual = through_combine(comm, rows.clone(), torch.full((8, 1), 0.5))
    assert usual.abs().min() > 0
    if not torch.set_flush_denormal(True):
        pytest.fail("this processor cannot flush denormals; the test means nothing here")
    try:
        seen = through_combine(comm, rows.clone(), torch.full((8, 1), 0.5))
        still = torch.tensor([1e-40]) * 0.5
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(usual, seen)
    assert still.item() == 0.0


def test_every_e4m3_rounding(comm: pc.Communicator) -> None:
    """448 in a block makes its scale 1, so that every other value is rounded as it is."""
    magnitudes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    values = torch.cat([magnitudes, between]).float()
    bits = values.view(torch.int32)
    near = torch.cat([(bits + d).clamp(min=0).view(torch.float32) for d in (-2, -1, 0, 1, 2)])
    generator = torch.Generator().manual_seed(seed())
    spread = torch.rand(200_000, generator=generator) * 448
    small = torch.rand(100_000, generator=generator) * 2.0**-5
    x = torch.cat([near[near <= 448], spread, small])
    x = torch.cat([x, -x])
    x = torch.cat([x, torch.zeros(-len(x) % 127)]).view(-1, 127)
    x = torch.cat([torch.full((len(x), 1), 448.0), x], dim=1)
    codes, scale = through_fp8(comm, x)
    assert (scale == 1.0).all()
    assert same_bits(codes, x.to(torch.float8_e4m3fn))
    # And by numpy, from the values themselves: nearest, ties to the even code.
    table = magnitudes.numpy()
    a = x.abs().double().numpy().reshape(-1)
    above = np.searchsorted(table, a).clip(max=len(table) - 1)
    below = (above - 1).clip(min=0)
    up, down = table[above] - a, a - table[below]
    nearest = np.where(up < down, above, np.where(down < up, below, np.where(above % 2 == 0, above, below)))
    assert (reference.as_bits(codes).numpy().reshape(-1) & 0x7F == nearest).all()


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_quantising_is_the_reference(comm: pc.Communicator, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed())
    for hidden in (8, 120, 128, 136, 256, 1000, 7168):
        x = torch.randn(64, hidden, generator=generator) * 2.0 ** torch.randint(-10, 10, (64, 1), generator=generator)
        x = x.to(dtype)
        codes, scale = through_fp8(comm, x)
        wanted, wanted_scale = reference.quantise(x)
        assert same_bits(scale, wanted_scale), hidden
        assert same_bits(codes, wanted), hidden


def test_error_of_fp8(comm: pc.Communicator) -> None:
    """On normally distributed data: 2.57 % of the vector's length, nothing systematic."""
    x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(seed()))
    codes, scale = through_fp8(comm, x)
    seen = codes.double() * scale.double().repeat_interleave(128, dim=1)
    error = ((seen - x.double()).norm() / x.double().norm()).item()
    assert 0.0250 < error < 0.0265, error
    bias = ((seen - x.double()).mean() / x.double().abs().mean()).abs().item()
    assert bias < 1e-3, bias


def test_blocks_of_zero_nan_and_infinity(comm: pc.Communicator) -> None:
    """Each block for itself: its neighbours are as if nothing were wrong."""
    generator = torch.Generator().manual_seed(seed())
    x = torch.randn(40, 3 * 128 + 32, generator=generator)
    good = x.clone()
    x[:10, 128:256] = 0.0
    x[5:10, 128:256] = -0.0
    x[10:20, 130] = float("nan")
    x[20:30, 400] = float("inf")
    x[30:40, 0] = -float("inf")
    codes, scale = through_fp8(comm, x)
    decoded = reference.dequantise(codes, scale)
    assert (scale[:10, 1] == 1.0).all()
    assert (decoded[:10, 128:256] == 0).all()
    assert decoded[10:20, 128:256].isnan().all()
    assert decoded[20:30, 384:].isnan().all()
    assert decoded[30:40, :128].isnan().all()
    wanted, wanted_scale = reference.quantise(good)
    for rows, block in [(slice(10), 0), (slice(10, 20), 0), (slice(20, 30), 0), (slice(30, 40), 1), (slice(40), 2)]:
        columns = slice(block * 128, block * 128 + 128)
        assert same_bits(codes[rows, columns], wanted[rows, columns])
        assert same_bits(scale[rows, block], wanted_scale[rows, block])


@pytest.mark.parametrize("exponent", [-149, -148, -140, -130, -126, -125, -119, -118, -117, -110])
def test_tiny_blocks(comm: pc.Communicator, exponent: int) -> None:
    """Finite in, finite out, within half of the largest code's step, or of the smallest number that there is."""
    x = (torch.rand(16, 128, generator=torch.Generator().manual_seed(seed())) * 2 - 1).double() * 2.0**exponent
    x = x.float()
    x[:, 0] = torch.tensor(2.0**exponent, dtype=torch.float64).float()
    codes, scale = through_fp8(comm, x)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    decoded = codes.double() * scale.double()
    assert decoded.isfinite().all()
    assert ((decoded - x.double()).abs() <= max(2.0**exponent * 2.0**-4, 2.0**-136)).all()


def test_the_largest_blocks(comm: pc.Communicator) -> None:
    """The largest finite numbers stay finite."""
    largest = torch.finfo(torch.float32).max
    x = torch.full((4, 128), largest)
    x[:, 1::2] = -largest
    codes, scale = through_fp8(comm, x)
    assert (reference.as_bits(codes)[:, 0] == 0x7E).all()
    assert (reference.as_bits(codes)[:, 1] == 0xFE).all()
    assert scale.isfinite().all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    top_k=st.integers(1, 16),
    hidden=st.integers(1, 90),
    dtype=st.sampled_from([torch.float32, *SIXTEEN]),
    weighted=st.booleans(),
    accumulate=st.booleans(),
    data_seed=st.integers(0, 2**31),
)
def test_sums(
    comm: pc.Communicator, top_k: int, hidden: int, dtype: torch.dtype, weighted: bool, accumulate: bool, data_seed: int
) -> None:
    """Choices in k order, in fp32, one rounding for the rank's partial sum and one at the end."""
    hidden *= 16 // dtype.itemsize
    generator = torch.Generator().manual_seed(data_seed)
    tokens, experts = 5, 4
    ids = torch.randint(-1, experts, (tokens, top_k), generator=generator)
    weights = torch.randn(tokens, top_k, generator=generator)
    with alone(comm, hidden, tokens, num_experts=experts, top_k=top_k, dtype=dtype) as a2a:
        d = a2a.dispatch(torch.zeros(tokens, hidden, dtype=dtype), ids, weights)
        rows = int(d.offsets[-1])
        out = (torch.randn(rows, hidden, generator=generator) * 100).to(dtype)
        start = torch.randn(tokens, hidden, generator=generator).to(dtype)
        y = a2a.combine(out, d, weighted=weighted, out=start.clone() if accumulate else None, accumulate=accumulate)
    seen = dict.fromkeys(range(experts), 0)
    offsets = d.offsets.tolist()
    for t in range(tokens):
        partial = torch.zeros(hidden)
        for k in range(top_k):
            e = int(ids[t, k])
            if e < 0:
                continue
            row = out[offsets[e] + seen[e]].float()
            seen[e] += 1
            partial = partial + (weights[t, k] * row if weighted else row)
        total = start[t].float() if accumulate else torch.zeros(hidden)
        if (ids[t] >= 0).any():
            total = total + partial.to(dtype).float()
        assert same_bits(y[t], total.to(dtype))


@pytest.mark.parametrize(
    ("partials", "nodes", "wanted"),
    [
        ([256, 1, 1, 1], (), 260),
        ([256, 1, 1, 1], (0, 0, 0, 0), 260),
        ([256, 1, 1, 1], (0, 1, 2, 3), 260),
        ([256, 1, 1, 1], (0, 0, 1, 1), 258),  # 257 is rounded to 256
        ([256, 1, 3, 1], (0, 0, 1, 1), 260),
        ([256, 1, 3, 1], (0, 1, 0, 1), 262),  # 259 is rounded to 260
        ([1, 256, 3, 1], (0, 1, 1, 0), 262),
    ],
)
def test_the_reference_adds_by_node(partials: list[int], nodes: tuple[int, ...], wanted: int) -> None:
    """In bfloat16, of which 256 and what follows have steps of 2. Each rank returns what the weights make of its expert's row."""
    shape = reference.Shape(4, 4, 4, 8, 1, nodes=nodes)
    ids = torch.arange(4, dtype=torch.int32)[None]
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    rows = reference.expert(shape, ids[0], x.float().expand(4, 8))[:, 0].float()
    tokens = reference.Tokens(x, ids, torch.tensor([partials]) / rows)
    nothing = reference.Tokens(x[:0], ids[:0], None)
    y = reference.combine(shape, [tokens, nothing, nothing, nothing], 0)
    assert y.tolist() == [[float(wanted)] * 8]
