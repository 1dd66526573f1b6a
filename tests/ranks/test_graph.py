"""dispatch and combine under torch.compile and autograd, on the CPU device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases import Case
from harness import Crew, Crews, seed

CASE = Case(7, 2, num_experts=6, top_k=3, hidden=64, max_tokens=12, dtype="float32", align=8)
LAYOUTS = ["ragged", "padded", "compact"]


def inductor(cache: Path) -> dict[str, str]:
    """The environment of ranks that compile. The cache is new: what is in another was made by another pplx_comm."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING": "1",  # today's warning becomes an error
    }


@pytest.fixture(scope="module", params=[2], ids=lambda n: f"{n} ranks")
def crew(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crews]:
    """Compiling takes most of the time, and what a compiler makes of our operators is the same with any number of ranks."""
    cache = tmp_path_factory.mktemp("inductor")
    with Crews(request.param, inductor(cache)) as crews:
        yield crews


STEPS = 5
"""All numbers of tokens that graph_cases draws: the most that fit, none, one, and one fewer."""


def check_compiled(crew: Crews, layout: str, backend: str, layers: int) -> None:
    case = replace(CASE, seed=seed(), world_size=crew.world_size, layout=layout)
    for r in crew.run("graph_cases:compiled", case, backend, STEPS, layers=layers, timeout=250):
        assert r["worst"] < 1e-5, r
        assert r["steps"] == STEPS * 2 * layers and r["open"] == 0, r


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_model(crew: Crews, layout: str) -> None:
    check_compiled(crew, layout, "aot_eager", 2 if layout == "ragged" else 1)


one_rank = pytest.mark.parametrize("crew", [1], indirect=True, ids=["1 rank"])
"""Where machine code is compiled, which takes a rank seconds."""


@one_rank
@pytest.mark.slow
def test_a_model_compiled_by_inductor(crew: Crews) -> None:
    check_compiled(crew, "padded", "inductor", 1)


def test_a_compiled_model_on_a_quantised_wire(crew: Crews) -> None:
    case = replace(CASE, seed=seed(), world_size=crew.world_size, hidden=256, wire="fp8", scale_layout="tma", dtype="bfloat16")
    for r in crew.run("graph_cases:compiled", case, "aot_eager", STEPS, layers=1, timeout=250):
        assert r["worst"] < 1e-2, r


def check_training(crew: Crews, layout: str, backend: str, layers: int) -> None:
    case = replace(CASE, seed=seed(), world_size=crew.world_size, layout=layout)
    for r in crew.run("graph_cases:compiled_training", case, backend, STEPS, layers=layers, timeout=250):
        assert r["worst"] < 1e-4, r
        assert r["steps"] == STEPS * layers * 2 * 2 and r["open"] == 0, r  # twice, forward and backward


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_training(crew: Crews, layout: str) -> None:
    check_training(crew, layout, "aot_eager", 2 if layout == "ragged" else 1)


@one_rank
@pytest.mark.slow
def test_training_compiled_by_inductor(crew: Crews) -> None:
    check_training(crew, "ragged", "inductor", 1)


@pytest.mark.slow
def test_a_compiler_keeps_the_order_of_layers_without_tokens(tmp_path: Path) -> None:
    order = [0, 0, 1, 1, 0, 0]  # a dispatch and a combine each, and the same backward
    with Crew(1, inductor(tmp_path)) as crew:
        case = replace(CASE, seed=seed(), world_size=1, num_experts=8)
        (r,) = crew.run("graph_cases:layers_without_tokens", case, timeout=250)
        assert r == {"orders": [order * 2] * 2, "steps": [2 * 2 * 2, 2 * 2], "open": 0}, r


@pytest.mark.parametrize("crew", [2, 4], indirect=True, ids=["2 ranks", "4 ranks"])
@pytest.mark.parametrize("through", ["all", "all twice", "experts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_autograd_as_in_one_process(crew: Crews, layout: str, through: str) -> None:
    for replicas in (1, 2):
        case = replace(CASE, seed=seed(), world_size=crew.world_size, layout=layout, replicas=replicas)
        for errors in crew.run("training_cases:gradients_of_autograd", case, through):
            assert max(errors.values()) < 1e-5, (case, errors)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_rules_of_single_calls(crew: Crews, in_flight: int) -> None:
    crew.run("graph_cases:rules", replace(CASE, seed=seed(), world_size=crew.world_size, in_flight=in_flight))


def test_tensors_of_before_a_reset(crew: Crews) -> None:
    crew.run("graph_cases:old_tensors", replace(CASE, seed=seed(), world_size=crew.world_size, in_flight=2), timeout=120)


def test_codes_have_no_gradient(crew: Crews) -> None:
    case = replace(CASE, seed=seed(), world_size=crew.world_size, hidden=128, wire="fp8", dtype="bfloat16")
    for said in crew.run("graph_cases:quantised", case):
        assert [text.partition(":")[0] for text in said] == ["dispatch", "combine"]
        assert all("torch.no_grad()" in text for text in said)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiler_keeps_the_order_of_steps(crew: Crews, backend: str) -> None:
    case = replace(CASE, seed=seed(), world_size=crew.world_size, in_flight=2)
    for eager, compiled in crew.run("graph_cases:in_order", case, backend, timeout=250):
        assert eager == compiled == [1, 2, 3, 3, 3]


def test_torch_s_own_checks_of_operators(crew: Crews) -> None:
    crew.run("graph_cases:operators", replace(CASE, seed=seed(), world_size=crew.world_size), timeout=120)
