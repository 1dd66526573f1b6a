"""Functions that ranks run for test_metrics.py."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import prometheus_client
from cases import Case
from dump_cases import step
from harness import Member, until
from outcomes import must
from prometheus_client.parser import text_string_to_metric_families
from rank_cases import Runner, open_all_to_all

from pplx_comm import metrics

"""How late a rank or a link is: far more than ranks wait for a core."""
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(families: Any) -> Samples:
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def a_file(me: Any, case: Case, folder: str) -> None:
    """PPLX_COMM_METRICS: the file has what a collector reads, comes anew, and is gone when the Communicator is closed."""
    comm = me.communicator()
    with open_all_to_all(Member(me.rank, me.world_size, comm=comm), case) as a2a:
        Runner(me, case, a2a).run()
        registry = prometheus_client.CollectorRegistry()
        registry.register(metrics.Collector(comm))

        def mine() -> list[Samples]:
            files = [path.read_text() for path in Path(folder).glob("*.prom")]
            found = [samples(text_string_to_metric_families(text)) for text in files]
            return [each for each in found if ("pplx_comm_world_size", frozenset({("rank", str(me.rank))})) in each]

        until("the file has all that was counted", lambda: mine() == [samples(registry.collect())])
        steps = {name[1]: value for name, value in samples(registry.collect()).items() if name[0] == "pplx_comm_steps_total"}
        must(list(steps.values()) == [case.steps], "steps", steps)
    comm.close()
    until("the files are gone", lambda: not list(Path(folder).iterdir()))


def no_such_folder(me: Any, case: Case) -> list[str]:
    """Steps go on; the log says it once."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pplx_comm").addHandler(handler)
    comm = me.communicator()
    with open_all_to_all(Member(me.rank, me.world_size, comm=comm), case) as a2a:
        Runner(me, case, a2a).run()
        until("the log has it", lambda: any("PPLX_COMM_METRICS" in line for line in heard))
    comm.close()
    return [line for line in heard if "PPLX_COMM_METRICS" in line]


def served(me: Any, case: Case) -> dict[str, Any]:
    """Serves its counters on a port that the test is told, and takes steps until it hears that this is enough."""
    registry = prometheus_client.CollectorRegistry()
    with open_all_to_all(me, case) as a2a:
        registry.register(metrics.Collector(me.comm))
        server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
        me.say("port", server.server_port)
        runner, turns = Runner(me, case, a2a), 0
        while me.comm.agree(not me.is_told()):
            runner.run()
            turns += 1
        me.hear()
        stats = me.comm.stats()
        me.say("stats", stats)
        me.hear()
        server.shutdown()
        server.server_close()
        thread.join()
    must(me.comm.stats()["all_to_alls"] == stats["all_to_alls"], "stats after close")
    return {"turns": turns, **stats}


def told_of_steps(me: Any, case: Case, late: int | None, late_us: int, times: int, steps: int) -> list[dict[str, Any]]:
    """Returns the counters before, and `times` times after `steps` steps. `late` has other work before each of them."""
    with me.communicator(node_size=case.node_size) as comm, open_all_to_all(Member(me.rank, me.world_size, comm=comm), case) as a2a:
        step(a2a, case)
        told = [comm.stats()]
        for _ in range(times):
            for _ in range(steps):
                if me.rank == late:
                    time.sleep(late_us / 1e6)
                step(a2a, case)
            told.append(comm.stats())
        comm.barrier()
    return told


def with_a_late_rank(me: Any, case: Case, late: int) -> int:
    """Takes steps until it hears that this is enough; one rank comes late to each."""
    turns = 0
    with open_all_to_all(me, case) as a2a:
        if me.rank == 0:
            me.say("job", me.comm.stats()["job"])
        runner = Runner(me, case, a2a)
        while me.comm.agree(not me.is_told()):
            if me.rank == late:
                time.sleep(0.1)
            runner.run()
            turns += 1
        me.hear()
    return turns
