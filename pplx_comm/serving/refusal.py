"""Refuses versions of an engine that its plug-in was not tested with."""

from __future__ import annotations

import re


def refusal(engine: str, version: str, tested: tuple[tuple[int, ...], ...], variable: str) -> str | None:
    """Why that version is refused, or None. variable: what lets others pass."""
    found = re.match(r"\.".join([r"(\d+)"] * len(tested[0])) + r"(?!\d)", version)
    if found and tuple(map(int, found.groups())) in tested:
        return None
    *others, last = (".".join(map(str, one)) for one in tested)
    words = f"{', '.join(others)} and {last}" if others else last
    return (
        f"pplx_comm was tested with {engine} {words}, and this is {version}, whose classes may differ: install a version that was "
        f"tested, or set {variable}=1 to go on at your own risk"
    )
