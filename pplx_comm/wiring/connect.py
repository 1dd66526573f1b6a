"""The proxy: one per provider for all AllToAlls of a Communicator."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pplx_comm._core as _core
from pplx_comm.control import deadlines
from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error
from pplx_comm.wiring.carriers import Carriers, Network, ProxyCarrier
from pplx_comm.wiring.compare import Answers, Attempts, agree, name_ranks
from pplx_comm.wiring.record import CLOSED, Wiring
from pplx_comm.wiring.request import Request


def connect(control: ControlPlane, request: Request, wiring: Wiring, alive: list[int]) -> None:
    """Collective: takes a carrier of the Communicator's, or makes one on all ranks, and attaches the exchange to it. Where this
    raises, the caller detaches the wiring."""
    timeout = request.patience
    network = _network(control, request, wiring, alive)
    carriers = Carriers.of(control)
    key = network.key(control.generation)
    attempts = Attempts()
    carrier = carriers.proxies.get(key)
    fresh = carrier is None
    with contextlib.ExitStack() as undo:
        if carrier is None:
            carrier = attempts.run(lambda: ProxyCarrier(control.rank, network))
            if carrier is not None:
                undo.callback(carrier.close)
        offer = {
            "error": attempts.error,
            "addresses": [address.hex() for address in carrier.addresses] if carrier else None,
            "fresh": fresh,
        }
        answers = agree(control, "AllToAll: fabric", offer, timeout)
        assert carrier is not None
        _check_fresh(answers)
        addresses = {r: _unpack(answers[r]["addresses"]) for r in alive if r != control.rank}  # type: ignore[index]
        attempts.run(lambda: carrier.connect(addresses, wiring.network_peers))
        regions = attempts.run(lambda: _register(carrier, wiring))
        described = [region.description.hex() for region in regions or []]
        answers = agree(control, "AllToAll: regions", {"error": attempts.error, "regions": described}, timeout)
        carriers.proxies[key] = carrier  # on all ranks, or on none: a later AllToAll looks here
        undo.pop_all()
    assert regions is not None
    descriptions = {r: _unpack(answers[r]["regions"]) for r in wiring.network_peers}  # type: ignore[index]
    attempts.run(lambda: carrier.attach(wiring.carried, regions, descriptions))
    over = f"{carrier.name} on {', '.join(carrier.nics)}"
    wiring.exchange.name_networks([over if rank in wiring.peers.remote else "" for rank in range(control.world_size)])
    agree(control, "AllToAll: proxy", {"error": attempts.error}, timeout)


def _register(carrier: ProxyCarrier, wiring: Wiring) -> list[_core.LocalRegion]:
    carried = wiring.carried
    wiring.carrier, wiring.regions = carrier, carrier.register(carried)
    if wiring.exchange is CLOSED:  # another thread closed it, and found no carrier to detach from
        wiring.carrier = None
        carrier.detach(carried, wiring.regions, deadlines.CLOSE_FAILED)
        raise Error("this AllToAll is closed")
    return wiring.regions


def _network(control: ControlPlane, request: Request, wiring: Wiring, alive: list[int]) -> Network:
    settings = request.settings
    if control.one_network and settings.interface is None:
        settings = replace(settings, interface="127.0.0.1")  # other hosts cannot even connect to these sockets
    return Network(
        provider=request.provider,
        nics=request.nics,
        proxies=request.proxies,
        device_memory=wiring.blocks_on_gpu,
        one_host=len({wiring.hosts[rank] for rank in alive}) == 1,
        localities=list(wiring.localities.values()),  # with the dead: the others keep their shares of the NICs
        locality=list(wiring.localities).index(control.rank),
        settings=settings,
    )


def _check_fresh(answers: Answers) -> None:
    if len({answer["fresh"] for answer in answers if answer is not None}) > 1:
        old = [rank for rank, answer in enumerate(answers) if answer is not None and not answer["fresh"]]
        raise Error(
            "the NICs of an AllToAll must be those of an earlier one on all ranks, or on none: here they are on "
            f"{name_ranks(old)} and not on the others"
        )


def _unpack(texts: list[str]) -> list[bytes]:
    return [bytes.fromhex(text) for text in texts]
