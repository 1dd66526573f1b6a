"""Latency against tokens, and against multiprocessors, from what --json writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PHASES = ("dispatch", "combine", "round trip")
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
PEER_STYLES = {
    "gloo": ("#555555", "s"), "mpi": ("#999999", "^"),
    "nccl": ("#555555", "s"), "ag_rs": ("#777777", "v"), "symm_mem": ("#999999", "^"), "deep_ep": ("#333333", "d"),
    "flashinfer": ("#555555", "P"),
}  # fmt: skip
BY_SMS_TOKENS = 4096
"""The size whose time is drawn against multiprocessors, where it was measured; else the largest."""

MOST_LEVEL_TICKS = 8
"""With more, their names would run into each other."""


def pyplot() -> Any:
    """matplotlib's, drawing into files: there is no screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _label(value: float) -> str:
    if value < 1000:
        return f"{value:g} µs"
    return f"{value / 1000:g} ms" if value < 1e6 else f"{value / 1e6:g} s"


def _settings(record: dict[str, Any]) -> list[int | None]:
    """Multiprocessors that were asked for, few first, all last."""
    return sorted({point.get("num_sms") for point in record["points"]}, key=lambda n: (n is None, n))


def by_tokens(record: dict[str, Any], num_sms: int | None) -> dict[str, Any]:
    """The part of a record that is about one setting: its points, and each peer's at that setting, or at its only one."""
    peers: dict[tuple[str, int], dict[str, Any]] = {}
    for peer in record["peers"]:
        if peer.get("num_sms") in (None, num_sms):
            key = peer["peer"], peer["tokens"]
            if key not in peers or peer.get("num_sms") is not None:
                peers[key] = peer
    points = [point for point in record["points"] if point.get("num_sms") == num_sms]
    return {**record, "points": points, "peers": list(peers.values())}


