"""The command line of the benchmark."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from pplx_comm.layer_arguments import DTYPES, add_layer_arguments, layout_of, positive
from pplx_comm.layouts import Layout

PEERS = {"cpu": ("gloo", "mpi"), "cuda": ("nccl", "ag_rs", "symm_mem", "deep_ep", "flashinfer")}
"""Peers to compare with, by device."""
ORDERS = ("tokens", "peers", "runs-1", "runs-16", "runs-128", "shuffled")
WAYS = ("push", "pull", "bulk")
SCHEDULES = tuple(f"{order}:{way}" for order in ORDERS for way in WAYS)
"""Schedules of the floor on GPUs, which bench/gpu/schedules.py makes."""


@dataclass(frozen=True)
class Transport:
    """One way to carry, as --transport names it: mapped, auto, dedup, proxy, proxy:PROVIDER, nvshmem, nvshmem:RANKS OF A NODE."""

    name: str
    transport: str
    provider: str | None
    node_size: int | None
    dedup: str = "rank"


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
    num_sms: tuple[int | None, ...]
    """Multiprocessors that a launch may take, one setting after the other; None: all."""
    schedules: tuple[str, ...]
    slot_bytes: int | None
    timeout: float
    json: str | None
    trace: str | None
    plot: str | None

    def described(self) -> dict[str, Any]:
        """As the JSON has them."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["dtype"] = str(self.dtype).removeprefix("torch.")
        plain["layout"] = repr(self.layout)
        plain["transports"] = [transport.name for transport in self.transports]
        return plain


def _pairs(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError("must be at least 2: a time is from one launch to the next")
    return value


def num_sms(text: str) -> tuple[int | None, ...]:
    """As they are measured: few first, all last."""
    given = {None if part.strip() == "all" else positive(part) for part in text.split(",")}
    return tuple(sorted(given, key=lambda n: (n is None, n)))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _peers(text: str) -> tuple[str, ...]:
    names = () if text == "none" else _names(text)
    known = [name for of_device in PEERS.values() for name in of_device]
    if unknown := set(names) - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: there are {', '.join(known)} and none")
    return names


def _schedules(text: str) -> tuple[str, ...]:
    names = SCHEDULES if text == "all" else _names(text)
    if not names or set(names) - set(SCHEDULES):
        raise argparse.ArgumentTypeError(f"{text}: there are {', '.join(SCHEDULES)} and all")
    return names


def _peers_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    return PEERS[arguments.device] if arguments.peers is None else tuple(p for p in arguments.peers if p in PEERS[arguments.device])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layer_arguments(parser)
    what = parser.add_argument_group("what is measured")
    what.add_argument("--device", choices=tuple(PEERS), default="cpu", help="device of the tensors (cpu)")
    what.add_argument(
        "--transport", type=_names, default=("auto",), metavar="T,T,...",
        help="mapped; proxy:PROVIDER, every peer through the proxy (shm, tcp, efa, verbs, ...); proxy, over the best "
            "provider; nvshmem, mapped inside a node and posts by kernels across; nvshmem:1, every peer by NVSHMEM; auto; dedup, "
            "as auto, with a row once per node (auto)",
    )  # fmt: skip
    what.add_argument("--provider", help="libfabric provider of auto and of a bare proxy")
    what.add_argument(
        "--node-size",
        type=positive,
        metavar="N",
        help="auto, dedup, nvshmem: treat each N consecutive ranks as one node; the proxy, or NVSHMEM, carries to all others",
    )
    what.add_argument(
        "--peers", "--peer", type=_peers, metavar="P,P",
        help="compare with gloo, mpi; on cuda nccl, ag_rs, symm_mem, deep_ep, flashinfer; or none (all that the device has)",
    )  # fmt: skip
    what.add_argument(
        "--routing", choices=("uniform", "zipf", "one-hot"), default="uniform", help="how tokens choose experts (uniform)"
    )
    what.add_argument(
        "--slot-bytes", type=positive, metavar="N", help="of the library: blocks that do not fit go in pieces (no limit)"
    )
    what.add_argument("--seed", type=int, default=1, help="seed of routing and values, alike for everything measured (1)")
    what.add_argument("--threads", type=positive, help="threads per rank (PPLX_COMM_THREADS, else this rank's share of the cores)")

    how = parser.add_argument_group("how long")
    how.add_argument(
        "--seconds", type=float, default=36.0, help="seconds for all measurements together, from which iterations follow (36)"
    )
    how.add_argument("--iters", type=positive, help="iterations of every point, in place of --seconds")
    how.add_argument("--warmup", type=int, default=5, help="iterations before each point, which do not count (5)")
    how.add_argument("--no-check", action="store_true", help="do not compare results with the reference")
    how.add_argument("--timeout", type=float, default=60.0, help="seconds after which a silent rank fails the run (60)")

    cuda = parser.add_argument_group("with --device cuda, in place of --seconds and --iters")
    cuda.add_argument(
        "--pairs", type=_pairs, default=32, help="dispatches and combines of a graph, each pair on an input of its own (32)"
    )
    cuda.add_argument("--replays", type=positive, default=10, help="replays of each graph (10)")
    cuda.add_argument(
        "--num-sms", type=num_sms, default=(None,), metavar="N,N,...",
        help="multiprocessors of a launch, for the library, the floors, NCCL and DeepEP's normal mode: 8,16,24,32,all (all)",
    )  # fmt: skip
    cuda.add_argument(
        "--schedules", type=_schedules, default=SCHEDULES[:1], metavar="ORDER:WAY,...",
        help=f"schedules of the floor inside a node, which is the fastest one's; all of them in a table: all ({SCHEDULES[0]})",
    )  # fmt: skip

    out = parser.add_argument_group("output")
    out.add_argument("--trace", metavar="FILE", help="a timeline of it for ui.perfetto.dev; what is measured takes longer")
    out.add_argument("--json", metavar="FILE", help="everything that was measured, with the machine and the command")
    out.add_argument("--plot", metavar="FILE.png", help="latency against tokens (needs matplotlib)")


def _transport(name: str, arguments: argparse.Namespace) -> Transport:
    kind, _, provider = name.partition(":")
    if kind == "nvshmem":
        return Transport(name, kind, None, int(provider) if provider else arguments.node_size)
    if kind == "proxy":
        return Transport(name, kind, provider or arguments.provider, 1)
    if kind == "dedup":
        return Transport(name, "auto", provider or arguments.provider, arguments.node_size, "node")
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
        schedules=arguments.schedules,
        slot_bytes=arguments.slot_bytes,
        timeout=arguments.timeout,
        json=arguments.json,
        trace=arguments.trace,
        plot=arguments.plot,
    )


def parser_of(program: str, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return parser
