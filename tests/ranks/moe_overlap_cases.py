"""A MoE layer's forward pass beside its step, and beside the same without: what ranks of test_moe_overlap.py do."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import torch
from moe_kernel_cases import patched

from pplx_comm.all_to_all import AllToAll
from pplx_comm.errors import Error, PeerError
from pplx_comm.hooks import HOOK_ROWS
from pplx_comm.layouts import Padded, Ragged
from pplx_comm.moe import functional as F
from pplx_comm.moe import grouped, quantise
from pplx_comm.moe.grouped.beside import CHUNK, Beside, words_of_scratch
from pplx_comm.moe.grouped.triton_mm import TritonGroupedMm
from pplx_comm.moe.grouped.triton_scaled import TritonScaledMm
from pplx_comm.moe.kernels.usable import INTERPRETED_PROGRAMS
from pplx_comm.moe.overlap import sms_of_step
from pplx_comm.moe.segments import Segments
from pplx_comm.wiring.config import make_config


@dataclass(frozen=True)
class OverlapCase:
    seed: int
    world_size: int
    overlap: str = "groups"
    groups: int = 3
    spread: str = "even"
    precision: str = "bf16"
    compute: str = "bf16"
    dtype: str = "bfloat16"
    layout: str = "ragged"
    align: int = 16
    hidden: int = 128
    intermediate: int = 128
    experts: int = 7
    top_k: int = 3
    most: int = 160
    """Tokens of a rank: fewer, or none, are drawn."""
    transport: str = "mapped"
    train: bool = True
    in_flight: int = 1
    steps: int = 2
    gemm: str = "auto"
    device: str = "cpu"

    @property
    def quantised(self) -> bool:
        return self.compute == "fp8"


WIRES = {"bf16": "native", "fp8": "fp8_ue8m0", "mxfp8": "mxfp8"}


def random_case(seed: int, world_size: int, **fields: Any) -> OverlapCase:
    r = random.Random(f"overlap {seed}")
    precision = r.choice(["bf16", "fp8", "mxfp8"])
    layout = r.choice(["ragged", "ragged", "padded"])
    drawn: dict[str, Any] = {
        "groups": r.choice([1, 2, 3, 8]),
        "spread": r.choice(["even", "zipf", "hot", "few"]),
        "precision": precision,
        "compute": "bf16" if precision == "bf16" else r.choice(["bf16", "fp8"]),
        "dtype": r.choice(["bfloat16", "float32", "float16"]),
        "layout": layout,
        "align": r.choice([16, 128]),
        "experts": r.choice([world_size - 1, world_size, 5, 9, 16]) or 1,
        "top_k": r.choice([1, 2, 4]),
        "most": r.choice([3, 40, 300]),
        "train": layout == "ragged" and r.random() < 0.5,
        "transport": r.choice(["mapped", "proxy:tcp"]),
    }
    drawn |= fields
    drawn["top_k"] = min(drawn["top_k"], drawn["experts"])
    return OverlapCase(seed, world_size, **drawn)


def open_all_to_all(me: Any, case: OverlapCase, overlap: bool, **more: Any) -> AllToAll:
    layout = Padded(align=case.align) if case.layout == "padded" else Ragged(case.align, zero_pad=case.train)
    more = {"timeout": 20.0, "transport": case.transport, **more}
    if overlap:
        more["num_sms"] = sms_of_step(torch.device(case.device))
    if case.transport.startswith("proxy:"):
        more |= {"transport": "proxy", "provider": case.transport.removeprefix("proxy:")}
    return AllToAll(
        me.comm, num_experts=case.experts, top_k=case.top_k, hidden=case.hidden, max_tokens_per_rank=case.most,
        dtype=getattr(torch, case.dtype), wire=WIRES[case.precision], layout=layout, in_flight=case.in_flight, hooks=overlap,
        scale_layout="tma" if case.precision == "fp8" else "row", device=case.device, **more,
    )  # fmt: skip


def drawn_inputs(me: Any, case: OverlapCase, step: int, device: torch.device, full: bool = False) -> dict[str, torch.Tensor]:
    """full: of as many tokens as there may be."""
    g = torch.Generator().manual_seed(case.seed * 1009 + 17 * step + me.rank)
    tokens = int(torch.randint(0, case.most + 1, (), generator=g)) * int(torch.rand((), generator=g) > 0.2)
    tokens = case.most if full else tokens
    e = torch.arange(case.experts)
    liked = {
        "even": torch.zeros(case.experts), "zipf": -torch.log1p(e), "hot": torch.where(e == 1, 1e4, 0.0),
        "few": torch.where(e < case.top_k, 1e4, 0.0),
    }[case.spread]  # fmt: skip
    noise = -torch.log(-torch.log(torch.rand(tokens, case.experts, generator=g)))
    ids = (noise + liked).topk(case.top_k, dim=-1).indices
    ids[torch.rand(ids.shape, generator=g) < 0.1] = -1
    inputs = {
        "x": torch.randn(tokens, case.hidden, generator=g).to(getattr(torch, case.dtype)),
        "ids": ids,
        "weights": torch.rand(tokens, case.top_k, generator=g).softmax(-1),
        "dy": torch.randn(tokens, case.hidden, generator=g).to(getattr(torch, case.dtype)),
    }
    return {name: t.to(device) for name, t in inputs.items()}


def drawn_weights(me: Any, case: OverlapCase, local: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(case.seed * 7 + me.rank)
    shapes = (local, 2 * case.intermediate, case.hidden), (local, case.hidden, case.intermediate)
    up, down = (torch.randn(*shape, generator=g) * shape[-1] ** -0.5 for shape in shapes)
    return up.to(device, getattr(torch, case.dtype)), down.to(device, getattr(torch, case.dtype))


def passed(case: OverlapCase, a2a: AllToAll, weights: Any, inputs: Any, options: F.Options, whole: bool) -> list[torch.Tensor]:
    """The output, and gradients where the case trains."""
    leaves = [t.detach().requires_grad_(case.train) for t in (inputs["x"], inputs["weights"], *weights)]
    with torch.set_grad_enabled(case.train):
        x, choice, gate_up, down = leaves
        one = F.send(a2a, x, inputs["ids"], choice, options, whole=whole)
        if whole:
            y = F.receive(one, gate_up, down, options)
        else:
            F.compute(one, gate_up, down, options)
            y = F.finish(one)
        forwards = [name for name in one.ran.products if name.startswith("forward")]
        assert one.ran.overlap == options.overlap and len(forwards) == 2, one.ran
        assert options.overlap != "signals" or {one.ran.products[name] for name in forwards} == {"triton"}, one.ran
        if case.train:
            y.backward(inputs["dy"])
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def options_of(case: OverlapCase, overlap: str) -> F.Options:
    return F.Options(case.quantised, case.gemm, case.gemm, overlap=overlap, expert_groups=case.groups)


def same_bits(me: Any, case: OverlapCase) -> list[bool]:
    """Of each step, by result."""
    plain, beside = (open_all_to_all(me, case, overlap) for overlap in (False, True))
    weights = drawn_weights(me, case, plain.num_local_experts, plain.device)
    found = []
    for step in range(case.steps):
        inputs = drawn_inputs(me, case, step, plain.device)
        wanted = passed(case, plain, weights, inputs, options_of(case, "none"), True)
        seen = passed(case, beside, weights, inputs, options_of(case, case.overlap), bool(step % 2))
        if not all(bool(t.isfinite().all()) for t in wanted):
            raise AssertionError(f"{case}: what is compared is not finite")
        found += [torch.equal(a, b) for a, b in zip(seen, wanted, strict=True)]
        assert beside.stats()["open_steps"] == 0
    for a2a in (plain, beside):
        a2a.close()
    return found


def late_and_poisoned(me: Any, case: OverlapCase) -> list[bool]:
    """The same while each product begins late, and what nobody has written is NaN: combine reads no row before its word is raised."""
    from pplx_comm.moe import overlap
    from pplx_comm.moe.grouped import products

    r, forward, memory = random.Random(f"late {case.seed} {me.rank}"), products.forward, overlap._memory

    def late(*arguments: Any, **options: Any) -> torch.Tensor:
        time.sleep(r.choice([0, 1e-3, 5e-3]))
        return forward(*arguments, **options)

    def poisoned(*arguments: Any) -> tuple[torch.Tensor, ...]:
        found = memory(*arguments)
        for t in found:
            t.fill_(torch.nan)
        return found

    products.forward, overlap._memory = late, poisoned  # type: ignore[assignment]
    try:
        return same_bits(me, case)
    finally:
        products.forward, overlap._memory = forward, memory


class Stream:
    """Of a GPU that does each thing at once. What it was told is noted."""

    cuda_stream = 1

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def wait_stream(self, other: Any) -> None:
        self.told.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.told.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.told.append(f"{self.name} notes")
        return "note"


def as_on_a_gpu(me: Any, case: OverlapCase) -> dict[str, Any]:
    """What the host does with a GPU: with streams, kernels that wait, and all rows for each group; in Triton's interpreter."""
    from pplx_comm.moe import lanes, overlap, routed

    told: list[str] = []
    current, beside = Stream("current", told), Stream("beside", told)
    inside: list[str] = []

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        inside.append(stream.name)
        yield
        inside.pop()

    def noted(what: str, call: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            told.append(f"{what} on {inside[-1] if inside else 'current'}")
            return call(*arguments, **options)

        return run

    names = ("dispatch", "dispatch_send", "dispatch_recv", "combine", "combine_send")
    changes: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_stream", lambda device: current), (torch.cuda, "Stream", lambda device, priority: beside),
        (torch.cuda, "stream", on), (overlap, "_on_gpu", lambda t: True), (routed, "lane_of", lanes.StreamLane),
        *((AllToAll, name, noted(name, getattr(AllToAll, name))) for name in names),
        *((Beside, name, noted(name, getattr(Beside, name))) for name in ("up", "down")),
        (overlap, "_await_producers", noted("gate", overlap._await_producers)), (lanes, "_streams", {}),
    ]  # fmt: skip
    before = [(where, name, getattr(where, name)) for where, name, _ in changes]
    for where, name, value in changes:
        setattr(where, name, value)
    try:
        return {"same": same_bits(me, case), "told": told}
    finally:
        for where, name, value in before:
            setattr(where, name, value)


