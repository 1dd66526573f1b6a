"""Latency against tokens, from what --json writes."""

from __future__ import annotations

from typing import Any

PHASES = ("dispatch", "combine", "round trip")
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
PEER_STYLES = {
    "gloo": ("#555555", "s"), "mpi": ("#999999", "^"),
    "nccl": ("#555555", "s"), "ag_rs": ("#777777", "v"), "symm_mem": ("#999999", "^"), "deep_ep": ("#333333", "d"),
}  # fmt: skip


def _label(value: float) -> str:
    if value < 1000:
        return f"{value:g} µs"
    return f"{value / 1000:g} ms" if value < 1e6 else f"{value / 1e6:g} s"


def plot(record: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    points = [point for point in record["points"] if point["off"] is None]
    transports = list(dict.fromkeys(point["transport"] for point in points))
    peers = list(dict.fromkeys(peer["peer"] for peer in record["peers"]))
    tokens = sorted({point["tokens"] for point in points})

    figure, axes = plt.subplots(1, len(PHASES), figsize=(15, 5.6), sharey=True)
    for axis, phase in zip(axes, PHASES, strict=True):

        def line(of: list[dict[str, Any]], kind: str, **style: Any) -> None:
            """p50, with a whisker up to p99."""
            found = sorted((p["tokens"], p[kind][phase]) for p in of if phase in p[kind])  # noqa: B023
            if not found:
                return
            x, figures = [n for n, _ in found], [f for _, f in found]
            middle = [f["p50"] for f in figures]
            up = [f["p99"] - f["p50"] for f in figures]
            axis.errorbar(x, middle, yerr=[[0.0] * len(up), up], capsize=3, elinewidth=0.8, **style)  # noqa: B023

        for name, colour in zip(transports, COLOURS, strict=False):
            mine = [p for p in points if p["transport"] == name]
            line(mine, "phases", color=colour, marker="o", linewidth=2, label=f"pplx_comm {name}")
            floors = sorted((p["tokens"], p["floor"][phase]["p50"]) for p in mine if phase in p["floor"])
            if floors:
                axis.plot(*zip(*floors, strict=True), color=colour, linestyle=":", linewidth=1.6, label=f"floor of {name}")
        for name in peers:
            colour, marker = PEER_STYLES.get(name, ("#777777", "d"))
            of_peer = [p for p in record["peers"] if p["peer"] == name]
            line(
                of_peer,
                "phases",
                color=colour,
                marker=marker,
                linestyle="--",
                linewidth=1.4,
                label=name if name == "deep_ep" else f"{name} + permutes",
            )

        axis.set_title(phase)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(tokens, [str(n) for n in tokens])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _label(value)))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.tick_params(labelleft=True)
        axis.set_xlabel("tokens per rank")
        axis.grid(True, which="major", alpha=0.3)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)

    axes[0].set_ylabel("latency, p50 with p99 whiskers")
    o, m = record["options"], record["machine"]
    # In groups: ours, floors, peers.
    entries = sorted(
        zip(*axes[0].get_legend_handles_labels(), strict=True),
        key=lambda entry: 0 if entry[1].startswith("pplx") else 1 if entry[1].startswith("floor") else 2,
    )
    handles, labels = [handle for handle, _ in entries], [label for _, label in entries]
    figure.legend(handles, labels, loc="lower center", ncol=min(4, len(labels)), frameon=False)
    layer = f"hidden {o['hidden']}, {o['experts']} experts, top-{o['top_k']}, {o['dtype']}, wire {o['wire']}"
    where = f"{m['cpu']}, {m['cores_allowed']} cores; pplx_comm {record['version']}, {record['date']}"
    device = f"\n{record['software_device']}" if record.get("software_device") else ""
    figure.suptitle(f"{record['ranks']} ranks, {layer}, {o['layout'].partition('(')[0]}\n{where}{device}", fontsize=11)
    rows = -(-len(labels) // 4)
    figure.tight_layout(rect=(0, 0.035 * rows + 0.02, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
