"""The steps that a test sends: an AllToAll and a few steps on it, the same on every rank by their seed."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import reference
import torch
from reference import Shape, Tokens

import pplx_comm as pc
from pplx_comm.wiring.config import make_config

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TRANSPORTS = ("mapped", "proxy:shm", "proxy:tcp", "mixed:shm", "mixed:tcp", "dealt:tcp", "relayed:tcp", "relayed-dealt:shm")
WIRES = ("native", "fp8", "fp8_ue8m0", "mxfp8")
ROUTINGS = ("uniform", "zipf", "to_one", "repeats", "sparse", "local")
CROWDS = ("full", "uneven", "one_has_none", "nobody", "one_has_all")


@dataclass(frozen=True)
class Case:
    """One AllToAll and a few steps on it. Everything follows from it, on every rank alike."""

    seed: int
    world_size: int
    num_experts: int = 8
    top_k: int = 2
    hidden: int = 64
    max_tokens: int = 8
    dtype: str = "bfloat16"
    wire: str = "native"
    layout: str = "ragged"
    align: int = 1
    zero_pad: bool = False
    rows: int | None = None  # a bound of the output, as Shape.rows
    transport: str = "mapped"
    in_flight: int = 1
    scale_layout: str = "row"
    threads: int = 1
    first_step: int = 1
    routing: str = "uniform"
    crowd: str = "full"
    steps: int = 3
    replicas: int = 1
    dead: tuple[int, ...] = ()
    proxy_threads: int = 1
    slot_bytes: int | None = None
    combine_wire: str = "native"

    @property
    def node_size(self) -> int | None:
        return {
            "nvshmem": self.replicas,
            "nvshmem-mixed": min(max(2, self.replicas), self.world_size),
            "mixed": min(max(2, self.replicas), self.world_size),
            "relayed": min(max(2, self.replicas), self.world_size),
            "relayed-copy": 2,
            "undecided": 2,
        }.get(self.transport.partition(":")[0])

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank. "dealt": two nodes, to which ranks are dealt in turn, groups of replicas together. "alone": rank 0 is
        alone, the others are two by two."""
        if "alone" in self.transport:
            return tuple((rank + 1) // 2 for rank in range(self.world_size))
        if "dealt" in self.transport:
            return tuple(rank // self.replicas % 2 for rank in range(self.world_size))
        return tuple(rank // (self.node_size or self.world_size) for rank in range(self.world_size))

    @property
    def without_nvshmem(self) -> Case:
        """A carrier that every device has in place of NVSHMEM, with the same nodes, on which a combine's bits depend."""
        return replace(self, transport={"nvshmem": "mapped", "nvshmem-mixed": "mixed:tcp"}.get(self.transport, self.transport))

    @property
    def relayed(self) -> bool:
        return self.transport.startswith("relayed")

    @property
    def shape(self) -> Shape:
        bound = self.rows
        if bound is None and self.layout == "padded":
            bound = self.world_size // self.replicas * self.max_tokens * self.top_k
        if bound is not None and self.layout == "padded":
            bound = -(-bound // self.align) * self.align
        return Shape(
            self.world_size, self.num_experts, self.top_k, self.hidden, self.max_tokens, DTYPES[self.dtype],
            self.wire, self.layout, self.align if self.layout == "ragged" else 1, bound, self.replicas, self.dead, self.nodes,
            self.combine_wire == "fp8" and len(set(self.nodes)) < self.world_size,
        )  # fmt: skip

    @property
    def layout_object(self) -> pc.Ragged | pc.Padded | pc.Compact:
        if self.layout == "ragged":
            return pc.Ragged(align=self.align, zero_pad=self.zero_pad, max_rows=self.rows)
        if self.layout == "compact":
            return pc.Compact()
        most = self.rows or self.world_size // self.replicas * self.max_tokens * self.top_k
        return pc.Padded(max_tokens_per_expert=most, align=self.align)

    def __str__(self) -> str:
        default = asdict(Case(0, 0))
        return f"Case({', '.join(f'{k}={v!r}' for k, v in asdict(self).items() if v != default[k])})"


def in_pieces(case: Case, on_gpu: bool = False) -> Case:
    """With the smallest slots that there are: blocks of more than 256 rows go in pieces of 128."""
    config = make_config(
        case.world_size, 0, num_experts=case.num_experts, top_k=case.top_k, hidden=case.hidden, max_tokens_per_rank=case.max_tokens,
        dtype=DTYPES[case.dtype], wire=case.wire, layout=case.layout_object, in_flight=case.in_flight, scale_layout="row",
        replicas=case.replicas, on_gpu=on_gpu,
    )  # fmt: skip
    return replace(case, slot_bytes=int(config.least_slot_bytes))


def random_case(seed: int, world_size: int, transports: tuple[str, ...] = TRANSPORTS) -> Case:
    r = random.Random(f"{seed} {world_size}")
    dtype = r.choice(sorted(DTYPES))
    unit = 16 // DTYPES[dtype].itemsize
    hidden = unit * r.choice([1, 1, 2, 3, 5, 7, 15, 16, 17, 33, r.randint(1, 80)])
    experts = r.choice([1, world_size, r.randint(1, 3 * world_size + 1), r.randint(1, 40)])
    layout = r.choice(["ragged", "ragged", "padded", "compact"])
    transport = r.choice(transports)
    if world_size == 1:
        transport = "mapped"
    return Case(
        seed=seed, world_size=world_size, num_experts=experts, top_k=r.choice([1, 2, 3, 8, r.randint(1, 16)]), hidden=hidden,
        max_tokens=r.choice([1, 2, 5, 8, r.randint(1, 24)]), dtype=dtype, wire=r.choice(WIRES), layout=layout,
        align=r.choice([1, 8, 128]), zero_pad=r.random() < 0.5, transport=transport, in_flight=r.choice([1, 1, 2, 4]),
        scale_layout=r.choice(["row", "tma"]), threads=r.choice([1, 1, 2, 3]), first_step=r.choice([1, 1, 2**32 - 5, 2**32 - 1, 0]),
        routing=r.choice(ROUTINGS), crowd=r.choice(CROWDS[:1] * 3 + CROWDS), steps=r.choice([3, 6]),
        replicas=r.choice([1, 1, *(g for g in (2, 3, 4, 5, 8) if world_size % g == 0)]), proxy_threads=r.choice([1, 1, 2]),
    )  # fmt: skip


def variants(case: Case, **changes: list[Any]) -> list[Case]:
    """The case with each value of each change, one at a time."""
    return [replace(case, **{name: value}) for name, values in changes.items() for value in values]


# ---- inputs ------------------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One step of a case, as all ranks know it."""

    tokens: list[Tokens]  # indexed by rank
    late_weights: list[torch.Tensor] | None  # weights= at combine
    weighted: bool
    released: bool
    start: list[torch.Tensor] | None  # accumulate=True adds to it
    given_out: bool
    plan_of: int | None  # reuse that step's plan
    tails: list[torch.Tensor] | None = None  # indexed by rank of the tokens: what each choice's expert attaches
    how: list[str] = field(default_factory=list)  # indexed by rank: whole, halves, async, other_thread
    strided: list[bool] = field(default_factory=list)


def _ids(case: Case, rank: int, tokens: int, g: torch.Generator) -> torch.Tensor:
    shape, e = (tokens, case.top_k), case.num_experts
    ids = torch.randint(0, e, shape, generator=g)
    if case.routing == "zipf":
        p = 1.0 / torch.arange(1, e + 1)
        ids = torch.multinomial(p, tokens * case.top_k, replacement=True, generator=g).view(shape) if tokens else ids
    elif case.routing == "to_one":
        ids.fill_(e - 1)
    elif case.routing == "repeats":
        ids = ids[:, :1].expand(shape).clone()
    elif case.routing == "sparse":
        ids[torch.rand(shape, generator=g) < 0.7] = -1
    elif case.routing == "local":
        mine = case.shape.experts_of(rank)
        ids = ids % len(mine) + mine.start if len(mine) else ids
    ids[torch.rand(shape, generator=g) < 0.05] = -1
    return ids


def _count(case: Case, rank: int, chosen: int, r: random.Random) -> int:
    chosen -= chosen % case.replicas
    if (
        case.crowd == "nobody"
        or (case.crowd == "one_has_all" and rank != chosen)
        or (case.crowd == "one_has_none" and rank == chosen)
    ):
        return 0
    return case.max_tokens if case.crowd in ("full", "one_has_all") else r.randint(0, case.max_tokens)


def _values(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=g) * 2.0 ** torch.randint(-6, 7, (*shape[:-1], 1), generator=g)
    if shape[0] and torch.rand((), generator=g) < 0.3:
        x[torch.randint(0, shape[0], (), generator=g)] = 0.0
    return x.to(dtype)


def bits(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=g).to(torch.int32).view(torch.float32)


def _alike(case: Case, by_rank: list[torch.Tensor]) -> list[torch.Tensor]:
    """Replicas pass the same."""
    return [by_rank[rank - rank % case.replicas] for rank in range(case.world_size)]


def make_steps(case: Case) -> list[Step]:
    r = random.Random(f"steps {case.seed}")
    g = torch.Generator().manual_seed(case.seed)
    dtype = DTYPES[case.dtype]
    steps: list[Step] = []
    for number in range(case.steps):
        chosen = r.randrange(case.world_size)
        plan_of = r.randrange(number) if number and r.random() < 0.25 else None
        quantised = case.wire != "native" and r.random() < 0.4
        tokens = []
        for rank in range(case.world_size):
            if rank % case.replicas:
                tokens.append(tokens[-1])
                continue
            n = _count(case, rank, chosen, r)
            wide = r.random() < 0.5
            ids = _ids(case, rank, n, g).to(torch.int64 if wide else torch.int32)
            # A plan keeps the weights that it was made with unless it is given others.
            weights = torch.rand(n, case.top_k, generator=g) if r.random() < 0.8 else None
            if plan_of is not None:
                before = steps[plan_of].tokens[rank]
                ids, n = before.ids, before.ids.shape[0]
                weights = torch.rand(n, case.top_k, generator=g) if r.random() < 0.5 else before.weights
            x = _values((n, case.hidden), dtype, g)
            entry = Tokens(x, ids, weights)
            if quantised:
                codes, scale = reference.quantise(x, case.wire)
                entry = Tokens(codes, ids, weights, scale)
            tokens.append(entry)
        counts = [t.ids.shape[0] for t in tokens]
        late = case.layout != "compact" and r.random() < 0.2
        accumulate = r.random() < 0.25
        step = Step(
            tokens=tokens,
            late_weights=_alike(case, [torch.rand(n, case.top_k, generator=g) for n in counts]) if late else None,
            weighted=late or r.random() < 0.8,
            released=r.random() < 0.12,
            start=_alike(case, [_values((n, case.hidden), dtype, g) for n in counts]) if accumulate else None,
            given_out=accumulate or r.random() < 0.5,
            plan_of=plan_of,
            # Every bit pattern: what rides is bits, not numbers.
            tails=_alike(case, [bits((n, case.top_k), g) for n in counts]) if r.random() < 0.3 else None,
        )
        step.how = [r.choice(["whole", "halves", "async", "other_thread"]) for _ in counts]
        step.strided = [r.random() < 0.4 for _ in counts]
        steps.append(step)
    return steps
