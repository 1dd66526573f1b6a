"""The MoE layer on ranks beside the same layer in one process, in float64."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from harness import Crew, Crews, run_ranks, seed
from moe_reference import MoECase, make_world, run

from pplx_comm.moe import RouterOptions

BF16, FP8_WIRE, FP8 = 0.006, 0.045, 0.08
"""Relative errors that formats explain: of a layer in bfloat16, with dispatch in FP8, and all in FP8."""


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n} ranks")
def crew(request: pytest.FixtureRequest) -> Iterator[Crews]:
    with Crews(request.param) as crews:
        yield crews


two_ranks = pytest.mark.parametrize("crew", [2], indirect=True, ids=["2 ranks"])
"""Two ranks suffice where their number does not matter."""


def check(crew: Crew | Crews, limit: float, how: str = "plain", **fields: object) -> None:
    case = replace(MoECase(seed(), crew.world_size), **fields)
    for rank, found in enumerate(crew.run("moe_cases:whole_step", case, how, timeout=120)):
        assert max(found.values()) < limit, (rank, case, found)


@pytest.mark.parametrize("spread", ["even", "zipf", "hot", "few"])
def test_as_in_one_process(crew: Crews, spread: str) -> None:
    check(crew, 1e-5, spread=spread)
    check(crew, 1e-5, spread=spread, score="sigmoid", normalise=False, top_k=1, num_experts=5, shared=0)


@pytest.mark.parametrize(("ranks", "expert_tp"), [(2, 2), (4, 2), (4, 4)])
def test_slices_of_experts(ranks: int, expert_tp: int) -> None:
    """Also where experts do not divide by the groups of ranks."""
    case = MoECase(seed(), ranks, "zipf", expert_tp=expert_tp, num_experts=5, shared=0)
    for rank, found in enumerate(run_ranks(ranks, "moe_cases:whole_step", case)):
        assert max(found.values()) < 1e-5, (rank, found)


@two_ranks
@pytest.mark.parametrize("recompute", ["activations", "dispatch"])
def test_recomputing(crew: Crews, recompute: str) -> None:
    check(crew, 1e-5, spread="zipf", recompute=recompute)


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_of_experts(ranks: int) -> None:
    """As DeepSeek-V3 routes: sigmoid scores, a bias on the choice, the best groups, weights that are normalised and scaled."""
    routing = {"score": "sigmoid", "num_experts": 12, "groups": (4, 2), "top_k": 4, "scale": 2.5}
    with Crew(ranks) as crew:
        for spread in ("even", "zipf"):
            check(crew, 1e-5, spread=spread, **routing)


def test_groups_decide() -> None:
    """The reference's choices are others without groups, and keep to two of them."""
    case = MoECase(seed(), 2, "zipf", score="sigmoid", num_experts=12, groups=(4, 2), top_k=4)
    world = make_world(case)
    (_, _, grouped), (_, _, free) = (run(c, world.parameters, world.x[0]) for c in (case, replace(case, groups=(1, 1))))
    assert all(len({e // 3 for e in chosen}) <= 2 for chosen in grouped)
    assert [sorted(chosen) for chosen in grouped] != [sorted(chosen) for chosen in free]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "float32"), ("fp8", "bfloat16")])
def test_repeated(precision: str, dtype: str) -> None:
    """The same bits again, of output, loss and all gradients."""
    for same in run_ranks(2, "moe_cases:repeated", MoECase(seed(), 2, "zipf", precision, dtype=dtype, hidden=128)):
        assert len(same) == 8 and all(same), same


