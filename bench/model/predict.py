"""Runs of the model: microbenchmarks, the replay of pplx-garden, and this library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.model import _model, published
from bench.model.fabrics import FABRICS, KIB, SUBMIT_US, Fabric, Parameter
from bench.model.kernels import (
    DEEPEP_COMBINE,
    DEEPEP_DISPATCH,
    DEEPEP_SOURCE,
    KERNELS,
    NORMAL_H800,
    NORMAL_HOPPER,
    Kernels,
)

NODE = 8
PAGES = 4096
DEFAULT_KERNELS = KERNELS["measured"]
NOTHING: Mapping[str, float] = {}
# Large messages are cut more coarsely, for speed: below these sizes nothing changes any more.
CHUNK_BYTES, CHUNK_BYTES_MANY_TOKENS = 8192, 65536
PART_BYTES = 65536
"""PPLX_COMM_PART_BYTES."""
PARTS_UP_TO = 256
"""Ranks. Of more, what all proxies keep of parts does not fit one machine; blocks are small then, and most are one part."""


def shape(ranks: int, tokens: int, experts: int | None = None, groups: int = 0) -> _model.Shape:
    """DeepSeek-V3's layer; beyond 256 ranks, one expert each. `groups`: of 8, a token's choices lie in this number; 0: in any."""
    s = _model.Shape()
    s.ranks = ranks
    s.node_size = min(NODE, ranks)
    s.tokens = tokens
    s.experts = experts if experts is not None else max(256, ranks)
    s.top_k, s.hidden, s.fp8, s.groups = 8, 7168, True, groups
    return s


_OURS, _GARDEN = _model.OurCosts(), _model.GardenCosts()
OUR_HOST = (
    Parameter(
        "mailbox_us",
        _OURS.mailbox_us,
        "us",
        "half a flag's round trip GPU-CPU-GPU through pinned memory, 2.9 us, measured on an H200",
    ),
    Parameter("arrival_us", _OURS.arrival_us, "us", "the other half"),
    Parameter("mapped_us", _OURS.mapped_us, "us", "half a flag's round trip between two GPUs, 2.6 us, measured on 2 of 4 H200"),
    Parameter(
        "block_us",
        _OURS.block_us,
        "us",
        "production Proxy over a fabric that does nothing, 14 to 20 ns a block, measured on an AMD EPYC",
    ),
    Parameter(
        "word_us",
        _OURS.word_us,
        "us",
        "the same, no mail: 0.2 to 0.8 ns a word where mailboxes are cached, so this is the careful side",
    ),
    Parameter("shard_bytes", _OURS.shard_bytes, "bytes", "the proxy's default"),
    Parameter("part_bytes", PART_BYTES, "bytes", "the default: a block of at least this size leaves in parts; up to EP256"),
)
RELAYS = (
    Parameter(
        "pass_on_us",
        _OURS.pass_on_us,
        "us",
        "a fence to the system scope, 1,150 cycles on an idle GPU, and a flag's way to another; under load a fence takes 10 us",
    ),
    Parameter("pull_us", _OURS.pull_us, "us", "a load's way there and back, taken for a flag's round trip between two GPUs"),
    Parameter("pull_bytes_per_us", _OURS.pull_bytes_per_us, "bytes/us", "rows fetched by a combine between two H200"),
)
OUR_GPUS = (
    Parameter("gpu_post_us", _OURS.gpu_post_us, "us", "assumed: a release to the system, a work request, a doorbell across PCIe"),
    Parameter("signal_us", _OURS.signal_us, "us", "assumed: the NIC's atomic on GPU memory, and a poll of it"),
)
GARDEN_HOST = (
    Parameter("first_us", _GARDEN.first_us, "us", "the paper: launch to first transfer, about 15 us at EP64"),
    Parameter("dispatch_tail_us", _GARDEN.dispatch_tail_us, "us", "EP16 on p5en by another team: the receive half, data present"),
    Parameter("combine_tail_us", _GARDEN.combine_tail_us, "us", "the same"),
    Parameter("submit_us", SUBMIT_US, "us", "Table 8, p50: enqueue, dequeue, up to the first write"),
    Parameter("flag_us", _GARDEN.flag_us, "us", "as ours"),
    Parameter("route_row_us", _GARDEN.route_row_us, "us", "assumed: a few ns of scalar code per received copy"),
    Parameter("private_copies", _GARDEN.private_copies, "tokens", "its benchmark's --max-private-tokens"),
)

DEEPEP_GPUS = tuple(
    Parameter(f"{phase}_{name}", value, "us", DEEPEP_SOURCE)
    for phase, kernel in (("dispatch", DEEPEP_DISPATCH), ("combine", DEEPEP_COMBINE))
    for name, value in (("fixed_us", kernel.fixed_us), ("row_us", kernel.row_us))
)


def fabric_costs(fabric: Fabric, s: _model.Shape, changed: Mapping[str, float]) -> _model.FabricCosts:
    return fabric.costs({"chunk_bytes": CHUNK_BYTES if s.tokens <= 512 else CHUNK_BYTES_MANY_TOKENS, **changed})


@dataclass(frozen=True)
class Predicted:
    """One operation; times from the common start of all ranks, in microseconds."""

    median_us: float  # over the ranks
    slowest_us: float
    posted_us: float  # when the last write of any rank was posted
    wire_us: float  # time of the mean rank's bytes at the link's rate
    host_us: float  # CPU time of the busiest proxy
    writes_per_rank: float


def _predicted(result: _model.Result, s: _model.Shape, fabric: _model.FabricCosts) -> Predicted:
    if result.bytes_posted != result.bytes_landed:
        raise AssertionError(f"{result.bytes_posted} bytes were posted, {result.bytes_landed} landed")
    return Predicted(
        median_us=median(result.finished),
        slowest_us=max(result.finished),
        posted_us=result.posted,
        wire_us=result.bytes_posted / s.ranks / fabric.nics / fabric.bytes_per_us,
        host_us=result.host_us,
        writes_per_rank=result.writes / s.ranks,
    )


def ours(
    fabric: Fabric,
    s: _model.Shape,
    *,
    kernels: Kernels = DEFAULT_KERNELS,
    seed: int = 1,
    changed: Mapping[str, float] = NOTHING,
    **costs: Any,
) -> tuple[Predicted, Predicted]:
    """`changed` varies the fabric's costs, `costs` this library's."""
    c, f = _model.OurCosts(), fabric_costs(fabric, s, changed)
    kernels.into(c)
    for name, value in {"part_bytes": PART_BYTES if s.ranks <= PARTS_UP_TO else 0, **costs}.items():
        setattr(c, name, value)
    dispatch, combine = _model.run_ours(s, f, c, seed)
    return _predicted(dispatch, s, f), _predicted(combine, s, f)


def total(both: tuple[Predicted, Predicted]) -> float:
    return sum(p.median_us for p in both)


def garden(
    fabric: Fabric, s: _model.Shape, *, seed: int = 1, changed: Mapping[str, float] = NOTHING
) -> tuple[Predicted, Predicted]:
    f = fabric_costs(fabric, s, changed)
    costs = _model.GardenCosts()
    costs.submit_us = SUBMIT_US
    dispatch, combine = _model.run_garden(s, f, costs, seed)
    return _predicted(dispatch, s, f), _predicted(combine, s, f)


def deepep(
    fabric: Fabric, s: _model.Shape, *, seed: int = 1, changed: Mapping[str, float] = NOTHING
) -> tuple[Predicted, Predicted]:
    """Its low-latency mode: a put for each row of each expert, by kernels."""
    f = fabric_costs(fabric, s, changed)
    costs = _model.RowsCosts()
    costs.dispatch, costs.combine = DEEPEP_DISPATCH, DEEPEP_COMBINE
    dispatch, combine = _model.run_rows(s, f, costs, seed)
    return _predicted(dispatch, s, f), _predicted(combine, s, f)


@dataclass(frozen=True)
class Beside:
    """A published point of others, and this library predicted there, by its proxy and by kernels that post."""

    point: published.Point
    proxy: tuple[Predicted, Predicted]
    by_gpu: tuple[Predicted, Predicted]


def beside(points: tuple[published.Point, ...], kernels: Kernels, seed: int) -> Iterator[Beside]:
    known: dict[tuple[str, int], tuple[tuple[Predicted, Predicted], tuple[Predicted, Predicted]]] = {}
    for p in points:
        if (p.fabric, p.ranks) not in known:
            s = shape(p.ranks, p.tokens, p.experts)
            known[p.fabric, p.ranks] = (
                ours(FABRICS[p.fabric], s, kernels=kernels, seed=seed),
                ours(FABRICS[p.fabric], s, kernels=kernels, seed=seed, by_gpu=True),
            )
        yield Beside(p, *known[p.fabric, p.ranks])


@dataclass(frozen=True)
class Held:
    """A figure of the model against a published one."""

    what: str
    published: float
    predicted: float
    unit: str
    source: str

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def microbenchmarks() -> Iterator[Held]:
    for fabric in FABRICS.values():
        m, costs = fabric.microbenchmarks, fabric.costs()
        if m is None:
            continue
        for kib, gbit in m.single_write.items():
            us = _model.single_write_us(costs, SUBMIT_US, kib * KIB)
            yield Held(f"{fabric.name}, one write of {kib} KiB", gbit, kib * KIB * 8 / us / 1e3, "Gbit/s", "Table 2")
        for kib, (gbit, _) in m.paged_write.items():
            us = _model.paged_writes_us(costs, SUBMIT_US, kib * KIB, PAGES)
            yield Held(f"{fabric.name}, many writes of {kib} KiB", gbit, PAGES * kib * KIB * 8 / us / 1e3, "Gbit/s", "Table 2")


Replay = Callable[..., tuple[Predicted, Predicted]]


def validation(points: tuple[published.Point, ...], seed: int, replay: Replay = garden) -> Iterator[Held]:
    for p in points:
        dispatch, combine = replay(FABRICS[p.fabric], shape(p.ranks, p.tokens, p.experts), seed=seed)
        name = f"{p.fabric} EP{p.ranks}"
        yield Held(f"{name} dispatch", p.dispatch_us, dispatch.median_us, "us", p.source)
        if p.combine_us is not None:
            yield Held(f"{name} combine", p.combine_us, combine.median_us, "us", p.source)


def reference(seed: int) -> Iterator[Held]:
    for ranks, us in published.REFERENCE_SUMS.items():
        dispatch, combine = garden(FABRICS["efa-p5en"], shape(ranks, 128), seed=seed)
        yield Held(f"efa-p5en EP{ranks} dispatch + combine", us, dispatch.median_us + combine.median_us, "us", "the paper's bars")


def deepep_normal(seed: int) -> Iterator[Held]:
    """Its normal mode as our relays, by kernels that post and that store over NVLink as it does inside a node."""

    def replayed(s: _model.Shape, kernels: Kernels) -> tuple[Predicted, Predicted]:
        row = 7392 / kernels.dispatch_row_us
        return ours(FABRICS["cx7"], s, kernels=kernels, seed=seed, by_node=True, by_gpu=True, pull_bytes_per_us=row)

    for ranks, gb in published.DEEPEP_NORMAL_GB.items():
        s = shape(ranks, 4096, groups=4 if ranks == 64 else 0)
        routing = _model.random_routing(s, seed)
        nodes = range(ranks // NODE)
        pairs = sum(routing.rows_to_node(source, node) for source in range(ranks) for node in nodes) / ranks
        phases = zip(("dispatch", "combine"), replayed(s, NORMAL_H800), gb, (7392, 14336), strict=True)
        for phase, predicted, rate, row in phases:
            us = pairs * row / rate / 1e3
            yield Held(f"cx7 EP{ranks} {phase}, H800", us, predicted.median_us, "us", published.DEEPEP_NORMAL)
    for ranks, us in published.DEEPEP_COMBINE_US.items():
        _, combine = replayed(shape(ranks, 4096), NORMAL_HOPPER)
        yield Held(f"cx7 EP{ranks} combine, H100", us, combine.median_us, "us", published.DEEPEP_COMBINE)


# Expected of relays on p5en before they were modelled, by tokens and ranks: sum, and sum with FP8 back.
EXPECTED = {
    128: {16: (144, 127), 32: (257, 206), 64: (378, 290)},
    4096: {16: (2300, 1650), 32: (5700, 4100), 64: (9600, 6700)},
}
NONE: dict[str, Any] = {}
SPLIT: dict[str, Any] = {"shard_bytes": 32 * KIB}
"""With it the proxy splits each part of a block over the NICs. Parts below its default go by one each."""


@dataclass(frozen=True)
class Expected:
    tokens: int
    ranks: int
    fp8: bool
    expected_us: float
    predicted_us: float
    split_us: float


def expected(fabric: Fabric, many: list[int], kernels: Kernels, seed: int) -> Iterator[Expected]:
    for tokens, ranks in ((t, r) for t in EXPECTED if t in many for r in EXPECTED[t]):
        for fp8, us in zip((False, True), EXPECTED[tokens][ranks], strict=True):
            costs: dict[str, Any] = {"kernels": kernels, "seed": seed, "by_node": True, "combine_fp8": fp8}
            as_is, split = (total(ours(fabric, shape(ranks, tokens), **costs, **of)) for of in (NONE, SPLIT))
            yield Expected(tokens, ranks, fp8, us, as_is, split)


def grouped(fabric: Fabric, kernels: Kernels, seed: int) -> Iterator[tuple[int, list[float]]]:
    """Yields ranks and sums: once per rank, once per node, and the same for choices in 4 of 8 groups, as DeepSeek routes."""
    for ranks in (16, 32, 64, 128):
        shapes = (shape(ranks, 128, groups=groups) for groups in (0, 4))
        yield ranks, [total(ours(fabric, s, kernels=kernels, seed=seed, by_node=node)) for s in shapes for node in (False, True)]


@dataclass(frozen=True)
class Stages:
    """An operation's time by node: its bytes at the link's rate, what every step costs once, and the rest."""

    what: str
    bytes_us: float
    fixed_us: float
    total_us: float

    @property
    def rest_us(self) -> float:
        return self.total_us - self.bytes_us - self.fixed_us


def stages(fabric: Fabric, ranks: int, kernels: Kernels, seed: int) -> Iterator[Stages]:
    host = _OURS.mailbox_us + _OURS.arrival_us + fabric.value("post_us") + fabric.value("latency_us")
    hops = {"dispatch": _OURS.pass_on_us + _OURS.pull_us, "combine": _OURS.mapped_us}
    fixed = {"dispatch": kernels.dispatch_fixed_us, "combine": kernels.combine_fixed_us}
    both = ours(fabric, shape(ranks, 128), kernels=kernels, seed=seed, by_node=True)
    for phase, p in zip(hops, both, strict=True):
        yield Stages(f"EP{ranks} {phase}", p.wire_us, fixed[phase] + host + hops[phase], p.median_us)


@dataclass(frozen=True)
class Sensitivity:
    what: str
    ours_us: float | None  # dispatch + combine, median rank; None: it does not enter there
    by_node_us: float | None = None
    garden_us: float | None = None


def of_many_ranks(fabric: Fabric, ranks: int, tokens: int, seed: int) -> Iterator[Sensitivity]:
    """Limits of a rank that writes to very many: the host's posts, or the NIC's messages."""
    s = shape(ranks, tokens)
    post, message = {"post_us": fabric.value("post_us") / 2}, {"nic_message_us": fabric.value("nic_message_us") / 2}
    cases = {
        "as above": NOTHING,
        "NICs take messages twice as fast": message,
        "a post costs half": post,
        "both": {**post, **message},
    }
    for what, changed in cases.items():
        mine, by_node = (total(ours(fabric, s, seed=seed, changed=changed, by_node=node)) for node in (False, True))
        yield Sensitivity(what, mine, by_node)


def of_gpus_that_post(fabric: Fabric, ranks: int, tokens: int, seed: int) -> Iterator[Sensitivity]:
    """Assumptions about such GPUs: the time of a post or a signal is not published."""
    s, post, signal = shape(ranks, tokens), _OURS.gpu_post_us, _OURS.signal_us
    for what, times_post, times_signal in (
        ("as above", 1.0, 1.0),
        ("a post takes nothing", 0.0, 1.0),
        ("a post takes four times as long", 4.0, 1.0),
        ("a signal takes nothing", 1.0, 0.0),
        ("a signal takes four times as long", 1.0, 4.0),
    ):
        costs: dict[str, Any] = {"by_gpu": True, "gpu_post_us": post * times_post, "signal_us": signal * times_signal}
        mine, by_node = (total(ours(fabric, s, seed=seed, by_node=node, **costs)) for node in (False, True))
        yield Sensitivity(what, mine, by_node)


def sensitivity(fabric: Fabric, ranks: int, tokens: int, seed: int) -> Iterator[Sensitivity]:
    s = shape(ranks, tokens)

    def case(what: str, seed: int = seed, kernels: Kernels = DEFAULT_KERNELS, **costs: Any) -> Sensitivity:
        mine, by_node = (total(ours(fabric, s, seed=seed, kernels=kernels, by_node=node, **costs)) for node in (False, True))
        return Sensitivity(what, mine, by_node)

    def both(what: str, seed: int = seed, **changed: float) -> Sensitivity:
        mine, by_node = (total(ours(fabric, s, seed=seed, changed=changed, by_node=node)) for node in (False, True))
        return Sensitivity(what, mine, by_node, total(garden(fabric, s, seed=seed, changed=changed)))

    latency, gbit, message = (fabric.value(name) for name in ("latency_us", "gbit_per_nic", "nic_message_us"))
    yield both("as above")
    yield both("latency a quarter less", latency_us=latency * 0.75)
    yield both("latency a quarter more", latency_us=latency * 1.25)
    yield both("bandwidth of one 32 MiB write", gbit_per_nic=gbit * 336 / 364)
    yield both("a post costs a 56th of the published scatter, not a 63rd", post_us=fabric.value("post_us") * 63 / 56)
    yield both("NICs take messages twice as fast", nic_message_us=message / 2)
    yield both("NICs finish one message before the next", interleave=1)
    yield both("another routing", seed=seed + 1)
    yield case("kernels as the bars ask", kernels=KERNELS["bars"])
    yield case("blocks leave whole", part_bytes=0)
    yield case("blocks are split over NICs from 32 KiB on", **SPLIT)
    yield case("the proxy takes 200 ns a block", block_us=0.2)


def of_relays(fabric: Fabric, ranks: int, tokens: int, seed: int) -> Iterator[Sensitivity]:
    s = shape(ranks, tokens)
    free = {"pull_bytes_per_us": 1e12}
    fixed = Kernels("fixed", "", DEFAULT_KERNELS.dispatch_fixed_us, 0, DEFAULT_KERNELS.combine_fixed_us, 0)
    cases: dict[str, Any] = {
        "as above": {},
        "a relay passes on behind a busy fence, 10 us later": {"pass_on_us": _OURS.pass_on_us + 10},
        "mates pull at 200 GB/s": {"pull_bytes_per_us": 200e3},
        "mates pull as fast as they read their own memory": free,
        "rows cost no kernel time": {**free, "kernels": fixed},
    }
    for what, costs in cases.items():
        yield Sensitivity(what, None, total(ours(fabric, s, seed=seed, by_node=True, **costs)))
