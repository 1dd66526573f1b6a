"""Replicas where blocks go in pieces, over every carrier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cases import Case
from emulation_cases import CHAOS, ON_X86_64, module, numbers, piece_case
from harness import Crew, seed
from open_step_cases import small_case

pytestmark = [ON_X86_64, pytest.mark.slow]

REPLICAS = [(2, 2, "mapped"), (4, 2, "mapped"), (4, 4, "mapped"), (3, 3, "mapped"), (4, 2, "proxy:tcp"), (4, 2, "mixed:tcp")]
"""World, replicas, transport: those of a group are of one node."""


def replica_case(number: int, world: int, replicas: int, transport: str = "mapped") -> Case:
    """Each sends the tokens that a rank of piece_case() does: one of a group may have one more than the next."""
    case = piece_case(number, world)
    return replace(case, replicas=replicas, max_tokens=replicas * case.max_tokens - number % replicas, transport=transport)


@pytest.mark.parametrize(("world", "replicas", "transport"), REPLICAS)
def test_replicas_in_pieces(world: int, replicas: int, transport: str) -> None:
    with Crew(world) as crew:
        for number in numbers(6):
            case = replica_case(1000 + number, world, replicas, transport)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=200)


@pytest.mark.parametrize("transport", ["proxy:tcp", "mixed:tcp"])
def test_replicas_in_pieces_in_a_chaos(transport: str) -> None:
    with Crew(4, {"PPLX_COMM_CHAOS": f"seed={seed()},{CHAOS}"}) as crew:
        for number in numbers(3):
            case = replica_case(1100 + number, 4, 2, transport)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=200)


@pytest.mark.parametrize("room", [1, 2])
def test_replicas_in_pieces_with_one_resident_thread_block(room: int) -> None:
    """It finishes all that replicas wait for."""
    with Crew(2, {"PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "5"}) as crew:
        for number in numbers(3):
            case = replica_case(1200 + number, 2, 2)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=120)


@pytest.mark.parametrize(
    ("layout", "world", "transport"),
    [("ragged", 2, "mapped"), ("padded", 2, "mapped"), ("compact", 2, "mapped"), ("ragged", 4, "proxy:tcp")],
)
def test_replicas_of_which_one_has_many(layout: str, world: int, transport: str) -> None:
    """From 17 tokens of its own on a rank takes the kernels of many: of 33 the first replica does, the second one does not. As on the CPU
    device, in the same memory."""
    with Crew(world) as crew:
        case = Case(seed(), world, num_experts=8, top_k=3, hidden=144, max_tokens=160, wire="fp8", layout=layout, align=4)
        case = replace(case, replicas=2, transport=transport)
        tokens_of = [160, 33, 6, 33, 81, 32, 34, 33, 1, 2, 33, 0, 33]
        crew.run(
            "emulated:in_pieces", module(), 16, "gpu_cases:both_devices", case, len(tokens_of), tokens_of=tokens_of, timeout=200
        )


def test_plans_of_replicas_in_pieces() -> None:
    with Crew(2) as crew:
        for tokens in (41, 7):
            case = Case(seed(), 2, num_experts=6, top_k=3, hidden=48, max_tokens=tokens, replicas=2)
            crew.run("emulated:in_pieces", module(), 4, "pieces_cases:plan_of_replicas", case)


def test_long_rows_of_replicas_in_pieces() -> None:
    """Sums of several tiles, and strips of those that replicas finish."""
    with Crew(2) as crew:
        case = Case(seed(), 2, num_experts=6, top_k=2, hidden=4624, max_tokens=31, steps=4, crowd="full", replicas=2)
        crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=200)


def test_replicas_in_pieces_as_without_either() -> None:
    with Crew(4) as crew:
        for number, transport in enumerate(("mapped", "mixed:tcp")):
            case = replace(replica_case(1300 + number, 4, 2, transport), max_tokens=41)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:as_without_replicas", case, timeout=200)


@pytest.mark.parametrize("transport", ["mapped", "mixed:tcp"])
@pytest.mark.parametrize("through", ["recipe", "autograd"])
def test_gradients_of_replicas_in_pieces(through: str, transport: str) -> None:
    with Crew(4) as crew:
        for layout in ("ragged", "padded", "compact"):
            case = Case(
                seed(), 4, num_experts=7, top_k=4, hidden=64, max_tokens=41, dtype="float32", layout=layout, align=4,
                transport=transport, replicas=2,
            )  # fmt: skip
            name, how = ("gradients", []) if through == "recipe" else ("gradients_of_autograd", ["all"])
            for errors in crew.run("emulated:in_pieces", module(), 4, f"training_cases:{name}", case, *how, timeout=120):
                assert all(error < 2e-6 for error in errors.values()), (layout, errors)


@pytest.mark.parametrize(("world", "transport"), [(2, "mapped"), (4, "mapped"), (4, "proxy:tcp"), (4, "mixed:tcp")])
def test_hooks_of_replicas_in_pieces(world: int, transport: str) -> None:
    with Crew(world) as crew:
        for number in numbers(4):
            case = replica_case(1400 + number, world, 2, transport)
            crew.run("emulated:in_pieces", module(), 4, "hook_cases:hooked", case, timeout=200)


@pytest.mark.parametrize(("world", "transport"), [(2, "mapped"), (4, "proxy:tcp")])
@pytest.mark.parametrize("hooks", [False, True])
def test_replicas_in_pieces_among_replays(hooks: bool, world: int, transport: str) -> None:
    with Crew(world, {"PPLX_TEST_STEP_TIMEOUT": "60"}) as crew:  # nothing waits for it
        case = replace(small_case(seed(), world, 1), max_tokens=41, transport=transport, replicas=2)
        if hooks:
            crew.run("emulated:in_pieces", module(), 4, "hook_cases:replayed", replace(case, layout="padded"), 2, 6, timeout=120)
        else:
            crew.run("emulated:in_pieces", module(), 4, "open_step_cases:interleaved", case, list(range(3)), 8, timeout=200)


@pytest.mark.parametrize("kind", ["ids", "tokens", "accumulate"])
@pytest.mark.parametrize("transport", ["mapped", "mixed:tcp"])
def test_replicas_apart_in_pieces(kind: str, transport: str) -> None:
    case = Case(seed(), 4, max_tokens=40, replicas=2, transport=transport)
    with Crew(4) as crew:
        results = crew.run("emulated:in_pieces", module(), 4, "failure_cases:replicas_apart", case, kind)
    for r in results:
        assert r.get("is_peer") and not r["is_timeout"], r
    word = {"ids": "passed different topk_ids", "tokens": "rank 3 passed 39 ", "accumulate": "accumulate="}[kind]
    assert any(word in r["message"] for r in results), results


@pytest.mark.parametrize(("world", "transport"), [(2, "mapped"), (4, "proxy:tcp")])
@pytest.mark.parametrize("phase", ["dispatch_recv", "combine_recv"])
def test_a_replica_that_does_not_come_for_its_pieces(phase: str, world: int, transport: str) -> None:
    """Its replica waits for its rows and for those that it finishes, and names it. Among four, some wait for others that wait for
    it. All reset, and go on."""
    case = Case(2, world, max_tokens=80, num_experts=world, transport=transport, replicas=2)
    # Good steps of four emulated ranks take long on a busy machine.
    with Crew(world, {"PPLX_TEST_STEP_TIMEOUT": "5" if world == 2 else "15"}) as crew:
        heard = crew.run("emulated:in_pieces", module(), 4, "pieces_cases:does_not_come", case, phase)[1:]
        assert all(r["type"] == "StepTimeout" for r in heard), heard
        assert world > 2 or (heard[0]["phase"], heard[0]["peer"]) == (phase, 0), heard


@pytest.mark.parametrize(("replicas", "transport"), [(2, "mapped"), (2, "mixed:tcp"), (4, "mapped")])
def test_replicas_in_pieces_after_a_reset(tmp_path: Path, replicas: int, transport: str) -> None:
    """Those that are left of a group send the tokens of the dead, too."""
    paths = [str(tmp_path / f"died{i}") for i in range(2)]
    case = Case(seed(), 4, num_experts=10, top_k=4, max_tokens=24 * replicas, crowd="uneven", in_flight=2, transport=transport)
    with Crew(4) as crew:
        crew.start("emulated:in_pieces", module(), 4, "failure_cases:reset_after", replace(case, replicas=replicas), [2, 0], paths)
        assert [len(r["rounds"]) for r in crew.collect(200, [1, 3])] == [2, 2]
        crew.leave()


@pytest.mark.parametrize(("world", "near"), [(4, "none"), (4, "odd")])
def test_replicas_in_pieces_by_kernels(world: int, near: str) -> None:
    with Crew(world, {"PPLX_EMULATION_NEAR": near}) as crew:
        for number in numbers(4):
            case = replace(piece_case(950 + number, world), transport="nvshmem", replicas=2)
            crew.run("emulated:in_pieces", module(), 4, "rank_cases:exchange", case, timeout=200)