def microbatches(me: Any, case: OverlapCase) -> bool:
    """Two passes whose parts take turns."""
    plain, beside = (open_all_to_all(me, case, overlap) for overlap in (False, True))
    weights = drawn_weights(me, case, plain.num_local_experts, plain.device)
    both = [drawn_inputs(me, case, step, plain.device) for step in range(2)]
    with torch.no_grad():
        wanted = [passed(case, plain, weights, inputs, options_of(case, "none"), False)[0] for inputs in both]
        options = options_of(case, case.overlap)
        begun = [F.send(beside, i["x"], i["ids"], i["weights"], options) for i in both]
        for one in begun:
            F.compute(one, *weights, options)
        seen = [F.finish(one) for one in begun]
    return all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))


def nobody_comes(me: Any, case: OverlapCase) -> dict[str, Any]:
    """Rank 1 sends nothing: the passes of the others end, with an error that names it."""
    with open_all_to_all(me, case, True, timeout=1.0) as a2a:
        if me.rank == 1:
            me.hear()
            return {}
        weights = drawn_weights(me, case, a2a.num_local_experts, a2a.device)
        inputs = drawn_inputs(me, case, 0, a2a.device, full=True)
        try:
            passed(case, a2a, weights, inputs, options_of(case, case.overlap), True)
            if a2a.device.type == "cuda":
                torch.cuda.synchronize()
            a2a.check()
        except PeerError as error:
            return {"type": type(error).__name__, "peer": error.peer, "threads": threading.active_count()}
    return {"type": "nothing"}


