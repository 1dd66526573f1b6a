"""Blocks in pieces on GPUs: as on the CPU device, to the last bit, for long, in graphs, and when a rank dies. Ranks map each other, or reach
each other through the proxy: all of them, or those of other nodes, of two ranks each.

python -m pytest tests/gpu/test_pieces_gpu.py
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import WIRES, Case, in_pieces
from gpus import AT_ONCE, ENDS, GPUS
from harness import Crew, Crews, seed
from open_step_cases import small_case
from test_failure import check_survivors

HAS_LARGE = GPUS > 0 and torch.cuda.get_device_capability()[0] >= 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_LARGE, reason="no GPU with large kernels")]
WORLD = min(ENDS[-1], 4)
CARRIERS = ["mapped", *(["proxy:tcp", "proxy:shm"] if WORLD > 1 else []), *(["mixed:tcp"] if WORLD > 2 else [])]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crews]:
    with Crews(WORLD) as crews:
        yield crews


def pieces(case: Case) -> Case:
    return in_pieces(case, on_gpu=True)


def large(transport: str, wire: str = "fp8", layout: str = "ragged", tokens: int = 2048) -> Case:
    experts, top_k = (8, 2) if layout == "padded" else (64, 8)  # an expert of Padded has room for all rows of all ranks
    return pieces(
        Case(
            seed(), WORLD, num_experts=experts, top_k=top_k, hidden=1024, max_tokens=tokens, wire=wire, layout=layout, align=128,
            threads=4, transport=transport,
        )
    )  # fmt: skip


def random_large(number: int, transport: str) -> Case:
    r = random.Random(f"{seed()} {number} {WORLD}")
    case = Case(
        seed() * 100 + number, WORLD, num_experts=r.choice([WORLD, 3 * WORLD, 64]), top_k=r.choice([1, 2, 4, 8]),
        hidden=r.choice([16, 144, 528, 1040]), max_tokens=r.randint(300, 700), wire=r.choice(WIRES),
        layout=r.choice(["ragged", "padded", "compact"]), in_flight=r.choice([1, 2, 4]),
        crowd=r.choice(["full", "uneven", "uneven", "one_has_all", "one_has_none"]),
        routing=r.choice(["uniform", "uniform", "zipf", "to_one", "sparse", "local"]), steps=4, first_step=2**32 - 3,
        transport=transport,
    )  # fmt: skip
    if case.layout == "padded":
        case = replace(case, num_experts=min(case.num_experts, 3 * WORLD), top_k=min(case.top_k, 4), hidden=min(case.hidden, 528))
    return pieces(case)


@pytest.mark.parametrize("transport", CARRIERS)
def test_random_shapes(crew: Crews, transport: str) -> None:
    for number in range(8):
        crew.run("gpu_cases:exchange", random_large(100 * CARRIERS.index(transport) + number, transport), timeout=300)


@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize(
    ("wire", "layout"), [("native", "compact"), ("fp8", "ragged"), ("fp8_ue8m0", "compact"), ("mxfp8", "padded")]
)
def test_as_on_the_cpu(crew: Crews, wire: str, layout: str, transport: str) -> None:
    """Steps of few tokens in between, of which none is cut."""
    tokens_of = [2048, 128, 1500, 1, 257, 256, 900]
    crew.run("gpu_cases:both_devices", large(transport, wire, layout), len(tokens_of), tokens_of=tokens_of, timeout=300)


@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize("num_sms", [1, 8])
def test_few_multiprocessors(crew: Crews, num_sms: int, transport: str) -> None:
    crew.run("gpu_cases:both_devices", large(transport, tokens=1024), 2, num_sms=num_sms, timeout=300)


@pytest.mark.parametrize("transport", CARRIERS)
def test_soak(crew: Crews, transport: str) -> None:
    """Counts of tokens grow from step to step: whole blocks at first, then more and more pieces."""
    assert crew.run("gpu_cases:soak", large(transport, tokens=1400), 200, timeout=300) == [0] * WORLD


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("transport", CARRIERS)
def test_streams(crew: Crews, transport: str, in_flight: int) -> None:
    """The rest of a step, which a receive half sends, was written on another stream."""
    case = replace(large(transport, "native", tokens=1024), in_flight=in_flight)
    crew.run("gpu_cases:streams", pieces(replace(case, slot_bytes=None)), 20, timeout=300)


@pytest.mark.parametrize("transport", CARRIERS)
def test_among_replays(crew: Crews, transport: str) -> None:
    case = pieces(replace(small_case(seed(), WORLD, 1), max_tokens=900, transport=transport))
    crew.run("open_step_cases:interleaved", case, list(range(3)), 12, timeout=300)


@pytest.mark.skipif(AT_ONCE < 2, reason="one GPU")
@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize(("through", "layout"), [("recipe", "padded"), ("autograd", "ragged"), ("autograd", "compact")])
def test_gradients(crew: Crews, through: str, layout: str, transport: str) -> None:
    case = Case(
        seed(), WORLD, num_experts=7, top_k=4, hidden=64, max_tokens=600, dtype="float32", layout=layout, align=4,
        transport=transport,
    )  # fmt: skip
    for errors in crew.run("gpu_cases:on_gpu", "training_cases:gradients_in_pieces", pieces(case), through, timeout=300):
        assert max(errors.values()) < 1e-5, errors


# ---- deaths: on the CPU device and in the emulation at all places, over every carrier


@pytest.mark.skipif(AT_ONCE < 2, reason="one GPU")
@pytest.mark.parametrize(
    ("place", "transport"),
    [
        ("after_dispatch_send", "mapped"), ("amid_dispatch_recv", "mapped"), ("amid_combine_recv", "mapped"),
        ("in_dispatch_recv", "proxy:tcp"), ("after_combine_send", "proxy:tcp"), ("amid_combine_recv", "mixed:tcp" if WORLD > 2 else "proxy:tcp"),
    ],
)  # fmt: skip
@pytest.mark.alone
def test_death(place: str, transport: str, tmp_path: Path) -> None:
    with Crew(WORLD) as crew:
        case = pieces(Case(21, WORLD, max_tokens=700, hidden=64, crowd="full", transport=transport))
        crew.start("gpu_cases:on_gpu", "failure_cases:survive", case, 1, place, str(tmp_path / "died"))
        left = [rank for rank in range(WORLD) if rank != 1]
        check_survivors(crew.collect(60, left), 1, float((tmp_path / "died").read_text()))
