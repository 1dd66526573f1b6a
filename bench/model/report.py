"""The report, as Markdown, and its record. Nothing in it was measured on these fabrics, and it says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import mean
from typing import Any

from bench.model import published
from bench.model.fabrics import FABRICS, Parameter
from bench.model.kernels import Kernels
from bench.model.predict import (
    DEEPEP_GPUS,
    GARDEN_HOST,
    OUR_GPUS,
    OUR_HOST,
    RELAYS,
    Beside,
    Expected,
    Held,
    Predicted,
    Sensitivity,
    Stages,
    total,
)

NOT_MODELLED = (
    "congestion control, packet loss and retries, paths of unequal length, switches with less than full bisection: the replay's "
    "shortfall at EP128 is what that may cost",
    "other traffic, several AllToAlls, ranks that begin at different times: every operation begins at once on all ranks, as in "
    "pplx-garden's benchmark",
    "jitter of hosts and NICs: times are of one run per point, without a tail",
    "reading and writing GPU memory over PCIe as a limit of its own; blocks that have to lie in host memory",
    "how rows of different experts differ in size of work: kernels take the same time per row, and half of it on each side",
    "steps larger than a slot, which go in pieces: at 4096 tokens a block goes as one",
    "how many completions a queue holds: a proxy posts all it has before it reads any",
    "verbs through libfabric: ConnectX costs are those of verbs posted directly",
)


CONGESTION = """\
EP128 is a third too low. No model of congestion is added: this run of one team is the only published EFA point beyond EP64.
ConnectX is met at EP128 and EP256 (below), so links that are shared fairly are not what is wrong; on EFA the errors grow from
EP16 on. Incast, a NIC's messages and the host's work for each peer would all explain that. To tell them apart takes what is not
published: EFA's bandwidth into one NIC from N senders, its message rate by number of peers, or EP128 with 4096 tokens, where
bytes alone count. Once per node, a rank of EP128 has 15 network peers, where pplx-garden has 120. The combine of p5 is not met
either; its published p99 is 3,847 us, so something in that run stood still at times.
"""
NORMAL = """\
EP16 is met. EP32 and EP64 are too slow: a GPU of the model sends, then relays, then receives, where DeepEP's channels do all
three at once. So much is to be won for large steps by node.
"""
WHY = """\
What is off by more than 10 %, and why:

- 4096 tokens: the last part of a block, or the last two, have most of its rows. Mates pull those after they have landed, when the
  network has nothing left to do. A relay begins to add when its rank has stored all of its own sums, so the network begins late.
  Finer parts for large blocks, and a relay's sums before those for the own node, would win some of that back; rows that cost no
  kernel time are the limit (below). FP8 back halves the bytes and none of this.
