"""Software NICs for tests, and which transports go over them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Crew, Crews

from pplx_comm.efasoft import libfabrics
from pplx_comm.efasoft.device import Options, SoftEfa

EFA = ("proxy:efa", "proxy:efa-direct")
MIXED = ("mixed:efa", "mixed:efa-direct")


def software(**options: Any) -> SoftEfa:
    """Closed by the caller. `more`: further variables of the device, by name."""
    # efa fills the queue at once, 9 KiB each: with 32768 of them opening eight ranks' endpoints took a minute.
    options.setdefault("receives", 1024)
    more = tuple((name, str(value)) for name, value in options.pop("more", {}).items())
    # Uses a wheel of the checkout's environment; a wheel that is there and cannot be used fails the test.
    if not any(path.is_file() for path, _ in libfabrics.candidates(options.get("libfabric"), os.environ)):
        pytest.skip("no libfabric with efa: pip install mpich, or set PPLX_LIBFABRIC=/path/of/libfabric.so.1, 1.18 or newer")
    return SoftEfa(Options(more=more, **options))


@contextlib.contextmanager
def crew_on(
    world_size: int, env: dict[str, str | None] | None = None, *, crew: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[SoftEfa, Crew]]:
    """Ranks on NICs of their own."""
    with software(**options) as efa, Crew(world_size, {**efa.environment, **(env or {})}, **(crew or {})) as ranks:
        yield efa, ranks


@contextlib.contextmanager
def crews_on(world_size: int, env: dict[str, str | None] | None = None, **options: Any) -> Iterator[Crews]:
    with software(**options) as efa, Crews(world_size, {**efa.environment, **(env or {})}) as crews:
        yield crews
