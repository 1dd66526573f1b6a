"""The command line of bench/layer.py."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from pplx_comm.layer_arguments import numbers, positive

LAYERS = ("ours", "nccl", "ag_rs", "capacity", "deep_ep", "mega")
TOKENS = (8, 128, 1024, 4096, 8192)
PRECISIONS = ("bf16", "fp8-dispatch", "fp8", "mxfp8")
ROUTINGS = ("even", "zipf", "hot", "ordered")


@dataclass(frozen=True)
class LayerOptions:
    device: str
    tokens: tuple[int, ...]
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    precisions: tuple[str, ...]
    layers: tuple[str, ...]
    capacities: tuple[str, ...]
    routings: tuple[str, ...]
    decode_tokens: int
    backward: bool
    rounds: int
    calls: int
    seed: int
    timeout: float
    threads: int | None
    json: str | None
    plot: str | None
    capacity_plot: str | None
    transport: str
    provider: str | None
    node_size: int | None
    slot_bytes: int | None

    def described(self) -> dict[str, Any]:
        """As the JSON has them."""
        return asdict(self)


def _some(known: tuple[str, ...]) -> Any:
    def chosen(text: str) -> tuple[str, ...]:
        names = tuple(part.strip() for part in text.split(",") if part.strip())
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(known)}")
        return names

    return chosen


def _capacities(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for one in found:
        if one != "most" and float(one) <= 0:
            raise argparse.ArgumentTypeError(f"{one}: must be more than 0, or most")
    return found


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="layer.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--ranks", type=positive, metavar="N", help="start N ranks on this host, without a launcher (1)")
    shape = parser.add_argument_group("the MoE layer")
    shape.add_argument("--tokens", type=numbers, default=TOKENS, metavar="N,N", help=f"per rank ({','.join(map(str, TOKENS))})")
    shape.add_argument("--hidden", type=positive, default=7168, help="elements of a token (7168)")
    shape.add_argument("--intermediate", type=positive, default=2048, help="between an expert's two products (2048)")
    shape.add_argument("--experts", type=positive, default=256, help="of all ranks together (256)")
    shape.add_argument("--top-k", type=positive, default=8, help="experts per token (8)")
    shape.add_argument(
        "--precisions", type=_some(PRECISIONS), default=("bf16", "fp8"), metavar="P,P",
        help="bf16, fp8, mxfp8; fp8-dispatch: rows travel as FP8 and are multiplied in bfloat16 (bf16,fp8)",
    )  # fmt: skip
    what = parser.add_argument_group("what is measured")
    what.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the tensors (cpu)")
    what.add_argument("--layers", type=_some(LAYERS), default=LAYERS, metavar="L,L", help=f"of {', '.join(LAYERS)} (all)")
    what.add_argument(
        "--capacities", type=_capacities, default=("1.25", "most"), metavar="F,F",
        help="of the layer with padded capacity: multiples of an expert's even share, beyond which tokens are dropped; or most, "
            "the room that the fullest expert takes (1.25,most)",
    )  # fmt: skip
    what.add_argument(
        "--routings", type=_some(ROUTINGS), default=("even",), metavar="R,R",
        help="how tokens choose: even, zipf, hot; ordered: on each rank, neighbouring tokens choose the same local expert (even)",
    )  # fmt: skip
    what.add_argument("--decode-tokens", type=int, default=256, help="up to how many ours takes Padded, forward (256)")
    what.add_argument("--transport", default="auto", help="of ours: auto, mapped, proxy, nvshmem (auto)")
    what.add_argument("--provider", help="of ours: the libfabric provider of the proxy")
    what.add_argument("--node-size", type=positive, help="of ours: how many ranks share a node, whatever the hosts say")
    what.add_argument("--slot-bytes", type=positive, help="of ours: blocks that do not fit go in pieces")
    what.add_argument("--no-backward", action="store_true", help="forward only")
    what.add_argument("--seed", type=int, default=1, help="of weights, tokens and routing, alike for everything measured (1)")
    how = parser.add_argument_group("how long")
    how.add_argument("--rounds", type=positive, default=20, help="times of which the median is taken (20)")
    how.add_argument("--calls", type=positive, default=4, help="calls of a round on a GPU, one after the other (4)")
    how.add_argument("--timeout", type=float, default=120.0, help="seconds after which a silent rank fails the run (120)")
    how.add_argument("--threads", type=positive, help="per rank (PPLX_COMM_THREADS, else this rank's share of the cores)")
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="everything that was measured, with the machine and the command")
    out.add_argument("--plot", metavar="FILE.png", help="times against tokens (needs matplotlib)")
    out.add_argument("--capacity-plot", metavar="FILE.png", help="what experts compute, beside padded capacity, by routing")
    return parser


def from_arguments(a: argparse.Namespace) -> LayerOptions:
    return LayerOptions(
        device=a.device, tokens=tuple(sorted(set(a.tokens))), hidden=a.hidden, intermediate=a.intermediate, experts=a.experts,
        top_k=a.top_k, precisions=tuple(dict.fromkeys(a.precisions)), layers=tuple(dict.fromkeys(a.layers)),
        capacities=a.capacities, routings=tuple(dict.fromkeys(a.routings)), decode_tokens=a.decode_tokens,
        backward=not a.no_backward, rounds=a.rounds, calls=a.calls, seed=a.seed, timeout=a.timeout, threads=a.threads,
        json=a.json, plot=a.plot, capacity_plot=a.capacity_plot, transport=a.transport, provider=a.provider, node_size=a.node_size,
        slot_bytes=a.slot_bytes,
    )  # fmt: skip
