"""The model of fabrics that cannot be run here: each mechanism by hand, its limits, and that it meets what was published."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

m = pytest.importorskip("bench.model._model", reason="built in a checkout only")

from bench.model import fabrics, kernels, predict, published  # noqa: E402
from bench.model.__main__ import main  # noqa: E402

SEED = int(os.environ.get("PPLX_SEED", "1"))
EFA = fabrics.FABRICS["efa-p5en"]
CX7 = fabrics.FABRICS["cx7"]
NO_KERNELS = kernels.Kernels("none", "a test", 0.0, 0.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def seed() -> None:
    print(f"seed {SEED} (again with PPLX_SEED={SEED})")


def fabric(**changed: float) -> Any:
    """100 bytes/us, 10 us there, 4 us back, and nothing else costs anything."""
    f = m.FabricCosts()
    f.nics, f.bytes_per_us, f.latency_us, f.ack_us, f.nic_message_us = 1, 100.0, 10.0, 4.0, 0.0
    f.post_us = f.completion_us = f.poll_us = 0.0
    f.chunk_bytes = 100
    for name, value in changed.items():
        setattr(f, name, value)
    return f


@pytest.mark.parametrize(
    ("changed", "ranks", "writes", "landed"),
    [
        # 1000 bytes: 10 us on the link and 10 us of latency; links are cut through, so the far one adds nothing.
        ({}, 2, [(5.0, 0, 1, 0, 1000)], [25.0]),
        ({}, 2, [(0.0, 0, 1, 0, 0)], [10.0]),
        # Two messages to two ranks: chunk by chunk, so both need the link until nearly the end; or one after the other.
        ({}, 3, [(0.0, 0, 1, 0, 1000), (0.0, 0, 2, 0, 1000)], [29.0, 30.0]),
        ({"interleave": 1}, 3, [(0.0, 0, 1, 0, 1000), (0.0, 0, 2, 0, 1000)], [20.0, 30.0]),
        # Four sources with links of their own, one target: 4000 bytes through one link.
        ({}, 5, [(0.0, source, 4, 0, 1000) for source in range(4)], [47.0, 48.0, 49.0, 50.0]),
        # NICs are links of their own, and start, or take in, one message at a time.
        ({"nics": 2}, 2, [(0.0, 0, 1, 0, 1000), (0.0, 0, 1, 1, 1000)], [20.0, 20.0]),
        ({"nic_message_us": 3.0}, 4, [(0.0, 0, target, 0, 0) for target in (1, 2, 3)], [10.0, 13.0, 16.0]),
        ({"nic_message_us": 3.0}, 4, [(0.0, source, 3, 0, 0) for source in (0, 1, 2)], [10.0, 13.0, 16.0]),
    ],
)
def test_bare_writes(
    changed: dict[str, float], ranks: int, writes: list[tuple[float, int, int, int, int]], landed: list[float]
) -> None:
    """A write is (at, source, target, nic, bytes); it is acknowledged 4 us after it has landed."""
    found = m.bare_writes(fabric(**changed), ranks, writes)
    assert sorted(at for at, _ in found) == pytest.approx(landed)
    assert changed or [back - at for at, back in found] == pytest.approx([4.0] * len(found))


def test_posts_completions_and_full_queues_take_host_time() -> None:
    """The last one's completion is read after the way there and back. Two writes, room for one: the second waits for the first."""
    assert m.paged_writes_us(fabric(post_us=2.0, completion_us=0.5), 1.0, 0, 3) == pytest.approx(1 + 3 * 2 + 10 + 4 + 0.5)
    assert m.paged_writes_us(fabric(post_us=2.0, poll_us=0.25), 1.0, 0, 1) == pytest.approx(1 + 2 + 10 + 4 + 0.25)
    assert m.paged_writes_us(fabric(depth=1), 0.0, 0, 2) == pytest.approx(2 * (10 + 4))
    assert m.paged_writes_us(fabric(depth=2), 0.0, 0, 2) == pytest.approx(10 + 4)


def tiny_costs() -> Any:
    costs = m.OurCosts()
    costs.dispatch_send = costs.combine_send = m.KernelTime(3.0, 0.0)
    costs.dispatch_recv = costs.combine_recv = m.KernelTime(2.0, 0.0)
    costs.mailbox_us, costs.arrival_us, costs.mapped_us = 1.0, 0.5, 0.25
    costs.block_us = costs.word_us = 0.0
    return costs


def two_ranks(tokens: int, node_size: int) -> Any:
    s = predict.shape(2, tokens, experts=2)
    s.node_size, s.top_k, s.hidden = node_size, 2, 128  # every token goes to both ranks
    return s


