"""compat.deep_ep: DeepEP's V1 Buffer over this library, by what its documentation promises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gloo import GlooCrews
from harness import Crew, Crews, seed

from pplx_comm import AllToAll, Compact
from pplx_comm.compat.deep_ep import Config
from pplx_comm.compat.shared import IN_FLIGHT

LAYER = {"hidden": 1024, "experts": 8, "top_k": 3}
TOKENS = [5, 0, 9, 3]
ENV = {"PPLX_COMM_COMPAT_MAX_TOKENS": "64", "PPLX_COMM_COMPAT_TIMEOUT": "20"}


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crews]:
    with GlooCrews(4, tmp_path_factory.mktemp, ENV) as crews:
        yield crews


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crews]:
    with GlooCrews(4, tmp_path_factory.mktemp, ENV | {"PPLX_COMM_COMPAT_NODE_SIZE": "2", "PPLX_COMM_PROVIDER": "tcp"}) as crews:
        yield crews


@pytest.mark.parametrize("how", ["whole", "async", "hook"])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "powers", "packed"])
def test_low_latency(crew: Crews, kind: str, how: str) -> None:
    crew.run("deep_ep_cases:low_latency", seed(), LAYER, TOKENS, 9, kind, how)


def test_low_latency_of_two_nodes(two_nodes: Crews) -> None:
    two_nodes.run("deep_ep_cases:low_latency", seed(), LAYER, TOKENS, 9, "fp8", "hook")


def test_more_dispatches_than_are_held(crew: Crews) -> None:
    crew.run("deep_ep_cases:many_open", seed(), LAYER, TOKENS, 9)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("with_top_k", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_normal(crew: Crews, kind: str, with_top_k: bool, asynchronous: bool) -> None:
    crew.run("deep_ep_cases:normal", seed(), LAYER, TOKENS, 1, kind, with_top_k, asynchronous)


@pytest.mark.parametrize("with_top_k", [False, True])
def test_normal_of_two_nodes(two_nodes: Crews, with_top_k: bool) -> None:
    two_nodes.run("deep_ep_cases:normal", seed(), LAYER, TOKENS, 2, "bf16", with_top_k, False)


def test_backward_passes(crew: Crews) -> None:
    crew.run("deep_ep_cases:backward", seed(), LAYER, TOKENS)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_layout_behind_an_event(crew: Crews, asynchronous: bool) -> None:
    crew.run("deep_ep_cases:layout_behind_an_event", seed(), LAYER, TOKENS, asynchronous)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("top_k", [1, 8, 16])
@pytest.mark.parametrize("hidden", [64, 2048, 7168])
def test_blocks_of_the_size_hint_are_whole(hidden: int, top_k: int, device: str) -> None:
    """A set of slots is as large with the bytes that a Buffer of that size gives as without a limit."""
    given = Config().get_nvl_buffer_size_hint(2 * hidden, 8) // IN_FLIGHT
    shape: dict[str, Any] = {
        "world_size": 8, "num_experts": 256, "top_k": top_k, "hidden": hidden, "max_tokens_per_rank": 4096, "layout": Compact(),
        "device": device,
    }  # fmt: skip
    assert AllToAll.required_bytes(**shape, slot_bytes=given) == AllToAll.required_bytes(**shape)


def test_blocks_in_pieces(crew: Crews) -> None:
    crew.run("deep_ep_cases:in_pieces", seed(), LAYER, TOKENS)


def test_closed_all_to_alls(crew: Crews) -> None:
    crew.run("deep_ep_cases:closed_lanes", seed(), LAYER, TOKENS)


def test_dispatches_that_a_capture_cannot_have(crew: Crews) -> None:
    for closing, counting in crew.run("deep_ep_cases:captured"):
        assert "before this CUDA graph's capture" in closing and "num_worst_tokens=" in counting


def test_more_shapes_than_a_communicator_has_all_to_alls(crew: Crews) -> None:
    assert crew.run("deep_ep_cases:many_shapes", seed()) == [(8, True)] * 4


def test_a_buffer_that_nothing_refers_to(crew: Crews) -> None:
    assert crew.run("deep_ep_cases:dropped") == [[True, False]] * 4


def test_the_provider_is_logged_once(crew: Crews) -> None:
    first, *others = crew.run("deep_ep_cases:logged")
    assert len(first) == 1 and "provided by pplx_comm" in first[0] and others == [[]] * 3


REFUSALS = {
    "shrink": r"Buffer: pplx_comm does not support enable_shrink=True: .*PeerError",
    "no group": "give group=",
    "nvfp4": r"use_nvfp4=: use use_fp8=True",
    "ue8m0 alone": "needs use_fp8=True and round_scale=True",
    "packed": "multiple of 512",
    "uneven layout": "get_dispatch_layout: num_experts=9 must be a multiple of the 4 ranks",
    "few experts": "get_dispatch_layout: num_experts=3 must be a multiple of the 4 ranks",
    "async and hook": "not both",
    "uneven": "num_experts=9 must be a multiple of the 4 ranks",
    "logfmt": "use_logfmt=True: leave it out",
    "overlap": "--enable-single-batch-overlap",
    "zero copy": "get_next_low_latency_combine_buffer",
    "mask": "mask=True: end that rank",
    "memory": "get_local_buffer_tensor: pplx_comm does not support access",
    "no layout": "get_dispatch_layout",
    "scales": "scales of torch.int32: pass float32",
    "no wait": "without async_finish=True",
}


def test_refusals(crew: Crews) -> None:
    for told in crew.run("deep_ep_cases:refusals"):
        assert told.keys() == REFUSALS.keys()
        wrong = {name: said for name, said in told.items() if not re.search(REFUSALS[name], said)}
        assert not wrong


def test_more_tokens_than_there_is_room_for(crew: Crews) -> None:
    """All ranks hear of it at once."""
    for rank, told in enumerate(crew.run("deep_ep_cases:too_many")):
        if rank == 1:
            assert "rank 1 has 70 tokens" in told["message"] and "PPLX_COMM_COMPAT_MAX_TOKENS" in told["message"]
        else:
            assert told["is_peer"] and "rank 1" in told["message"], told


def test_a_death(tmp_path: Path) -> None:
    with Crew(3, ENV) as crew:
        crew.run("gloo:start", str(tmp_path / "store"))
        crew.start("deep_ep_cases:a_death", 1)
        crew.all_heard("ready")
        crew.kill(1)
        assert crew.collect(ranks=[0, 2]) == [[0, 1, 0]] * 2