@two_ranks
@pytest.mark.parametrize("how", ["checkpoint", "main_grad", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_ways_to_train(crew: Crews, how: str) -> None:
    check(crew, 1e-5, how, spread="zipf")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_to_machine_code() -> None:
    """Router and shared expert by inductor. Ranks compile within a step, so that it may take them long."""
    case = MoECase(seed(), 2, "zipf", all_to_all={"timeout": 400.0})
    for rank, found in enumerate(run_ranks(2, "moe_cases:whole_step", case, "inductor", timeout=500)):
        assert max(found.values()) < 1e-5, (rank, found)


@two_ranks
@pytest.mark.parametrize("recompute", ["nothing", "dispatch"])
def test_passes_end_with_their_backward_pass(crew: Crews, recompute: str) -> None:
    assert (
        crew.run("moe_cases:passes_left", replace(MoECase(seed(), crew.world_size), recompute=recompute)) == [0] * crew.world_size
    )


def test_no_tokens_anywhere(crew: Crews) -> None:
    check(crew, 1e-30, tokens=(0, 0, 0, 0))


@two_ranks
@pytest.mark.parametrize(
    ("precision", "compute", "limit"),
    [("bf16", None, BF16), ("fp8", "bf16", FP8_WIRE), ("mxfp8", "bf16", FP8_WIRE), ("fp8", None, FP8), ("mxfp8", None, FP8)],
)
def test_errors_of_formats(crew: Crews, precision: str, compute: str | None, limit: float) -> None:
    """The output within the format's bound; gradients pass through more roundings."""
    sizes = {
        "hidden": 512,
        "intermediate": 320,
        "num_experts": 8,
        "top_k": 4,
        "tokens": (64, 7, 0, 40),
        "shared": 0,
        "losses": (0.0, 0.0),
    }
    case = MoECase(seed(), crew.world_size, "zipf", precision, compute, "bfloat16", **sizes)
    for rank, found in enumerate(crew.run("moe_cases:whole_step", case, timeout=120)):
        del found["loss"]
        assert found["y"] < limit, (rank, found)
        assert max(found.values()) < 2 * limit, (rank, found)
        if precision != "bf16" and case.tokens[rank]:
            assert found["y"] > BF16, "nothing was quantised"


@two_ranks
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_layers_in_flight(crew: Crews, precision: str) -> None:
    case = MoECase(seed(), crew.world_size, "zipf", precision, dtype="bfloat16", hidden=128, in_flight=2, losses=(0.0, 0.0))
    for found in crew.run("moe_cases:layers_in_flight", case):
        assert found == {"same": [True, True], "open": 0}


@pytest.mark.parametrize(("in_flight", "recompute"), [(2, "nothing"), (4, "dispatch")])
def test_one_forward_one_backward(in_flight: int, recompute: str) -> None:
    """Interleaved microbatches have the same bits, and two of their steps are open at a time."""
    case = MoECase(seed(), 2, "zipf", "fp8", dtype="bfloat16", hidden=128, in_flight=in_flight, recompute=recompute)
    for found in run_ranks(2, "moe_cases:scheduled", case):
        assert found == {"same": True, "losses": True, "most_open": 2, "open": 0}


def test_a_rank_that_fails_inside_a_layer() -> None:
    """The others hear of it, and do not wait for its answers until they give up. A reset goes on."""
    case = MoECase(seed(), 2, "zipf", all_to_all={"timeout": 10.0})
    with Crew(2) as crew:
        for where, own, phase in (
            ("begin", "KeyboardInterrupt", "begin"), ("compute", "OutOfMemoryError", "compute"),
            ("backward", "Error", "backward of compute"), ("begun", "", "finish"),
        ):  # fmt: skip
            other, mine = crew.run("moe_cases:fails_inside", case, where, 1)
            assert mine["type"] == own, mine
            assert other["type"] == "PeerError" and other["peer"] == 1, other
            assert f"rank 1 left a step open in {phase} (" in other["message"], other
            assert all(found["survivors"] == [0, 1] and found["error"] < 1e-5 for found in (mine, other)), (mine, other)


WRONG: list[tuple[dict[str, object], str]] = [
    ({"intermediate": 0}, "intermediate=0 must be 1 to 1048576"),
    ({"intermediate": -8}, "intermediate=-8 must be 1 to 1048576"),
    ({"shared_intermediate": -1}, "shared_intermediate=-1 must be 0 to 1048576"),
    ({"shared_gate": True}, "shared_gate=True .* shared_intermediate"),
    ({"precision": "fp4"}, "precision='fp4'"),
]
"""Arguments of one rank, and the words for them."""
DIFFERENT: list[dict[str, object]] = [
    {"seed": 1}, {"hidden": 128}, {"router": RouterOptions("sigmoid")}, {"shared_intermediate": 32}, {"intermediate": 48},
    {"param_dtype": torch.float32}, {"recompute": "dispatch"}, {"inference": True},
    {"main_grad": True}, {"precision": "fp8"}, {"compute": "fp8"}, {"all_to_all": {"timeout": 7.0}},
]  # fmt: skip


def test_ranks_that_differ() -> None:
    """A wrong argument of one rank, or one that differs from the others', raises on all ranks, and names the rank."""
    with Crew(2) as crew:
        zero, one = crew.run("moe_cases:differing", [*(each for each, _ in WRONG), *DIFFERENT])
    for there, here, (_, says) in zip(zero, one, WRONG, strict=False):
        assert here["type"] == "Error" and re.match(says, here["message"]), here
        assert there["type"] == "PeerError" and there["peer"] == 1 and re.search(f"rank 1 .* MoE: {says}", there["message"]), there
    for there, here, each in zip(zero[len(WRONG) :], one[len(WRONG) :], DIFFERENT, strict=True):
        (name,) = each
        assert here["message"] == there["message"] and here["type"] == there["type"] == "Error", (here, there)
        says = rf"MoE\(\) must be called alike on all ranks, but {name}.* is .* on rank 0, .* on rank 1"
        assert re.fullmatch(says, here["message"]), here


@two_ranks
def test_a_deep_copy(crew: Crews) -> None:
    for found in crew.run("moe_cases:copied", MoECase(seed(), crew.world_size, "zipf")):
        assert found["shared"] and found["error"] < 1e-5, found


@two_ranks
def test_gradients_of_experts_alone(crew: Crews) -> None:
    for found in crew.run("moe_cases:experts_alone", MoECase(seed(), crew.world_size, "zipf")):
        assert found == {"same": True, "open": 0}


@pytest.mark.parametrize("transport", ["mapped", "proxy"])
def test_recovery_of_both_paths(transport: str) -> None:
    """A layer with decode_tokens= has two AllToAlls. One comm.reset() recovers both."""
    where = {"transport": transport, **({"provider": "tcp"} if transport == "proxy" else {})}
    case = MoECase(seed(), 3, tokens=(8, 8, 8), all_to_all=where)
    with Crew(3) as crew:
        crew.start("moe_cases:recovery", case, 8, 2)
        assert crew.collect(60, [0, 1]) == [[2], [2]]


@pytest.mark.parametrize(
    ("precision", "decode_tokens", "limit"), [("bf16", 24, BF16), ("bf16", 64, BF16), ("fp8", 24, FP8), ("mxfp8", 24, FP8)]
)
def test_decoding(precision: str, decode_tokens: int, limit: float) -> None:
    """Few tokens take a path of their own, if all ranks know that they are few. Also where that is all there is."""
    sizes = {"hidden": 256, "intermediate": 192, "num_experts": 7, "top_k": 3, "shared": 0}
    case = MoECase(seed(), 2, "zipf", precision, None, "bfloat16", **sizes)
    for found in run_ranks(2, "moe_cases:decoding", case, decode_tokens):
        assert max(found["errors"].values()) < limit, found
        assert found["steps"] == ([2, 2] if decode_tokens == 24 else [4, 4]), found


@two_ranks
def test_too_few_rows(crew: Crews) -> None:
    """Rows that do not fit raise at the next call, on every rank."""
    for said in crew.run("moe_cases:too_few_rows", MoECase(seed(), crew.world_size, "hot", in_flight=4)):
        assert "max_rows" in said, said


def test_bias_follows_the_load_of_all_ranks(crew: Crews) -> None:
    case = MoECase(seed(), crew.world_size, "zipf", losses=(0.0, 0.0))
    world = make_world(case)
    wanted = [0.0] * case.num_experts
    for x in world.x:
        for chosen in run(case, world.parameters, x)[2]:
            for expert in chosen:
                wanted[expert] += 1
    mean = sum(wanted) / len(wanted)
    steps = [0.25 if load < mean else -0.25 if load > mean else 0.0 for load in wanted]
    answers = crew.run("moe_cases:load_and_bias", case)
    assert [sum(loads) for loads in zip(*(answer["load"] for answer in answers), strict=True)] == wanted
    for answer in answers:
        assert answer["bias"] == pytest.approx(steps, abs=1e-6) and not any(answer["after"])


@two_ranks
def test_codes_that_become_subnormal_are_counted(crew: Crews) -> None:
    case = MoECase(seed(), crew.world_size, precision="mxfp8", dtype="bfloat16", hidden=512, num_experts=8, top_k=4)
    assert sum(crew.run("moe_cases:subnormal_codes", case)) > 0
