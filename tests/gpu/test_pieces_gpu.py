"""Blocks in pieces on GPUs: as on the CPU device, to the last bit, for long, in graphs, and when a rank dies. Ranks map each other, or reach
each other through the proxy: all of them, or those of other nodes, of two ranks each.

python -m pytest tests/gpu/test_pieces_gpu.py
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import WIRES, Case, in_pieces
from gpus import APART, AT_ONCE, GPUS
from harness import Crew, seed
from open_step_cases import small_case
from test_failure import check_survivors

HAS_LARGE = GPUS > 0 and torch.cuda.get_device_capability()[0] >= 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_LARGE, reason="no GPU with large kernels")]
WORLDS = APART or [1]
REMOTE = ["proxy:tcp", "proxy:shm", *(["mixed:tcp"] if max(WORLDS) > 2 else [])]
CARRIERS = ["mapped", *(REMOTE if max(WORLDS) > 1 else [])]


def pieces(case: Case) -> Case:
    return in_pieces(case, on_gpu=True)


def large(world: int, wire: str = "fp8", layout: str = "ragged", tokens: int = 4096) -> Case:
    experts, top_k = (8, 2) if layout == "padded" else (64, 8)  # an expert of Padded has room for all rows of all ranks
    return pieces(
        Case(
            seed(), world, num_experts=experts, top_k=top_k, hidden=1024, max_tokens=tokens, wire=wire, layout=layout, align=128,
            threads=4,
        )
    )  # fmt: skip


def random_large(number: int, world: int) -> Case:
    r = random.Random(f"{seed()} {number} {world}")
    case = Case(
        seed() * 100 + number, world, num_experts=r.choice([world, 3 * world, 64]), top_k=r.choice([1, 2, 4, 8]),
        hidden=r.choice([16, 144, 1024, 4112]), max_tokens=r.randint(300, 1500), wire=r.choice(WIRES),
        layout=r.choice(["ragged", "padded", "compact"]), in_flight=r.choice([1, 2, 4]),
        crowd=r.choice(["full", "uneven", "uneven", "one_has_all", "one_has_none"]),
        routing=r.choice(["uniform", "uniform", "zipf", "to_one", "sparse", "local"]), steps=4, first_step=2**32 - 3,
    )  # fmt: skip
    if case.layout == "padded":
        case = replace(case, num_experts=min(case.num_experts, 3 * world), top_k=min(case.top_k, 4))
    return pieces(case)


@pytest.mark.parametrize("world", WORLDS)
def test_random_shapes(world: int) -> None:
    with Crew(world) as crew:
        for number in range(12):
            crew.run("gpu_cases:exchange", random_large(number, world), timeout=300)


@pytest.mark.skipif(AT_ONCE < 2, reason="one GPU")
@pytest.mark.parametrize("transport", REMOTE)
def test_random_shapes_between_nodes(transport: str) -> None:
    world = max(WORLDS)
    with Crew(world) as crew:
        for number in range(12):
            crew.run("gpu_cases:exchange", replace(random_large(100 + number, world), transport=transport), timeout=300)


@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
@pytest.mark.parametrize("wire", WIRES)
def test_as_on_the_cpu(wire: str, layout: str, transport: str) -> None:
    """Steps of few tokens in between, of which none is cut."""
    with Crew(max(WORLDS)) as crew:
        tokens_of = [4096, 128, 3000, 1, 257, 256, 900]
        case = replace(large(max(WORLDS), wire, layout), transport=transport)
        crew.run("gpu_cases:both_devices", case, len(tokens_of), tokens_of=tokens_of, timeout=300)


@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize("num_sms", [1, 8])
def test_few_multiprocessors(num_sms: int, transport: str) -> None:
    with Crew(max(WORLDS)) as crew:
        case = replace(large(max(WORLDS)), transport=transport)
        crew.run("gpu_cases:both_devices", case, 3, num_sms=num_sms, timeout=300)


@pytest.mark.parametrize("transport", CARRIERS)
def test_soak(transport: str) -> None:
    with Crew(max(WORLDS)) as crew:
        case = replace(large(max(WORLDS), tokens=2048), transport=transport)
        crew.run("gpu_cases:both_devices", case, 100, timeout=600)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("transport", CARRIERS)
def test_streams(transport: str, in_flight: int) -> None:
    """The rest of a step, which a receive half sends, was written on another stream."""
    with Crew(max(WORLDS)) as crew:
        case = replace(large(max(WORLDS), "native", tokens=1500), transport=transport, in_flight=in_flight)
        crew.run("gpu_cases:streams", pieces(replace(case, slot_bytes=None)), 20, timeout=300)


@pytest.mark.parametrize("transport", CARRIERS)
def test_among_replays(transport: str) -> None:
    with Crew(max(WORLDS)) as crew:
        case = pieces(replace(small_case(seed(), max(WORLDS), 1), max_tokens=900, transport=transport))
        crew.run("open_step_cases:interleaved", case, list(range(3)), 12, timeout=300)


@pytest.mark.skipif(AT_ONCE < 2, reason="one GPU")
@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize("layout", ["ragged", "padded", "compact"])
@pytest.mark.parametrize("through", ["recipe", "autograd"])
def test_gradients(through: str, layout: str, transport: str) -> None:
    world = max(WORLDS)
    with Crew(world) as crew:
        case = pieces(
            Case(
                seed(), world, num_experts=7, top_k=4, hidden=64, max_tokens=1200, dtype="float32", layout=layout, align=4,
                transport=transport,
            )
        )  # fmt: skip
        for errors in crew.run("gpu_cases:on_gpu", "training_cases:gradients_in_pieces", case, through, timeout=300):
            assert max(errors.values()) < 1e-5, errors


# ---- deaths


@pytest.mark.skipif(AT_ONCE < 2, reason="one GPU")
@pytest.mark.parametrize("transport", CARRIERS)
@pytest.mark.parametrize(
    "place",
    [
        "after_dispatch_send", "in_dispatch_recv", "amid_dispatch_recv", "after_dispatch", "after_combine_send", "in_combine_recv",
        "amid_combine_recv",
    ],
)  # fmt: skip
def test_death(place: str, transport: str, tmp_path: Path) -> None:
    world = max(WORLDS)
    with Crew(world) as crew:
        case = pieces(Case(21, world, max_tokens=1500, hidden=64, crowd="full", transport=transport))
        crew.start("gpu_cases:on_gpu", "failure_cases:survive", case, 1, place, str(tmp_path / "died"))
        left = [rank for rank in range(world) if rank != 1]
        check_survivors(crew.collect(60, left), 1, float((tmp_path / "died").read_text()))