def test_two_ranks_by_hand() -> None:
    """Send 3, mailbox 1, post 2, its bytes, latency 10, completion 0.5, arrival 0.5, receive 2."""
    s = two_ranks(tokens=5, node_size=1)
    header = 128  # with one expert's count, in units of 64
    row = 176  # 128 of payload, a scale in 16, a route of 8 + 2 * 8, an arrival word of 8
    dispatch, combine = m.run_ours(s, fabric(post_us=2.0, completion_us=0.5), tiny_costs(), SEED)
    around = 3 + 1 + 2 + 10 + 0.5 + 0.5 + 2
    assert dispatch.bytes_posted == 2 * (header + 5 * row)
    assert dispatch.finished == [pytest.approx(around + (header + 5 * row) / 100)] * 2
    back = 64 + 5 * 288  # 256 of payload, a tail of 2 * 4 and an arrival word of 8, up to a multiple of 32
    assert combine.bytes_posted == 2 * back
    assert combine.finished == [pytest.approx(around + back / 100)] * 2


def test_parts_by_hand() -> None:
    """Five rows in parts of 2, 2 and 1 (a row is 176 bytes): each is posted when its rows are stored, and received when it is there."""
    s, costs = two_ranks(tokens=5, node_size=1), tiny_costs()
    costs.dispatch_send = m.KernelTime(3.0, 11.0)  # a row; of five tokens, each for both
    costs.part_bytes = 400
    dispatch, _ = m.run_ours(s, fabric(post_us=2.0, completion_us=0.5), costs, SEED)
    assert dispatch.writes == 2 * 3 and dispatch.bytes_posted == 2 * (128 + 5 * 176)
    last_stored = 3 + 10 * 11
    assert dispatch.finished == [pytest.approx(last_stored + 1 + 2 + 176 / 100 + 10 + 0.5 + 0.5 + 2)] * 2
    costs.part_bytes = 0
    whole, _ = m.run_ours(s, fabric(post_us=2.0, completion_us=0.5), costs, SEED)
    assert whole.writes == 2
    assert whole.finished == [pytest.approx(last_stored + 1 + 2 + (128 + 5 * 176) / 100 + 10 + 0.5 + 0.5 + 2)] * 2


def test_one_node_needs_no_network() -> None:
    dispatch, combine = m.run_ours(two_ranks(tokens=5, node_size=2), fabric(), tiny_costs(), SEED)
    for operation in (dispatch, combine):
        assert operation.writes == operation.bytes_posted == 0
        assert operation.finished == [pytest.approx(3 + 0.25 + 2)] * 2


def rows_costs(fixed: float, row: float) -> Any:
    costs = m.RowsCosts()
    costs.dispatch = costs.combine = m.KernelTime(fixed, row)
    costs.gpu_post_us, costs.signal_us = 1.0, 0.5
    return costs


def test_rows_that_gpus_post_by_hand() -> None:
    """Half of 6 us, the post 1, rows and a count on the link, latency 10, the signal 0.5, the other half."""
    s = two_ranks(tokens=5, node_size=1)
    dispatch, combine = m.run_rows(s, fabric(), rows_costs(6.0, 0.0), SEED)
    row, back, count = 128 + 4 + 16, 256, 8  # codes, a scale and a header; bfloat16
    assert (dispatch.writes, combine.writes) == (2 * (5 + 1), 2 * (5 + 1))
    assert dispatch.bytes_posted == dispatch.bytes_landed == 2 * (5 * row + count)
    around = 3 + 1 + 10 + 0.5 + 3
    assert dispatch.finished == [pytest.approx(around + (5 * row + count) / 100)] * 2
    assert combine.finished == [pytest.approx(around + (5 * back + count) / 100)] * 2


@pytest.mark.parametrize("name", sorted(fabrics.FABRICS))
def test_bytes_in_are_bytes_out(name: str) -> None:
    s, costs = predict.shape(16, 128), fabrics.FABRICS[name].costs()
    operations = m.run_ours(s, costs, tiny_costs(), SEED)
    for operation, expected in zip(operations, m.bytes_between_nodes(s, SEED), strict=True):
        assert operation.bytes_posted == operation.bytes_landed == expected
    for operation in (*m.run_garden(s, costs, m.GardenCosts(), SEED), *m.run_rows(s, costs, rows_costs(10.0, 0.01), SEED)):
        assert operation.bytes_posted == operation.bytes_landed


def test_refused_posts_are_repeated() -> None:
    """A queue of four writes a NIC: posts are refused, and everything arrives all the same, later."""
    s = predict.shape(64, 128)
    f = EFA.costs({"depth": 4})
    few, many = m.run_ours(s, f, tiny_costs(), SEED)[0], m.run_ours(s, EFA.costs(), tiny_costs(), SEED)[0]
    assert few.again > 0 == many.again
    assert few.writes == many.writes
    assert max(few.finished) > max(many.finished)


