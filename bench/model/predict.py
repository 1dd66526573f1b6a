"""Runs of the model: microbenchmarks, the replay of pplx-garden, and this library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from bench.model import _model, published
from bench.model.fabrics import FABRICS, KIB, SUBMIT_US, Fabric, Parameter
from bench.model.kernels import DEEPEP_COMBINE, DEEPEP_DISPATCH, DEEPEP_SOURCE, KERNELS, Kernels

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


def shape(ranks: int, tokens: int, experts: int | None = None) -> _model.Shape:
    """DeepSeek-V3's layer; beyond 256 ranks, one expert each."""
    s = _model.Shape()
    s.ranks = ranks
    s.node_size = min(NODE, ranks)
    s.tokens = tokens
    s.experts = experts if experts is not None else max(256, ranks)
    s.top_k, s.hidden, s.fp8 = 8, 7168, True
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
    next_us: float  # when the last rank could begin another operation
    wire_us: float  # time of the mean rank's bytes at the link's rate
    unevenness: float  # the bytes into the busiest NIC, over the mean NIC's
    host_us: float  # CPU time of the busiest proxy
    bytes_per_rank: float
    writes_per_rank: float


def _predicted(result: _model.Result, s: _model.Shape, fabric: _model.FabricCosts) -> Predicted:
    if result.bytes_posted != result.bytes_landed:
        raise AssertionError(f"{result.bytes_posted} bytes were posted, {result.bytes_landed} landed")
    mean_nic = result.bytes_posted / s.ranks / fabric.nics
    return Predicted(
        median_us=median(result.finished),
        slowest_us=max(result.finished),
        posted_us=result.posted,
        next_us=result.free,
        wire_us=mean_nic / fabric.bytes_per_us,
        unevenness=result.most_bytes_in / mean_nic if mean_nic else 1.0,
        host_us=result.host_us,
        bytes_per_rank=result.bytes_posted / s.ranks,
        writes_per_rank=result.writes / s.ranks,
    )


def ours(
    fabric: Fabric,
    s: _model.Shape,
    *,
    kernels: Kernels = DEFAULT_KERNELS,
    seed: int = 1,
    block_us: float | None = None,
    by_gpu: bool = False,
    gpu_post_us: float | None = None,
    signal_us: float | None = None,
    part_bytes: int | None = None,
    changed: Mapping[str, float] = NOTHING,
) -> tuple[Predicted, Predicted]:
    costs, f = _model.OurCosts(), fabric_costs(fabric, s, changed)
    kernels.into(costs)
    costs.by_gpu = by_gpu
    if gpu_post_us is not None:
        costs.gpu_post_us = gpu_post_us
    if signal_us is not None:
        costs.signal_us = signal_us
    if block_us is not None:
        costs.block_us = block_us
    costs.part_bytes = (PART_BYTES if s.ranks <= PARTS_UP_TO else 0) if part_bytes is None else part_bytes
    dispatch, combine = _model.run_ours(s, f, costs, seed)
    return _predicted(dispatch, s, f), _predicted(combine, s, f)


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


@dataclass(frozen=True)
class Sensitivity:
    what: str
    garden_us: float | None  # dispatch + combine, median rank; None: it does not enter there
    ours_us: float


def total(both: tuple[Predicted, Predicted]) -> float:
    return sum(p.median_us for p in both)


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
        yield Sensitivity(what, None, total(ours(fabric, s, seed=seed, changed=changed)))


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
        took = ours(fabric, s, seed=seed, by_gpu=True, gpu_post_us=post * times_post, signal_us=signal * times_signal)
        yield Sensitivity(what, None, total(took))


def sensitivity(fabric: Fabric, ranks: int, tokens: int, seed: int) -> Iterator[Sensitivity]:
    s = shape(ranks, tokens)

    def both(what: str, seed: int = seed, **changed: float) -> Sensitivity:
        theirs = garden(fabric, s, seed=seed, changed=changed)
        mine = ours(fabric, s, seed=seed, changed=changed)
        return Sensitivity(what, total(theirs), total(mine))

    latency, gbit, message = (fabric.value(name) for name in ("latency_us", "gbit_per_nic", "nic_message_us"))
    yield both("as above")
    yield both("latency a quarter less", latency_us=latency * 0.75)
    yield both("latency a quarter more", latency_us=latency * 1.25)
    yield both("bandwidth of one 32 MiB write", gbit_per_nic=gbit * 336 / 364)
    yield both("a post costs a 56th of the published scatter, not a 63rd", post_us=fabric.value("post_us") * 63 / 56)
    yield both("NICs take messages twice as fast", nic_message_us=message / 2)
    yield both("NICs finish one message before the next", interleave=1)
    yield both("another routing", seed=seed + 1)
    yield Sensitivity("kernels as the bars ask", None, total(ours(fabric, s, seed=seed, kernels=KERNELS["bars"])))
    yield Sensitivity("blocks leave whole", None, total(ours(fabric, s, seed=seed, part_bytes=0)))
    yield Sensitivity("the proxy takes 200 ns a block", None, total(ours(fabric, s, seed=seed, block_us=0.2)))
