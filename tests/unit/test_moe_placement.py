"""Where experts are, and slices of them."""

from __future__ import annotations

import pytest
import torch

import pplx_comm as pc
from pplx_comm.moe.placement import Placement


@pytest.mark.parametrize(("experts", "ranks", "slices"), [(6, 4, 1), (5, 4, 2), (8, 4, 4), (3, 8, 2), (1, 2, 2)])
def test_each_slice_is_where_its_expert_is(experts: int, ranks: int, slices: int) -> None:
    places = [Placement(experts, ranks, rank, slices) for rank in range(ranks)]
    ids, weights = torch.arange(experts)[:, None], torch.rand(experts, 1)
    targets, each = places[0].targets(ids, weights)
    share = -(-places[0].num_targets // ranks)  # as an AllToAll has them
    assert targets.shape == (experts, slices) and torch.equal(each, weights.expand(experts, slices))
    for expert, of_expert in enumerate(targets.tolist()):
        for number, target in enumerate(of_expert):
            there = places[target // share]
            assert there.slice == number % slices and there.experts[target % share] == expert
    assert sum(len(place.experts) for place in places) == experts * slices


def test_dropped_choices_stay_dropped() -> None:
    targets, weights = Placement(4, 4, 0, 2).targets(torch.tensor([[3, -1]]), torch.tensor([[0.25, 0.75]]))
    assert targets.tolist() == [[5, 7, -1, -1]] and weights.tolist() == [[0.25, 0.25, 0.75, 0.75]]


def test_placements_that_are_impossible() -> None:
    with pytest.raises(pc.Error, match="expert_tp=3"):
        Placement(6, 4, 0, 3)
    with pytest.raises(pc.Error, match="at most 16"):
        Placement(64, 4, 0, 4).top_k(8)