- 4096 tokens from EP512 on: once per node saves a twentieth of the bytes or less, and costs more than that. It pays below.
"""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(head)
    yield f"| {' | '.join(names)} |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def held(points: list[Held]) -> Iterator[str]:
    yield from table(
        ("what", "published", "predicted", "error"),
        ((h.what, f"{h.published:.1f} {h.unit}", f"{h.predicted:.1f} {h.unit}", f"{h.error:+.1%}") for h in points),
    )
    sizes = [abs(h.error) for h in points]
    signed = mean(h.error for h in points)
    yield f"Mean of the errors' sizes {mean(sizes):.1%}, largest {max(sizes):.1%}; mean with its sign {signed:+.1%}."
    yield ""


def sources(points: Iterable[published.Point]) -> str:
    return "; ".join(dict.fromkeys(p.source for p in points))


def parameters(title: str, of: Iterable[Parameter]) -> Iterator[str]:
    yield f"**{title}**"
    yield ""
    yield from table(("parameter", "value", "from"), ((p.name, f"{p.value:.4g} {p.unit}".strip(), p.source) for p in of))


Ours = dict[tuple[str, int, int], tuple[Predicted, Predicted]]


def ours(predicted: Ours, replayed: Ours, tokens: int) -> Iterator[str]:
    def phases(both: tuple[Predicted, Predicted] | None) -> tuple[str, ...]:
        if both is None:
            return ("",) * 4
        each = (f"{p.median_us:.0f} ({p.wire_us:.0f})" for p in both)
        return (*each, f"{total(both):.0f}", f"{both[0].writes_per_rank:.0f}")

    rows = []
    for fabric, ranks in dict.fromkeys((name.partition(", by node")[0], r) for name, r, many in predicted if many == tokens):
        of = {suffix: predicted.get((fabric + suffix, ranks, tokens)) for suffix in ("", ", by node", ", by node, fp8")}
        theirs, fp8, mine = replayed.get((fabric, ranks, tokens)), of[", by node, fp8"], of[""]
        rows.append(
            (
                fabric,
                str(ranks),
                *phases(mine),
                *phases(of[", by node"]),
                f"{total(fp8):.0f}" if fp8 else "",
                f"{total(theirs) / total(mine):.2f}x" if theirs and mine else "",
            )
        )
    rank, node = ("dispatch", "combine", "sum", "writes"), ("by node: dispatch", "combine", "sum", "writes", "sum, FP8 back")
    yield from table(("fabric", "EP", *rank, *node, "the replay takes"), rows)


def by_gpus(points: list[Beside]) -> Iterator[str]:
    """Kernels that post to a ConnectX themselves: ours, predicted, and what others have published."""

    def pair(both: tuple[Predicted, Predicted]) -> str:
        return f"{both[0].median_us:.0f} / {both[1].median_us:.0f} ({both[0].median_us + both[1].median_us:.0f})"

    rows = []
    for b in points:
        p = b.point
        assert p.combine_us is not None
        mine = b.by_gpu[0].median_us + b.by_gpu[1].median_us
        rows.append(
            (
                p.fabric, str(p.ranks), pair(b.proxy), pair(b.by_gpu),
                f"{p.dispatch_us:.0f} / {p.combine_us:.0f} ({p.dispatch_us + p.combine_us:.0f})",
                f"{(p.dispatch_us + p.combine_us) / mine:.2f}x", p.source,
            )
        )  # fmt: skip
    head = ("fabric", "EP", "ours by proxy", "ours by GPUs", "theirs, published", "theirs / ours by GPUs", "whose")
    yield from table(head, rows)


def comparison(of: dict[str, list[Held]]) -> list[str]:
    lines = [
        "## What the model is held against",
        "",
        "The costs come from microbenchmarks alone (below): one set per fabric, nothing tuned to the points that follow. With them",
        "the model replays pplx-garden's protocol: its route exchange, its private-buffer writes and overflow, its halves of peers",
        "by NIC, its barriers. Its kernels enter with three published times: 15 us from launch to first transfer (the paper),",
        "receive kernels of 18.0 and 13.7 us (an EP16 run on p5en by another team). 128 tokens a rank, median rank.",
        "",
    ]
    lines += held(of["reference"])
    lines += [f"Point by point ({sources(published.DECODE)}):", ""]
    lines += held(of["decode"])
    lines += [f"Beyond the paper ({sources(published.BEYOND)}). The costs of p6 and p5 are p5en's, scaled:", ""]
    lines += held(of["beyond"])
    lines += CONGESTION.split("\n")
    lines += [
        f"GPUs that post themselves ({sources(published.BY_DEEPEP)}): DeepEP's low-latency",
        "mode in the same model, a put for each row of each expert, NVLink inside a node. Its kernels enter as they were measured",
        "over NVLink, and the NIC is the ConnectX of the table above: nothing is tuned to these points.",
        "",
    ]
    lines += held(of["posted"])
    if of["by node"]:
        lines += [
            f"Once per node ({published.DEEPEP_NORMAL}; {published.DEEPEP_COMBINE}),",
            "4096 tokens: our relays, by kernels that post, and that store over NVLink as DeepEP does inside a node: 153",
            "and 158 GB/s on the H800, which bounds EP16. Choices lie in 4 of 8 nodes at EP64 there, in any on the H100.",
            "",
        ]
        lines += held(of["by node"])
        lines += NORMAL.split("\n")
    if of["prefill"]:
        lines += [
            f"4096 tokens ({sources(published.PREFILL)}). Kernel times at this size were not published, so the small ones stand:",
            "",
        ]
        lines += held(of["prefill"])
    return lines


def relays(expected: list[Expected], stages: list[Stages], grouped: Iterable[tuple[int, list[float]]]) -> Iterator[str]:
    yield "**By node, beside what was expected** on p5en before relays were modelled: bytes at full rate, the rest of a step as it"
    yield "was. *Split*: if each part of a block went over both NICs."
    yield ""
    rows = (
        (
            str(e.tokens), str(e.ranks), "FP8" if e.fp8 else "bfloat16", f"{e.expected_us:.0f}", f"{e.predicted_us:.0f}",
            f"{e.predicted_us / e.expected_us - 1:+.0%}", f"{e.split_us:.0f}", f"{e.split_us / e.expected_us - 1:+.0%}",
        )
        for e in expected
    )  # fmt: skip
    yield from table(("tokens", "EP", "back in", "expected", "predicted", "", "split", ""), rows)
    yield "Where the 128 tokens' time goes. *Fixed*: kernels, proxy, a post, the latency and the hops inside a node, once each."
    yield "*Rest*: rows stored, pulled and added up, and waiting for links that are not always busy."
    yield ""
    yield from table(
        ("", "bytes alone", "fixed", "rest", "all"),
        ((s.what, f"{s.bytes_us:.0f}", f"{s.fixed_us:.0f}", f"{s.rest_us:.0f}", f"{s.total_us:.0f}") for s in stages),
    )
    yield from WHY.split("\n")
    yield "Choices in 4 of 8 groups (`--routing groups=4`), p5en, 128 tokens, sums:"
    yield ""
    head = ("EP", "uniform", "by node", "groups", "by node")
    yield from table(head, ((str(ranks), *(f"{us:.0f}" for us in sums)) for ranks, sums in grouped))


def prediction(kernels: Kernels, predicted: Ours, replayed: Ours, gpus: list[Beside], by_node: Iterable[str]) -> list[str]:
    lines = [
        "## This library, predicted",
        "",
        f"Kernels `{kernels.name}`: {kernels.source}. As a line: dispatch {kernels.dispatch_fixed_us:.1f} us + "
        f"{kernels.dispatch_row_us * 1000:.1f} ns a row, combine {kernels.combine_fixed_us:.1f} us + "
        f"{kernels.combine_row_us * 1000:.1f} ns a row; half before the network, half behind it.",
        "256 experts, beyond EP256 one a rank; top-8, hidden 7168, FP8 dispatch, bfloat16 combine, nodes of 8. EP8 has no network",
        "in it. Times of the median rank; behind them a rank's bytes on its links at full rate, and writes of a dispatch.",
        "*By node*: a row crosses the network once per node, to its relay there, the rank of the same rail. Mates hear",
        "from the relay that rows are there, and pull theirs. Combines store partial sums at the relay, which sends one row back.",
        "*FP8 back*: that row in FP8. *The replay takes*: pplx-garden's protocol in the same model, in multiples of ours.",
        "",
    ]
    for tokens in sorted({tokens for _, _, tokens in predicted}):
        lines += [f"**{tokens} tokens a rank**, predicted:", ""]
        lines += ours(predicted, replayed, tokens)
        if tokens <= 512 and max(ranks for _, ranks, _ in predicted) > 256:
            lines += [
                "Beyond EP256 the EFA figures hang on how many messages a NIC takes. That was never published: `nic_message_us` is",
                "the slowest that the microbenchmarks allow, and on p6 one NIC has to take them all. Read these as upper bounds.",
                "",
            ]
    if max(ranks for _, ranks, _ in predicted) > 64:
        lines += ['`device="cuda"` takes at most 64 ranks today: beyond EP64 the figures are of the protocol.', ""]
    lines += by_node
    if mori := predicted.get(("cx7, by node", 16, 128)):
        there, back = published.MORI_EP16
        lines += [
            "The only published decode that crosses once per node is MORI's on MI300X with ConnectX-7:",
            f"{there:.0f} and {back:.0f} us at EP16, 35 and 47 at EP8. By node on cx7 the model has {mori[0].median_us:.0f} and",
            f"{mori[1].median_us:.0f} at EP16. So no published decode confirms these rows.",
            "",
        ]
    if gpus:
        lines += ['**Posted by the GPU** (`transport="nvshmem"`), 128 tokens, dispatch / combine (sum), median rank:', ""]
        lines += by_gpus(gpus)
        lines += [
            "No host is in the way: a put when a part of a block is complete, a signal in GPU memory when it has landed. Ours are",
            "predicted, the published ones measured by their authors on hosts of theirs, so the ratio is no measurement. DeepEP's",
            "times the model explains (above). pplx-kernels' it does not: they fall as ranks are added, though bytes grow.",
            "",
        ]
    return lines


def costs(microbenchmarks: list[Held]) -> list[str]:
    lines = ["## Costs", ""]
    for fabric in FABRICS.values():
        lines += parameters(f"{fabric.name}: {fabric.what}", fabric.parameters)
    lines += parameters("this library's hosts", OUR_HOST)
    lines += parameters("relays", RELAYS)
    lines += parameters("this library's GPUs, where they post", OUR_GPUS)
    lines += parameters("DeepEP's kernels", DEEPEP_GPUS)
    lines += parameters("pplx-garden's hosts and kernels", GARDEN_HOST)
    lines += ["The microbenchmarks themselves, in the model (ConnectX posts pages in chains of four, which is not modelled):", ""]
    lines += held(microbenchmarks)
    return lines


def markdown(
    *,
    head: dict[str, str],
    kernels: Kernels,
    held_against: dict[str, list[Held]],
    predicted: Ours,
    replayed: Ours,
    sensitivity: dict[str, list[Sensitivity]],
    gpus: list[Beside],
    by_node: Iterable[str],
) -> str:
    lines = ["# Predicted", ""]
    lines += [
        "Every figure here is predicted by a model (`bench/model`), none is measured on the fabric it names. The model is a",
        "discrete-event simulation of hosts' proxies and NICs; this library's side of it is the production Proxy with the",
        "production block sizes and plan, on a virtual clock. Microseconds, unless a unit stands beside the figure.",
        "",
    ]
    lines += [f"- {name}: {text}" for name, text in head.items()]
    lines += ["", *comparison(held_against), *prediction(kernels, predicted, replayed, gpus, by_node)]
    for of, cases in sensitivity.items():
        lines += [f"What the parameters do ({of}, dispatch + combine, predicted):", ""]
        lines += table(
            ("if", "ours", "ours by node", "pplx-garden's protocol"),
            ((s.what, *(f"{us:.0f}" if us else "" for us in (s.ours_us, s.by_node_us, s.garden_us))) for s in cases),
        )
    lines += [*costs(held_against["microbenchmarks"]), "## Not modelled", "", *(f"- {what}" for what in NOT_MODELLED)]
    return "\n".join(lines)


def record(points: Ours) -> list[dict[str, Any]]:
    return [
        {
            "predicted": True,
            "fabric": fabric,
            "ranks": ranks,
            "tokens": tokens,
            "dispatch": vars(dispatch),
            "combine": vars(combine),
        }
        for (fabric, ranks, tokens), (dispatch, combine) in points.items()
    ]