def test_same_seed_same_times_and_more_takes_longer() -> None:
    s = predict.shape(32, 128)
    assert predict.ours(EFA, s, seed=SEED) == predict.ours(EFA, s, seed=SEED) != predict.ours(EFA, s, seed=SEED + 1)
    sizes = [(ranks, 128) for ranks in (8, 16, 32, 64)], [(32, tokens) for tokens in (1, 32, 512, 2048)]
    for points in sizes:
        for operation in zip(*(predict.ours(CX7, predict.shape(*size), seed=SEED) for size in points), strict=True):
            times = [p.median_us for p in operation]
            assert times == sorted(set(times)), times


def test_what_binds() -> None:
    """Many bytes: bandwidth, never less and not much more. Few bytes: latency. Many peers: posts."""
    for operation in predict.ours(CX7, predict.shape(16, 4096), kernels=NO_KERNELS, seed=SEED):
        assert operation.wire_us < operation.slowest_us < 1.08 * operation.wire_us
    fast = {"gbit_per_nic": 1e6, "post_us": 0.0, "nic_message_us": 0.0, "completion_us": 0.0, "poll_us": 0.0, "latency_us": 50.0}
    dispatch, _ = predict.ours(EFA, predict.shape(16, 1), kernels=NO_KERNELS, seed=SEED, changed=fast)
    assert 50 < dispatch.slowest_us < 55
    dispatch, _ = predict.ours(EFA, predict.shape(256, 1), kernels=NO_KERNELS, seed=SEED, changed={"post_us": 2.0})
    assert dispatch.posted_us == pytest.approx(248 * 2.0, rel=0.05) and dispatch.slowest_us > dispatch.posted_us


def test_the_replay_writes_what_its_protocol_says() -> None:
    """Routes and a barrier to all 63, private buffers to 56; what overflows them and the combine, by both NICs, to 56."""
    dispatch, combine = predict.garden(EFA, predict.shape(64, 128), seed=SEED)
    assert dispatch.writes_per_rank == 63 + 56 + 63
    assert combine.writes_per_rank == 2 * 56 + 63
    dispatch, _ = predict.garden(EFA, predict.shape(64, 4096), seed=SEED)
    assert dispatch.writes_per_rank == 63 + 56 + 2 * 56 + 63


def test_published_figures_are_met() -> None:
    """One set of costs. The bounds are what the committed results state, not a wish. What the costs were taken from comes back."""
    for held in predict.microbenchmarks():
        chained = held.what.startswith("cx7, many writes") and "64 KiB" not in held.what
        assert abs(held.error) < (0.5 if chained else 0.1), held
    reference, decode = list(predict.reference(SEED)), list(predict.validation(published.DECODE, SEED))
    assert len(reference) == 3 and all(abs(held.error) < 0.12 for held in reference), reference
    assert len(decode) == 12 and all(abs(held.error) < 0.19 for held in decode), decode
    # 4 ranks of one node: the ends of the line, give or take the routing, and 128 tokens, which the line was not told of.
    for tokens, dispatch_us, combine_us, within in ((1, 11.4, 7.7, 0.02), (128, 22.6, 23.3, 0.16), (4096, 302.9, 473.4, 0.02)):
        for operation, microseconds in zip(
            predict.ours(EFA, predict.shape(4, tokens), seed=SEED), (dispatch_us, combine_us), strict=True
        ):
            assert operation.median_us == pytest.approx(microseconds, rel=within)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="one size"):
        m.run_ours(predict.shape(20, 1), fabric(), tiny_costs(), SEED)
    with pytest.raises(ValueError, match="more experts"):
        m.run_ours(predict.shape(2, 1, experts=4), fabric(), tiny_costs(), SEED)
    with pytest.raises(ValueError, match="NICs"):
        m.run_ours(predict.shape(16, 1), fabric(nics=17), tiny_costs(), SEED)
    with pytest.raises(ValueError, match="no such"):
        m.bare_writes(fabric(), 2, [(0.0, 0, 2, 0, 1)])
    with pytest.raises(ValueError, match="has no"):
        EFA.costs({"colour": 1.0})


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "p.json", tmp_path / "p.png"
    arguments = ["--fabrics", "efa-p5en,cx7", "--ranks", "8,16", "--tokens", "128", "--json", str(file), "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", ["model", *arguments])
    assert main() == 0 and picture.read_bytes().startswith(b"\x89PNG")
    printed, record = capsys.readouterr().out, json.loads(file.read_text())
    assert "# Predicted\n" in printed and "| cx7 | 16 | " in printed and published.PPLX_KERNELS in printed
    of = ("efa-p5en", "cx7", "cx7, by GPUs")
    assert [(p["fabric"], p["ranks"]) for p in record["points"]] == [(fabric, ranks) for ranks in (8, 16) for fabric in of]
    assert record["predicted"] and all(p["predicted"] for p in record["points"])