def by_sms(record: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The size, and the part of a record that is about it. Peers without a setting have a point at each."""
    sizes = {point["tokens"] for point in record["points"] if point["off"] is None}
    tokens = BY_SMS_TOKENS if BY_SMS_TOKENS in sizes else max(sizes)
    peers = []
    for num_sms in _settings(record):
        peers += [{**peer, "num_sms": num_sms} for peer in by_tokens(record, num_sms)["peers"] if peer["tokens"] == tokens]
    return tokens, {**record, "points": [point for point in record["points"] if point["tokens"] == tokens], "peers": peers}


def _draw(axis: Any, phase: str, record: dict[str, Any], x_of: Callable[[dict[str, Any]], float]) -> None:
    """p50 of everything, with a whisker up to p99."""
    points = [point for point in record["points"] if point["off"] is None]

    def line(of: list[dict[str, Any]], kind: str, **style: Any) -> None:
        found = sorted(((x_of(p), p[kind][phase]) for p in of if phase in p[kind]), key=lambda one: one[0])
        if not found:
            return
        x, figures = [n for n, _ in found], [f for _, f in found]
        middle = [f["p50"] for f in figures]
        up = [f["p99"] - f["p50"] for f in figures]
        axis.errorbar(x, middle, yerr=[[0.0] * len(up), up], capsize=3, elinewidth=0.8, **style)

    for name, colour in zip(dict.fromkeys(point["transport"] for point in points), COLOURS, strict=False):
        mine = [p for p in points if p["transport"] == name]
        line(mine, "phases", color=colour, marker="o", linewidth=2, label=f"pplx_comm {name}")
        for kind, style, what in (("floor", ":", "floor"), ("composite", "-.", "composite floor")):
            bare = sorted((x_of(p), p[kind][phase]["p50"]) for p in mine if phase in p.get(kind, {}))
            if bare:
                axis.plot(*zip(*bare, strict=True), color=colour, linestyle=style, linewidth=1.6, label=f"{what} of {name}")
    for name in dict.fromkeys(peer["peer"] for peer in record["peers"]):
        colour, marker = PEER_STYLES.get(name, ("#777777", "d"))
        label = name if name in ("deep_ep", "flashinfer") else f"{name} + permutes"
        of_peer = [p for p in record["peers"] if p["peer"] == name]
        line(of_peer, "phases", color=colour, marker=marker, linestyle="--", linewidth=1.4, label=label)


def _dress(axis: Any, ticks: Sequence[float], names: Sequence[str], what: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, names)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _label(value)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(labelleft=True, labelbottom=True)
    if len(names) > MOST_LEVEL_TICKS:
        axis.tick_params(axis="x", labelrotation=45)
    axis.set_xlabel(what)
    axis.grid(True, which="major", alpha=0.3)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _save(figure: Any, axes: Sequence[Any], record: dict[str, Any], what: str, path: str) -> None:
    plt = pyplot()
    # In groups: ours, floors, peers. One of a name, from whichever axis has it.
    named = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    labels = sorted(named, key=lambda label: 0 if label.startswith("pplx") else 1 if "floor of" in label else 2)
    figure.legend([named[label] for label in labels], labels, loc="lower center", ncol=min(4, len(labels)), frameon=False)
    o, m = record["options"], record["machine"]
    layer = f"hidden {o['hidden']}, {o['experts']} experts, top-{o['top_k']}, {o['dtype']}, wire {o['wire']}"
    where = f"{m['cpu']}, {m['cores_allowed']} cores; pplx_comm {record['version']}, {record['date']}"
    device = f"\n{record['software_device']}" if record.get("software_device") else ""
    title = f"{record['ranks']} ranks, {layer}, {o['layout'].partition('(')[0]}{what}\n{where}{device}"
    rows, height = -(-len(labels) // 4), float(figure.get_figheight())
    figure.suptitle(title, fontsize=11, y=1 - 0.1 / height, verticalalignment="top")
    figure.tight_layout(rect=(0, (0.2 * rows + 0.11) / height, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot(record: dict[str, Any], path: str) -> list[str]:
    """Against tokens, a row of the grid for each number of multiprocessors; where there are several, another picture against those.
    Returns what was written."""
    plt = pyplot()

    settings = _settings(record)
    figure, axes = plt.subplots(
        len(settings), len(PHASES), figsize=(15, 0.9 + 4.7 * len(settings)), sharex=True, sharey=True, squeeze=False
    )
    tokens = sorted({point["tokens"] for point in record["points"] if point["off"] is None})
    for num_sms, row in zip(settings, axes, strict=True):
        for axis, phase in zip(row, PHASES, strict=True):
            _draw(axis, phase, by_tokens(record, num_sms), lambda point: float(point["tokens"]))
            _dress(axis, tokens, [str(n) for n in tokens], "tokens per rank")
            axis.set_title(phase if len(settings) == 1 else f"{phase}, {'all' if num_sms is None else num_sms} SMs")
        row[0].set_ylabel("latency, p50 with p99 whiskers")
    _save(figure, list(axes.ravel()), record, "", path)
    if len(settings) == 1:
        return [path]
    another = str(Path(path).with_suffix("")) + "-by-sms.png"
    _plot_by_sms(record, settings, another)
    return [path, another]


def _plot_by_sms(record: dict[str, Any], settings: list[int | None], path: str) -> None:
    plt = pyplot()
    tokens, part = by_sms(record)
    # "all" at the number that this is, or where it is unknown, an octave on.
    everything = record.get("multiprocessors") or 2 * max((n for n in settings if n is not None), default=1)
    ticks = [float(n if n is not None else everything) for n in settings]
    figure, axes = plt.subplots(1, len(PHASES), figsize=(15, 5.6), sharey=True)
    for axis, phase in zip(axes, PHASES, strict=True):
        _draw(axis, phase, part, lambda point: float(point["num_sms"] or everything))
        _dress(axis, ticks, ["all" if n is None else str(n) for n in settings], "SMs of a launch")
        axis.set_title(phase)
    axes[0].set_ylabel("latency, p50 with p99 whiskers")
    _save(figure, list(axes), record, f", {tokens} tokens per rank", path)