def a_product_that_fails(me: Any, case: OverlapCase) -> dict[str, Any]:
    """On rank 1, in the second group: its own error there, and one that names it elsewhere. After a reset all go on."""
    from pplx_comm.moe.grouped import products

    with open_all_to_all(me, case, True, timeout=5.0) as a2a:
        weights = drawn_weights(me, case, a2a.num_local_experts, a2a.device)
        inputs = drawn_inputs(me, case, 0, a2a.device, full=True)  # a rank without tokens would miss nothing
        options, forward, calls = options_of(case, case.overlap), products.forward, 0
        before = passed(case, a2a, weights, inputs, options, True)[0]

        def failing(*arguments: Any, **more: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if me.rank == 1 and calls == 3:
                raise ValueError("no such product")
            return forward(*arguments, **more)

        said: dict[str, Any] = {}
        products.forward = failing  # type: ignore[assignment]
        try:
            passed(case, a2a, weights, inputs, options, True)
        except Exception as error:
            said = {"type": type(error).__name__, "peer": getattr(error, "peer", None)}
        finally:
            products.forward = forward
        a2a.reset()
        said["after"] = torch.equal(passed(case, a2a, weights, inputs, options, True)[0], before)
        return said


def mistakes(me: Any, case: OverlapCase) -> list[str]:
    """Each raises before anything is sent, and the next right call works."""
    said: list[str] = []

    def refused(call: Any, *arguments: Any, **options: Any) -> None:
        try:
            call(*arguments, **options)
        except Error as error:
            said.append(str(error))
        else:
            said.append("nothing")

    refused(F.Options, overlap="some")
    refused(F.Options, overlap="groups", expert_groups=0)
    refused(F.Options, overlap="signals", backend="loop")
    i = drawn_inputs(me, case, 0, torch.device(case.device))
    with open_all_to_all(me, case, False) as a2a, torch.no_grad():
        refused(F.send, a2a, i["x"], i["ids"], i["weights"], F.Options(overlap="groups"))
    with open_all_to_all(me, case, True) as a2a, torch.no_grad():
        refused(F.send, a2a, i["x"], i["ids"], i["weights"], F.Options(overlap="signals"))
        weights = drawn_weights(me, case, a2a.num_local_experts, a2a.device)
        one = F.send(a2a, i["x"], i["ids"], i["weights"])
        refused(F.compute, one, *weights, F.Options(overlap="groups"))
        F.receive(one, *weights)
        passed(case, a2a, weights, i, F.Options(overlap="groups"), True)
    return said


# ---- kernels -----------------------------------------------------------------------------------------------------------------------


HELD_BACK = 0.1
"""Seconds in which a product that does not wait would read rows that are not there."""


def words_of(where: Segments, rows: int) -> int:
    return where.experts if where.room else rows // HOOK_ROWS


def rows_of_word(where: Segments, word: int) -> slice:
    """That are filled."""
    if where.room:
        return slice(word * where.room, word * where.room + min(int(where.where[word]), where.room))
    return slice(word * HOOK_ROWS, (word + 1) * HOOK_ROWS)


SEGMENTS = {
    "ragged": Segments(torch.tensor([0, 256, 256, 640, 640, 768], dtype=torch.int32)),
    "padded": Segments(torch.tensor([3, 0, 205, 17, 140], dtype=torch.int32), 200, 100),
    "few": Segments(torch.tensor([3, 0, 105, 17, 64], dtype=torch.int32), 100, 20),
    "ragged, few": Segments(torch.tensor([0, 128, 128, 256, 640, 896], dtype=torch.int32), expected=40),
    "nothing": Segments(torch.tensor([0, 0, 0, 0, 0, 0], dtype=torch.int32)),
}


def product_of(where: Segments, codes: bool, seed: int) -> tuple[Any, Any, Any, torch.Tensor]:
    """Rows, weights, rows of NaN, and the result, by the kernels that wait for nothing."""
    rows, width, height, g = 900 if not where.room else 5 * where.room, 256, 320, torch.Generator().manual_seed(seed)
    rows = rows // HOOK_ROWS * HOOK_ROWS if not where.room else rows
    x, w = torch.randn(rows, width, generator=g), torch.randn(where.experts, height, width, generator=g)
    if codes:
        operands: Any = quantise.quantise(x), quantise.quantise_weights(w)
        if where.room:
            operands = ((operands[0][0], operands[0][1].unflatten(0, (-1, where.room))), operands[1])
        poison: Any = tuple(torch.empty_like(t).fill_(torch.nan) for t in operands[0])
        wanted = TritonScaledMm().product(*operands, where, False, torch.float16)
    else:
        operands = x.half(), w.half()
        poison = torch.full_like(operands[0], torch.nan)
        wanted = TritonGroupedMm().forward(*operands, where)
    return *operands, poison, wanted


def beside_of(where: Segments, rows: int, ordered: bool) -> Beside:
    words = words_of(where, rows)
    chunks = words if where.room else -(-words // CHUNK)
    zeros = torch.zeros(2 * words + words_of_scratch(chunks), dtype=torch.int32)
    return Beside(zeros[:words], zeros[words : 2 * words], zeros[2 * words :], chunks, 0, ordered)


def rows_come(me: Any, name: str, codes: bool, beforehand: int, seed: int) -> dict[str, Any]:
    """Rows are NaN until a thread writes them and then raises their word: a while after the product took on their chunk, since nothing
    else was left. beforehand: so many blocks of a hundred are there before the product begins."""
    where, r = SEGMENTS[name], random.Random(f"rows come {seed}")
    x, w, poison, wanted = product_of(where, codes, seed)
    parts = list(zip(x, poison, strict=True)) if codes else [(x, poison)]
    beside = beside_of(where, len(wanted), False)
    blocks = list(range(len(beside.arrived)))
    turn = [*r.sample(range(1, beside.chunks), beside.chunks - 1), 0]  # whose rows come when: those of the first chunk last
    blocks.sort(key=lambda word: turn.index(word if where.room else word // CHUNK))

    def write(word: int) -> None:
        rows = rows_of_word(where, word)
        for real, late in parts:
            flat = (real.flatten(0, -2), late.flatten(0, -2)) if real.dim() == 3 else (real, late)
            flat[1][rows] = flat[0][rows]
        beside.arrived[word] = -(2**31) + 7  # the top bit

    early = len(blocks) * beforehand // 100
    for word in blocks[:early]:
        write(word)

    def write_late() -> None:
        left = blocks[early:]
        while left and not ended.is_set():
            asked = [word for word in left if int(beside.scratch[word if where.room else word // CHUNK])]
            if asked:
                time.sleep(HELD_BACK)
                write(asked[0])
                left.remove(asked[0])

    out, ended = torch.full_like(wanted, torch.nan), threading.Event()
    writer = Thread(target=write_late)
    writer.start()
    beside.up(poison, w, where, out)
    ended.set()
    writer.join()
    noted, order = int(beside.noted[0]), beside.scratch[beside.chunks : 2 * beside.chunks].tolist()
    filled = [word for word in range(len(blocks)) if _rows(where, word)]
    chunks = sorted({word if where.room else word // CHUNK for word in filled})
    there = torch.cat([torch.arange(len(out))[rows] for _, rows in where.slices()] or [torch.arange(0)])
    first = [c for c in order[:noted] if all(b in blocks[:early] for b in filled if (b if where.room else b // CHUNK) == c)]
    return {
        "same": torch.equal(out[there], wanted[there]), "order": sorted(order[:noted]) == chunks,
        "first": order[: len(first)] == first, "untouched": bool(out[_others(there, len(out))].isnan().all()),
    }  # fmt: skip


def _rows(where: Segments, word: int) -> bool:
    """Whether it has any."""
    if where.room:
        return int(where.where[word]) > 0
    return word * HOOK_ROWS < int(where.where[-1])


def _others(there: torch.Tensor, rows: int) -> torch.Tensor:
    mask = torch.ones(rows, dtype=torch.bool)
    mask[there] = False
    return mask


def rows_go(me: Any, name: str, codes: bool, ordered: bool, seed: int) -> dict[str, Any]:
    """A thread looks at the words of ready, and at a block's rows the moment its word says that they are written.

    All programs begin, and those of multiprocessors that a step takes end at once.
    """
    where, r = SEGMENTS[name], random.Random(f"rows go {seed}")
    x, w, _, wanted = product_of(where, codes, seed)
    beside = replace(beside_of(where, len(wanted), ordered), sms_of_step=(seed + ordered) % INTERPRETED_PROGRAMS)
    if ordered and not where.room:
        chunks = list(range(-(-int(where.where[-1]) // (CHUNK * HOOK_ROWS))))
        r.shuffle(chunks)
        beside.scratch[beside.chunks : beside.chunks + len(chunks)] = torch.tensor(chunks, dtype=torch.int32)
    value, out = beside.ready_value(x, w, where), torch.full_like(wanted, torch.nan)
    waited = {word for word in range(len(beside.ready)) if _rows(where, word)}
    seen: dict[int, bool] = {}
    ended = threading.Event()

    def look() -> None:
        while len(seen) < len(waited) and not ended.is_set():
            for word in waited - set(seen):
                if int(beside.ready[word]) >= value:
                    rows = rows_of_word(where, word)
                    seen[word] = torch.equal(out[rows], wanted[rows])
            ended.wait(1e-4)  # a tile takes the interpreter longer, and longer still where this thread spins

    reader = Thread(target=look)
    reader.start()
    with patched(grouped.beside, {"KEPT_FREE": 0}):
        beside.down(x, w, where, out)
        kept = beside.kept
    raised = {word for word in range(len(beside.ready)) if int(beside.ready[word])}
    ended.set()
    reader.join()
    exact = all(int(beside.ready[word]) == value for word in waited)
    there = torch.cat([torch.arange(len(out))[rows] for _, rows in where.slices()] or [torch.arange(0)])
    return {
        "same": torch.equal(out[there], wanted[there]), "words": raised == waited and exact, "rows": all(seen.values()),
        "begun": int(beside.begun[0]) == beside.producers(x, where),
        "kept": kept == INTERPRETED_PROGRAMS - beside.sms_of_step == int((beside.begun[3:] == 2).sum()),
        "given up": int((beside.begun[3:] == 3).sum()) == beside.sms_of_step,
    }  # fmt: skip


# ---- before the network has finished -----------------------------------------------------------------------------------------------


def before_the_network(me: Any, case: OverlapCase) -> dict[str, Any]:
    """Blocks go in pieces through a network, and rank 1 sends its last ones when it hears that rank 0 has multiplied rows.

    Tokens go to the experts in order, so that the rows of the first ones come first, from both ranks.
    """
    from pplx_comm.moe import overlap

    g = torch.Generator().manual_seed(case.seed + me.rank)
    x = torch.randn(case.most, case.hidden, generator=g).to(getattr(torch, case.dtype))
    local = case.experts // 2  # those of rank 0 have all tokens
    ids = (torch.arange(case.most) * local // case.most)[:, None]
    options, made, memory = options_of(case, case.overlap), [], overlap._memory

    def poisoned(*arguments: Any) -> tuple[torch.Tensor, ...]:
        tensors = memory(*arguments)
        for t in tensors:
            t.fill_(torch.nan)
        made[:] = tensors  # not before they are poisoned: the looker takes any number for a product
        return tensors

    def look() -> None:
        while not (made and bool(made[0][0].isfinite().all())):
            time.sleep(1e-3)
        me.say("multiplied", [bool(row.isfinite().all()) for row in (made[0][0], made[0][-1])])

    config = make_config(
        2, 0, num_experts=case.experts, top_k=1, hidden=case.hidden, max_tokens_per_rank=case.most, dtype=x.dtype, wire="native",
        layout=Ragged(case.align), in_flight=1, scale_layout="row",
    )  # fmt: skip
    with open_all_to_all(me, case, True, slot_bytes=int(config.least_slot_bytes)) as a2a, torch.no_grad():
        weights = drawn_weights(me, case, a2a.num_local_experts, a2a.device)
        overlap._memory = poisoned
        try:
            one = F.send(a2a, x, ids, torch.ones(ids.shape), options)
            looker = Thread(target=look)
            if me.rank == 1:
                me.hear()
            else:
                looker.start()
            F.compute(one, *weights, options)
            y = F.finish(one)
            if me.rank == 0:
                looker.join()
        finally:
            overlap._memory = memory
        plain = F.send(a2a, x, ids, torch.ones(ids.shape))
        return {"same": torch.equal(y, F.receive(plain, *weights, options_of(case, "none"))), "rows": len(made[0])}
