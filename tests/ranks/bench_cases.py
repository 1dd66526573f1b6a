"""The floors of the benchmarks and the peers, on a rank: where their bytes go."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.cpu.floor import Copies
from bench.gpu import peers
from bench.gpu.composite import Geometry, Places, Plan, Row
from bench.gpu.device import Cuda, instruments
from bench.gpu.flashinfer import Exchange, FlashInfer
from bench.gpu.schedules import schedule
from bench.harness.batch import Shape, Source
from bench.harness.clock import Clock
from bench.harness.options import ORDERS, WAYS, Options, from_arguments, parser_of
from bench.harness.reference import Checks, Wrong
from bench.harness.world import World


def parse(arguments: list[str]) -> Options:
    return from_arguments(parser_of("test", None).parse_args(arguments))


def floor_copies(me: Any, arguments: list[str], remote: list[int]) -> dict[str, int]:
    """Runs the floor's copies and looks where the bytes went. Returns how many were read and written."""
    options = parse(arguments)
    world = World(options, None)
    try:
        shape = Shape(options, options.tokens[0], me.rank, me.world_size)
        source = Source(shape)
        copies = Copies(world, shape, frozenset(remote) - {me.rank}, "test")
        batch = source.batch(7)
        batch.run_experts()
        for _ in range(2):  # the second reads what the first one's peers wrote
            copies._y.fill_(float("nan"))
            copies.step(batch, Clock(world), None)
            world.barrier()

        p = batch.placement
        rows = copies._out[torch.from_numpy(p.place)]
        for rank in {*range(shape.world)} - ({*remote} - {shape.rank}):  # the proxy's rows did not come
            mine = p.source == rank
            sent = batch.x_of(rank)[torch.from_numpy(p.token[mine])].view(torch.uint8)[:, : shape.payload_bytes]
            assert torch.equal(rows[torch.from_numpy(mine)], sent)
        assert not copies._y.isnan().any() or shape.rank in remote
        dispatch, combine = copies.dispatch_ops(batch), copies.combine_ops(batch)
        return {
            "dispatch read": int(dispatch[:, 2].sum()),
            "dispatch written": int(dispatch[dispatch[:, 0] != 0, 2].sum()),
            "combine read": int(combine[:, 2].sum()),
            "combine written": int(combine[combine[:, 0] != 0, 2].sum()),
            "sent": int(batch.rows[me.rank].sum() - batch.rows[me.rank, me.rank]),
            "returned": int(batch.rows[:, me.rank].sum() - batch.rows[me.rank, me.rank]),
            "placed": len(np.unique(p.place)),
            "tokens": int(batch.wants[me.rank].any(axis=1).sum()),
            "only here": int((batch.wants[me.rank].sum(axis=1) == 1)[batch.wants[me.rank, :, me.rank]].sum()),
        }
    finally:
        world.close()


def gpu_peers(me: Any, arguments: list[str]) -> None:
    """Those that are torch's collectives, over gloo: what they bring is what was sent, for each of several inputs in any order."""
    options = parse(arguments)
    world = World(options, None)
    try:
        shape = Shape(options, options.tokens[0], me.rank, me.world_size)
        source = Source(shape)
        batches = [source.batch(i) for i in range(3)]
        inputs = peers.Inputs([b.x for b in batches], [b.topk_ids for b in batches], [b.topk_weights for b in batches])
        cpu = SimpleNamespace(device=torch.device("cpu"))
        notes: list[str] = []
        nccl, gather = peers.AllToAllSingle(world, options, cpu), peers.GatherAndReduce(world, options, cpu)
        for peer in (nccl, gather):
            peer.prepare(shape, inputs)
        for i in (0, 1, 2, 1, 0, 2):
            batch = batches[i]
            batch.run_experts()
            checks = Checks(batch, source.table, notes)
            nccl.dispatch(i)
            checks.rows("nccl", *nccl._peer.unpacked(nccl.received))
            nccl._answers[: len(batch.expert_out_by_expert)] = batch.expert_out_by_expert
            nccl.combine(i)
            checks.close("nccl", nccl.y)

            gather.received.fill_(0xFF)
            gather.dispatch(i)
            rows = gather.received.view(shape.world, shape.tokens, -1)
            for rank in range(shape.world):
                if rank != me.rank or not shape.quantised:
                    codes = batch.quantised_x_of(rank)[0] if shape.quantised else batch.x_of(rank)
                    assert torch.equal(rows[rank, :, : shape.payload_bytes], codes.view(torch.uint8))
                routes = rows[rank, :, shape.payload_bytes + shape.scale_bytes :].clone()
                ids, weights = routes.view(torch.int32)[:, : options.top_k], routes.view(torch.float32)[:, options.top_k :]
                assert torch.equal(ids.long(), torch.from_numpy(batch.ids[rank])) and torch.equal(weights, batch.weights_of(rank))
            gather.y.fill_(float("nan"))
            gather.combine(i)
            everybody = [torch.empty_like(gather.partial) for _ in range(shape.world)]
            dist.all_gather(everybody, gather.partial)
            mine = slice(me.rank * shape.tokens, (me.rank + 1) * shape.tokens)
            assert torch.allclose(gather.y, torch.stack(everybody).sum(0)[mine], rtol=1e-5, atol=1e-5)
        assert not notes, notes
    finally:
        dist.destroy_process_group()
        world.close()


