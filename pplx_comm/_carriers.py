"""Who carries to whom, and the proxies of a Communicator: one per provider, shared by its AllToAlls."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, ClassVar

from . import _core
from ._failure import Failure
from ._libfabric import open_fabric
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


def positive_setting(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdigit() or int(text) < 1:
        raise Error(f"{name}={text!r} must be a positive integer")
    return int(text)


def proxy_cpu(local_rank: int, ranks_here: int) -> int:
    """A core of its own for the proxy thread where there are two per rank, counted from the end; else -1: not pinned."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[-1 - local_rank] if len(allowed) >= 2 * ranks_here and local_rank < len(allowed) else -1


class ProxyCarrier:
    """One fabric and its proxy thread, connected to every other rank."""

    def __init__(self, comm: Communicator, provider: str | None, one_host: bool, ranks_here: int) -> None:
        endpoints = positive_setting("PPLX_COMM_ENDPOINTS", 0)
        nics = [nic.strip() for nic in os.environ.get("PPLX_COMM_NICS", "").split(",") if nic.strip()]
        self._addresses: dict[int, bytes] = {}
        self._closed = False
        self.users = 0
        self.fabric = open_fabric(
            provider,
            endpoints=endpoints,
            nics=nics or None,
            slot=comm.host_rank,
            slots=ranks_here,
            peers_on_this_host=one_host,
        )
        driven = self.fabric
        chaos = os.environ.get("PPLX_COMM_CHAOS", "")
        if chaos:
            try:
                driven = _core.chaos(self.fabric, chaos, comm.rank)
            except ValueError as reason:
                raise Error(f"PPLX_COMM_CHAOS={chaos!r}: {reason}") from None
        self.name: str = driven.name
        self.address: bytes = self.fabric.address()
        shard_bytes = positive_setting("PPLX_COMM_SHARD_BYTES", 256 * 1024)
        self.proxy = _core.Proxy(driven, shard_bytes, proxy_cpu(comm.local_rank, ranks_here))

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
        self.proxies: dict[tuple[str | None, int], ProxyCarrier] = {}
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
