"""The proxies of a Communicator: one carrier per provider, shared by its AllToAlls."""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pplx_comm._core as _core
from pplx_comm.control import deadlines
from pplx_comm.control.failure import Failure
from pplx_comm.control.plane import ControlPlane
from pplx_comm.errors import Error
from pplx_comm.log import log
from pplx_comm.settings import Settings
from pplx_comm.wiring.libfabric import Locality, open_fabric

Key = tuple[str | None, int, tuple[str, ...], int, bool]
"""Provider, generation, names of NICs, number of proxies, and whether they reach GPU memory."""


def host_key() -> str:
    """Ranks with the same key can use the shm provider with each other."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    shm, pid = os.stat("/dev/shm"), os.stat("/proc/self/ns/pid")
    return f"{boot}:{shm.st_dev}:{shm.st_ino}:{pid.st_ino}"


def named_nics(given: str | Sequence[str]) -> tuple[str, ...]:
    """The argument `nics` of an AllToAll."""
    listed = given.split(",") if isinstance(given, str) else given
    if not (isinstance(listed, (list, tuple)) and all(isinstance(name, str) for name in listed)):
        raise Error(f"nics={given!r} must be names of NICs: a list of strings, or one string with commas")
    return tuple(name.strip() for name in listed if name.strip())


@dataclass(frozen=True)
class Network:
    """The fabrics that the proxies of a rank open."""

    provider: str | None  # None: the best there is
    nics: tuple[str, ...]  # names; empty: the nearest
    proxies: int  # threads, each with a fabric of its own
    device_memory: bool  # only a provider that reaches GPU memory
    one_host: bool  # no peer lives elsewhere
    localities: list[Locality]  # one for each process of this host
    locality: int  # this one's
    settings: Settings

    def key(self, generation: int) -> Key:
        """AllToAlls with the same one share a carrier."""
        return self.provider, generation, self.nics, self.proxies, self.device_memory

    def open(self, proxy: int) -> _core.Fabric:
        return open_fabric(
            self.provider,
            endpoints=self.settings.endpoints,
            nics=list(self.nics) or None,
            address=self.settings.interface,
            peers_on_this_host=self.one_host,
            localities=self.localities,
            locality=self.locality,
            proxies=self.proxies,
            proxy=proxy,
            device_memory=self.device_memory,
        )


class _Proxy:
    """One fabric and its proxy thread, connected to every other rank."""

    def __init__(self, rank: int, network: Network, number: int) -> None:
        settings = network.settings
        self.fabric = network.open(number)
        driven = self.fabric
        if settings.chaos:
            try:
                driven = _core.chaos(self.fabric, settings.chaos, rank)
            except ValueError as reason:
                raise Error(f"PPLX_COMM_CHAOS={settings.chaos!r}: {reason}") from None
        self.name: str = driven.name
        self.nics: list[str] = [self.fabric.endpoint_name(endpoint) for endpoint in range(self.fabric.endpoints)]
        self.address: bytes = self.fabric.address()
        self.proxy = _core.Proxy(driven, settings.shard_bytes, self.fabric.proxy_cpu)
        facts = {"rank": rank, "proxy": self.name, "nics": self.nics}
        self._told = _core.Told(json.dumps(facts), self.proxy.teller)
        log.debug("proxy over %s: %s (%s), CPU %d", self.name, ", ".join(self.nics), self.fabric.why, self.fabric.proxy_cpu)

    def close(self, timeout: float) -> None:
        self._told.end()
        if self.proxy.close(timeout):
            self.fabric.close()
        else:
            self.fabric.abandon()
            log.warning("the proxy thread hangs inside %s and was left behind", self.name)


class ProxyCarrier:
    """The proxies of one provider, between which the peers are split. Addresses and regions are lists, an entry for each proxy."""

    def __init__(self, rank: int, network: Network) -> None:
        self._rank = rank
        self._addresses: dict[int, list[bytes]] = {}
        self.connected: set[int] = set()
        self._closed = False
        self.users = 0
        self.proxies: list[_Proxy] = []
        try:
            for number in range(network.proxies):
                self.proxies.append(_Proxy(rank, network, number))
        except BaseException:
            self.close()
            raise
        self.name = self.proxies[0].name
        self.nics = self.proxies[0].nics
        self.addresses = [proxy.address for proxy in self.proxies]

    def stats(self, fresh: bool = True) -> dict[str, Any]:
        """The proxies' counters, added up; `nics` has what each of this rank's endpoints posted, in their order.

        Of several proxies `proxies` has each one's own. fresh: waits up to ten seconds for a thread that stands still; else the
        counters are those of the time when it last told of them.
        """
        each = []
        for proxy in self.proxies:
            stats: dict[str, Any] = proxy.proxy.stats(fresh)
            sent = zip(proxy.nics, stats.pop("endpoint_writes"), stats.pop("endpoint_bytes"), strict=False)
            stats["nics"] = [{"nic": nic, "writes": writes, "bytes": nbytes} for nic, writes, nbytes in sent]
            each.append(stats)
        if len(each) == 1:
            return {"provider": self.name, **each[0]}
        added = ("writes", "bytes", "again", "dropped", "duplicates", "errors")
        total: dict[str, Any] = {"provider": self.name, **{name: sum(stats[name] for stats in each) for name in added}}
        total["deepest"] = max(stats["deepest"] for stats in each)
        total["nics"] = [
            {"nic": nics[0]["nic"], **{name: sum(nic[name] for nic in nics) for name in ("writes", "bytes")}}
            for nics in zip(*(stats["nics"] for stats in each), strict=True)
        ]
        if all("chaos" in stats for stats in each):
            total["chaos"] = {name: sum(stats["chaos"][name] for stats in each) for name in each[0]["chaos"]}
        total["proxies"] = each
        return total

    def stands_still(self) -> bool:
        """True while a proxy thread takes no turn: it hangs in the provider, or gets no core."""
        return not all(proxy.proxy.takes_turns(deadlines.PROXY_TURN) for proxy in self.proxies)

    def connect(self, addresses: dict[int, list[bytes]], peers: Sequence[int]) -> None:
        """Gives each proxy the addresses of the peers that it carries to, and has not got from an earlier AllToAll. addresses: of
        all ranks, for peer_died()."""
        self._addresses.update(addresses)
        for rank in sorted(set(peers) - self.connected):
            number = self._number(rank)
            self.proxies[number].proxy.insert_peer(rank, addresses[rank][number])
            self.connected.add(rank)

    def register(self, carried: _core.Carried) -> list[_core.LocalRegion]:
        """Counts as a user of this carrier until detach()."""
        regions: list[_core.LocalRegion] = []
        self.users += 1
        try:
            regions += (proxy.proxy.register_memory(carried) for proxy in self.proxies)
        except BaseException:
            self.detach(carried, regions, deadlines.CLOSE_FAILED)
            raise
        return regions

    def attach(self, carried: _core.Carried, regions: list[_core.LocalRegion], descriptions: dict[int, list[bytes]]) -> None:
        for number, (proxy, region) in enumerate(zip(self.proxies, regions, strict=True)):
            mine = {rank: of_peer[number] for rank, of_peer in descriptions.items() if self._number(rank) == number}
            proxy.proxy.attach(carried, region, mine)

    def detach(self, carried: _core.Carried, regions: list[_core.LocalRegion], timeout: float) -> None:
        if self._closed:
            return
        end = time.monotonic() + timeout
        for proxy, region in zip(self.proxies, regions, strict=False):  # fewer where registering failed
            proxy.proxy.detach(carried, region, max(deadlines.CLOSE_PROXY, end - time.monotonic()))
        self.users -= 1

    def peer_died(self, rank: int) -> None:
        """Removes what the rank's provider left in /dev/shm. Its process may not be quite gone yet: close() repeats it."""
        for address in self._addresses.get(rank, []):
            _core.cleanup_dead_peer(address)

    def close(self, timeout: float = deadlines.CLOSE_PROXIES) -> None:
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + timeout
        for proxy in self.proxies:
            proxy.close(max(deadlines.CLOSE_PROXY, end - time.monotonic()))
        for rank in self._addresses:  # nothing of living ranks is removed
            self.peer_died(rank)

    def _number(self, peer: int) -> int:
        return int(_core.proxy_of(self._rank, peer, len(self.proxies)))


