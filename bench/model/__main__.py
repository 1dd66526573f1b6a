"""Predicts dispatch and combine on fabrics that cannot be run here, after holding the model against published figures.

python -m bench.model --plot bench/results/predicted.png > bench/results/predicted.md
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.model import plot, published
from bench.model.fabrics import FABRICS
from bench.model.kernels import given
from bench.model.predict import (
    NODE,
    Held,
    Sensitivity,
    beside,
    deepep,
    deepep_normal,
    expected,
    garden,
    grouped,
    microbenchmarks,
    of_gpus_that_post,
    of_many_ranks,
    of_relays,
    ours,
    reference,
    sensitivity,
    shape,
    stages,
    validation,
)
from bench.model.report import Ours, markdown, record, relays
from pplx_comm import __version__

# The replay is there for comparison, where pplx-garden was ever run.
REPLAYED = (16, 32, 64, 128)
BY_GPU = ("cx7",)
"""Where GPUs can post to the NIC themselves, with transport="nvshmem"."""
DEDUP: dict[str, dict[str, dict[str, Any]]] = {
    "rank": {"": {}},
    "node": {", by node": {"by_node": True}, ", by node, fp8": {"by_node": True, "combine_fp8": True}},
}
SENSITIVITY = ("efa-p5en", 64, 128)
RELAYS = ("efa-p5en", 16, 4096)
MANY_RANKS = ("efa-p5en", 1024, 128)
POSTING = ("cx7, by GPUs", 64, 128)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def routing(text: str) -> int:
    """The number of groups; 0: uniform."""
    return 0 if text == "uniform" else int(text.removeprefix("groups="))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fabrics", default=",".join(FABRICS), help="which fabrics (%(default)s)")
    parser.add_argument("--ranks", type=numbers, default=[8, 16, 32, 64, 128, 256, 512, 1024], metavar="N,N,...")
    parser.add_argument("--tokens", type=numbers, default=[128, 4096], metavar="N,N,...", help="per rank; default 128,4096")
    parser.add_argument(
        "--dedup",
        type=lambda text: text.split(","),
        default="rank,node",
        metavar="rank,node",
        help="a row crosses the network once per rank, or once per node (both)",
    )
    parser.add_argument(
        "--routing",
        type=routing,
        default=0,
        metavar="uniform|groups=N",
        help="choices in N of 8 groups, as DeepSeek routes (uniform)",
    )
    parser.add_argument(
        "--kernels",
        type=given,
        default="measured",
        help="kernel times: measured (the default), bars (aimed at), or four numbers: "
        "dispatch fixed us, us a row, combine fixed us, us a row",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the routing (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all predicted points, and what the model was held against")
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    options.fabrics = options.fabrics.split(",")
    if unknown := [name for name in options.fabrics if name not in FABRICS]:
        parser.error(f"no fabric {', '.join(unknown)}; there are {', '.join(FABRICS)}")
    if unknown := [name for name in options.dedup if name not in DEDUP]:
        parser.error(f"--dedup takes {' and '.join(DEDUP)}, not {', '.join(unknown)}")
    return options


def points(options: argparse.Namespace) -> tuple[Ours, Ours]:
    """Returns what is predicted for this library, and by the replay."""
    predicted: Ours = {}
    replayed: Ours = {}
    for tokens in options.tokens:
        for ranks in options.ranks:
            for name in options.fabrics:
                at = time.monotonic()
                s = shape(ranks, tokens, groups=options.routing)
                variants = {
                    suffix: costs for d in options.dedup if d == "rank" or ranks > NODE for suffix, costs in DEDUP[d].items()
                }
                if name in BY_GPU and "rank" in options.dedup:
                    variants[", by GPUs"] = {"by_gpu": True}
                for suffix, costs in variants.items():
                    mine = ours(FABRICS[name], s, kernels=options.kernels, seed=options.seed, **costs)
                    predicted[name + suffix, ranks, tokens] = mine
                if ranks in REPLAYED:
                    replayed[name, ranks, tokens] = garden(FABRICS[name], s, seed=options.seed)
                print(f"{name} EP{ranks} {tokens} tokens: {time.monotonic() - at:.1f} s", file=sys.stderr, flush=True)
    return predicted, replayed


def held_against(options: argparse.Namespace) -> dict[str, list[Held]]:
    return {
        "microbenchmarks": list(microbenchmarks()),
        "reference": list(reference(options.seed)),
        "decode": list(validation(published.DECODE, options.seed)),
        "beyond": list(validation(published.BEYOND, options.seed)),
        "posted": list(validation(published.BY_DEEPEP, options.seed, deepep)),
        "prefill": list(validation(published.PREFILL, options.seed)) if max(options.tokens) >= 4096 else [],
        "by node": list(deepep_normal(options.seed)) if max(options.tokens) >= 4096 else [],
    }


def by_node(options: argparse.Namespace) -> Iterator[str]:
    if "node" in options.dedup and "efa-p5en" in options.fabrics and 128 in options.tokens:
        fabric, kernels, seed = FABRICS["efa-p5en"], options.kernels, options.seed
        where = [s for ranks in (16, 32, 64) for s in stages(fabric, ranks, kernels, seed)]
        yield from relays(list(expected(fabric, options.tokens, kernels, seed)), where, grouped(fabric, kernels, seed))


def asked(predicted: Ours, seed: int) -> dict[str, list[Sensitivity]]:
    """Returns what parameters do at four points, of those that were predicted."""
    found = {}
    for point, ask in (
        (SENSITIVITY, sensitivity), (RELAYS, of_relays), (MANY_RANKS, of_many_ranks), (POSTING, of_gpus_that_post)
    ):  # fmt: skip
        name, ranks, tokens = point
        if point in predicted:
            found[f"{name}, EP{ranks}, {tokens} tokens"] = list(ask(FABRICS[name.partition(",")[0]], ranks, tokens, seed))
    return found


def main() -> int:
    options, begun = parsed(), time.monotonic()
    predicted, replayed = points(options)
    beside_others = "cx7" in options.fabrics and 128 in options.tokens
    gpus = list(beside(published.BY_GPUS, options.kernels, options.seed)) if beside_others else []
    checks, cases = held_against(options), asked(predicted, options.seed)
    command = " ".join(["python -m bench.model", *sys.argv[1:]])
    date = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    head = {
        "command": f"`{command}`, seed {options.seed}",
        "commit": f"{__version__}; {date}",
        "took": f"{time.monotonic() - begun:.0f} s on {platform.machine()}, python {platform.python_version()}",
    }
    print(
        markdown(
            head=head,
            kernels=options.kernels,
            held_against=checks,
            predicted=predicted,
            replayed=replayed,
            sensitivity=cases,
            gpus=gpus,
            by_node=by_node(options),
        )
    )
    if options.json:
        whole = {
            **head,
            "predicted": True,
            "seed": options.seed,
            "kernels": vars(options.kernels),
            "held_against": {part: [{**vars(h), "error": h.error} for h in of] for part, of in checks.items()},
            "parameters": {f: [vars(p) for p in FABRICS[f].parameters] for f in options.fabrics},
            "points": record(predicted),
            "replayed": record(replayed),
            "sensitivity": {of: [vars(s) for s in many] for of, many in cases.items()},
        }
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    if options.plot:
        plot.plot(predicted, replayed, options.plot, f"{command}; {__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
