"""Who carries to whom, and the proxies of a Communicator: one per provider, shared by its AllToAlls."""

from __future__ import annotations

import logging
import os
import threading
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


class ProxyCarrier:
    """One fabric and its proxy thread, connected to every other rank."""

    def __init__(
        self, rank: int, provider: str | None, nics: Sequence[str], one_host: bool, places: Sequence[Place], place: int
    ) -> None:
        endpoints = positive_setting("PPLX_COMM_ENDPOINTS", 0)
        self._addresses: dict[int, bytes] = {}
        self._closed = False
        self.users = 0
        self.fabric = open_fabric(
            provider, endpoints=endpoints, nics=list(nics) or None, places=places, place=place, peers_on_this_host=one_host
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

    def stats(self) -> dict[str, Any]:
        """The proxy's counters; `nics` has the bytes that each of this rank's endpoints posted, in the order of the endpoints."""
        stats: dict[str, Any] = self.proxy.stats()
        stats["nics"] = [{"nic": nic, "bytes": sent} for nic, sent in zip(self.nics, stats.pop("endpoint_bytes"), strict=False)]
        return stats

    def connect(self, addresses: dict[int, bytes]) -> None:
        for rank, address in addresses.items():
            self.proxy.insert_peer(rank, address)
            self._addresses[rank] = address

    def attach(self, exchange: _core.Exchange, region: _core.LocalRegion, descriptions: dict[int, bytes]) -> None:
        self.proxy.attach(exchange, region, descriptions)
        self.users += 1

    def detach(self, exchange: _core.Exchange, region: _core.LocalRegion, timeout: float) -> None:
        if not self._closed:
            self.proxy.detach(exchange, region, timeout)
            self.users -= 1

    def peer_died(self, rank: int) -> None:
        """Removes what the rank's provider left in /dev/shm. Its process may not be quite gone yet: close() repeats it."""
        address = self._addresses.get(rank)
        if address is not None:
            _core.cleanup_dead_peer(address)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.proxy.close(1.0):
            self.fabric.close()
        else:
            log.warning("the proxy thread hangs inside %s and was left behind", self.name)
        for rank in self._addresses:  # of those who live, nothing is removed
            self.peer_died(rank)


class Carriers:
    """The proxies of one Communicator."""

    _of: ClassVar[weakref.WeakKeyDictionary[Communicator, Carriers]] = weakref.WeakKeyDictionary()
    _of_lock = threading.Lock()

    def __init__(self, comm: Communicator) -> None:
        self._comm = weakref.ref(comm)
        self.proxies: dict[tuple[str | None, int, tuple[str, ...]], ProxyCarrier] = {}  # by provider, generation, names of NICs
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