class Carriers:
    """The proxies of one Communicator."""

    _of: ClassVar[weakref.WeakKeyDictionary[ControlPlane, Carriers]] = weakref.WeakKeyDictionary()
    _of_lock = threading.Lock()

    def __init__(self, control: ControlPlane) -> None:
        self.proxies: dict[Key, ProxyCarrier] = {}
        control.on_failure(self._on_failure)
        control.on_close(self.close)

    @classmethod
    def of(cls, control: ControlPlane) -> Carriers:
        with cls._of_lock:
            if control not in cls._of:
                cls._of[control] = Carriers(control)
            return cls._of[control]

    def _on_failure(self, failure: Failure) -> None:
        if failure.kind != "death":
            return
        for proxy in list(self.proxies.values()):
            proxy.peer_died(failure.rank)

    def stats(self) -> list[dict[str, Any]]:
        """Counters of each carrier. If a thread of it stands still, they are those of the time when it last told of them."""
        return [carrier.stats(not carrier.stands_still()) for carrier in list(self.proxies.values())]

    def close_unused(self, generation: int) -> None:
        """Closes what generations before that one used, once all AllToAlls have left it."""
        for key, proxy in list(self.proxies.items()):
            if key[1] < generation and proxy.users == 0:
                del self.proxies[key]
                proxy.close()

    def close(self) -> None:
        end = time.monotonic() + deadlines.CLOSE_PROXIES
        for proxy in list(self.proxies.values()):
            proxy.close(end - time.monotonic())
        self.proxies.clear()
