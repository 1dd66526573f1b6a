"""The collective part of an AllToAll's construction: every rank agrees on everything, or every rank raises."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from pplx_comm._version import __version__
from pplx_comm.control import deadlines, memfd
from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error
from pplx_comm.gpus import cuda_module
from pplx_comm.wiring.carriers import host_key
from pplx_comm.wiring.compare import Answers, Attempts, agree, compare
from pplx_comm.wiring.connect import connect
from pplx_comm.wiring.gpu_memory import lay_gpu_relays, make_gpu_exchange
from pplx_comm.wiring.libfabric import Locality, this_locality
from pplx_comm.wiring.memory import lay_relays, make_exchange
from pplx_comm.wiring.peers import NoRelays, Peers, find_peers, node_ranks, nodes_of
from pplx_comm.wiring.record import Wiring
from pplx_comm.wiring.request import Request

MOST = 8
"""AllToAlls that live on one Communicator."""


def wire_up(control: ControlPlane, request: Request, used_numbers: set[int]) -> Wiring:
    """Builds everything that needs the other ranks. The AllToAll's number is config.object then."""
    config = request.config
    attempts = Attempts(request.error)
    left = [rank for rank, lives in enumerate(control.alive()) if lives]
    peers = attempts.run(lambda: find_peers(request, control, left))
    config.node_ranks = attempts.run(lambda: node_ranks(request, control, peers)) or 0
    config.combine_fp8 = bool(config.node_ranks) and request.combine_wire == "fp8"
    locality = attempts.run(lambda: _locality(request))
    answers = agree(
        control,
        "AllToAll: arguments",
        {
            "error": attempts.error,
            "compared": {"version": __version__, "nodes": attempts.run(lambda: nodes_of(request, control)), **request.compared},
            "used": sorted(used_numbers),
            "host": host_key(),
            "memory": memfd.available_bytes(),  # before any rank takes some
            "locality": asdict(locality) if locality else None,
            "remote": len(peers.remote) if peers else 0,
        },
        request.patience,
    )
    compare(answers)
    assert peers is not None
    config.object = _free_number(answers)
    config.on_gpu = request.gpu is not None
    laid = None
    try:
        laid = _lay_memory(control, request, peers, answers)
    except NoRelays:
        if request.dedup == "node":
            raise
        config.node_ranks = 0
    wiring, proxied = laid or _lay_memory(control, request, peers, answers)  # the memory laid in vain is gone by now
    alive = [rank for rank, answer in enumerate(answers) if answer is not None]
    if control.generation > 0:  # made after a reset, by those that are left
        wiring.exchange.reset(core_generation(control.generation), [rank in alive for rank in range(control.world_size)])
    try:
        _lay_relays(control, request, wiring, _share(control, answers) - config.heap_bytes)
        if proxied:
            connect(control, request, wiring, alive)
        # No rank writes before all can receive.
        agree(control, "AllToAll: ready", {}, request.patience)
    except BaseException:
        wiring.close(deadlines.CLOSE_FAILED)
        raise
    return wiring


def core_generation(generation: int) -> int:
    """An exchange's generation in that of its Communicator: the same on all ranks, whatever reset() failed on some. 0 is none."""
    return generation + 1


def rewire(control: ControlPlane, request: Request, wiring: Wiring, survivors: list[int]) -> None:
    """After a failure: the mappings stay; the proxy is made anew, for the dead may have left the old one in any state."""
    wiring.peers = wiring.peers.of(survivors)
    posted = wiring.exchange.posted() if wiring.puts else None
    mine = {"remote": len(wiring.peers.remote), "posted": posted}
    answers = agree(control, "reset: survivors", mine, request.patience)
    if wiring.puts:
        settle(control, request, wiring, answers)
    elif any(answer is not None and answer["remote"] for answer in answers):
        _lay_relays(control, request, wiring)
        connect(control, request, wiring, survivors)
    agree(control, "reset: ready", {}, request.patience)


def _lay_relays(control: ControlPlane, request: Request, wiring: Wiring, share: int | None = None) -> None:
    """share: bytes of this host's memory that this rank may take for them."""
    if request.config.node_ranks == 0:
        return
    if request.gpu is None:
        lay_relays(control, request, wiring.exchange, wiring.peers, share)
    else:
        lay_gpu_relays(control, request, wiring.exchange, wiring.peers, wiring.kernels)


def settle(control: ControlPlane, request: Request, wiring: Wiring, answers: Answers) -> None:
    """Collective: what the survivors have put in the old generation lands; then all count anew. A put that came later would be
    taken for one of the new generation."""
    attempts = Attempts()
    expected = {r: answer["posted"][control.rank] for r, answer in enumerate(answers) if answer is not None and r != control.rank}
    end = time.monotonic() + request.patience

    def wait() -> None:
        while True:
            landed = wiring.exchange.landed()
            late = [rank for rank, puts in expected.items() if landed[rank] != puts]
            if not late:
                return
            if time.monotonic() > end:
                rank = late[0]
                raise Error(
                    f"reset: only {landed[rank]} of {expected[rank]} puts of rank {rank} have landed on rank "
                    f"{control.rank} within {request.patience:.0f} s: the network between them is broken"
                )
            time.sleep(0.001)  # puts land in a GPU's memory, which wakes no thread

    attempts.run(wait)
    agree(control, "reset: puts", {"error": attempts.error}, 2 * request.patience)
    wiring.exchange.rebase()


def _lay_memory(control: ControlPlane, request: Request, peers: Peers, answers: Answers) -> tuple[Wiring, bool]:
    """Also whether some rank has a proxy, which GPUs that do not reach each other decide."""
    request.config.remote_peers = len(peers.remote)
    proxied = any(answer is not None and answer["remote"] for answer in answers)
    hosts = {rank: answer["host"] for rank, answer in enumerate(answers) if answer is not None}
    here = host_key()
    localities = {
        r: Locality(**answer["locality"]) for r, answer in enumerate(answers) if answer is not None and answer["host"] == here
    }
    if request.gpu is None:
        exchange: Any = make_exchange(control, request, peers, len(localities), _share(control, answers))
        return Wiring(exchange, peers, hosts, localities, blocks_on_gpu=False), proxied
    made = make_gpu_exchange(control, request, peers, proxied, localities)
    wiring = Wiring(made.exchange, made.peers, hosts, localities, made.blocks_on_gpu, made.kernels, made.symmetric)
    if wiring.puts:
        made.exchange.name_networks(["NVSHMEM" if rank in made.peers.remote else "" for rank in range(control.world_size)])
    return wiring, made.proxied


def _share(control: ControlPlane, answers: Answers) -> int:
    """Returns the free bytes that this rank may take: ranks of this host under the same limit share them evenly."""
    here, (free, limit) = host_key(), answers[control.rank]["memory"]  # type: ignore[index]
    sharing = [answer for answer in answers if answer is not None and (answer["host"], answer["memory"][1]) == (here, limit)]
    return int(free // len(sharing))


def _locality(request: Request) -> Locality:
    """The NICs are to be near this locality: the GPU, or the CPUs."""
    return this_locality(None if request.gpu is None else cuda_module().pci_address(request.gpu))


def _free_number(answers: Answers) -> int:
    taken = {number for answer in answers if answer is not None for number in answer["used"]}
    free = [number for number in range(MOST) if number not in taken]
    if not free:
        raise Error(
            f"{MOST} AllToAlls live on this Communicator already, its limit: close one, or use one for all layers of a shape"
        )
    return free[0]
