"""One rank of test_two_nics.py, in a network namespace of its own: what its two interfaces carried, as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import rank_cases
from cases import Case
from rank_cases import Runner

import pplx_comm as pc


def carried(interfaces: list[str]) -> list[int]:
    return [int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text()) for name in interfaces]


def main() -> None:
    interfaces = os.environ["INTERFACES"].split(",")
    seed = int(os.environ["PPLX_SEED"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with pc.Communicator.from_env(timeout=60) as comm:
        me = SimpleNamespace(rank=rank, world_size=world_size, comm=comm)
        case = Case(seed, world_size, transport="proxy:tcp", hidden=4096, max_tokens=64, steps=6)
        report: dict[str, Any] = {}

        # Every output of the Runner is compared with the reference bit for bit.
        before = carried(interfaces)
        with rank_cases.open_all_to_all(me, case, nics=interfaces, timeout=60.0) as both:
            Runner(me, case, both).run()
            report["both"] = both.stats()["proxy"]["nics"]
            report["both_carried"] = [now - then for now, then in zip(carried(interfaces), before, strict=True)]

            # Others of this Communicator may use other NICs.
            before = carried(interfaces)
            with rank_cases.open_all_to_all(me, case, nics=interfaces[1], timeout=60.0) as second:
                Runner(me, case, second).run()
                report["second"] = second.stats()["proxy"]["nics"]
                report["second_carried"] = [now - then for now, then in zip(carried(interfaces), before, strict=True)]

            # But a proxy is made by all ranks or by none; and a name that is none fails on all.
            for name, nics in (
                ("differ", interfaces if rank == 0 else interfaces[:1]),
                ("unknown", interfaces if rank == 0 else ["eth77"]),
            ):
                try:
                    rank_cases.open_all_to_all(me, case, nics=nics, timeout=60.0)
                except pc.Error as error:
                    report[name] = str(error)
        print(json.dumps(report))


if __name__ == "__main__":
    main()
