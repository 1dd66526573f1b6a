"""One AllToAll for all layers of a shape: they are few per Communicator, and each holds memory."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

from pplx_comm.all_to_all import AllToAll
from pplx_comm.communicator import Communicator
from pplx_comm.control.plane import ControlPlane

_of: weakref.WeakKeyDictionary[ControlPlane, dict[Hashable, AllToAll]] = weakref.WeakKeyDictionary()


def shared_all_to_all(comm: Communicator, **arguments: Any) -> AllToAll:
    """The Communicator's AllToAll with these arguments, made at first use: collective. It lives as long as the Communicator."""
    known = _of.get(comm.control)
    if known is None:
        known = _of[comm.control] = {}
        control = weakref.ref(comm.control)

        def forget() -> None:
            if (plane := control()) is not None:
                _of.pop(plane, None)

        comm.control.on_close(forget)
    key = tuple(sorted((name, repr(value)) for name, value in arguments.items()))
    if key not in known:
        known[key] = AllToAll(comm, **arguments)
    return known[key]
