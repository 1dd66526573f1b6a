"""The wiring of an AllToAll: its exchange, its peers, and the carrier to those that are remote."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pplx_comm._core as _core
from pplx_comm.errors import Error
from pplx_comm.wiring.carriers import ProxyCarrier
from pplx_comm.wiring.libfabric import Locality
from pplx_comm.wiring.peers import Peers
from pplx_comm.wiring.symmetric import Symmetric


class _Closed:
    """In the place of an exchange: for calls of other threads that were about to use it."""

    def __getattr__(self, name: str) -> Any:
        raise Error("this AllToAll is closed")


CLOSED = _Closed()


@dataclass
class Wiring:
    """reset() changes the peers, the carrier and the regions."""

    exchange: Any  # _core.Exchange or _cuda.Exchange
    peers: Peers
    hosts: dict[int, str]  # rank -> host_key
    localities: dict[int, Locality]  # the ranks of this host
    blocks_on_gpu: bool  # those that the proxy moves
    kernels: Any = None  # the module of a GPU's exchange
    symmetric: Symmetric | None = None  # memory of a carrier that kernels drive
    carrier: ProxyCarrier | None = None
    regions: list[_core.LocalRegion] = field(default_factory=list)  # one a proxy

    @property
    def puts(self) -> bool:
        """True if kernels of some rank put blocks. Otherwise symmetric memory is only mapped memory."""
        return self.symmetric is not None and self.symmetric.puts

    @property
    def carried(self) -> _core.Carried:
        """The memory and the words that the proxy works on."""
        return self.exchange if isinstance(self.exchange, _core.Exchange) else self.exchange.host

    @property
    def network_peers(self) -> list[int]:
        """Those with which this rank exchanges blocks over the network: with dedup="node" relays and their sources alone."""
        peers: list[int] = self.exchange.network_peers
        return peers

    def detach(self, timeout: float) -> None:
        """Takes the AllToAll off its proxy, if it has one, waiting that long for running kernels and writes in flight. Gives its
        registrations back."""
        carrier, self.carrier = self.carrier, None
        end = time.monotonic() + timeout
        if not isinstance(self.exchange, _core.Exchange):
            self.exchange.ended(timeout)
        if carrier is None:
            return
        carrier.detach(self.carried, self.regions, max(0.0, end - time.monotonic()))

    def close(self, timeout: float, failed: bool = True) -> None:
        """detach(), and the memory is given back as soon as no call uses it any more. failed: something may be in flight."""
        if self.exchange is CLOSED:
            return
        self.detach(timeout)
        symmetric, self.symmetric = self.symmetric, None
        if symmetric is not None:
            symmetric.segment.close(not failed and self._all_heard())
        self.exchange = CLOSED

    def _all_heard(self) -> bool:
        """True if this rank has waited for everything that peers put to it. The put of a step that it has not received, or gave up
        on,
        may land at any time: in memory that another AllToAll has by then, whose signals would count it."""
        if not self.exchange.ended(0.0) or self.exchange.open_steps > 0:
            return False
        try:
            self.exchange.raise_trouble()
        except Exception:  # a kernel gave up, and no call has looked since
            return False
        return True
