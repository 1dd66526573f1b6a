"""The report, as Markdown, and its record. Nothing in it was measured on these fabrics, and it says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import mean
from typing import Any

from bench.model import published
from bench.model.fabrics import FABRICS, Parameter
from bench.model.kernels import Kernels
from bench.model.predict import DEEPEP_GPUS, GARDEN_HOST, OUR_GPUS, OUR_HOST, Beside, Held, Predicted, Sensitivity

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
    rows = []
    for (fabric, ranks, many), (dispatch, combine) in predicted.items():
        if many != tokens:
            continue
        total = dispatch.median_us + combine.median_us
        theirs = replayed.get((fabric, ranks, many))
        rows.append(
            (
                fabric,
                str(ranks),
                f"{dispatch.median_us:.0f}",
                f"{dispatch.slowest_us:.0f}",
                f"{dispatch.wire_us:.0f}",
                f"{combine.median_us:.0f}",
                f"{combine.slowest_us:.0f}",
                f"{combine.wire_us:.0f}",
                f"{total:.0f}",
                f"{dispatch.writes_per_rank:.0f}",
                f"{dispatch.posted_us:.0f}",
                f"{dispatch.host_us:.0f}",
                f"{(theirs[0].median_us + theirs[1].median_us) / total:.2f}x" if theirs else "",
            )
        )
    yield from table(
        (
            "fabric",
            "EP",
            "dispatch",
            "slowest rank",
            "bytes alone",
            "combine",
            "slowest rank",
            "bytes alone",
            "sum",
            "writes a rank",
            "last post",
            "proxy busy",
            "the replay takes",
        ),
        rows,
    )


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
    lines += [
        f"GPUs that post themselves ({sources(published.BY_DEEPEP)}): DeepEP's low-latency",
        "mode in the same model, a put for each row of each expert, NVLink inside a node. Its kernels enter as they were measured",
        "over NVLink, and the NIC is the ConnectX of the table above: nothing is tuned to these points.",
        "",
    ]
    lines += held(of["posted"])
    if of["prefill"]:
        lines += [
            f"4096 tokens ({sources(published.PREFILL)}). Kernel times at this size were not published, so the small ones stand:",
            "",
        ]
        lines += held(of["prefill"])
    return lines


def prediction(kernels: Kernels, predicted: Ours, replayed: Ours, gpus: list[Beside]) -> list[str]:
    lines = [
        "## This library, predicted",
        "",
        f"Kernels `{kernels.name}`: {kernels.source}. As a line: dispatch {kernels.dispatch_fixed_us:.1f} us + "
        f"{kernels.dispatch_row_us * 1000:.1f} ns a row, combine {kernels.combine_fixed_us:.1f} us + "
        f"{kernels.combine_row_us * 1000:.1f} ns a row; half before the network, half behind it.",
        "256 experts, beyond EP256 one a rank; top-8, hidden 7168, FP8 dispatch, bfloat16 combine, nodes of 8. EP8 has no network",
        "in it. Times of the median rank, and of the slowest. *Bytes alone*: a rank's bytes on its links at full rate.",
        "*Last post*: of the dispatch, by the rank that posts last. *Proxy busy*: the busiest proxy's CPU time in it. *The replay",
        "takes*: pplx-garden's protocol in the same model, in multiples of ours.",
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
) -> str:
    lines = ["# Predicted", ""]
    lines += [
        "Every figure here is predicted by a model (`bench/model`), none is measured on the fabric it names. The model is a",
        "discrete-event simulation of hosts' proxies and NICs; this library's side of it is the production Proxy with the",
        "production block sizes and plan, on a virtual clock. Microseconds, unless a unit stands beside the figure.",
        "",
    ]
    lines += [f"- {name}: {text}" for name, text in head.items()]
    lines += ["", *comparison(held_against), *prediction(kernels, predicted, replayed, gpus)]
    for of, cases in sensitivity.items():
        lines += [f"What the parameters do ({of}, dispatch + combine, predicted):", ""]
        lines += table(
            ("if", "ours", "pplx-garden's protocol"),
            ((s.what, f"{s.ours_us:.0f}", f"{s.garden_us:.0f}" if s.garden_us is not None else "") for s in cases),
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
