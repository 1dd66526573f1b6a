"""Replicas, in whole blocks. Random shapes with replicas are test_emulation's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cases import Case
from emulation_cases import ON_X86_64, case_of, module, numbers
from harness import Crew, seed
from test_failure import reset_after_deaths

pytestmark = [ON_X86_64, pytest.mark.slow]


@pytest.mark.parametrize("on_one", [False, True])
def test_replicas_in_pieces_are_refused(on_one: bool) -> None:
    """On every rank, where all ranks ask for them and where one does. Slots of whole blocks are no limit."""
    both, usual = {"replicas": 2, "slot_bytes": 1 << 21}, {"device": "cuda", "max_tokens_per_rank": 4096, "hidden": 512}
    with Crew(2) as crew:
        for r in crew.run(
            "emulated:call", module(), "misuse_cases:construct", usual if on_one else {**usual, **both}, {1: both}, {}
        ):
            assert r.get("is_error") and "replicas=2 with device='cuda' needs whole blocks" in r["message"], r
            assert "give slot_bytes at least " in r["message"] and r["seconds"] < 15, r
        case = Case(seed(), 2, replicas=2, max_tokens=300, slot_bytes=1 << 40)
        crew.run("emulated:call", module(), "rank_cases:exchange", case)


@pytest.mark.parametrize("room", [1, 2])
def test_replicas_with_one_resident_thread_block(room: int) -> None:
    """It finishes all that replicas wait for."""
    with Crew(2, {"PPLX_EMULATION_ROOM": str(room), "PPLX_EMULATION_SMS": "5"}) as crew:
        for number in numbers(3):
            case = replace(case_of(25_000, number, 2, "mapped"), replicas=2)
            crew.run("emulated:call", module(), "rank_cases:exchange", case, timeout=120)


@pytest.mark.parametrize("kind", ["ids", "tokens", "accumulate"])
@pytest.mark.parametrize("transport", ["mapped", "mixed:tcp", "relayed:tcp"])
def test_replicas_apart(kind: str, transport: str) -> None:
    case = Case(seed(), 4, max_tokens=40, replicas=2, transport=transport)
    with Crew(4) as crew:
        results = crew.run("emulated:call", module(), "failure_cases:replicas_apart", case, kind)
    for r in results:
        assert r.get("is_peer") and not r["is_timeout"], r
    word = {"ids": "passed different topk_ids", "tokens": "rank 3 passed 39 ", "accumulate": "accumulate="}[kind]
    assert any(word in r["message"] for r in results), results


@pytest.mark.parametrize(("replicas", "transport"), [(2, "mixed:tcp"), (2, "mapped"), (4, "mapped")])
def test_replicas_after_a_reset(tmp_path: Path, replicas: int, transport: str) -> None:
    """Those that are left of a group send the tokens of the dead."""
    case = Case(seed(), 4, num_experts=10, top_k=4, max_tokens=24 * replicas, crowd="uneven", in_flight=2, transport=transport)
    with Crew(4) as crew:
        reset_after_deaths(crew, ["emulated:call", module()], replace(case, replicas=replicas), tmp_path)
