"""The command line of the benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Error
from ..layouts import Compact, Layout, Padded, Ragged
from ..wire import Wire

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PEERS = {"cpu": ("gloo", "mpi"), "cuda": ("nccl", "symm_mem", "deep_ep")}
"""By device, those to compare with."""


@dataclass(frozen=True)
class Transport:
    """One way to carry, as --transport names it: mapped, auto, proxy, proxy:PROVIDER, nvshmem."""

    name: str
    transport: str
    provider: str | None
    node_size: int | None


@dataclass(frozen=True)
class Options:
    device: str
    tokens: tuple[int, ...]
    hidden: int
    experts: int
    top_k: int
    dtype: torch.dtype
    wire: str
    layout: Layout
    transports: tuple[Transport, ...]
    routing: str
    seed: int
    peers: tuple[str, ...]
    seconds: float
    iters: int | None
    warmup: int
    check: bool
    threads: int | None
    pairs: int
    replays: int
    num_sms: int | None
    timeout: float
    json: str | None
    plot: str | None

    def described(self) -> dict[str, Any]:
        """What the JSON says of them."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["dtype"] = str(self.dtype).removeprefix("torch.")
        plain["layout"] = repr(self.layout)
        plain["transports"] = [transport.name for transport in self.transports]
        return plain


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _pairs(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError("must be at least 2: a time is from one launch to the next")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _peers(text: str) -> tuple[str, ...]:
    names = () if text == "none" else _names(text)
    known = [name for of_device in PEERS.values() for name in of_device]
    if unknown := set(names) - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: there are {', '.join(known)} and none")
    return names


def _peers_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    return PEERS[arguments.device] if arguments.peers is None else tuple(p for p in arguments.peers if p in PEERS[arguments.device])


def _wire(text: str) -> str:
    try:
        return Wire.of(text).value
    except Error as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    """The MoE layer: what doctor asks for too."""
    shape = parser.add_argument_group("the MoE layer")
    shape.add_argument("--tokens", type=_numbers, default=(1, 8, 32, 128), metavar="N,N,...", help="tokens per rank (1,8,32,128)")
    shape.add_argument("--hidden", type=_positive, default=7168, help="elements of a token (7168)")
    shape.add_argument("--experts", type=_positive, default=256, help="experts of all ranks together (256)")
    shape.add_argument("--top-k", type=_positive, default=8, help="experts per token (8)")
    shape.add_argument("--dtype", choices=DTYPES, default="bf16", help="what dispatch takes and combine returns (bf16)")
    shape.add_argument(
        "--wire", type=_wire, default="native", help="what travels in dispatch: native, fp8, fp8_ue8m0 or mxfp8 (native)"
    )
    shape.add_argument("--layout", choices=("ragged", "padded", "compact"), default="ragged", help="of the rows received (ragged)")
    shape.add_argument("--align", type=_positive, default=128, help="ragged: each expert's rows start at a multiple of it (128)")


def layout_of(arguments: argparse.Namespace) -> Layout:
    layouts: dict[str, Layout] = {"ragged": Ragged(align=arguments.align), "padded": Padded(), "compact": Compact()}
    return layouts[arguments.layout]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layer_arguments(parser)
    what = parser.add_argument_group("what is measured")
    what.add_argument("--device", choices=tuple(PEERS), default="cpu", help="where the tensors are (cpu)")
    what.add_argument(
        "--transport", type=_names, default=("auto",), metavar="T,T,...",
        help="mapped; proxy:PROVIDER, every peer through the proxy (shm, tcp, efa, verbs, ...); proxy, over the best "
            "provider; auto (auto)",
    )  # fmt: skip
    what.add_argument("--provider", help="libfabric provider of auto and of a bare proxy")
    what.add_argument("--node-size", type=_positive, help="auto: pretend that so many ranks share a node; the rest goes by proxy")
    what.add_argument(
        "--peers", "--peer", type=_peers, metavar="P,P",
        help="compare with gloo, mpi; on cuda nccl, symm_mem, deep_ep; or none (all that the device has)",
    )  # fmt: skip
    what.add_argument(
        "--routing",
        choices=("uniform", "zipf", "one-hot"),
        default="uniform",
        help="how tokens choose experts (uniform)",
    )
    what.add_argument("--seed", type=int, default=1, help="of routing and values; all backends see the same (1)")
    what.add_argument("--threads", type=_positive, help="threads per rank (PPLX_COMM_THREADS, else this rank's share of the cores)")

    how = parser.add_argument_group("how long")
    how.add_argument("--seconds", type=float, default=36.0, help="for all measuring together; iterations follow from it (36)")
    how.add_argument("--iters", type=_positive, help="iterations of every point, instead of --seconds")
    how.add_argument("--warmup", type=int, default=5, help="iterations before each point that do not count (5)")
    how.add_argument("--no-check", action="store_true", help="do not compare results with the reference")
    how.add_argument("--timeout", type=float, default=60.0, help="seconds after which a silent rank fails the run (60)")

    cuda = parser.add_argument_group("with --device cuda, in place of --seconds and --iters")
    cuda.add_argument("--pairs", type=_pairs, default=32, help="dispatches and combines of a graph, on as many inputs (32)")
    cuda.add_argument("--replays", type=_positive, default=10, help="of each graph (10)")
    cuda.add_argument("--num-sms", type=_positive, help="bounds the grid of the kernels")

    out = parser.add_argument_group("where to")
    out.add_argument("--json", metavar="FILE", help="everything that was measured, with the machine and the command")
    out.add_argument("--plot", metavar="FILE.png", help="latency against tokens (needs matplotlib)")


def _transport(name: str, arguments: argparse.Namespace) -> Transport:
    kind, _, provider = name.partition(":")
    if kind == "proxy":
        return Transport(name, kind, provider or arguments.provider, 1)
    return Transport(name, kind, provider or arguments.provider, arguments.node_size if kind == "auto" else None)


def from_arguments(arguments: argparse.Namespace) -> Options:
    return Options(
        device=arguments.device,
        tokens=tuple(sorted(set(arguments.tokens))),
        hidden=arguments.hidden,
        experts=arguments.experts,
        top_k=arguments.top_k,
        dtype=DTYPES[arguments.dtype],
        wire=arguments.wire,
        layout=layout_of(arguments),
        transports=tuple(_transport(name, arguments) for name in dict.fromkeys(arguments.transport)),
        routing=arguments.routing,
        seed=arguments.seed,
        peers=_peers_of(arguments),
        seconds=arguments.seconds,
        iters=arguments.iters,
        warmup=arguments.warmup,
        check=not arguments.no_check,
        threads=arguments.threads,
        pairs=arguments.pairs,
        replays=arguments.replays,
        num_sms=arguments.num_sms,
        timeout=arguments.timeout,
        json=arguments.json,
        plot=arguments.plot,
    )


def parse(arguments: Sequence[str], program: str) -> Options:
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    add_arguments(parser)
    return from_arguments(parser.parse_args(arguments))