class FlashInferStandIn:
    """Its functions on CPU tensors. Rows arrive last token first. plant: what is wrong, on all ranks."""

    mnnvl = SimpleNamespace(MnnvlConfig=SimpleNamespace)

    def __init__(self, plant: str) -> None:
        self._plant = plant

    def Mapping(self, size: int, rank: int, gpus_per_node: int, **parallel: int) -> None:
        assert gpus_per_node == size and parallel == {"tp_size": size, "moe_ep_size": size}

    def moe_a2a_get_workspace_size_per_rank(self, size: int, tokens: int, dispatched: int, combined: int) -> int:
        return size * tokens * (dispatched + combined)

    def MoeAlltoAll(self, mapping: None, tokens: int, top_k: int, experts: int, nbytes: int, mnnvl_config: Any) -> Any:
        self._exchange: Exchange = mnnvl_config.comm_backend
        return SimpleNamespace(workspace=torch.zeros(self._exchange.Get_size(), nbytes, dtype=torch.uint8), metainfo=None)

    def moe_a2a_dispatch(
        self, ids: torch.Tensor, payloads: list[torch.Tensor], workspace: Any, metainfo: None, tokens: int, rank: int, size: int,
        top_k: int, experts: int,
    ) -> tuple[list[torch.Tensor], int, None]:  # fmt: skip
        assert ids is payloads[-2] and ids.dtype == torch.int32 and ids.shape == (tokens, top_k)
        all_ranks, per_rank = self._exchange.allgather((ids, payloads)), experts // size
        self._sent = [[(of // per_rank == to).any(1).nonzero()[:, 0].flip(0) for to in range(size)] for of, _ in all_ranks]
        planes = [torch.zeros(size, tokens, payload.shape[1], dtype=payload.dtype) for payload in payloads]
        for source, (_, of_source) in enumerate(all_ranks):
            for plane, payload in zip(planes, of_source, strict=True):
                rows = payload[self._sent[source][rank]]
                plane[source, : len(rows)] = rows
        planes[0][0, 0, 0] += self._plant == "rows"
        return planes, 16, None

    def moe_a2a_sanitize_expert_ids(self, ids: torch.Tensor, workspace: Any, metainfo: None, rank: int, invalid: int) -> None:
        for source, plane in enumerate(ids):
            plane[len(self._sent[source][rank]) :] = 0 if self._plant == "ids" else invalid

    def moe_a2a_wrap_payload_tensor_in_workspace(
        self, workspace: torch.Tensor, leading: list[int], begin: int, end: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return workspace[begin:end].view(dtype).view(*leading, -1)

    def moe_a2a_combine(
        self, answers: torch.Tensor, tokens: int, workspace: Any, metainfo: None, runtime_tokens: int, rank: int, size: int,
        top_k: int, offset: int, payload_in_workspace: bool, output: torch.Tensor,
    ) -> None:  # fmt: skip
        assert payload_in_workspace and answers.data_ptr() == workspace[rank].data_ptr() + offset
        output.fill_(self._plant == "sums")
        for sent, of_rank in zip(self._sent[rank], self._exchange.allgather(answers), strict=True):
            output[sent] += of_rank[rank, : len(sent)]


def flashinfer_peer(me: Any, arguments: list[str], plant: str) -> str:
    """Returns what its check says."""
    options = parse(arguments)
    world = World(options, None)
    try:
        cpu = SimpleNamespace(device=torch.device("cpu"))
        peer = FlashInfer(lambda: FlashInferStandIn(plant), world, options, cpu)
        for tokens in options.tokens:
            shape = Shape(options, tokens, me.rank, me.world_size)
            batches = [Source(shape).batch(i) for i in range(2)]
            inputs = peers.Inputs([b.x for b in batches], [b.topk_ids for b in batches], [b.topk_weights for b in batches])
            peer.prepare(shape, inputs)
            for i in (1, 0):
                peer.dispatch(i)
                peer.combine(i)
        return ""
    except Wrong as wrong:
        return str(wrong)
    finally:
        world.close()


CHUNK = 512


def folded(source: torch.Tensor, row: Row, fold: int) -> torch.Tensor:
    """A row's bytes. Of each chunk of a part, sixteen bytes of a lane are `fold` times sixteen that were read, a chunk apart; what
    would lie beyond the part's share is read at its end."""
    pieces, parts = source.view(-1, 16), []
    for begin in range(0, row.bytes, row.part_bytes):
        end = min(row.bytes, begin + row.part_bytes)
        last = min(row.source_bytes, end * fold) - 16
        within = torch.arange(0, end - begin, 16)
        first = (begin + within // CHUNK * CHUNK) * fold + within % CHUNK
        made = torch.zeros(len(within), 16, dtype=torch.uint8)
        for f in range(fold):
            made ^= pieces[(first + f * CHUNK).clamp(max=last) // 16]
        parts.append(made.ravel())
    return torch.cat(parts)


class Emulated(Cuda):
    """The kernels themselves, on a CPU: see tests/emulation."""

    def __init__(self) -> None:
        self.device, self.multiprocessors = torch.device("cpu", 0), 3

    def stream(self) -> int:
        return 0

    def synchronize(self) -> None:
        """Its streams are the module's own."""
        ctypes.CDLL(instruments().__file__).pplx_emulation_synchronize(None)


COMPOSITE_DEVICES: dict[str, Callable[[int], Any]] = {"emulated": lambda rank: Emulated(), "gpu": Cuda}


def composite(me: Any, arguments: list[str], kind: str, num_sms: int | None) -> dict[str, dict[str, int]]:
    """Runs the composite floor twice, whose second launch finds what the first one's peers stored; looks where all bytes went. Returns
    how many bytes it says that it moves, and how many a count of the routing, choice by choice, finds."""
    options = parse(arguments)
    world = World(options, None)
    device = COMPOSITE_DEVICES[kind](me.rank)
    try:
        shape = Shape(options, options.tokens[0], me.rank, me.world_size)
        batch, g = Source(shape).batch(3), Geometry(shape)
        p = batch.placement
        generators = [torch.Generator().manual_seed(rank) for rank in range(shape.world)]
        everybody = torch.stack(
            [torch.randint(0, 256, (shape.tokens, shape.row_bytes), generator=of_rank).byte() for of_rank in generators]
        )
        x = everybody[me.rank]
        # Small numbers, whose sums are exact in any order.
        places = [Source(Shape(options, shape.tokens, rank, shape.world)).batch(3).placement for rank in range(shape.world)]
        room, generator = max(int(of_rank.place.max()) + 1 for of_rank in places), torch.Generator().manual_seed(9)
        answers = torch.randint(-8, 8, (room, options.hidden), generator=generator).to(options.dtype)
        out = torch.full((g.out_bytes(batch) // g.placed.bytes, g.placed.bytes), 0xA5, dtype=torch.uint8)
        y = torch.full((shape.tokens, options.hidden), float("nan"), dtype=options.dtype)
        found = {}
        x, answers, out, y = (tensor.to(device.device) for tensor in (x, answers, out, y))
        with device.sharing(world, g.area_bytes, "composite") as area:
            plan = Plan(batch, g, Places(tuple(area), out.data_ptr(), y.data_ptr(), x.data_ptr(), answers.data_ptr()))
            for phase in ("dispatch", "combine"):
                work = plan.of(phase)
                launch = device.composite(phase, work, g)
                for _ in range(2):
                    launch(num_sms)
                    device.synchronize()
                    world.barrier()
                found[phase] = asdict(work.traffic)
        answers, out, y = (tensor.cpu() for tensor in (answers, out, y))

        tokens = everybody[torch.from_numpy(p.source), torch.from_numpy(p.token)]
        rows = torch.stack([folded(token, g.sent, g.fold)[: g.placed.bytes] for token in tokens])
        assert torch.equal(out[torch.from_numpy(p.place)], rows)
        untouched = torch.ones(len(out), dtype=torch.bool)
        untouched[torch.from_numpy(p.place)] = False
        assert (out[untouched] == 0xA5).all()

        sums = torch.zeros(shape.tokens, options.hidden)
        for q in places:  # row for row, the experts of all ranks answer alike
            mine = q.source == me.rank
            for place, t in {(int(place), int(t)) for place, t in zip(q.place[mine], q.token[mine], strict=True)}:
                sums[t] += answers[place].float()
        assert torch.equal(y.float(), sums)

        row, token, placed = shape.config.row_bytes(0), shape.row_bytes, shape.payload_bytes + shape.scale_bytes
        assert placed == g.placed.bytes
        counted = {f"{phase} {what}": 0 for phase in found for what in ("read", "written", "pushed")}
        per_rank = shape.config.experts_per_rank
        for source in range(shape.world):
            for t in range(shape.tokens):
                goes = [int(expert) // per_rank for expert in batch.ids[source, t]]
                here, ranks = goes.count(me.rank), set(goes)
                if source == me.rank:  # sent, and the sums added up
                    counted["dispatch read"] += token
                    counted["dispatch written"] += row * len(ranks)
                    counted["dispatch pushed"] += row * len(ranks - {me.rank})
                    counted["combine read"] += token * len(ranks)
                    counted["combine written"] += token
                if here:  # placed, and answered
                    copies = 1 if shape.compact else here
                    counted["dispatch read"] += placed
                    counted["dispatch written"] += placed * copies
                    counted["combine read"] += token * copies
                    counted["combine written"] += token
                    counted["combine pushed"] += token if source != me.rank else 0
        return {"says": {f"{phase} {what}": n for phase, of in found.items() for what, n in of.items()}, "counted": counted}
    finally:
        world.close()


def schedules(me: Any, arguments: list[str]) -> dict[str, int]:
    """Runs the floor by every schedule of rows, and looks where all bytes went. Returns how often a dispatch's pushes change their
    peer, by order."""
    options = parse(arguments)
    world, device = World(options, None), Emulated()
    try:
        shape = Shape(options, options.tokens[0], me.rank, me.world_size)
        batch, g = Source(shape).batch(3), Geometry(shape)
        changes = {}
        with device.sharing(world, g.area_bytes, "schedules") as area:
            mine = np.frombuffer((ctypes.c_char * g.area_bytes).from_address(area[me.rank]), dtype=np.uint8)
            for op, order, way in itertools.product((0, 1), ORDERS, WAYS):
                nbytes = shape.config.row_bytes(op)
                sizes = shape.tokens, nbytes
                sent = np.stack([np.random.default_rng(rank).integers(256, size=sizes) for rank in range(shape.world)])
                expected = np.zeros_like(mine)

                def put(memory: Any, source: int, row: Any, rows: Any, op: int = op, nbytes: int = nbytes) -> None:
                    first = g.slot(op, np.zeros(1, dtype=np.uint64), np.array(source), row).astype(np.int64)
                    memory[first[:, None] + np.arange(nbytes)] = rows

                for source in range(shape.world):
                    wants, rows = (of[source, :, me.rank] if op == 0 else of[me.rank, :, source] for of in (batch.wants, batch.row))
                    own = source == me.rank
                    wanted = np.arange(shape.tokens) if own else wants.nonzero()[0]
                    put(expected, source, wanted if own else rows[wanted], sent[source, wanted])
                mine[:] = 0
                put(mine, me.rank, np.arange(shape.tokens), sent[me.rank])
                world.barrier()
                work = schedule(batch, g, area, op, order, way)
                launch = device.composite(way, work, g)  # has the memory of what it launches
                launch(2)
                device.synchronize()
                world.barrier()
                assert np.array_equal(mine, expected), (op, order, way)
                world.barrier()
                if (op, way) == (0, "push"):
                    peers_of = [[at <= to < at + g.area_bytes for at in area] for to in work.others[:, 0].tolist()]
                    changes[order] = sum(a != b for a, b in itertools.pairwise(peers_of))
        return changes
    finally:
        world.close()
