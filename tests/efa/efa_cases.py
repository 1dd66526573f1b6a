"""Cases of ranks on software NICs that no other test has."""

from __future__ import annotations

from typing import Any

import rank_cases
from cases import Case

from pplx_comm import doctor


def findings(me: Any) -> dict[str, str]:
    """doctor's findings here, by name."""
    return {one.name: one.says for one in doctor.findings()}


def shards(me: Any, case: Case) -> dict[str, int]:
    """A case's steps, and the bytes that each of this rank's NICs posted."""
    with rank_cases.open_all_to_all(me, case) as a2a:
        rank_cases.Runner(me, case, a2a).run()
        me.comm.barrier()
        return {nic["nic"]: nic["bytes"] for nic in a2a.stats()["proxy"]["nics"]}
