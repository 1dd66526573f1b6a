"""Who carries to whom, and the proxies of a Communicator: one per provider, shared by its AllToAlls."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from . import _core
from ._failure import Failure
from ._libfabric import Place, open_fabric
from .errors import Error

if TYPE_CHECKING:
    from .communicator import Communicator

log = logging.getLogger("pplx_comm")

_STANDS_STILL = 0.1  # seconds without a turn of a proxy thread, which in use takes one every millisecond, napping too


def host_key() -> str:
    """Ranks with the same key can use the shm provider with each other."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    shm, pid = os.stat("/dev/shm"), os.stat("/proc/self/ns/pid")
    return f"{boot}:{shm.st_dev}:{shm.st_ino}:{pid.st_ino}"


def named_nics(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Those of the argument `nics`, else of PPLX_COMM_NICS; none: the nearest are taken."""
    names = os.environ.get("PPLX_COMM_NICS", "") if given is None else given
    listed = names.split(",") if isinstance(names, str) else names
    if not (isinstance(listed, (list, tuple)) and all(isinstance(name, str) for name in listed)):
        raise Error(f"nics={given!r} must be names of NICs: a list of strings, or one string with commas")
    return tuple(name.strip() for name in listed if name.strip())


def positive_setting(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdigit() or int(text) < 1:
        raise Error(f"{name}={text!r} must be a positive integer")
    return int(text)


class _Proxy:
    """One fabric and its proxy thread, connected to every other rank."""

    def __init__(self, rank: int, provider: str | None, nics: Sequence[str], one_host: bool, place: dict[str, Any]) -> None:
        self.fabric = open_fabric(
            provider,
            endpoints=positive_setting("PPLX_COMM_ENDPOINTS", 0),
            nics=list(nics) or None,
            peers_on_this_host=one_host,
            **place,
        )
        driven = self.fabric
        chaos = os.environ.get("PPLX_COMM_CHAOS", "")
        if chaos:
            try:
                driven = _core.chaos(self.fabric, chaos, rank)
            except ValueError as reason:
                raise Error(f"PPLX_COMM_CHAOS={chaos!r}: {reason}") from None
        self.name: str = driven.name
        self.nics: list[str] = [self.fabric.endpoint_name(endpoint) for endpoint in range(self.fabric.endpoints)]
        self.address: bytes = self.fabric.address()
        shard_bytes = positive_setting("PPLX_COMM_SHARD_BYTES", 256 * 1024)
        self.proxy = _core.Proxy(driven, shard_bytes, self.fabric.proxy_cpu)
        log.debug("proxy over %s: %s (%s), CPU %d", self.name, ", ".join(self.nics), self.fabric.why, self.fabric.proxy_cpu)

    def close(self, timeout: float) -> None:
        if self.proxy.close(timeout):
            self.fabric.close()
        else:
            self.fabric.abandon()
            log.warning("the proxy thread hangs inside %s and was left behind", self.name)


class ProxyCarrier:
    """The proxies of one provider, between which the peers are split. Addresses and regions are lists, an entry for each proxy."""

    def __init__(
        self,
        rank: int,
        provider: str | None,
        nics: Sequence[str],
        one_host: bool,
        places: Sequence[Place],
        place: int,
        proxies: int,
        device_memory: bool,
    ) -> None:
        self._rank = rank
        self._addresses: dict[int, list[bytes]] = {}
        self._closed = False
        self.users = 0
        self.proxies: list[_Proxy] = []
        try:
            for number in range(proxies):
                where = {"places": places, "place": place, "proxies": proxies, "proxy": number, "device_memory": device_memory}
                self.proxies.append(_Proxy(rank, provider, nics, one_host, where))
        except BaseException:
            self.close()
            raise
        self.name = self.proxies[0].name
        self.nics = self.proxies[0].nics
        self.addresses = [proxy.address for proxy in self.proxies]

    def stats(self) -> dict[str, Any]:
        """The proxies' counters, added up; `nics` has the bytes that each of this rank's endpoints posted, in their order.

        Of several proxies `proxies` has each one's own.
        """
        each = []
        for proxy in self.proxies:
            stats: dict[str, Any] = proxy.proxy.stats()
            sent = zip(proxy.nics, stats.pop("endpoint_bytes"), strict=False)
            stats["nics"] = [{"nic": nic, "bytes": nbytes} for nic, nbytes in sent]
            each.append(stats)
        if len(each) == 1:
            return each[0]
        total: dict[str, Any] = {
            name: sum(stats[name] for stats in each) for name in ("writes", "bytes", "again", "dropped", "duplicates")
        }
        total["nics"] = [
            {"nic": nics[0]["nic"], "bytes": sum(nic["bytes"] for nic in nics)}
            for nics in zip(*(stats["nics"] for stats in each), strict=True)
        ]
        if all("chaos" in stats for stats in each):
            total["chaos"] = {name: sum(stats["chaos"][name] for stats in each) for name in each[0]["chaos"]}
        total["proxies"] = each
        return total

    def stands_still(self) -> bool:
        """Whether a proxy thread takes no turn for a while: it hangs in the provider, or gets no core."""
        return not all(proxy.proxy.takes_turns(_STANDS_STILL) for proxy in self.proxies)

    def connect(self, addresses: dict[int, list[bytes]]) -> None:
        """Of the peers that it does not carry to a proxy knows nothing."""
        for rank, of_peer in addresses.items():
            number = self._number(rank)
            self.proxies[number].proxy.insert_peer(rank, of_peer[number])
            self._addresses[rank] = of_peer

    def register(self, carried: _core.Carried) -> list[_core.LocalRegion]:
        return [proxy.proxy.register_memory(carried) for proxy in self.proxies]

    def attach(self, carried: _core.Carried, regions: list[_core.LocalRegion], descriptions: dict[int, list[bytes]]) -> None:
        for number, (proxy, region) in enumerate(zip(self.proxies, regions, strict=True)):
            mine = {rank: of_peer[number] for rank, of_peer in descriptions.items() if self._number(rank) == number}
            proxy.proxy.attach(carried, region, mine)
        self.users += 1

    def detach(self, carried: _core.Carried, regions: list[_core.LocalRegion], timeout: float) -> None:
        if self._closed:
            return
        end = time.monotonic() + timeout
        for proxy, region in zip(self.proxies, regions, strict=True):
            proxy.proxy.detach(carried, region, max(0.1, end - time.monotonic()))
        self.users -= 1

    def peer_died(self, rank: int) -> None:
        """Removes what the rank's provider left in /dev/shm. Its process may not be quite gone yet: close() repeats it."""
        for address in self._addresses.get(rank, []):
            _core.cleanup_dead_peer(address)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + 1.0
        for proxy in self.proxies:
            proxy.close(max(0.1, end - time.monotonic()))
        for rank in self._addresses:  # of those who live, nothing is removed
            self.peer_died(rank)

    def _number(self, peer: int) -> int:
        return int(_core.proxy_of(self._rank, peer, len(self.proxies)))


class Carriers:
    """The proxies of one Communicator."""

    _of: ClassVar[weakref.WeakKeyDictionary[Communicator, Carriers]] = weakref.WeakKeyDictionary()
    _of_lock = threading.Lock()

    def __init__(self, comm: Communicator) -> None:
        self._comm = weakref.ref(comm)
        self.proxies: dict[tuple[str | None, int, tuple[str, ...], int, bool], ProxyCarrier] = {}
        """By provider, generation, names of NICs, number of proxies, and whether it reaches GPU memory."""
        comm._on_failure(self._on_failure)
        comm._on_close(self.close)

    @classmethod
    def of(cls, comm: Communicator) -> Carriers:
        with cls._of_lock:
            if comm not in cls._of:
                cls._of[comm] = Carriers(comm)
            return cls._of[comm]

    def _on_failure(self, failure: Failure) -> None:
        if failure.kind != "death":
            return
        for proxy in list(self.proxies.values()):
            proxy.peer_died(failure.rank)

    def close_unused(self, generation: int) -> None:
        """Closes what generations before that one used, once all AllToAlls have left it."""
        for key, proxy in list(self.proxies.items()):
            if key[1] < generation and proxy.users == 0:
                del self.proxies[key]
                proxy.close()

    def close(self) -> None:
        for proxy in list(self.proxies.values()):
            proxy.close()
        self.proxies.clear()
