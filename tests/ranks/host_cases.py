"""The host path of device="cuda" up to its launches, on CPU tensors: what would be launched, and what is refused."""

from __future__ import annotations

from typing import Any

import torch
from graph_cases import apart
from outcomes import raised
from torch.overrides import TorchFunctionMode

import pplx_comm as pc
from bench.host import NoLaunches, allocations, without_launches

TOKENS, HIDDEN, TOP_K = 8, 64, 2


class Recorded(NoLaunches):
    """Keeps the arguments of the last launches."""

    def dispatch(self, launch: Any, tokens: Any, outputs: Any = None) -> int:
        self.dispatched = {
            **self._launched(launch), "tokens": tokens.count, "x": tokens.x, "stride": tokens.stride, "ids": tokens.ids,
            "wide": tokens.wide_ids, "weights": tokens.weights, "scales": tokens.scales, "scale_row": tokens.scale_row_stride,
            "scale": tokens.scale_stride, "rows_x": outputs.x if outputs else 0, "rows_scales": outputs.scales if outputs else 0,
            "rows_weights": outputs.weights if outputs else 0,
        }  # fmt: skip
        return 1

    def combine(self, launch: Any, outputs: Any, result: Any) -> None:
        self.combined = {
            **self._launched(launch), "tokens": result.tokens, "rows": outputs.expert_out, "stride": outputs.stride,
            "count": outputs.rows, "weighted": outputs.weighted, "late": outputs.uses_weights, "weights": outputs.weights,
            "has_tail": result.has_tail, "tail": outputs.tail, "tail_rows": outputs.tail_rows, "y": result.y,
            "y_stride": result.stride, "accumulate": result.accumulate, "tail_out": result.tail,
        }  # fmt: skip

    @staticmethod
    def _launched(launch: Any) -> dict[str, Any]:
        return {name: getattr(launch, name) for name in ("stream", "halves", "plan", "buffer")}


