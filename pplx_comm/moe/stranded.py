"""Steps that a layer leaves open on one rank: the others hear of them at once, in place of waiting for its answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pplx_comm.handles import Dispatched


@contextlib.contextmanager
def telling(d: Dispatched | None, phase: str) -> Iterator[None]:
    """Around what runs while d's step is open: any error there strands the step. None: no step is open."""
    try:
        yield
    except BaseException as error:
        if d is not None:
            d.owner.strand(d, phase, repr(error))
        raise
