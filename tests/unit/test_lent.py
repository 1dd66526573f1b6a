"""An AllToAll lends memory of its own to a dispatch: which, and when again."""

from __future__ import annotations

import torch

from pplx_comm.device.lent import Lender, Lent


def buffers(count: int) -> list[Lent]:
    return [Lent(torch.zeros(4, 8)) for _ in range(count)]


def dispatch(lender: Lender, stream: int = 0, capturing: bool = False) -> Lent | None:
    buffer = lender.lend(stream, capturing)
    lender.dispatches += 1
    return buffer


def test_a_tensor_or_a_view_of_it_keeps_the_memory() -> None:
    lender = Lender(buffers(1), 1)
    buffer = dispatch(lender)
    assert buffer is not None
    expert_out = buffer.tensor()
    row = expert_out[1:2]
    assert dispatch(lender) is None
    del expert_out
    assert dispatch(lender) is None
    leaf = torch.ones(8, requires_grad=True)
    product = (row * leaf).sum()
    del row
    assert dispatch(lender) is None  # the graph of gradients has it
    product.backward()
    del product
    assert dispatch(lender) is buffer


def test_the_least_recently_lent_is_lent_next() -> None:
    lender = Lender(buffers(3), 1)
    first = [dispatch(lender) for _ in range(3)]
    assert None not in first
    assert [dispatch(lender) for _ in range(3)] == first


def test_not_again_while_peers_may_fetch() -> None:
    lender = Lender(buffers(1), 3)
    buffer = dispatch(lender)
    assert buffer is not None
    assert [dispatch(lender) for _ in range(4)] == [None, None, buffer, None]
    lender.dispatches += 2  # those that were lent nothing count
    assert dispatch(lender) is buffer


def test_a_dispatch_that_was_not_launched_does_not_count() -> None:
    lender = Lender(buffers(1), 2)
    buffer = lender.lend(0, False)
    assert buffer is not None
    assert [dispatch(lender) for _ in range(3)] == [None, None, buffer]


def test_each_stream_has_its_own() -> None:
    lender = Lender(buffers(2), 1)
    one, two = dispatch(lender, 1), dispatch(lender, 2)
    assert one is not None
    assert two is not None
    assert one is not two
    assert [dispatch(lender, stream) for stream in (2, 1, 3)] == [two, one, None]


def test_a_graph_keeps_what_it_was_captured_with() -> None:
    lender = Lender(buffers(2), 1)
    eager, captured = dispatch(lender, 1), dispatch(lender, 2, True)
    assert eager is not None
    assert captured is not None
    assert [dispatch(lender, 2) for _ in range(2)] == [None, None]  # the second buffer is stream 1's
    assert dispatch(lender, 1) is eager
    assert dispatch(lender, 2, True) is captured