def launches(me: Any, layout: str) -> None:
    kind = {"ragged": pc.Ragged(align=8), "padded": pc.Padded(), "compact": pc.Compact()}[layout]
    a2a = pc.AllToAll(me.comm, num_experts=4, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=TOKENS, layout=kind, device="cpu")
    core = Recorded()
    with without_launches(a2a, core), torch.no_grad():
        x, weights = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.rand(TOKENS, TOP_K)
        ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
        for turn in range(2):  # the second time they are known
            d = a2a.dispatch(x, ids, weights)
            seen = core.dispatched
            assert (seen["halves"], seen["tokens"], seen["stride"], seen["wide"]) == (3, TOKENS, 2 * HIDDEN, True), turn
            assert [seen[name] for name in ("x", "ids", "weights")] == [t.data_ptr() for t in (x, ids, weights)]
            assert seen["plan"] == d.plan.buffer.data_ptr() and seen["buffer"] == d.buffer.data_ptr() != seen["plan"]
            rows = torch.zeros(d.x.shape, dtype=torch.bfloat16)
            y = a2a.combine(rows, d)
            done = core.combined
            assert (done["rows"], done["stride"], done["count"]) == (rows.data_ptr(), 2 * HIDDEN, rows.numel() // HIDDEN)
            assert (done["y"], done["y_stride"], done["accumulate"]) == (y.data_ptr(), 2 * HIDDEN, False)
            assert (done["plan"], done["buffer"], done["weighted"]) == (seen["plan"], seen["buffer"], True)
            assert (done["has_tail"], done["tail"], done["tail_out"]) == (False, 0, 0)
        _allocations(a2a, x, ids, weights, rows)
        _unseen(a2a, x, ids, weights, rows)
        _tailed(a2a, core, a2a.dispatch(x, ids, weights), rows)
        _as_operators(a2a, core, x, ids, weights)
        _with_gradients(a2a, core, x, ids, weights)
        if layout == "ragged":
            _others(a2a, core, x, ids, weights)
        _refused(a2a, x, ids, weights)
    a2a.close()
    for scale_layout in ("row", "tma"):
        quantised = pc.AllToAll(
            me.comm, num_experts=4, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=TOKENS, layout=kind, wire="fp8",
            scale_layout=scale_layout, device="cpu",
        )  # fmt: skip
        with quantised, without_launches(quantised, core), torch.no_grad():
            _as_operators(quantised, core, x, ids, weights)
            _scaled(quantised, core, x, ids, weights)


def _allocations(a2a: pc.AllToAll, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> None:
    """One for all that a dispatch leaves, one for what a combine returns, and none where `out` is given."""
    out, handles = torch.zeros(TOKENS, HIDDEN, dtype=x.dtype), list[pc.Dispatched]()
    assert allocations(lambda: handles.append(a2a.dispatch(x, ids, weights))) == 1
    assert allocations(lambda: a2a.combine(rows, handles[0])) == 1
    assert allocations(lambda: handles.append(a2a.dispatch(x, plan=handles[0].plan))) == 1
    assert allocations(lambda: a2a.combine(rows, handles[1], out=out)) == 0


class Seen(TorchFunctionMode):
    functions: list[Any]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


def _unseen(a2a: pc.AllToAll, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> None:
    """Modes of torch, of which a default device is one, see nothing of a pair of calls: they take 2 us a function."""
    with Seen() as mode:
        mode.functions = []
        d = a2a.dispatch(x, ids, weights)
        _ = d.x, d.counts
        a2a.combine(rows, d)
    assert mode.functions == []


def _scaled(a2a: pc.AllToAll, core: Recorded, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Scales may have any strides, also when rows like these were seen with others, and are checked when rows like these were seen."""
    codes = x.to(torch.float8_e4m3fn)
    for columns in (1, 3, 2):
        scales = torch.ones(TOKENS, columns)[:, :1]
        a2a.dispatch(codes, ids, weights, x_scale=scales).used = True
        seen = core.dispatched
        assert (seen["x"], seen["stride"], seen["weights"]) == (codes.data_ptr(), HIDDEN, weights.data_ptr())
        assert (seen["scales"], seen["scale_row"], seen["scale"]) == (scales.data_ptr(), 4 * columns, 4)
    wrong: list[tuple[Any, Any, str]] = [
        (codes, torch.ones(TOKENS, 2), "x_scale has shape"),
        (codes, torch.ones(TOKENS, 1).double(), "x_scale is torch.float64"),
        (codes, torch.ones(TOKENS, 1, device="meta"), "x_scale is on meta"),
        (codes, [1.0], "x_scale must be a tensor"),
        (codes, None, "goes with x_scale="),
        (x, torch.ones(TOKENS, 1), "x is torch.bfloat16"),
    ]
    for rows, scale, says in wrong:
        problem = raised(lambda rows=rows, scale=scale: a2a.dispatch(rows, ids, weights, x_scale=scale))
        assert problem.get("is_error") and says in problem["message"], (says, problem)


def _tailed(a2a: pc.AllToAll, core: Recorded, d: pc.Dispatched, rows: torch.Tensor) -> None:
    numbers = d.topk_weights if d.weights is None else d.weights
    assert numbers is not None
    tail = torch.zeros(numbers.shape)
    y, back = a2a.combine(rows, d, weighted=False, tail=tail)
    done = core.combined
    assert (done["weighted"], done["has_tail"], done["tail"]) == (False, True, tail.data_ptr())
    assert (done["tail_rows"], done["y"], done["tail_out"]) == (rows.numel() // HIDDEN, y.data_ptr(), back.data_ptr())
    assert back.shape == (TOKENS, TOP_K)


def _as_operators(a2a: pc.AllToAll, core: Recorded, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Their outputs share no memory: a launch is told where each is."""
    ops, spec = torch.ops.pplx_comm, a2a._graph.spec
    outputs = ops.dispatch(spec, x, ids, weights, None, None, True, False)
    rows, scale, row_weights, ticket, plan = outputs
    seen = core.dispatched
    assert apart(outputs) and (scale.numel() > 0) == a2a.wire.quantised
    assert [seen[name] for name in ("rows_x", "rows_scales", "rows_weights", "buffer", "plan")] == [
        t.data_ptr() for t in (rows, scale, row_weights, ticket, plan)
    ]
    assert not rows.view(torch.uint8).any() and not row_weights.any()
    d = a2a._steps.dispatch(3, (x, ids, weights, None, None))
    assert (core.dispatched["rows_x"], core.dispatched["rows_weights"]) == (0, 0)
    assert a2a._steps.device.as_tensors(d)[3].shape == ticket.shape  # that of a dispatch which was no operator
    expert_out = torch.zeros(rows.shape, dtype=torch.bfloat16)
    ops.combine(spec, expert_out, row_weights, ticket, plan, len(x), None, True, None, None)
    assert core.combined["buffer"] == seen["buffer"]


def _with_gradients(a2a: pc.AllToAll, core: Recorded, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Autograd launches the same, its backward pass a dispatch on the plan and a combine with a tail. A reset() ends what was begun."""
    leaf, leaf_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()

    def forward() -> torch.Tensor:
        d = a2a.dispatch(leaf, ids, leaf_weights)
        y = a2a.combine(torch.zeros(d.x.shape, dtype=x.dtype) + 0 * d.x, d)
        assert isinstance(y, torch.Tensor)
        return y

    with torch.enable_grad():
        y = forward()
        forth = core.dispatched
        y.sum().backward()
        back, done = core.dispatched, core.combined
        assert (back["ids"], back["plan"]) == (0, forth["plan"]) and forth["ids"] != 0
        assert (done["weighted"], done["has_tail"], done["buffer"]) == (False, True, back["buffer"]) and done["tail_out"] != 0
        # Tensors beside a plan may change while the backward pass needs it.
        plain = a2a.dispatch(x, ids, weights)
        d = a2a.dispatch(leaf, plan=plain.plan)
        plain.counts.zero_()
        y = a2a.combine(torch.zeros(d.x.shape, dtype=x.dtype) + 0 * d.x, d)
        assert isinstance(y, torch.Tensor)
        y.sum().backward()
        y = forward()
        open_d, plain = a2a.dispatch(leaf, ids, leaf_weights), a2a.dispatch(x, ids, weights)
        core.generation = 2
        a2a._graph.renew()
        for wrong in (
            lambda: y.sum().backward(),
            lambda: a2a.combine(open_d.x, open_d),
            lambda: a2a.combine(plain.x.detach(), plain),
            lambda: a2a.combine(open_d.x, plain),
            lambda: open_d.release(),
            lambda: plain.release(),
            lambda: a2a.dispatch(leaf, plan=open_d.plan),
            lambda: a2a.dispatch(x, plan=plain.plan),
            lambda: a2a.dispatch(leaf, plan=plain.plan),
        ):
            problem = raised(wrong)
            assert problem.get("is_error") and "before reset()" in problem["message"], problem
        forward().sum().backward()
    core.generation = 1
    a2a._graph.renew()


def _others(a2a: pc.AllToAll, core: Recorded, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    def given(*arguments: Any, **options: Any) -> dict[str, Any]:
        d = a2a.dispatch(*arguments, **options)
        d.used = True
        return {**core.dispatched, "d": d}

    assert given(x, ids.int())["wide"] is False
    assert given(x, ids)["weights"] == 0
    # Rows apart, rows that start where no vector may, ids by column: copied where kernels cannot take them.
    apart = torch.zeros(TOKENS, 2 * HIDDEN, dtype=torch.bfloat16)[:, :HIDDEN]
    for _ in range(2):
        assert given(apart, ids)["x"] == apart.data_ptr() and core.dispatched["stride"] == 4 * HIDDEN
        odd = torch.zeros(TOKENS * HIDDEN + 1, dtype=torch.bfloat16)[1:].view(TOKENS, HIDDEN)
        assert given(odd, ids)["x"] not in (0, odd.data_ptr()) and core.dispatched["x"] % 16 == 0
        by_column = torch.zeros(TOP_K, TOKENS, dtype=torch.int64).t()
        assert given(x, by_column)["ids"] != by_column.data_ptr()
    # A plan, and its weights, which the kernel would have written: at their place in it.
    first = given(x, ids, weights)["d"]
    again = given(x, plan=first.plan)
    at = first.plan.buffer.data_ptr() + a2a._steps.device.plan_layout.weights
    assert (again["ids"], again["plan"], again["weights"]) == (0, first.plan.buffer.data_ptr(), at)
    assert given(x, plan=given(x, ids)["d"].plan)["weights"] == 0
    other = given(x, None, weights + 1, plan=first.plan)
    assert other["weights"] not in (0, at, weights.data_ptr()) and torch.equal(other["d"].plan.topk_weights, weights + 1)
    # No tokens are tokens, too.
    nothing = given(x[:0], ids[:0], weights[:0])
    assert nothing["tokens"] == 0 and nothing["ids"] != 0


def _refused(a2a: pc.AllToAll, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    many = torch.zeros(TOKENS + 1, HIDDEN, dtype=torch.bfloat16)
    d = a2a.dispatch(x, ids, weights)
    rows = torch.zeros(d.x.shape, dtype=torch.bfloat16)
    wrong: list[tuple[Any, str]] = [
        (lambda: a2a.dispatch(x), "give topk_ids"),
        (lambda: a2a.dispatch([1], ids), "x must be a tensor"),
        (lambda: a2a.dispatch(x, [1]), "topk_ids must be int32 or int64"),
        (lambda: a2a.dispatch(x, ids, [1]), "topk_weights must be a float32 tensor"),
        (lambda: a2a.dispatch(x.float(), ids), "torch.float32"),
        (lambda: a2a.dispatch(x[:, :32], ids), "has shape"),
        (lambda: a2a.dispatch(many, ids), "more than max_tokens_per_rank"),
        (lambda: a2a.dispatch(x, ids[:-1]), "topk_ids has shape"),
        (lambda: a2a.dispatch(x, ids.float()), "topk_ids must be int32 or int64"),
        (lambda: a2a.dispatch(x, ids, weights.double()), "float32"),
        (lambda: a2a.dispatch(x.to("meta"), ids), "is on meta"),
        (lambda: a2a.dispatch(x, ids.to("meta")), "is on meta"),
        (lambda: a2a.dispatch(x.t().contiguous().t(), ids), "contiguous in its last dimension"),
        (lambda: a2a.combine(None, d), "expert_out must be a tensor"),
        (lambda: a2a.combine(rows.float(), d), "must be torch.bfloat16"),
        (lambda: a2a.combine(rows[..., :32], d), "has shape"),
        (lambda: a2a.combine(rows.to("meta"), d), "is on meta"),
        (lambda: a2a.combine(rows, d, accumulate=True), "needs out="),
        (lambda: a2a.combine(rows, d, out=x[:-1]), "out has shape"),
        (lambda: a2a.combine(rows, d, weights=weights, weighted=False), "contradict"),
        (lambda: a2a.combine(rows, d, tail=[1.0]), "tail must be a float32 tensor"),
        (lambda: a2a.combine(rows, d, tail=torch.zeros(1, 1, 1)), "tail has shape"),
    ]
    for call, says in wrong:
        problem = raised(call)
        assert problem.get("is_error") and says in problem["message"], (says, problem)
    a2a.combine(rows, d)
    assert "combined once" in raised(lambda: a2a.combine(rows, d))["message"]
