"""Which versions of an engine its plug-in was tested with."""

from __future__ import annotations

import re


def refusal(engine: str, version: str, tested: tuple[tuple[int, ...], tuple[int, ...]], variable: str) -> str | None:
    """Why that version is refused, or None. tested: from and to, both included. variable: what lets others pass."""
    least, most = tested
    found = re.match(r"\.".join([r"(\d+)"] * len(least)) + r"(?!\d)", version)
    if found and least <= tuple(map(int, found.groups())) <= most:
        return None
    words = ".".join(map(str, least)) + ("" if least == most else " to " + ".".join(map(str, most)))
    return (
        f"pplx_comm was tested with {engine} {words}, and this is {version}, whose classes may differ: install a version that was "
        f"tested, or set {variable}=1 to go on at your own risk"
    )
