"""Dispatch + combine against ranks: this library and pplx-garden's protocol as predicted, and what was published."""

from __future__ import annotations

from typing import Any

from bench.harness.plot import pyplot
from bench.model import published
from bench.model.report import Ours

COLOURS = {"efa-p5en": "#1f77b4", "cx7": "#d62728", "cx7, by GPUs": "#ff9896", "efa-p6": "#2ca02c", "efa-p5": "#9467bd"}


def sums(of: Ours, fabric: str, tokens: int) -> list[tuple[int, float]]:
    """Times of dispatch and combine together, ascending by ranks."""
    return sorted((r, sum(p.median_us for p in both)) for (f, r, t), both in of.items() if f == fabric and t == tokens)


def plot(predicted: Ours, replayed: Ours, path: str, footer: str) -> None:
    plt = pyplot()
    from matplotlib.ticker import NullLocator

    tokens = sorted({many for _, _, many in predicted})
    figure, axes = plt.subplots(1, len(tokens), figsize=(7.5 * len(tokens), 5.6), squeeze=False)
    for axis, many in zip(axes[0], tokens, strict=True):
        for fabric, colour in COLOURS.items():
            styles: tuple[tuple[Ours, str, dict[str, Any]], ...] = (
                (predicted, fabric, {"marker": "o", "linewidth": 2, "label": f"pplx_comm on {fabric}, predicted"}),
                (predicted, f"{fabric}, by node", {"marker": ".", "linestyle": ":", "label": f"{fabric}, by node, predicted"}),
                (replayed, fabric, {"linestyle": "--", "linewidth": 1.4, "label": f"pplx-garden on {fabric}, predicted"}),
            )
            for of, name, style in styles:
                found = sums(of, name, many)
                if found:
                    axis.plot(*zip(*found, strict=True), color=colour, **style)
            points = [
                (p.ranks, p.dispatch_us + p.combine_us)
                for p in (*published.DECODE, *published.BEYOND, *published.PREFILL)
                if p.fabric == fabric and p.tokens == many and p.combine_us is not None
            ]
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    marker="x",
                    linestyle="",
                    markersize=9,
                    label=f"pplx-garden on {fabric}, published",
                )
        ranks = sorted({r for _, r, t in predicted if t == many})
        axis.set_title(f"{many} tokens a rank")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ranks, [str(r) for r in ranks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("ranks")
        axis.grid(True, which="both", alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0][0].set_ylabel("dispatch + combine, us, median rank")
    figure.suptitle("PREDICTED by bench/model, not measured (crosses: published measurements)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=3, frameon=False)
    figure.text(0.99, 0.005, footer, ha="right", fontsize=7)
    figure.tight_layout(rect=(0, 0.24, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
